"""The ledger does not answer: each lane's posture, in time, and what its requests become when the ledger is back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.load import Streams, Trickle, chat, malformed, over_capacity, until, whole
from tests.support.stack import PROMPT, READY_WITHIN_S, SEEN_AFTER_S, Stack, running

PRIMARY = ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"]
REMOTE = ["--blocks", "4097", "--served-model", "r", "--decode-tokens-per-s", "4000"]
TARGETS: dict[str, Any] = {
    "primary": {
        "engine": "vllm", "servedModel": "m", "watermark": 0.0, "abortLagMs": 4000, "replicas": [{"name": "primary-0"}],
    },
    "remote": {"engine": "openai", "servedModel": "r", "engineName": "remote-0"},
}  # fmt: skip
REST: dict[str, Any] = {
    "lanes": {"strict": {}, "away": {"whenDown": "remote"}, "shared": {"whenDown": "share"}},
    "aliases": {
        "strict": {"lane": "strict", "targets": ["primary", "remote"]},
        "away": {"lane": "away", "targets": ["primary", "remote"]},
        "home": {"lane": "away", "targets": ["primary"]},
        "shared": {"lane": "shared", "targets": ["primary"]},
    },
}
#: The ledger's deadline is 200 ms here, Envoy's 20 s, and the ledger is away until all have been answered.
DECIDED_WITHIN_S = 10.0
#: 57 blocks by the bound: five of them fit 320.
LONG = 600
#: Speed of the engine while its streams must not end: ``LONG`` lasts two minutes.
SLOW = 0.1

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """A local engine and a remote for all tests."""
    with running({"primary-0": PRIMARY, "remote-0": REMOTE}, TARGETS, ledger=PROMPT["ledger"], **REST) as made:
        yield made


def served(stack: Stack, engine: str) -> int:
    return int(stack.engines[engine].stats()["submitted"])


async def until_admitted(stack: Stack) -> float:
    """Ask until the primary is used again; the seconds it took."""
    began = time.monotonic()
    while True:
        reply = await stack.send(chat("home", 5))
        if reply.status == 200 and reply.headers["x-kvgate-target"] == "primary":
            return time.monotonic() - began
        assert malformed(reply) is None
        assert time.monotonic() - began < READY_WITHIN_S, (reply, stack.logs())
        await asyncio.sleep(0.2)


async def settled(stack: Stack) -> None:
    """The primary admits, nothing is reserved, and serve's own view of the fleet says so."""
    await until_admitted(stack)
    await stack.until_empty()
    await asyncio.sleep(SEEN_AFTER_S)


@pytest.mark.parametrize("how", ["hangs", "dead"])
async def test_posture_of_each_lane(stack: Stack, how: str) -> None:
    """Reject, remote or share, each within the deadline; nothing of it waits for the ledger."""
    await settled(stack)
    before = {name: served(stack, name) for name in stack.engines}
    if how == "hangs":
        stack.valkey.pause()
    else:
        stack.valkey.kill()
    try:
        took: list[float] = []
        for _ in range(4):
            for model, decision, reason, status in (
                ("strict", "reject", "ledger_down", 503),
                ("home", "reject", "ledger_down", 503),
                ("away", "fallback", "ledger_down", 200),
                ("shared", "admit", None, 200),
            ):
                reply = await stack.send(chat(model, 1))
                shown = (reply.status, reply.headers.get("x-kvgate-decision"), reply.headers.get("x-kvgate-reason"))
                assert shown == (status, decision, reason), (model, reply, stack.logs())
                assert status == 200 or malformed(reply) is None
                took.append(reply.took_s)
        print(f"slowest answer {max(took):.3f} s, fastest {min(took):.3f} s")
        assert max(took) < DECIDED_WITHIN_S
        assert {name: served(stack, name) - before[name] for name in stack.engines} == {"primary-0": 4, "remote-0": 4}
    finally:
        if how == "hangs":
            stack.valkey.resume()
        else:
            await asyncio.to_thread(stack.valkey.start)
    print(f"admitted again after {await until_admitted(stack):.3f} s")
    await stack.until_empty()
    assert over_capacity(stack) == []


async def test_share_is_no_more_than_was_free(stack: Stack) -> None:
    """With two places taken before the outage, a share admits the three that were left, and a fourth when one has ended."""
    await settled(stack)
    before = served(stack, "primary-0")
    stack.engines["primary-0"].faults(rate=SLOW)
    streams = Streams(stack)
    streams.start(2, chat("strict", LONG))
    await stack.until_reserved(2)
    await asyncio.sleep(SEEN_AFTER_S)  # the last snapshot shows them
    stack.valkey.pause()
    try:
        shared = Streams(stack, again=False)
        shared.start(5, chat("shared", LONG))
        await until(
            lambda: shared.running == 3 and served(stack, "primary-0") - before == 5, "three run, two are refused"
        )
        refused = [task.result() for task in shared.tasks if task.done()]
        assert {(reply.status, reply.headers["x-kvgate-reason"]) for reply in refused} == {(503, "ledger_down")}
        leaves = next(task for task in shared.tasks if not task.done())
        leaves.cancel()
        early = await stack.send(chat("shared", LONG, stream=True))
        assert early.status == 503, "the engine frees later than the client leaves"
        fourth = Streams(stack)
        fourth.start(1, chat("shared", LONG))
        await until(lambda: served(stack, "primary-0") - before == 6, "the place of the one that left is given again")
        assert shared.running + fourth.running == 3
    finally:
        stack.valkey.resume()
    stack.engines["primary-0"].faults(clear=True)
    shared.tasks.remove(leaves)
    done = [*await streams.all(), *await shared.all(), *await fourth.all()]
    assert [reply for reply in done if not whole(reply) and reply not in refused] == []
    await stack.until_empty()
    assert over_capacity(stack) == []


async def test_what_a_share_admitted_is_reserved_when_the_ledger_is_back(stack: Stack) -> None:
    """Streams that began without the ledger are in it as soon as it answers: no room is given away twice."""
    await settled(stack)
    before = served(stack, "primary-0")
    stack.engines["primary-0"].faults(rate=SLOW)
    streams = Streams(stack, again=False)
    stack.valkey.pause()
    try:
        await asyncio.sleep(2.5)  # long enough for the connection to be given up
        streams.start(4, chat("shared", LONG))
        await until(lambda: served(stack, "primary-0") - before == 4, "all four are admitted")
    finally:
        stack.valkey.resume()
    async with Trickle(stack, chat("home", LONG, stream=True), every_s=0.05, timeout_s=3.0) as trickle:
        await asyncio.sleep(1.5)
    await stack.until_reserved(4)
    assert streams.running == 4
    stack.engines["primary-0"].faults(clear=True)
    print(Counter((r.status, r.headers.get("x-kvgate-reason")) for r in trickle.replies()))
    assert [reply for reply in await streams.all() if not whole(reply)] == []
    await stack.until_empty()
    assert over_capacity(stack) == []
