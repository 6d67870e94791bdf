"""Two ``serve`` processes on one ledger: a race for the last places, a rolling restart, one that hangs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.ledger.base import SILENCE_S
from tests.support.load import Streams, Trickle, chat, malformed, over_capacity, until, whole
from tests.support.stack import STOP_WITHIN_S, Stack, running

#: A request of 200 output tokens takes 32 blocks by the bound: ten of them fit 330 blocks, eleven do not.
PLACES = 10
OUTPUT = 200
PRIMARY = ["--blocks", "331", "--served-model", "m", "--decode-tokens-per-s", "4000"]
REMOTE = ["--blocks", "8193", "--served-model", "r", "--decode-tokens-per-s", "100000"]
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "maxWaiting": None,
                "replicas": [{"name": "primary-0"}]},
    "remote": {"engine": "openai", "servedModel": "r", "engineName": "remote-0"},
}  # fmt: skip
REST: dict[str, Any] = {
    "lanes": {"edit": {}},
    "aliases": {
        "coder": {"lane": "edit", "targets": ["primary", "remote"]},
        "house": {"lane": "edit", "targets": ["primary"]},
    },
}

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """Two serve processes behind one Envoy."""
    with running({"primary-0": PRIMARY, "remote-0": REMOTE}, TARGETS, serves=2, **REST) as made:
        yield made


def served(stack: Stack, engine: str) -> int:
    """Requests that the engine itself says it has seen."""
    return int(stack.engines[engine].stats()["submitted"])


@pytest.mark.parametrize(("model", "overflow"), [("coder", "remote-0"), ("house", None)])
async def test_exactly_ten_of_two_hundred(stack: Stack, model: str, overflow: str | None) -> None:
    """200 requests at once over two deciders: ten at the primary by its own count, the others elsewhere or refused."""
    stack.engines["primary-0"].faults(rate=0.02)  # nothing ends before all are decided
    before = {name: served(stack, name) for name in stack.engines}
    streams = Streams(stack)
    streams.start(200, chat(model, OUTPUT))
    await until(lambda: streams.running <= PLACES, "all but those with a place are over")
    stack.engines["primary-0"].faults(clear=True)
    replies = await streams.all()
    got = {name: served(stack, name) - before[name] for name in stack.engines}
    print(Counter((r.status, r.headers.get("x-kvgate-decision"), r.headers.get("x-kvgate-reason")) for r in replies))
    assert got["primary-0"] == PLACES
    assert sum(whole(reply) for reply in replies) == PLACES + (200 - PLACES if overflow else 0)
    if overflow:
        assert got[overflow] == 200 - PLACES
        assert {reply.headers["x-kvgate-decision"] for reply in replies} == {"admit", "fallback"}
    else:
        refused = [reply for reply in replies if reply.status != 200]
        assert {reply.status for reply in refused} == {429}
        assert [malformed(reply) for reply in refused if malformed(reply)] == []
    assert over_capacity(stack) == []
    await stack.until_empty()


async def test_told_to_go(stack: Stack) -> None:
    """SIGTERM under load: no client notices, reservations live on, and the other instance ends them."""
    stack.engines["primary-0"].faults(rate=0.3)  # half a minute: no stream ends before the instance has
    streams = Streams(stack)
    streams.start(3, chat("house", 500))
    await stack.until_reserved(3)
    # Short enough for the room beside them, however slowly the engine writes.
    async with Trickle(stack, chat("house", 2), every_s=0.3) as trickle:
        await trickle.until_answered(2, 0.0)
        leaving = stack.serves[0]
        leaving.send_signal(signal.SIGTERM)
        try:
            assert await asyncio.to_thread(leaving.wait, STOP_WITHIN_S) == 0
            gone = time.monotonic()
            assert streams.running == 3
            assert await stack.reservations() >= 3
            stack.engines["primary-0"].faults(clear=True)
            await trickle.until_answered(3, gone)
        finally:
            await asyncio.to_thread(stack.start_serve, 0)
    answers = Counter(
        (r.status, r.headers.get("x-kvgate-decision"), r.headers.get("x-kvgate-reason")) for r in trickle.replies()
    )
    assert {status for status, *_ in answers} == {200}, (answers, stack.logs())
    replies = await streams.all()
    assert [reply for reply in replies if not whole(reply)] == [], stack.logs()
    await stack.until_empty()
    print(f"empty after {time.monotonic() - streams.ended_s:.3f} s")
    assert over_capacity(stack) == []


@pytest.mark.parametrize("number", [0, 1])
async def test_one_of_two_hangs(stack: Stack, number: int) -> None:
    """SIGSTOP of either for longer than a silence: the other never takes its silence for the end of a stream that lives."""
    streams = Streams(stack)
    stack.engines["primary-0"].faults(rate=0.1)  # a minute: no stream ends while they are watched
    streams.start(5, chat("house", 300))
    await stack.until_reserved(5)
    await asyncio.sleep(1.5)
    stopped = stack.serves[number]
    stopped.send_signal(signal.SIGSTOP)
    counts = []
    until_s = time.monotonic() + SILENCE_S + 5.0
    try:
        while time.monotonic() < until_s:
            counts.append(await stack.reservations())
            await asyncio.sleep(0.25)
        assert streams.running == 5
    finally:
        stopped.send_signal(signal.SIGCONT)
        stack.engines["primary-0"].faults(clear=True)
    print(f"{len(counts)} looks, {min(counts)} to {max(counts)} reservations")
    assert set(counts) == {5}
    assert [reply for reply in await streams.all() if not whole(reply)] == []
    await stack.until_empty()
    assert over_capacity(stack) == []
