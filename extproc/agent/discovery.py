"""Where the replicas are: a static list, a watched file, a DNS name; one Protocol, so that others can follow.

Owns names and addresses, never an engine's state. A source that fails keeps its last answer and says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from extproc.agent.engines.base import Hints
from extproc.agent.http import Trust
from extproc.config import Config, Target, load
from extproc.errors import ConfigError
from extproc.gateway.names import member, port_of
from extproc.memory import KvModel
from extproc.modelset import ModelSet

log = logging.getLogger("kvgate.agent")

#: Host and port of a URL.
Place = tuple[str, int]
#: How often a name is resolved again.
RESOLVE_EVERY_S = 10.0
#: Longest a lookup may take.
RESOLVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine instance or remote API to watch.

    ``address`` overrides the URL's host for the connection (one of many A records); ``discover``: it stands for every
    address of that host; ``metrics_url`` is the origin of the metrics where they have one of their own.
    """

    replica: str
    target: str
    engine: str
    url: str
    hints: Hints = field(default_factory=Hints)
    devices: tuple[str, ...] = ()
    address: str | None = None
    discover: bool = False
    metrics_url: str | None = None
    trust: Trust = field(default_factory=Trust)


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
    """The local replicas of a configuration, then its remote targets under their own names."""
    costs = _cost_models(config)
    local = tuple(
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
                kv=costs.get(name),
                by_geometry=target.model in config.models and config.models[target.model].geometry is not None,
            ),
            devices=replica.devices,
            discover=replica.discover is not None,
            metrics_url=replica.metrics_url,
            trust=_trust(target),
        )
        for name, target, replica in config.local_replicas()
    )
    remote = tuple(
        Endpoint(
            replica=name,
            target=name,
            engine=target.engine,
            # An SDK's base URL ends in /v1, which the path read here brings along.
            url=target.url.rstrip("/").removesuffix("/v1"),
            hints=Hints(served_model=target.served_model),
            trust=_trust(target),
        )
        for name, target in config.targets.items()
        if target.remote and target.url is not None
    )
    return (*local, *remote)


def _cost_models(config: Config) -> dict[str, Callable[[int | None], KvModel]]:
    """Target -> its cost model by reported block size, for those whose geometry can be read on this host.

    An agent may run where the model's files are not; it reports all the same.
    """
    try:
        models = ModelSet.load(config, where=config.where)
    except ConfigError as error:
        log.info("geometries cannot be read here (%s); engines' reports are taken as they are", error.problems[0])
        return {}
    return {
        name: cache(partial(models.kv, name))
        for name, target in config.targets.items()
        if not target.remote and models.geometry(name) is not None
    }


def _trust(target: Target) -> Trust:
    return Trust(target.tls.ca_file, target.tls.server_name)


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

    Compared by times, size and inode, which also sees a Kubernetes ConfigMap's symlink swap and a change of permissions.
    """

    def __init__(self, path: str | Path, first: Config | None = None, *, only: frozenset[str] = frozenset()) -> None:
        self._path = Path(path)
        self._only = only
        # ``first`` was read some time ago; the first round looks whether that is still what the file says.
        self._stamp = self._look() if first is None else None
        self._endpoints = self._chosen(first if first is not None else load(path))
        self._health = "ok"

    async def endpoints(self) -> Sequence[Endpoint]:
        """The replicas of the file as it is now, or as it last was in order."""
        stamp = self._look()
        if stamp is None:
            self._health = f"{self._path}: cannot be read; the last list stays in use"
            self._stamp = None  # it may come back as it was
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

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


async def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, sorted; ``OSError`` where it has none.

    IPv4 where there is any: a dual-stack engine has one address of each kind, and counts once.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {
        family: {str(e[4][0]) for e in found if e[0] == family} for family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(by_family[socket.AF_INET] or by_family[socket.AF_INET6])


class Dns:
    """Replaces each endpoint with ``discover`` by one per address of its host (a headless service), ``NAME@ADDRESS``.

    The host's name stays the Host header and the TLS name. An address that vanishes leaves the list, so its engine
    drains; a name that does not resolve keeps its last addresses.
    """

    def __init__(
        self,
        source: Discovery,
        *,
        lookup: Callable[[str, int], Awaitable[Sequence[str]]] = resolve,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._lookup = lookup
        self._now_s = now_s
        self._known: dict[Place, tuple[float, Sequence[str]]] = {}
        self._asked: dict[Place, asyncio.Future[Sequence[str]]] = {}
        self._late: set[Place] = set()
        self._problems: dict[Place, str] = {}

    async def endpoints(self) -> Sequence[Endpoint]:
        """The source's endpoints, those to be discovered replaced by what was found."""
        listed = [(endpoint, _place(endpoint)) for endpoint in await self._source.endpoints()]
        await self._look_up({place for endpoint, place in listed if endpoint.discover})
        expanded: list[Endpoint] = []
        for endpoint, place in listed:
            if not endpoint.discover:
                expanded.append(endpoint)
                continue
            _, addresses = self._known.get(place, (0.0, ()))
            expanded += [
                replace(endpoint, replica=member(endpoint.replica, address), address=address, discover=False)
                for address in addresses
            ]
        return expanded

    def health(self) -> str:
        """ok, the names that do not resolve, or the source's own trouble."""
        return "; ".join(self._problems.values()) or self._source.health()

    async def close(self) -> None:
        """Close the source; a lookup that hangs is left to its thread."""
        for task in self._asked.values():
            task.cancel()
        await self._source.close()

    async def _look_up(self, places: set[Place]) -> None:
        """Ask for names whose addresses are old, side by side, and take what has come.

        A resolver that hangs is waited for once and never asked twice at a time: rounds must go on for all others.
        """
        self._problems = {place: problem for place, problem in self._problems.items() if place in places}
        waited: list[asyncio.Future[Sequence[str]]] = []
        for place in sorted(places):
            at_s, _ = self._known.get(place, (float("-inf"), ()))
            if place not in self._asked and self._now_s() - at_s >= RESOLVE_EVERY_S:
                self._asked[place] = asyncio.ensure_future(self._lookup(*place))
                waited += [] if place in self._late else [self._asked[place]]
        if waited:
            await asyncio.wait(waited, timeout=RESOLVE_TIMEOUT_S)
        else:
            await asyncio.sleep(0)
        for place, task in list(self._asked.items()):
            if task.done():
                del self._asked[place]
                self._late.discard(place)
                self._take(place, task)
            else:
                self._late.add(place)
                self._problem(place)

    def _take(self, place: Place, task: asyncio.Future[Sequence[str]]) -> None:
        try:
            found = tuple(dict.fromkeys(task.result()))
        except (OSError, ValueError):  # ValueError: no name that a resolver takes
            found = ()
        if found:
            self._known[place] = (self._now_s(), found)
            self._problems.pop(place, None)
        else:
            self._problem(place)

    def _problem(self, place: Place) -> None:
        kept = "its last addresses stay in use" if place in self._known else "nothing is known of it"
        self._problems[place] = f"{place[0]} does not resolve; {kept}"


def _place(endpoint: Endpoint) -> Place:
    return urlsplit(endpoint.url).hostname or "", port_of(endpoint.url)
