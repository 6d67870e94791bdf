"""Valkey killed with its data, and hung: what runs is found again, ends of the outage arrive, nothing is promised twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.load import Streams, Trickle, chat, malformed, over_capacity, whole
from tests.support.stack import PROMPT, RELEASED_WITHIN_S, Stack, running

PRIMARY = ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"]
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "primary-0"}]}
}
REST: dict[str, Any] = {"lanes": {"edit": {}}, "aliases": {"coder": {"lane": "edit", "targets": ["primary"]}}}
#: 57 blocks by the bound and 13 s or more: five of them fit 320.
LONG = chat("coder", 600)
#: Speed of the engine while its streams must not end: ``LONG`` lasts over two minutes.
SLOW = 0.1
#: From the ledger's return to a replica that is known again.
KNOWN_WITHIN_S = 60.0
#: New requests that have to be answered during the outage.
REFUSED = 8

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """One engine for all tests."""
    with running({"primary-0": PRIMARY}, TARGETS, ledger=PROMPT["ledger"], **REST) as made:
        yield made


async def rids(stack: Stack) -> set[str]:
    """The reservations in the ledger now."""
    held = await stack.read(lambda ledger: ledger.reservations("primary-0"))
    return {live.reservation.rid for live in held}


async def check_after(stack: Stack, streams: Streams) -> None:
    """Every stream was whole, the ledger becomes empty, the engine was never promised too much."""
    stack.engines["primary-0"].faults(clear=True)
    assert [reply for reply in await streams.all() if not whole(reply)] == [], stack.logs()
    await stack.until_empty()
    print(f"empty {time.monotonic() - streams.ended_s:.3f} s after the last stream")
    assert over_capacity(stack) == []


async def test_killed_and_empty_again(stack: Stack) -> None:
    """All data lost: refusals meanwhile, nothing admitted before every live stream is back in the ledger."""
    stack.engines["primary-0"].faults(rate=SLOW)
    streams = Streams(stack)
    streams.start(4, LONG)
    await stack.until_reserved(4)
    before = await rids(stack)
    async with Trickle(stack, LONG | {"stream": True}, every_s=0.1, timeout_s=3.0) as trickle:
        stack.valkey.kill()
        killed = time.monotonic()
        await trickle.until_answered(REFUSED, killed)
        # All of them while the ledger was still away: none of the answers waited for it.
        refused = trickle.answered(killed)
        back = time.monotonic()
        await asyncio.to_thread(stack.valkey.start)
        known = 0.0
        while time.monotonic() < back + KNOWN_WITHIN_S:
            view = (await stack.snapshot()).replicas.get("primary-0")
            found = await rids(stack)
            if not known and before <= found:
                known = time.monotonic()
                print(f"every live stream is back in the ledger after {known - back:.3f} s")
            if view is not None and view.state == "ready":
                # Nobody was let in before that, though each of these asked for room that the lost data had not shown.
                assert known, "ready before the live streams were known"
                print(f"the replica is known again after {time.monotonic() - back:.3f} s")
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(stack.logs())
        assert before <= await rids(stack)
    assert {(r.status, r.headers.get("x-kvgate-reason")) for r in refused} == {(503, "ledger_down")}
    assert [malformed(reply) for reply in trickle.replies() if reply.status not in (0, 200) and malformed(reply)] == []
    assert streams.running == 4
    await check_after(stack, streams)


async def test_ends_of_an_outage_are_delivered(stack: Stack) -> None:
    """Streams that end while the ledger hangs are gone from it as soon as it answers, those that go on are not."""
    stack.engines["primary-0"].faults(rate=0.3)
    streams, short = Streams(stack), Streams(stack)
    streams.start(2, LONG)
    short.start(2, chat("coder", 60))
    await stack.until_reserved(4)
    stack.valkey.pause()
    try:
        assert [reply for reply in await short.all() if not whole(reply)] == []
        await asyncio.sleep(1.5)
        assert streams.running == 2
    finally:
        stack.valkey.resume()
    stack.engines["primary-0"].faults(rate=SLOW)
    back = time.monotonic()
    # Before silence could have ended them: nobody listened while the ledger was away.
    await stack.until_reserved(2, within_s=RELEASED_WITHIN_S)
    print(f"the ends were delivered {time.monotonic() - back:.3f} s after the return")
    assert streams.running == 2
    await check_after(stack, streams)


async def test_hung_for_longer_than_a_lease(stack: Stack) -> None:
    """12 s without the ledger, over the lease's 10: every live stream still counts on its return, and nobody else got in."""
    stack.engines["primary-0"].faults(rate=SLOW)
    streams = Streams(stack)
    streams.start(5, LONG)
    await stack.until_reserved(5)
    before = await rids(stack)
    stack.valkey.pause()
    await asyncio.sleep(12)
    stack.valkey.resume()
    async with Trickle(stack, LONG | {"stream": True}, every_s=0.1, timeout_s=3.0) as trickle:
        for _ in range(30):
            assert before <= await rids(stack)
            await asyncio.sleep(0.1)
    assert 200 not in {reply.status for reply in trickle.replies()}
    assert streams.running == 5
    await check_after(stack, streams)
