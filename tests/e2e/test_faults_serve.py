"""``serve`` stopped, killed and told to go, under load: clients, the engine's own count, and the ledger afterwards."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.load import Streams, Trickle, chat, malformed, over_capacity, whole
from tests.support.stack import PROMPT, Stack, running

#: 320 usable blocks; a step takes 20 ms and more, so a stream writes at most 50 tokens per second.
PRIMARY = ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"]
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "primary-0"}]}
}
REST: dict[str, Any] = {"lanes": {"edit": {}}, "aliases": {"coder": {"lane": "edit", "targets": ["primary"]}}}
#: Envoy's message timeout is 1 s here; ``serve`` stands still for nine.
REFUSED_WITHIN_S = 5.0
#: New requests that have to be refused while ``serve`` is dead.
REFUSED = 8
#: Speed of the engine while its streams must not end: ``LONG`` lasts two minutes.
SLOW = 0.1
#: 57 blocks by the bound, and 13 s or more: five leave room for one or two short ones.
LONG = chat("coder", 600)
SHORT = chat("coder", 20)

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """One engine for all tests."""
    with running({"primary-0": PRIMARY}, TARGETS, **PROMPT, **REST) as made:
        yield made


async def check_after(stack: Stack, streams: Streams) -> None:
    """Every stream was whole, the engine was never promised too much, the ledger becomes empty."""
    stack.engines["primary-0"].faults(clear=True)
    replies = await streams.all()
    harmed = [reply for reply in replies if not whole(reply)]
    assert harmed == [], stack.logs()
    await stack.until_empty()
    print(f"empty_after_s: {round(time.monotonic() - streams.ended_s, 3)}")
    assert over_capacity(stack) == []


async def test_stopped_for_nine_seconds(stack: Stack) -> None:
    """SIGSTOP: running streams go on, new requests get their 503 within the message timeout, nothing is lost."""
    stack.engines["primary-0"].faults(rate=SLOW)
    streams = Streams(stack)
    streams.start(5, LONG)
    await stack.until_reserved(5)
    async with Trickle(stack, SHORT) as trickle:
        stack.serves[0].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await asyncio.sleep(9.0)
        resumed = time.monotonic()
        stack.serves[0].send_signal(signal.SIGCONT)
        assert streams.running == 5
        stack.engines["primary-0"].faults(clear=True)
        await trickle.until_served(resumed)
    refused = trickle.answered(stopped, resumed)
    assert len(refused) >= REFUSED
    assert {(reply.status, reply.headers.get("x-kvgate-decision")) for reply in refused} == {(503, "unavailable")}
    assert [malformed(reply) for reply in refused if malformed(reply)] == []
    assert trickle.waiting(stopped, resumed - REFUSED_WITHIN_S, resumed) == 0
    print(f"slowest_refusal_s: {round(max(reply.took_s for reply in refused), 3)}")
    await check_after(stack, streams)


async def test_killed_and_back(stack: Stack) -> None:
    """SIGKILL: running streams go on, new ones are refused at once, the next instance takes everything over."""
    stack.engines["primary-0"].faults(rate=SLOW)
    streams = Streams(stack)
    streams.start(5, LONG)
    await stack.until_reserved(5)
    async with Trickle(stack, SHORT) as trickle:
        stack.kill_serve()
        killed = time.monotonic()
        # All of them while it is dead: none of the answers waits for the next instance.
        await trickle.until_answered(REFUSED, killed)
        refused = trickle.answered(killed)
        back = time.monotonic()
        await asyncio.to_thread(stack.start_serve)
        # Short requests whose end nobody heard keep their room until the silence rule frees it: on a slow machine two
        # of them leave none for a newcomer while the streams run.
        stack.engines["primary-0"].faults(clear=True)
        await trickle.until_served(back)
    assert {reply.status for reply in refused} == {503}
    assert [malformed(reply) for reply in refused if malformed(reply)] == []
    await check_after(stack, streams)


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
    await stack.until_empty()
    print(f"empty_after_s: {round(time.monotonic() - killed, 3)}")
    assert over_capacity(stack) == []
