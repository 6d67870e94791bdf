"""Replicas found by DNS behind real Envoy: which engine answered, by its own log, as addresses come and go."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from extproc.agent import discovery
from extproc.agent.devices.watch import DeviceWatch
from extproc.agent.loop import Agent, Settings
from extproc.ledger.base import LedgerSnapshot
from extproc.local.emulator_server import EmulatedEngine
from extproc.local.emulator_settings import Settings as EngineSettings
from extproc.local.paged import EngineShape
from tests.support import envoy_process
from tests.support.stack import (
    ANSWERED_WITHIN_S,
    PATIENT,
    READY_WITHIN_S,
    SEEN_AFTER_S,
    Stack,
    _stop,
    _until_healthy,
    bootstrap,
    merged,
)
from tests.support.valkey import ValkeyServer, free_port

#: 71 blocks of 16 tokens; a long request below takes 63 of them (the input by its bound), so an engine holds one.
SHAPE = EngineShape(blocks=72, max_model_tokens=1136)
LONG = 700
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@dataclass
class Found:
    """The stack, the engines by address, and the addresses that the name has now."""

    stack: Stack
    engines: dict[str, EmulatedEngine]
    addresses: list[str]
    agent: Agent
    streams: list[asyncio.StreamWriter] = field(default_factory=list)

    async def until(self, holds: Callable[[LedgerSnapshot], bool]) -> LedgerSnapshot:
        """Wait until the ledger shows it, and until `serve` has read it too."""
        until = time.monotonic() + READY_WITHIN_S
        while not holds(snapshot := await self.stack.snapshot()):
            if time.monotonic() > until:
                raise AssertionError({name: view.state for name, view in snapshot.replicas.items()})
            await asyncio.sleep(0.1)
        await asyncio.sleep(SEEN_AFTER_S)
        return snapshot

    async def until_states(self, **wanted: str) -> None:
        """The same for the states of replicas, by the last part of their address."""
        names = {f"pool@127.0.0.{last.removeprefix('_')}": state for last, state in wanted.items()}
        await self.until(lambda s: all(n in s.replicas and s.replicas[n].state == x for n, x in names.items()))

    async def ask(self, **extra: Any) -> tuple[int, list[str]]:
        """One short request; its status and the addresses whose engine logged it."""
        mine = str(uuid.uuid4())
        body = {"model": "coder", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **extra}
        reply = await self.stack.send(body, headers={"x-request-id": mine})
        until = time.monotonic() + READY_WITHIN_S
        while True:
            where = [a for a, e in self.engines.items() if any(r["id"] == mine for r in e.log)]
            if where or reply.status != 200 or time.monotonic() > until:
                return reply.status, where
            await asyncio.sleep(0.01)

    async def hold(self) -> str:
        """A stream that fills one engine; the address whose engine runs it, told by that engine."""
        before = {address: len(engine.engine.running) for address, engine in self.engines.items()}
        body = {"model": "coder", "stream": True, "max_tokens": LONG, "min_tokens": LONG, "ignore_eos": True}
        data = json.dumps(body | {"messages": [{"role": "user", "content": "x"}]}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.stack.envoy.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        status = (await asyncio.wait_for(reader.readuntil(b"\r\n"), ANSWERED_WITHIN_S)).split()[1]
        assert status == b"200", self.stack.logs()
        self.streams.append(writer)
        (grown,) = [a for a, e in self.engines.items() if len(e.engine.running) > before[a]]
        return grown


@asynccontextmanager
async def found(
    monkeypatch: pytest.MonkeyPatch, *addresses: str, rest: dict[str, Any] | None = None
) -> AsyncIterator[Found]:
    """Engines at 127.0.0.2 to .4 on one port, of which the name ``engines.test`` has ``addresses``."""
    monkeypatch.setattr(discovery, "RESOLVE_EVERY_S", 0.2)
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    port, now = free_port(), list(addresses)
    async with AsyncExitStack() as exits:
        exits.callback(shutil.rmtree, folder, ignore_errors=True)
        engines: dict[str, EmulatedEngine] = {}
        for address in ADDRESSES:
            engine = engines[address] = EmulatedEngine(EngineSettings(shape=SHAPE))
            exits.push_async_callback(engine.close)
            await engine.listen(address, port)
        valkey = ValkeyServer().start()
        exits.callback(valkey.close)
        config = {
            "ledger": {"url": valkey.url},
            "serve": {"listen": f"unix:{folder}/x.sock", "admin": "127.0.0.1:0"},
            "envoy": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "agent": {"intervalS": 0.2, "node": "test"},
            "targets": {
                "big": {
                    "engine": "vllm", "watermark": 0.0, "servedModel": "emulated",
                    "replicas": [{"name": "pool", "url": f"http://engines.test:{port}", "discover": "dns"}],
                }
            },
            "lanes": {"l": {"maxOutputTokens": LONG}},
            "aliases": {"coder": {"lane": "l", "targets": ["big"]}},
            **(rest or {}),
        }  # fmt: skip
        path = folder / "kvgate.yaml"
        path.write_text(json.dumps(merged(config, PATIENT)))

        async def lookup(_host: str, _port: int) -> Sequence[str]:
            return list(now)

        envoy = exits.enter_context(envoy_process.running(bootstrap(path), folder))
        stack = Stack(folder, path, valkey, {}, envoy, None, [], [f"unix:{folder}/x.sock"])
        await asyncio.to_thread(stack.start_serve)
        exits.callback(_stop, lambda: stack.serves[0])
        await asyncio.to_thread(_until_healthy, envoy)
        ledger = await stack.ledger()
        exits.push_async_callback(ledger.close)
        agent = Agent(
            ledger,
            discovery.Dns(discovery.WatchedFile(path), lookup=lookup),
            DeviceWatch([]),
            Settings("test", "one", interval_s=0.2, timeout_s=1.0),
        )
        running = asyncio.create_task(agent.run())
        made = Found(stack, engines, now, agent)
        try:
            yield made
        finally:
            for writer in made.streams:
                writer.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_each_request_reaches_exactly_the_engine_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two addresses: what the ledger reserved at an address, its engine runs; full means refused, never elsewhere."""
    async with found(monkeypatch, "127.0.0.2", "127.0.0.3") as made:
        await made.until_states(_2="ready", _3="ready")
        for engine in made.engines.values():
            engine.faults.rate = 0.05
        first, second = await made.hold(), await made.hold()
        assert {first, second} == {"127.0.0.2", "127.0.0.3"}
        ledger = await made.stack.ledger()
        held = [len(await ledger.reservations(f"pool@{address}")) for address in ("127.0.0.2", "127.0.0.3")]
        await ledger.close()
        assert held == [1, 1]
        body = {"max_tokens": LONG, "min_tokens": LONG, "ignore_eos": True}
        assert await made.ask(**body) == (429, [])
        assert [len(e.engine.running) for e in made.engines.values()] == [1, 1, 0]
        for engine in made.engines.values():
            engine.faults.rate = 100.0
        await made.stack.until_empty()
        await made.until(lambda s: all(view.reservations == 0 for view in s.replicas.values()))
        served = [await made.ask() for _ in range(6)]
        assert all(status == 200 and len(where) == 1 for status, where in served), served
        await made.stack.until_empty()


