"""Where the replicas are: a static list, a watched file, a DNS name; one Protocol, so that others can follow.

Owns names and addresses, never an engine's state. A source that fails keeps its last answer and says so.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from extproc.agent.engines.base import Hints
from extproc.config import Config, load
from extproc.errors import ConfigError

#: How often a name is resolved again.
RESOLVE_EVERY_S = 10.0
#: Longest a lookup may take.
RESOLVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine instance to watch; ``address`` overrides the URL's host for the connection (one of many A records)."""

    replica: str
    target: str
    engine: str
    url: str
    hints: Hints = field(default_factory=Hints)
    devices: tuple[str, ...] = ()
    address: str | None = None


class Discovery(Protocol):
    """The current endpoints; ``health`` is "ok" or what is wrong."""

    async def endpoints(self) -> Sequence[Endpoint]:
        """Every endpoint now; bounded, never raises."""
        ...

    def health(self) -> str:
        """ "ok", or why the list may be old."""
        ...

    async def close(self) -> None:
        """Give resources back."""
        ...


def endpoints_of(config: Config) -> tuple[Endpoint, ...]:
    """The local replicas of a configuration."""
    return tuple(
        Endpoint(
            replica=replica.name,
            target=name,
            engine=target.engine,
            url=replica.url,
            hints=Hints(
                served_model=target.served_model,
                kv_tokens=replica.kv_tokens,
                max_sequences=replica.max_sequences,
                max_model_tokens=config.models[target.model].context_tokens if target.model in config.models else None,
            ),
            devices=replica.devices,
        )
        for name, target, replica in config.local_replicas()
    )


class Static:
    """A list that never changes."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)

    async def endpoints(self) -> Sequence[Endpoint]:
        """The list."""
        return self._endpoints

    def health(self) -> str:
        """Always ok."""
        return "ok"

    async def close(self) -> None:
        """Nothing to give back."""


class WatchedFile:
    """The configuration file itself: read again when it changes; a broken edit keeps what was there.

    Compared by modification time, size and inode, which also sees a Kubernetes ConfigMap's symlink swap.
    """

    def __init__(self, path: str | Path, first: Config | None = None, *, only: frozenset[str] = frozenset()) -> None:
        self._path = Path(path)
        self._only = only
        self._stamp = self._look()
        self._endpoints = self._chosen(first if first is not None else load(path))
        self._health = "ok"

    async def endpoints(self) -> Sequence[Endpoint]:
        """The replicas of the file as it is now, or as it last was in order."""
        stamp = self._look()
        if stamp is None:
            self._health = f"{self._path}: cannot be read; the last list stays in use"
        elif stamp != self._stamp:
            self._stamp = stamp
            try:
                self._endpoints = self._chosen(load(self._path))
                self._health = "ok"
            except ConfigError as error:
                self._health = f"{error.problems[0]} (the last list stays in use)"
        return self._endpoints

    def health(self) -> str:
        """ok, or the first problem of the file."""
        return self._health

    async def close(self) -> None:
        """Nothing to give back."""

    def _chosen(self, config: Config) -> tuple[Endpoint, ...]:
        return tuple(e for e in endpoints_of(config) if not self._only or e.replica in self._only)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


async def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, sorted; ``OSError`` where it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class Dns:
    """Replaces each endpoint whose host is a name by one endpoint per address (a headless service).

    A name with one address keeps the replica's name; several get ``name@address``. The name stays the Host
    header and the TLS name. ``suffix`` decides which hosts are expanded; others pass unchanged.
    """

    def __init__(
        self,
        source: Discovery,
        expand: frozenset[str],
        *,
        lookup: Callable[[str, int], object] = resolve,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._expand = expand
        self._lookup = lookup
        self._now_s = now_s
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._problem: str | None = None

    async def endpoints(self) -> Sequence[Endpoint]:
        """The source's endpoints with the chosen names expanded."""
        expanded: list[Endpoint] = []
        self._problem = None
        for endpoint in await self._source.endpoints():
            parts = urlsplit(endpoint.url)
            host = parts.hostname or ""
            if host not in self._expand or _literal(host):
                expanded.append(endpoint)
                continue
            addresses = await self._addresses(host, parts.port or 80)
            for address in addresses:
                name = endpoint.replica if len(addresses) == 1 else f"{endpoint.replica}@{address}"
                expanded.append(replace(endpoint, replica=name, address=address))
        return expanded

    def health(self) -> str:
        """ok, the name that does not resolve, or the source's own trouble."""
        return self._problem or self._source.health()

    async def close(self) -> None:
        """Close the source."""
        await self._source.close()

    async def _addresses(self, host: str, port: int) -> list[str]:
        at_s, known = self._known.get(host, (float("-inf"), []))
        if self._now_s() - at_s < RESOLVE_EVERY_S:
            return known
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await self._lookup(host, port)  # type: ignore[misc]
        except (OSError, TimeoutError):
            self._problem = f"{host} does not resolve; its last addresses stay in use"
            return known
        self._known[host] = (self._now_s(), list(found))
        return list(found)


def _literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
