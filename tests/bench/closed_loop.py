"""The cheapest client and upstream that asyncio gives: fixed bytes out, lengths counted, nothing parsed twice.

Both run in one process, so what they cost is in every arm alike. Loopback only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

#: What the upstream answers: a chat completion with its usage, as an engine writes it.
COMPLETION = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1764400000, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 300, "completion_tokens": 2, "total_tokens": 302},
}).encode()  # fmt: skip
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(COMPLETION),
    COMPLETION,
)


class Messages:
    """Counts whole HTTP/1.1 messages in a byte stream by their content-length."""

    __slots__ = ("_head", "_left")

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes | None:
        """The head of the message that ``data`` completes, or None; messages must not be pipelined."""
        if not self._left:
            self._head += data
            head, separator, body = self._head.partition(b"\r\n\r\n")
            if not separator:
                return None
            self._head = head
            at = head.lower().find(b"content-length:")
            self._left = (int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0) - len(body)
        else:
            self._left -= len(data)
        if self._left > 0:
            return None
        head, self._head, self._left = self._head, b"", 0
        return head


class Upstream(asyncio.Protocol):
    """Answers every request with ``ANSWER``."""

    def __init__(self) -> None:
        self._messages = Messages()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a TCP server's transport can be written to

    def data_received(self, data: bytes) -> None:
        if self._messages.feed(data) is not None and self._transport is not None:
            self._transport.write(ANSWER)


class Client(asyncio.Protocol):
    """One keep-alive connection with one request in flight."""

    def __init__(self) -> None:
        self._messages = Messages()
        self._transport: asyncio.WriteTransport | None = None
        self._answered: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        head = self._messages.feed(data)
        if head is not None and self._answered is not None:
            self._answered.set_result(head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the gateway closed the connection"))

    async def ask(self, request: bytes) -> bytes:
        """The head of the answer to ``request``."""
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


async def drive(port: int, requests: Callable[[], bytes], concurrent: int, seconds: float) -> tuple[list[float], int]:
    """Seconds of each request answered 200, ``concurrent`` at a time for ``seconds``; and how many got anything else.

    Anything else is Envoy's own 503 on a machine so busy that a health check took too long: told, not timed.
    """
    loop = asyncio.get_running_loop()
    took: list[float] = []
    stop_at = time.perf_counter() + seconds
    others = 0

    async def one() -> None:
        nonlocal others
        while time.perf_counter() < stop_at:
            _, client = await loop.create_connection(Client, "127.0.0.1", port)
            try:
                while (began := time.perf_counter()) < stop_at:
                    head = await client.ask(requests())
                    if not head.startswith(b"HTTP/1.1 200"):
                        others += 1
                        break
                    took.append(time.perf_counter() - began)
            finally:
                client.close()

    await asyncio.gather(*(one() for _ in range(concurrent)))
    return took, others
