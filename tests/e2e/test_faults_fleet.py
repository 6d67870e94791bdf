"""The agent and the engines go and come back: unknown is never empty, a restarted engine owes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.ledger.base import Candidate, ReserveRequest
from extproc.types import Need
from tests.support.load import Streams, chat, malformed, over_capacity, whole
from tests.support.stack import READY_WITHIN_S, Stack, running

PRIMARY = ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"]
REMOTE = ["--blocks", "4097", "--served-model", "r"]
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "primary-0"}]},
    "remote": {"engine": "openai", "servedModel": "r", "engineName": "remote-0"},
}
UNKNOWN_S = 3.0
REST: dict[str, Any] = {
    "lanes": {"edit": {}},
    "aliases": {
        "coder": {"lane": "edit", "targets": ["primary", "remote"]},
        "house": {"lane": "edit", "targets": ["primary"]},
    },
    "freshness": {"freshS": 1.0, "unknownS": UNKNOWN_S},
}

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """A local engine and a remote for all tests."""
    with running({"primary-0": PRIMARY, "remote-0": REMOTE}, TARGETS, **REST) as made:
        yield made


async def until_answer(stack: Stack, status: int, reason: str | None) -> float:
    """Ask until the primary alone answers like this; the seconds it took."""
    began = time.monotonic()
    while True:
        reply = await stack.send(chat("house", 2))
        if (reply.status, reply.headers.get("x-kvgate-reason")) == (status, reason):
            assert status == 200 or malformed(reply) is None
            return time.monotonic() - began
        assert time.monotonic() - began < READY_WITHIN_S, (reply, stack.logs())
        await asyncio.sleep(0.1)


async def until_running(stack: Stack, count: int) -> None:
    """Wait until the agent's last report shows so many requests running."""
    until = time.monotonic() + READY_WITHIN_S
    while (report := (await stack.snapshot()).replicas["primary-0"].report) is None or report.running != count:
        assert time.monotonic() < until, report
        await asyncio.sleep(0.1)


async def test_agent_killed(stack: Stack) -> None:
    """After unknownS nothing is admitted and the fallback serves; running streams go on; a new agent opens the door."""
    streams = Streams(stack)
    streams.start(2, chat("house", 300))
    await stack.until_reserved(2)
    stack.kill_agent()
    took = await until_answer(stack, 503, "unknown_state")
    snapshot = await stack.snapshot()
    report = snapshot.replicas["primary-0"].report
    assert report is not None
    age_s = snapshot.now_s - report.scrape_end_at_s
    print(f"unknown {took:.2f} s after the agent's death, when its last word was {age_s:.2f} s old")
    assert age_s >= UNKNOWN_S
    before = stack.engines["primary-0"].stats()["submitted"]
    for _ in range(5):
        assert (await stack.send(chat("house", 2))).status == 503
        rerouted = await stack.send(chat("coder", 2))
        assert (rerouted.status, rerouted.headers["x-kvgate-target"]) == (200, "remote")
        assert rerouted.headers["x-kvgate-reason"] == "unknown_state"
    assert stack.engines["primary-0"].stats()["submitted"] == before
    stack.start_agent()
    print(f"admitted again {await until_answer(stack, 200, None):.2f} s after the agent's start")
    assert [reply for reply in await streams.all() if not whole(reply)] == []
    await stack.until_empty()
    assert over_capacity(stack) == []


async def test_engine_killed(stack: Stack) -> None:
    """A dead engine is out of rotation at once and in again after its start; what was reserved on it is void."""
    streams = Streams(stack)
    streams.start(3, chat("house", 600))
    await stack.until_reserved(3)
    ledger = await stack.ledger()
    try:
        await ledger.reserve(_forgotten("forgotten"))
        await stack.until_reserved(4)
        # The agent has to see it at work first: counters that fall tell of the restart.
        await until_running(stack, 3)
        stack.kill_engine("primary-0")
        broken = await streams.all()
        assert {reply.status for reply in broken} == {0}
        for _ in range(5):
            rerouted = await stack.send(chat("coder", 2))
            assert rerouted.status == 200, rerouted
            refused = await stack.send(chat("house", 2))
            assert refused.status == 503
            assert malformed(refused) is None
            await asyncio.sleep(0.1)
        await until_answer(stack, 503, "unknown_state")
        await stack.until_reserved(1)
        await asyncio.to_thread(stack.engines["primary-0"].start)
        print(f"admitted again {await until_answer(stack, 200, None):.2f} s after the engine's start")
        await stack.until_reserved(0)
        assert [line for line in await ledger.audit() if line.stored != line.recomputed] == []
    finally:
        await ledger.close()
    assert over_capacity(stack) == []


def _forgotten(rid: str) -> ReserveRequest:
    """A reservation that no record will ever end: only the engine's restart can."""
    need = Need(kv_blocks=10, input_blocks=5, kv_bytes=0, prefill_tokens=0, sequences=1)
    return ReserveRequest(
        rid=rid, lane="edit", owner="nobody", request_id=rid, klass="chat:-:-:none", input_tokens=80,
        expected_output_tokens=80, max_output_tokens=80, lease_s=600.0,
        candidates=[Candidate("primary", "primary-0", False, need, cap_s=600.0, watermark=0.0)],
    )  # fmt: skip
