"""A tiny HTTP server for operators: fixed GET paths, bounded input, nothing of it reachable by clients of Envoy.

Owns the bytes on its connections. What a path answers is a function that the process brings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

#: A scraper sends a few hundred bytes; more is not a scraper.
MAX_HEAD_BYTES = 16 * 1024
#: A connection that does not send its request in this time is closed.
READ_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

#: (status, content type, body) for a request with this Accept header.
Answer = tuple[int, str, bytes]
Handler = Callable[[str], Awaitable[Answer]]


class AdminServer:
    """Answers ``routes``; one request per connection."""

    def __init__(self, routes: Mapping[str, Handler]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, address: str) -> None:
        """Listen on host:port (port 0: any; ``port`` then tells which)."""
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status, kind, body = await self._answer(head)
            writer.write(
                f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: {kind}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # A peer that is slow, gone or not HTTP gets no answer.
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> Answer:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        handler = self._routes.get(rest.partition(" ")[0].partition("?")[0])
        if handler is None:
            return 404, "text/plain", b"not found\n"
        if method != "GET":
            return 405, "text/plain", b"only GET\n"
        headers = dict(line.lower().split(":", 1) for line in lines[1:] if ":" in line)
        return await handler(headers.get("accept", "").strip())
