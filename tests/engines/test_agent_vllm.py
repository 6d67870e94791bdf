"""The agent against real vLLM: what it reads equals what vLLM logs and counts, and what the engine's death does."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path

import pytest

from extproc.agent.devices.watch import DeviceWatch
from extproc.agent.discovery import Endpoint, Static
from extproc.agent.engines.base import Hints
from extproc.agent.engines.vllm import PAUSED_ROUNDS
from extproc.agent.loop import Agent, Settings
from extproc.ledger.base import Candidate, ReplicaState, ReserveRequest
from extproc.ledger.inmemory import InMemoryLedger
from extproc.local import tiny_model
from extproc.local.client import request
from extproc.types import Need
from tests.engines.vllm_server import BLOCK_TOKENS, BLOCKS, MAX_MODEL_TOKENS, complete, vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory without weights (vLLM makes them up)."""
    return tiny_model.make(tmp_path / "model", quantizations=()).directory


def agent_for(url: str, ledger: InMemoryLedger) -> Agent:
    """An agent that watches one vLLM and no device."""
    endpoint = Endpoint("r0", "tiny", "vllm", url, Hints(served_model="tiny"))
    return Agent(ledger, Static([endpoint]), DeviceWatch([]), Settings("node-a", "one"))


async def states_after(port: int, path: str, agent: Agent) -> ReplicaState:
    """The state published once the agent has had every chance to see what this POST did."""
    assert (await request(port, "POST", path, timeout_s=60.0)).status == 200
    for _ in range(PAUSED_ROUNDS + 1):
        await agent.round()
    return agent.published[0].state


async def test_figures_equal_what_vllm_logs_and_counts(model: Path, tmp_path: Path) -> None:
    """Pool, block size, context, running, waiting, used blocks, tokens and preemptions are vLLM's own."""
    ledger = InMemoryLedger(time.time)
    async with vllm(model, tmp_path / "log", "--no-enable-prefix-caching") as server:
        agent = agent_for(server.url, ledger)
        await agent.round()
        idle = agent.published[0]
        pick = random.Random(1)
        work = [
            asyncio.create_task(complete(server.url, [pick.randrange(10, 4000) for _ in range(1500)], 1500))
            for _ in range(12)
        ]
        loads = []
        while not all(task.done() for task in work):
            await agent.round()
            report = agent.published[0]
            loads.append(((report.running or 0) + (report.waiting or 0), report.used_blocks, report.state))
            await asyncio.sleep(0.5)
        await agent.round()
        after, rates = agent.published[0], agent.watches[0].rates()
        paused = [await states_after(server.port, path, agent) for path in ("/pause", "/resume")]
        reading = agent.watches[0].reading
        await agent.close()
        log = server.log.read_text()
    tokens = re.search(r"KV cache size: ([\d,]+) tokens", log)
    logged_model = re.search(r"Maximum concurrency for ([\d,]+) tokens per request", log)
    assert tokens is not None
    assert logged_model is not None
    assert idle.state is ReplicaState.READY
    assert (idle.capacity_blocks, idle.block_tokens) == (BLOCKS - 1, BLOCK_TOKENS)
    # One block of what vLLM logs is the null block, which no request ever gets.
    assert (idle.capacity_blocks + 1) * idle.block_tokens == int(tokens[1].replace(",", ""))
    assert idle.max_model_tokens == int(logged_model[1].replace(",", "")) == MAX_MODEL_TOKENS
    assert max(load for load, _, _ in loads) == 12
    assert 400 < max(used for _, used, _ in loads if used is not None) <= 511
    assert {state for _, _, state in loads} == {ReplicaState.READY}
    usage = [answer["usage"] for _, answer in (task.result() for task in work)]
    assert (after.running, after.waiting, after.used_blocks) == (0, 0, 0)
    assert reading is not None
    assert reading.counters.prompt_tokens == sum(u["prompt_tokens"] for u in usage) == 12 * 1500  # type: ignore[index]
    assert reading.counters.output_tokens == sum(u["completion_tokens"] for u in usage) == 12 * 1500  # type: ignore[index]
    assert paused == [ReplicaState.DRAINING, ReplicaState.READY]
    # 12 x 3,000 tokens on a pool of 16,352: without kvgate in front vLLM has to preempt.
    assert after.preemptions_total is not None
    assert after.preemptions_total > 0
    assert rates.output_tokens_per_s is not None
    assert rates.decode_tokens_per_s is not None
    assert rates.ttft_s is not None
    print(f"loads {loads}\nrates {rates}\npreemptions {after.preemptions_total}")


async def test_a_killed_engine_is_out_within_two_scrapes_and_back_after_its_restart(
    model: Path, tmp_path: Path
) -> None:
    """The engine process dies under a living API server: lost; a new start voids what the old one had."""
    ledger = InMemoryLedger(time.time)
    async with vllm(model, tmp_path / "log") as server:
        agent = agent_for(server.url, ledger)
        await agent.round()
        need = Need(kv_blocks=100, input_blocks=80, kv_bytes=0, prefill_tokens=100, sequences=1)
        request = ReserveRequest(
            "rid", "lane", "envoy", "x", "k", 100, 20, 20, (Candidate("tiny", "r0", False, need),), lease_s=600.0
        )
        assert (await ledger.reserve(request)).chosen == 0
        server.kill_engine()
        states = []
        for _ in range(2):
            await asyncio.sleep(1.0)
            await agent.round()
            states.append(agent.published[0].state)
        held = [live.reservation.rid for live in await ledger.reservations("r0")]
        await server.stop()
        await server.start()
        returned = []
        for _ in range(3):
            await agent.round()
            returned.append(agent.published[0].state)
        left = await ledger.reservations("r0")
        await agent.close()
    assert states[-1] is ReplicaState.LOST
    assert held == ["rid"]
    assert returned == [ReplicaState.UNKNOWN, ReplicaState.READY, ReplicaState.READY]
    assert left == []
