"""Clients that leave, share a request id, or speak HTTP in unusual ways: nothing leaks, nobody pays for another."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset

from extproc.ledger.base import State
from extproc.local.client import Reply
from tests.support.load import Streams, chat, over_capacity, until, whole
from tests.support.stack import READY_WITHIN_S, RELEASED_WITHIN_S, Stack, running

#: 320 usable blocks: ten requests of 200 output tokens, of 32 blocks by the bound.
PLACES, OUTPUT = 10, 200
PRIMARY = ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"]
#: Long enough to be seen, and over before silence could have ended anything.
COOLING_MS = 3000
TARGETS: dict[str, Any] = {
    "primary": {
        "engine": "vllm", "servedModel": "m", "watermark": 0.0, "abortLagMs": COOLING_MS, "maxWaiting": None,
        "replicas": [{"name": "primary-0"}],
    }
}  # fmt: skip
REST: dict[str, Any] = {"lanes": {"edit": {}}, "aliases": {"coder": {"lane": "edit", "targets": ["primary"]}}}
#: What a client reads on a connection of its own comes within this long, or fails the test.
READ_WITHIN_S = 60.0
#: Odd requests are answered before any limit of ours strikes: 20 s for a decision, ``READ_WITHIN_S`` for the client.
ODD_WITHIN_S = 15.0

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """One engine for all tests."""
    with running({"primary-0": PRIMARY}, TARGETS, **REST) as made:
        yield made


def submitted(stack: Stack) -> int:
    """Requests that the engine itself says it was given."""
    return int(stack.engines["primary-0"].stats()["submitted"])


async def fill(stack: Stack, running: list[asyncio.Task[Reply]]) -> None:
    """Send streams, refused ones again, until as many run as have a place."""
    until_s = time.monotonic() + READY_WITHIN_S
    before = submitted(stack) - len(running)
    while len(running) < PLACES:
        assert time.monotonic() < until_s, f"{len(running)} of {PLACES} places were given"
        task = asyncio.create_task(stack.send(chat("coder", OUTPUT, stream=True), timeout_s=300.0))
        await until(lambda task=task: task.done() or submitted(stack) - before > len(running), "an answer")
        if task.done():
            assert task.result().status == 429, task.result()
            await asyncio.sleep(0.1)
        else:
            running.append(task)


async def test_places_of_clients_that_leave_are_given_again(stack: Stack) -> None:
    """All of them, and none before the engine is done with it, which is later than its client's leaving."""
    rng = random.Random(7)
    stack.engines["primary-0"].faults(abort_lag_s=0.4, rate=0.02)
    running: list[asyncio.Task[Reply]] = []
    for _ in range(3):
        await fill(stack, running)
        refused = await stack.send(chat("coder", OUTPUT))
        assert (refused.status, refused.headers["x-kvgate-reason"]) == (429, "insufficient_headroom")
        for leaver in rng.sample(running, PLACES // 2):
            running.remove(leaver)
            leaver.cancel()
            await asyncio.sleep(rng.uniform(0.0, 0.2))
    stack.engines["primary-0"].faults(clear=True)
    assert [reply for reply in await asyncio.gather(*running) if not whole(reply)] == []
    await stack.until_empty()
    assert over_capacity(stack) == []


async def states(stack: Stack) -> set[State]:
    """The states of what is reserved."""
    return {live.state for live in await stack.read(lambda ledger: ledger.reservations("primary-0"))}


async def test_abort_cools_and_a_whole_answer_does_not(stack: Stack) -> None:
    """A client's leaving keeps the reservation for the engine's lag; a complete answer's goes with its record."""
    assert whole(await stack.send(chat("coder", 10, stream=True)))
    ended, seen = time.monotonic(), set[State]()
    while found := await states(stack):
        seen |= found
        assert time.monotonic() - ended < RELEASED_WITHIN_S, found
    print(f"complete: released after {time.monotonic() - ended:.3f} s")
    assert seen <= {State.RESERVED}
    stack.engines["primary-0"].faults(rate=0.02)
    leaver = asyncio.create_task(stack.send(chat("coder", 300, stream=True), timeout_s=300.0))
    await stack.until_reserved(1)
    left = time.monotonic()
    leaver.cancel()
    while State.COOLING not in await states(stack):
        assert time.monotonic() - left < RELEASED_WITHIN_S, "it never cooled"
    await stack.until_empty(RELEASED_WITHIN_S)
    abort_s = time.monotonic() - left
    print(f"abort: after {abort_s:.3f} s")
    stack.engines["primary-0"].faults(clear=True)
    assert abort_s >= COOLING_MS / 1000


async def test_one_request_id_for_everything(stack: Stack) -> None:
    """A client that leaves while we decide takes nobody's reservation along, though all bear the same request id."""
    stack.engines["primary-0"].faults(rate=0.1)  # none of the two ends while they are watched
    headers = {"x-request-id": "always-the-same"}
    streams = [
        asyncio.create_task(stack.send(chat("coder", 250, stream=True), headers=headers, timeout_s=300.0))
        for _ in range(2)
    ]
    await stack.until_reserved(2)
    for _ in range(3):
        stack.valkey.pause()
        leavers = [stack.send(chat("coder", 5), headers=headers, timeout_s=0.04 + 0.02 * n) for n in range(3)]
        await asyncio.gather(*leavers)
        stack.valkey.resume()
        await asyncio.sleep(0.15)
    counts = []
    for _ in range(30):
        counts.append(await stack.reservations())
        await asyncio.sleep(0.1)
    assert not any(stream.done() for stream in streams)
    stack.engines["primary-0"].faults(clear=True)
    assert min(counts) == 2
    assert [reply for reply in await asyncio.gather(*streams) if not whole(reply)] == []
    await stack.until_empty()
    assert over_capacity(stack) == []


async def test_leaving_while_we_decide_leaks_nothing(stack: Stack) -> None:
    """40 clients leave within milliseconds of asking, some before the ledger answers, some after."""
    rng = random.Random(11)
    for _ in range(4):
        stack.valkey.pause()
        leavers = [
            asyncio.create_task(stack.send(chat("coder", 40), timeout_s=rng.uniform(0.002, 0.15))) for _ in range(10)
        ]
        await asyncio.sleep(0.1)
        stack.valkey.resume()
        await asyncio.gather(*leavers)
    began = time.monotonic()
    await stack.until_empty()
    print(f"empty after {time.monotonic() - began:.3f} s")
    reply = await stack.send(chat("coder", 2))
    assert reply.status == 200


def outcomes(stack: Stack) -> list[str]:
    """How the last two requests ended, by the engine's log."""
    return sorted(entry["outcome"] for entry in stack.engines["primary-0"].requests[-2:])


async def test_http2_whole_and_reset(stack: Stack) -> None:
    """Two streams on one HTTP/2 connection: one runs to its end, the other is reset and cools."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port)
    client = H2Connection()
    client.initiate_connection()
    for stream, output in ((1, 60), (3, 300)):
        body = json.dumps(chat("coder", output, stream=True)).encode()
        head = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "x"),
                ("content-type", "application/json")]  # fmt: skip
        client.send_headers(stream, head)
        client.send_data(stream, body, end_stream=True)
    writer.write(client.data_to_send())
    status: dict[int, bytes] = {}
    received = b""
    reset = ended = False
    while not ended:
        for event in client.receive_data(await asyncio.wait_for(reader.read(65536), READ_WITHIN_S)):
            if isinstance(event, ResponseReceived):
                status[event.stream_id] = dict(event.headers)[b":status"]
            elif isinstance(event, DataReceived):
                client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                received += event.data if event.stream_id == 1 else b""
            elif isinstance(event, StreamEnded):
                ended = event.stream_id == 1
            assert not isinstance(event, StreamReset)
        if len(status) == 2 and not reset:
            client.reset_stream(3)
            reset = True
        writer.write(client.data_to_send())
    assert status == {1: b"200", 3: b"200"}
    assert received.rstrip().endswith(b"[DONE]")
    await stack.until_empty(RELEASED_WITHIN_S)
    await until(lambda: outcomes(stack) == ["aborted", "complete"], "the engine's log shows both ends")
    writer.close()


async def raw(stack: Stack, *parts: bytes, pause_s: float = 0.05) -> bytes:
    """Send these bytes with pauses between them; what came back until the answer was whole or the peer closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port)
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(READ_WITHIN_S):
            while piece := await reader.read(65536):
                received += piece
                if received.endswith((b"}", b"0\r\n\r\n")) and b"HTTP/1.1 100" not in received[-40:]:
                    break
    except TimeoutError:
        pass
    finally:
        writer.close()
    return received


