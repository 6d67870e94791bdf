"""A bounded HTTP/1.1 GET client: what an agent may spend on an engine that answers late, long or wrong.

Owns one connection to one origin and the bytes on it. Follows no redirect (an engine that sends one is not
the engine), sends no credential, and turns every failure into ``Unreachable`` with a cause from a fixed set.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from extproc.config.forms import literal
from extproc.errors import DependencyDown

#: vLLM's /metrics is 67 kB, llama.cpp's /props some 20 kB; more than this is not an answer we asked for.
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_HEAD_BYTES = 32 * 1024
#: Interim answers (100, 103) before the final one; more is a server that never answers.
MAX_INTERIM = 16


class Cause(StrEnum):
    """Why no answer came; only ``refused`` and ``reset`` prove that the engine is not there."""

    REFUSED = "refused"
    RESET = "reset"
    TIMEOUT = "timeout"
    NAME = "name_not_found"
    TLS = "tls"
    PROTOCOL = "not_http"
    TOO_LARGE = "too_large"
    NETWORK = "network"


class Unreachable(DependencyDown):
    """No usable HTTP answer; ``cause`` says what kind of failure it was."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(f"{cause}{': ' if detail else ''}{detail}")
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom an https connection believes: a CA bundle (None: the system's) and the name its certificate must carry."""

    ca_file: str | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """The context; ``Unreachable`` where the bundle cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise Unreachable(Cause.TLS, f"{self.ca_file} is no readable CA bundle") from error


class Client:
    """GETs on one origin over one kept connection; not for concurrent use.

    ``url`` may carry a path prefix (``http://host:port/prefix``); ``trust`` says how an https server is believed. A
    connection that the server closed while
    idle is replaced once per request without counting as a failure (llama.cpp and vLLM close after 5 s).
    """

    def __init__(self, url: str, *, connect_host: str | None = None, trust: Trust | None = None) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._name = parts.hostname or ""
        self._host = connect_host or self._name
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._trust = trust or Trust()
        self._tls: ssl.SSLContext | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._lookup: asyncio.Future[Any] | None = None

    async def get(self, path: str, timeout_s: float) -> Response:
        """The answer to ``GET path``; ``Unreachable`` after ``timeout_s`` at the latest."""
        try:
            async with asyncio.timeout(timeout_s):
                reused = self._writer is not None
                try:
                    return await self._exchange(path)
                except Unreachable as error:
                    if not (reused and error.cause is Cause.RESET):
                        raise
                    return await self._exchange(path)
        except TimeoutError as error:
            self._drop()
            raise Unreachable(Cause.TIMEOUT) from error

    async def close(self) -> None:
        """Close the kept connection."""
        if self._lookup is not None:
            self._lookup.cancel()
        writer = self._writer
        self._drop()
        if writer is not None:
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, path: str) -> Response:
        try:
            reader, writer = await self._connection()
            head = f"GET {self._prefix}{path} HTTP/1.1\r\nHost: {self._authority}\r\nAccept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: kvgate-agent\r\n\r\n"
            writer.write(head.encode("latin-1"))
            await writer.drain()
            response, keep = await _read(reader)
        except BaseException as error:
            self._drop()
            if isinstance(error, Unreachable) or not isinstance(error, Exception):
                raise
            translated = _translate(error)
            if translated is None:
                raise
            raise translated from error
        if not keep:
            self._drop()
        return response

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._writer.is_closing() or self._reader.at_eof():
            self._drop()
            self._reader, self._writer = await self._connect()
        return self._reader, self._writer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Try the name's addresses in turn.

        One by one, because asyncio blends the errors of several (``localhost`` has two) into one without a number,
        and only "refused by all" proves that nobody listens.
        """
        if self._secure and self._tls is None:
            self._tls = self._trust.context()
        failures: list[OSError] = []
        for address in await self._addresses():
            try:
                return await asyncio.open_connection(
                    address,
                    self._port,
                    ssl=self._tls,
                    server_hostname=(self._trust.server_name or self._name) if self._tls else None,
                    limit=MAX_HEAD_BYTES,
                )
            except OSError as error:
                failures.append(error)
        raise next((error for error in failures if not isinstance(error, ConnectionRefusedError)), failures[0])

    async def _addresses(self) -> list[str]:
        """The host's addresses.

        A lookup that hangs holds a thread of the loop's pool for as long as the resolver likes, which no deadline of
        ours ends: there is never a second one for the same engine, and an address needs none.
        """
        if literal(self._host):
            return [self._host]
        if self._lookup is None:
            loop = asyncio.get_running_loop()
            self._lookup = asyncio.ensure_future(loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
        lookup = self._lookup
        try:
            found = await asyncio.shield(lookup)
        finally:
            if lookup.done():
                self._lookup = None
        if not found:
            raise Unreachable(Cause.NAME)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _translate(error: Exception) -> Unreachable | None:
    """The failure in our words; None for what is not the network's fault."""
    match error:
        case ConnectionRefusedError():
            return Unreachable(Cause.REFUSED)
        case ConnectionError() | asyncio.IncompleteReadError():
            return Unreachable(Cause.RESET)
        case asyncio.LimitOverrunError():
            return Unreachable(Cause.TOO_LARGE, "head or chunk line")
        case ssl.SSLError():
            return Unreachable(Cause.TLS, error.reason or "")
        case TimeoutError():
            return Unreachable(Cause.TIMEOUT)
        case socket.gaierror():
            return Unreachable(Cause.NAME, error.strerror or "")
        case OSError():
            return Unreachable(Cause.NETWORK, error.strerror or "")
        case ValueError():
            return Unreachable(Cause.PROTOCOL, "malformed answer")
    return None


async def _read(reader: asyncio.StreamReader) -> tuple[Response, bool]:
    version, status, headers = await _head(reader)
    keep = version == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
    coding = headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise Unreachable(Cause.PROTOCOL, f"Content-Encoding {coding[:20]!r}, which was not asked for")
    if status in (204, 304):
        return Response(status, headers, b""), keep
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Response(status, headers, await _chunks(reader)), keep
    if "content-length" in headers:
        length = headers["content-length"]
        if not length.isdigit():
            raise Unreachable(Cause.PROTOCOL, "Content-Length is no number")
        if int(length) > MAX_BODY_BYTES:
            raise Unreachable(Cause.TOO_LARGE)
        return Response(status, headers, await reader.readexactly(int(length))), keep
    body = bytearray()
    while block := await reader.read(65_536):
        body += block
        if len(body) > MAX_BODY_BYTES:
            raise Unreachable(Cause.TOO_LARGE)
    return Response(status, headers, bytes(body)), False


async def _head(reader: asyncio.StreamReader) -> tuple[str, int, dict[str, str]]:
    """Version, status and headers of the final answer; interim ones have no body and are passed over."""
    for _ in range(MAX_INTERIM):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise Unreachable(Cause.PROTOCOL, "no HTTP/1.1 status line")
        if (status := int(rest[:3])) >= 200:
            fields = (line.partition(":") for line in lines)
            return version, status, {name.strip().lower(): value.strip() for name, _, value in fields}
    raise Unreachable(Cause.PROTOCOL, "nothing but interim answers")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0].strip(), 16)
        if size < 0:
            raise Unreachable(Cause.PROTOCOL, "negative chunk")
        if len(body) + size > MAX_BODY_BYTES:
            raise Unreachable(Cause.TOO_LARGE)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return bytes(body)
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise Unreachable(Cause.PROTOCOL, "chunk without its end")
