"""The bounded HTTP client against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from extproc.agent.http import MAX_BODY_BYTES, Cause, Client, Unreachable
from tests.integration.agent.engines import free_port

#: A time-out that no busy machine meets.
ANSWERED_S = 60.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A loopback server; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/prefix"
    finally:
        listening.close()
        await listening.wait_closed()


def sends(*parts: bytes, forever: bool = False) -> Handler:
    """A handler that answers one request with these bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        while forever:
            writer.write(b"x" * 65536)
            await writer.drain()

    return handle


async def get(url: str, timeout_s: float = ANSWERED_S) -> tuple[int, bytes]:
    """One GET."""
    client = Client(url)
    try:
        response = await client.get("/metrics", timeout_s)
        return response.status, response.body
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",), b"abc"),
        ((b"HTTP/1.1 200 OK\r\nContent-", b"Length: 3\r\n\r\na", b"bc"), b"abc"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nT: v\r\n\r\n",), b"abc"),
        ((b"HTTP/1.0 200 OK\r\n\r\nabc",), b"abc"),
        ((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",), b"abc"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), b""),
    ],
)
async def test_framings_are_read(parts: tuple[bytes, ...], body: bytes) -> None:
    """Length, chunks, end of connection and interim answers give the same body."""
    async with server(sends(*parts)) as url:
        assert (await get(url))[1] == body


async def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    """What redirects is not the engine."""
    async with server(
        sends(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
    ) as url:
        assert await get(url) == (302, b"")


@pytest.mark.parametrize(
    ("handler", "cause"),
    [
        (sends(), Cause.RESET),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), Cause.RESET),
        (sends(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), Cause.PROTOCOL),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), Cause.PROTOCOL),
        (sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), Cause.PROTOCOL),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)), Cause.TOO_LARGE),
        (sends(b"HTTP/1.1 200 OK\r\n\r\n", forever=True), Cause.TOO_LARGE),
        (sends(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20000 + b"\r\n"), Cause.TOO_LARGE),
    ],
)
async def test_failures_have_a_cause(handler: Handler, cause: Cause) -> None:
    """Whatever the server does becomes one of the known causes."""
    async with server(handler) as url:
        with pytest.raises(Unreachable) as caught:
            await get(url)
    assert caught.value.cause is cause


async def test_a_silent_server_costs_the_deadline_and_no_more() -> None:
    """No answer: the time-out ends the wait, a tenth of a second with a server that is silent for as long as it is asked."""

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(silent) as url:
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable) as caught:
            await get(url, 0.1)
        elapsed_s = asyncio.get_running_loop().time() - began
    assert caught.value.cause is Cause.TIMEOUT
    assert 0.1 <= elapsed_s < ANSWERED_S / 2


async def test_nobody_listening_is_refused() -> None:
    """The one cause that proves that no engine is there."""
    with pytest.raises(Unreachable) as caught:
        await get(f"http://127.0.0.1:{free_port()}")
    assert caught.value.cause is Cause.REFUSED


async def test_a_name_that_does_not_resolve() -> None:
    """Names fail with their own cause."""
    with pytest.raises(Unreachable) as caught:
        await get("http://kvgate.invalid:1")
    assert caught.value.cause is Cause.NAME


async def test_one_connection_serves_many_gets_and_is_replaced_when_closed() -> None:
    """Keep-alive is used; a server that closes idle connections causes no failure."""
    heads: list[bytes] = []
    connections = 0

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async with server(twice) as url:
        client = Client(url)
        bodies = [(await client.get("/metrics", ANSWERED_S)).body for _ in range(6)]
        await client.close()
    assert bodies == [b"ok"] * 6
    assert connections == 3
    assert heads[0].startswith(b"GET /prefix/metrics HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"uthorization" not in heads[0]


async def test_a_name_with_two_addresses_is_refused_only_by_both() -> None:
    """localhost has ::1 and 127.0.0.1: one that answers is enough, none is "refused", not some network error."""
    port = free_port()
    with pytest.raises(Unreachable) as caught:
        await get(f"http://localhost:{port}")
    assert caught.value.cause is Cause.REFUSED
    async with server(sends(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")) as url:
        assert await get(url.replace("127.0.0.1", "localhost")) == (200, b"abc")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br, gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3000,
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
    ],
    ids=["gzip", "two codings", "interim answers for ever", "superscript"],
)
async def test_what_was_not_asked_for_is_no_answer(answer: bytes) -> None:
    """Codings that the request did not offer, answers that never become final, numbers that are none."""
    async with server(sends(answer)) as url:
        with pytest.raises(Unreachable) as caught:
            await get(url)
    assert caught.value.cause is Cause.PROTOCOL


async def test_a_coding_that_changes_nothing_is_read() -> None:
    """Some proxies name it."""
    async with server(sends(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc")) as url:
        assert await get(url) == (200, b"abc")


async def test_a_resolver_that_hangs_is_asked_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline ends its thread, and the pool of threads is everybody's; what has an address needs none of them."""
    asked: list[str] = []
    answered = asyncio.Event()

    async def hanging(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        await answered.wait()
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hanging)
    client = Client("http://engine.test:8000")
    causes = []
    for _ in range(3):
        with pytest.raises(Unreachable) as caught:
            await client.get("/metrics", 0.02)
        causes.append(caught.value.cause)
    async with server(sends(b"HTTP/1.1 204 No Content\r\n\r\n")) as url:
        numeric = await get(url)
    answered.set()
    with pytest.raises(Unreachable) as caught:
        await client.get("/metrics", ANSWERED_S)
    await client.close()

    assert causes == [Cause.TIMEOUT] * 3
    assert asked == ["engine.test"]
    assert numeric == (204, b"")
    assert caught.value.cause is Cause.NAME  # a resolver that finds nothing
