"""``serve`` stopped, killed and told to go, under load: clients, the engine's own count, and the ledger afterwards."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.load import Streams, Trickle, chat, malformed, over_capacity, whole
from tests.support.stack import Stack, running

#: 320 usable blocks; a step takes 20 ms and more, so a stream writes at most 50 tokens per second.
PRIMARY = ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"]
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "primary-0"}]}
}
REST: dict[str, Any] = {"lanes": {"edit": {}}, "aliases": {"coder": {"lane": "edit", "targets": ["primary"]}}}
#: From the end of the last client's stream to an empty ledger.
EMPTY_WITHIN_S = 15.0
#: From the return of serve to the first request that it admits: orphans go after 10 s of silence.
SERVED_WITHIN_S = 30.0
#: Envoy's message timeout is 1 s; the rest is this machine's.
REFUSED_WITHIN_S = 2.5
#: 57 blocks by the bound, and 13 s or more: five leave room for one or two short ones.
LONG = chat("coder", 600)
SHORT = chat("coder", 20)

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One stack; every test leaves it whole."""
    with running({"primary-0": PRIMARY}, TARGETS, **REST) as made:
        yield made


async def check_after(stack: Stack, streams: Streams) -> float:
    """Every stream was whole, the engine was never promised too much, the ledger is empty in time: how soon."""
    replies = await streams.all()
    harmed = [reply for reply in replies if not whole(reply)]
    assert harmed == [], stack.logs()
    await stack.until_empty(EMPTY_WITHIN_S)
    took = time.monotonic() - streams.ended_s
    assert took <= EMPTY_WITHIN_S
    assert over_capacity(stack) == []
    return took


async def test_stopped_for_nine_seconds(stack: Stack) -> None:
    """SIGSTOP: running streams go on, new requests get their 503 within the message timeout, nothing is lost."""
    streams = Streams(stack)
    streams.start(5, LONG)
    await stack.until_reserved(5)
    async with Trickle(stack, SHORT) as trickle:
        stopped = time.monotonic()
        stack.serves[0].send_signal(signal.SIGSTOP)
        await asyncio.sleep(9.0)
        stack.serves[0].send_signal(signal.SIGCONT)
        resumed = time.monotonic()
        assert streams.running == 5
        await asyncio.sleep(3.0)
    refused = trickle.replies(stopped, resumed - 1.5)
    assert len(refused) >= 15
    assert {(reply.status, reply.headers.get("x-kvgate-decision")) for reply in refused} == {(503, "unavailable")}
    assert [malformed(reply) for reply in refused if malformed(reply)] == []
    slowest = max(reply.took_s for reply in refused)
    assert slowest <= REFUSED_WITHIN_S
    assert 200 in {reply.status for reply in trickle.replies(resumed)}
    took = await check_after(stack, streams)
    print(f"slowest_refusal_s: {round(slowest, 3)}")
    print(f"empty_after_s: {round(took, 3)}")


async def test_killed_and_back(stack: Stack) -> None:
    """SIGKILL: running streams go on, new ones are refused at once, the next instance takes everything over."""
    streams = Streams(stack)
    streams.start(5, LONG)
    await stack.until_reserved(5)
    async with Trickle(stack, SHORT) as trickle:
        stack.kill_serve()
        killed = time.monotonic()
        await asyncio.sleep(3.0)
        back = time.monotonic()
        await asyncio.to_thread(stack.start_serve)
        # Short requests whose end nobody heard keep their room until the silence rule frees it, as the streams do to
        # their end: on a slow machine two of them leave none for a newcomer.
        await trickle.until_served(back, SERVED_WITHIN_S)
    refused = trickle.replies(killed, back)
    assert {reply.status for reply in refused} == {503}
    assert [malformed(reply) for reply in refused if malformed(reply)] == []
    took = await check_after(stack, streams)
    print(f"empty_after_s: {round(took, 3)}")


async def test_ends_while_nobody_listens(stack: Stack) -> None:
    """Clients that leave while serve is dead leave no end record; their reservations go all the same."""
    streams = Streams(stack)
    streams.start(4, LONG)
    await stack.until_reserved(4)
    stack.kill_serve()
    killed = time.monotonic()
    for task in streams.tasks:
        task.cancel()
    await asyncio.gather(*streams.tasks, return_exceptions=True)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(stack.start_serve)
    await stack.until_empty(EMPTY_WITHIN_S)
    print(f"empty_after_s: {round(time.monotonic() - killed, 3)}")
    assert time.monotonic() - killed <= EMPTY_WITHIN_S
    assert over_capacity(stack) == []