async def test_replicas_come_drain_and_go_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address leaves the name: its stream ends there, new work goes to the others; a new one takes work at once."""
    async with found(monkeypatch, "127.0.0.2") as made:
        await made.until_states(_2="ready")
        made.engines["127.0.0.2"].faults.rate = 0.05
        assert await made.hold() == "127.0.0.2"
        made.addresses[:] = ["127.0.0.3", "127.0.0.4"]
        await made.until_states(_2="draining", _3="ready", _4="ready")
        where = {address for _ in range(4) for address in (await made.ask())[1]}
        assert where <= {"127.0.0.3", "127.0.0.4"}
        assert where
        assert len(made.engines["127.0.0.2"].engine.running) == 1
        made.engines["127.0.0.2"].faults.rate = 100.0
        await made.stack.until_empty()
        assert made.engines["127.0.0.2"].log[-1]["output_tokens"] == LONG
        deadline = time.monotonic() + READY_WITHIN_S
        while any(watch.origin.replica.endswith(".2") for watch in made.agent.watches):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await made.engines["127.0.0.3"].close()
        await made.until_states(_3="lost")
        assert [await made.ask() for _ in range(3)] == [(200, ["127.0.0.4"])] * 3
        await made.stack.until_empty()


async def test_nothing_found_yet_is_an_early_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without addresses: 503 with a reason, for requests that reserve and for those that pass."""
    async with found(monkeypatch) as made:
        reply = await made.stack.send(
            {"model": "coder", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        )
        assert (reply.status, reply.headers["x-kvgate-reason"]) == (503, "unknown_state")
        reply = await made.stack.send({"model": "coder", "prompt": "x"}, path="/tokenize")
        assert (reply.status, reply.headers["x-kvgate-reason"]) == (503, "not_ready")
