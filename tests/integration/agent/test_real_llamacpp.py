"""The agent against a real llama-server: what it reads equals what the engine logs, and what a kill does."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from extproc.agent.devices.watch import DeviceWatch
from extproc.agent.discovery import Endpoint, Static
from extproc.agent.engines.base import Hints
from extproc.agent.loop import Agent, Settings
from extproc.ledger.base import Candidate, ReplicaState, ReserveRequest
from extproc.ledger.inmemory import InMemoryLedger
from extproc.types import Need
from tests.integration.agent.engines import Llama, llama, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model file."""
    return tiny(tmp_path_factory.mktemp("model"))


def agent_for(engine: Llama, ledger: InMemoryLedger, **hints: int) -> Agent:
    """An agent that watches one llama-server and no device."""
    endpoint = Endpoint("r0", "tiny", "llamacpp", engine.server.url, Hints(served_model="tiny", **hints))
    return Agent(ledger, Static([endpoint]), DeviceWatch([]), Settings("node-a", "agent-1"))


async def complete(engine: Llama, prompt: str, tokens: int) -> dict[str, object]:
    """One completion over a plain socket."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 1}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    parsed: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return parsed


@pytest.mark.parametrize(("cells", "slots", "unified"), [(8192, 4, True), (8192, 4, False), (2048, 1, False)])
async def test_pool_equals_what_the_engine_logs(
    model: Path, tmp_path: Path, cells: int, slots: int, unified: bool
) -> None:
    """Context per request and slots are the engine's; the pool is one slot's cells, the whole only where stated."""
    ledger = InMemoryLedger(time.time)
    async with llama(model, tmp_path / "log", cells=cells, slots=slots, unified=unified) as engine:
        agent = agent_for(engine, ledger)
        await agent.round()
        report = agent.published[0]
        logged = re.search(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(\w+)'", engine.log.read_text())
        stated = agent_for(engine, ledger, kv_tokens=cells)
        await stated.round()
        await agent.close()
        await stated.close()
    assert logged is not None
    assert (report.max_sequences, report.max_model_tokens) == (int(logged[1]), int(logged[2]))
    assert (report.state, report.block_tokens, report.shows_used) == (ReplicaState.READY, 1, False)
    assert report.capacity_blocks == int(logged[2])
    assert stated.published[0].capacity_blocks == cells


async def test_counts_and_rates_are_the_engines(model: Path, tmp_path: Path) -> None:
    """Running and waiting follow real requests, and rates come from what they did."""
    ledger = InMemoryLedger(time.time)
    async with llama(model, tmp_path / "log", slots=2) as engine:
        agent = agent_for(engine, ledger)
        await agent.round()
        work = [asyncio.create_task(complete(engine, f"{n} " + "def f(x): return x\n" * 60, 1200)) for n in range(3)]
        seen = set()
        while not all(task.done() for task in work):
            await agent.round()
            seen.add((agent.published[0].running, agent.published[0].waiting))
            await asyncio.sleep(0.1)
        await agent.round()
        rates = agent.watches[0].rates()
        prefilled = agent.watches[0].reading
        await agent.close()
    answers = [task.result() for task in work]
    assert (2, 1) in seen
    assert (agent.published[0].running, agent.published[0].waiting) == (0, 0)
    assert prefilled is not None
    usage = [answer["usage"] for answer in answers]
    assert prefilled.counters.prompt_tokens == sum(u["prompt_tokens"] for u in usage)  # type: ignore[index]
    assert prefilled.counters.output_tokens == sum(u["completion_tokens"] for u in usage)  # type: ignore[index]
    assert rates.output_tokens_per_s is not None
    assert rates.output_tokens_per_s > 0


async def test_a_killed_engine_is_out_within_two_scrapes_and_voids_on_return(model: Path, tmp_path: Path) -> None:
    """Killed: lost at the next scrape. Back: its old reservations are void, and it is ready after two good scrapes."""
    ledger = InMemoryLedger(time.time)
    async with llama(model, tmp_path / "log") as engine:
        agent = agent_for(engine, ledger)
        await agent.round()
        need = Need(kv_blocks=500, input_blocks=400, kv_bytes=0, prefill_tokens=400, sequences=1)
        request = ReserveRequest(
            "rid-1", "lane", "envoy", "x-1", "k", 400, 100, 100, (Candidate("tiny", "r0", False, need),), lease_s=60.0
        )
        assert (await ledger.reserve(request)).chosen == 0
        await engine.kill()
        await agent.round()
        assert agent.published[0].state is ReplicaState.LOST
        assert [r.reservation.rid for r in await ledger.reservations("r0")] == ["rid-1"]
        await engine.start(cells=4096)
        states = []
        for _ in range(3):
            await agent.round()
            states.append(agent.published[0].state)
        left = await ledger.reservations("r0")
        capacity = agent.published[0].capacity_blocks
        await agent.close()
    assert states == [ReplicaState.UNKNOWN, ReplicaState.READY, ReplicaState.READY]
    assert left == []
    assert capacity == 4096
