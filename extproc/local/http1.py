"""A small HTTP/1.1 server for local stand-ins: no routing, no framework, callbacks instead of tasks.

Owns bytes on a connection: heads, Content-Length and chunked bodies, keep-alive, chunked answers, the client's
going. Knows nothing of engines. One request is handled at a time per connection; pipelined bytes wait their turn.
Loopback use only: heads over 64 KiB and bodies over 64 MiB are refused.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 67_108_864
PHRASES = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required",
    413: "Content Too Large", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    501: "Not Implemented", 503: "Service Unavailable",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One request, body complete; header names are lower case, repeated ones joined by ", "."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class HttpFault(Exception):
    """Bytes that are no HTTP request we take; ``status`` is the answer before the connection closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Method, path without query and headers of a request head (without its last empty line)."""
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise HttpFault(400, "not an HTTP/1.1 request line")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpFault(400, "not a header line")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if parts[2] == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return parts[0], parts[1].partition("?")[0], headers


class BodyReader:
    """Collects one body from a growing buffer, by Content-Length or chunked."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise HttpFault(400, "bad content-length")
        self._left = int(length)
        self._in_trailers = False
        self._parts: list[bytes] = []
        self._size = 0
        if self._left > MAX_BODY_BYTES:
            raise HttpFault(413, "body too large")

    def feed(self, buffer: bytearray) -> bytes | None:
        """Take what belongs to the body off ``buffer``; the whole body once it is complete."""
        if not self._chunked:
            return self._take_plain(buffer)
        while (line := self._line(buffer)) is not None:
            if self._in_trailers:
                if not line:
                    return b"".join(self._parts)
                continue
            if not self._chunk(buffer, line):
                return None
        return None

    def _take_plain(self, buffer: bytearray) -> bytes | None:
        if len(buffer) < self._left:
            return None
        body = bytes(buffer[: self._left])
        del buffer[: self._left]
        return body

    @staticmethod
    def _line(buffer: bytearray) -> bytes | None:
        at = buffer.find(b"\r\n")
        if at < 0:
            return None
        line = bytes(buffer[:at])
        del buffer[: at + 2]
        return line

    def _chunk(self, buffer: bytearray, line: bytes) -> bool:
        """Take one chunk whose size line is ``line``; False (line put back) while it is incomplete."""
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            raise HttpFault(400, "bad chunk size") from None
        self._in_trailers = size == 0
        if self._in_trailers:
            return True
        if self._size + size > MAX_BODY_BYTES:
            raise HttpFault(413, "body too large")
        if len(buffer) < size + 2:
            buffer[:0] = line + b"\r\n"
            return False
        self._parts.append(bytes(buffer[:size]))
        self._size += size
        del buffer[: size + 2]
        return True


class Exchange:
    """One request and the way to answer it: ``send`` at once, or ``start`` .. ``write`` .. ``end``."""

    def __init__(self, request: Request, connection: HttpConnection) -> None:
        self.request = request
        self.on_gone: Callable[[], None] | None = None
        self.done = False
        self._connection = connection

    def send(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        """Answer completely."""
        if self.done:
            return
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self._connection.write(
            f"{self._status_line(status)}content-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode()
            + (b"" if self.request.method == "HEAD" else body)
        )
        self._finish()

    def start(self, status: int, content_type: str) -> None:
        """Begin a chunked answer."""
        if not self.done:
            head = f"{self._status_line(status)}content-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
            self._connection.write(head.encode())

    def write(self, data: bytes) -> None:
        """One chunk of a started answer."""
        if data and not self.done:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """The end of a started answer."""
        if not self.done:
            self._connection.write(b"0\r\n\r\n")
            self._finish()

    def reset(self) -> None:
        """Break the connection with a TCP reset, answered or not."""
        if not self.done:
            self.done = True
            self._connection.reset()

    def gone(self) -> None:
        """The client closed before the end (called by the connection)."""
        if not self.done:
            self.done = True
            if self.on_gone is not None:
                self.on_gone()

    def _status_line(self, status: int) -> str:
        return f"HTTP/1.1 {status} {PHRASES.get(status, 'Unknown')}\r\nserver: {self._connection.server_name}\r\n"

    def _finish(self) -> None:
        self.done = True
        self._connection.finished(close="close" in self.request.headers.get("connection", "").lower())


class HttpConnection(asyncio.Protocol):
    """One client connection; ``handler`` gets every complete request as an ``Exchange``.

    ``opened`` holds every connection from its beginning to its end, so that a server can end them with itself.
    """

    def __init__(
        self, handler: Callable[[Exchange], None], server_name: str, keep_alive_s: float, opened: set[HttpConnection]
    ) -> None:
        self._opened = opened
        self.server_name = server_name
        self._handler = handler
        self._keep_alive_s = keep_alive_s
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._body: BodyReader | None = None
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and start the idle clock."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened.add(self)
        self._wait_idle()

    def data_received(self, data: bytes) -> None:
        """Add bytes; handle a request once it is whole and the one before is answered."""
        self._buffer += data
        self._stop_idle()  # a request on its way is not idleness
        self._advance()

    def eof_received(self) -> bool:
        """A client that half-closes has gone: engines abort there too."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in hand."""
        self._transport = None
        self._opened.discard(self)
        self._stop_idle()
        if self._exchange is not None:
            self._exchange.gone()
            self._exchange = None

    def write(self, data: bytes) -> None:
        """Send bytes to the client, if it is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self, *, close: bool) -> None:
        """The request in hand is answered; go on with the next one or close."""
        self._exchange = None
        if close and self._transport is not None:
            self._transport.close()
            return
        self._wait_idle()
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._advance)

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Close with a TCP reset instead of a FIN."""
        self._exchange = None
        if self._transport is not None:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def _advance(self) -> None:
        if self._exchange is not None or self._transport is None:
            return
        try:
            request = self._next_request()
        except HttpFault as fault:
            exchange = Exchange(Request("GET", "/", {"connection": "close"}, b""), self)
            exchange.send(fault.status, str(fault).encode(), "text/plain")
            return
        if request is not None:
            self._exchange = Exchange(request, self)
            self._handler(self._exchange)

    def _next_request(self) -> Request | None:
        if self._head is None:
            at = self._buffer.find(b"\r\n\r\n")
            if max(at, 0 if at >= 0 else len(self._buffer)) > MAX_HEAD_BYTES:
                raise HttpFault(431, "head too large")
            if at < 0:
                return None
            self._head = parse_head(bytes(self._buffer[:at]))
            del self._buffer[: at + 4]
            self._body = BodyReader(self._head[2])
            if self._head[2].get("expect", "").lower() == "100-continue":
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert self._body is not None
        body = self._body.feed(self._buffer)
        if body is None:
            return None
        (method, path, headers), self._head = self._head, None
        return Request(method, path, headers, body)

    def _wait_idle(self) -> None:
        self._stop_idle()
        self._idle = asyncio.get_running_loop().call_later(self._keep_alive_s, self._close_idle)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close_idle(self) -> None:
        if self._transport is not None and self._exchange is None:
            self._transport.close()