BODY = json.dumps(chat("coder", 3)).encode()
WEBSOCKET = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def test_chunked_upload_with_trailers(stack: Stack) -> None:
    """A body in pieces with a trailer behind it is one body."""
    half = len(BODY) // 2
    pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:])]
    head = HEAD + b"transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
    answer = await raw(stack, head, *pieces, b"0\r\nx-sum: 1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b"x-kvgate-decision: admit" in answer
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_expect_100_continue(stack: Stack) -> None:
    """curl asks before it sends more than a kilobyte."""
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    answer = await raw(stack, head, BODY, pause_s=0.3)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200"), answer
    await stack.until_empty(RELEASED_WITHIN_S)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        WEBSOCKET,
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["get", "empty post", "websocket", "options", "two lengths", "bad chunk"],
)
async def test_odd_requests_get_an_answer_in_time(stack: Stack, request_bytes: bytes) -> None:
    """No body, no method of ours, an upgrade, broken framing: a client error before any limit, and nothing reserved."""
    began = time.monotonic()
    answer = await raw(stack, request_bytes)
    took = time.monotonic() - began
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert took < ODD_WITHIN_S
    assert await stack.reservations() == 0


async def test_half_a_body_and_silence_reserves_nothing(stack: Stack) -> None:
    """A client that stops in the middle of its body holds nothing of the engine's memory."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port)
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:-5])
    await asyncio.sleep(0.5)
    assert await stack.reservations() == 0
    writer.close()
    assert await reader.read() == b""


async def test_streams_of_a_slow_reader_are_whole(stack: Stack) -> None:
    """A client that reads nothing for a while gets everything in the end."""
    streams = Streams(stack)
    streams.start(1, chat("coder", 100))
    body = json.dumps(chat("coder", 100, stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port, limit=1024)
    writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await asyncio.sleep(3)
    async with asyncio.timeout(READ_WITHIN_S):
        received = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in received
    assert [reply for reply in await streams.all() if not whole(reply)] == []
    await stack.until_empty()
