"""The agent's round against emulated engines and the in-memory ledger: faults, discovery, restarts, siblings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from extproc.agent import loop
from extproc.agent.admin import routes
from extproc.agent.devices.base import DeviceReading, DeviceState, ProcessUse
from extproc.agent.devices.watch import DeviceWatch
from extproc.agent.discovery import Endpoint, Static
from extproc.agent.engines.base import Endpoint as EngineEndpoint
from extproc.agent.engines.base import Reading
from extproc.agent.exposition import parse
from extproc.agent.loop import Agent, Settings
from extproc.errors import LedgerDown
from extproc.ledger.base import Candidate, DeviceReport, PublishResult, ReplicaReport, ReplicaState, ReserveRequest
from extproc.ledger.inmemory import InMemoryLedger
from extproc.local.emulator_server import EmulatedEngine
from extproc.local.emulator_settings import Settings as EngineSettings
from extproc.local.paged import EngineShape
from extproc.types import Need
from tests.integration.agent.engines import free_port

#: The time-out is none that a busy machine meets.
SETTINGS = Settings("node-a", "one", interval_s=0.05, timeout_s=60.0, unknown_s=600.0)
#: The time-out where one is silent, which a stall of seconds does not make the others miss.
QUICK_S = 4.0
GIB = 1024**3


@asynccontextmanager
async def emulated(count: int = 1, **settings: str) -> AsyncIterator[list[EmulatedEngine]]:
    """Emulated engines on free ports."""
    engines = [EmulatedEngine(EngineSettings(shape=EngineShape(), **settings)) for _ in range(count)]
    try:
        for engine in engines:
            await engine.listen()
        yield engines
    finally:
        for engine in engines:
            await engine.close()


def endpoint(engine: EmulatedEngine, name: str = "r0", kind: str = "vllm", devices: tuple[str, ...] = ()) -> Endpoint:
    """An endpoint for an emulated engine."""
    return Endpoint(name, "t", kind, f"http://127.0.0.1:{engine.port}", devices=devices)


@asynccontextmanager
async def agent(
    ledger: InMemoryLedger, *endpoints: Endpoint, devices: DeviceWatch | None = None, settings: Settings = SETTINGS
) -> AsyncIterator[Agent]:
    """An agent over a static list, closed at the end."""
    running = Agent(ledger, Static(endpoints), devices or DeviceWatch([]), settings)
    try:
        yield running
    finally:
        await running.close()


def states(running: Agent) -> list[ReplicaState]:
    """The states last published."""
    return [report.state for report in running.published]


async def test_a_round_publishes_every_engine_in_one_call() -> None:
    """Two kinds of engine, one publish, on the ledger's clock; the snapshot shows them."""
    clock_s = 5_000_000.0
    ledger = InMemoryLedger(lambda: clock_s + time.monotonic())
    async with (
        emulated() as [vllm],
        emulated(personality="llamacpp") as [llama],
        agent(ledger, endpoint(vllm), endpoint(llama, "r1", "llamacpp")) as running,
    ):
        await running.round()
        snapshot = await ledger.snapshot()
        ready = running.health.ready()
    views = snapshot.replicas
    assert {name: view.state for name, view in views.items()} == {"r0": "ready", "r1": "ready"}
    assert views["r0"].report is not None
    assert (views["r0"].report.capacity_blocks, views["r0"].report.block_tokens) == (511, 16)
    assert abs(views["r0"].report.scrape_end_at_s - snapshot.now_s) < 60.0  # this machine's own clock is far from that
    assert ready


async def test_an_engine_that_says_it_is_dead_goes_and_comes_back() -> None:
    """/metrics stays 200 while /health is 503: lost; healthy again: ready after two scrapes."""
    ledger = InMemoryLedger(time.monotonic)
    async with emulated() as [engine], agent(ledger, endpoint(engine)) as running:
        seen = []
        for dead in (False, True, False, False):
            engine.faults.dead_health = dead
            await running.round()
            seen += states(running)
    assert seen == [ReplicaState.READY, ReplicaState.LOST, ReplicaState.UNKNOWN, ReplicaState.READY]


async def test_a_silent_metrics_endpoint_holds_up_neither_the_round_nor_the_others() -> None:
    """One engine never answers /metrics: the round ends in time, the other is fresh, the first keeps its age."""
    ledger = InMemoryLedger(time.monotonic)
    quick = replace(SETTINGS, timeout_s=QUICK_S)
    async with (
        emulated(2) as [slow, good],
        agent(ledger, endpoint(slow, "slow"), endpoint(good, "good"), settings=quick) as running,
    ):
        await running.round()
        first = {report.replica: report.scrape_end_at_s for report in running.published}
        slow.faults.silent_metrics = True
        began = time.monotonic()
        await running.round()
        elapsed_s = time.monotonic() - began
        second = {report.replica: report for report in running.published}
    assert QUICK_S <= elapsed_s < 10 * QUICK_S  # it is silent for good
    assert second["slow"].state is ReplicaState.READY
    assert second["slow"].scrape_end_at_s == pytest.approx(first["slow"], abs=QUICK_S / 2)
    assert second["good"].scrape_end_at_s > first["good"]


async def test_replicas_come_drain_and_go_without_a_restart() -> None:
    """A new endpoint is watched at once; a removed one drains, then is forgotten; its neighbour notices nothing."""

    class Changing(Static):
        """A list that the test replaces."""

        def put(self, *endpoints: Endpoint) -> None:
            """Replace the list."""
            self._endpoints = endpoints

    ledger = InMemoryLedger(time.monotonic)
    async with emulated(2) as [first, second]:
        discovery = Changing([endpoint(first, "a")])
        running = Agent(ledger, discovery, DeviceWatch([]), SETTINGS)
        seen = []
        for turn in range(4):
            if turn == 1:
                discovery.put(endpoint(first, "a"), endpoint(second, "b"))
            if turn == 2:
                discovery.put(endpoint(second, "b"))
            await running.round()
            seen.append({report.replica: report.state.value for report in running.published})
        await running.close()
    assert seen == [
        {"a": "ready"}, {"a": "ready", "b": "ready"}, {"a": "draining", "b": "ready"}, {"b": "ready"},
    ]  # fmt: skip


async def test_a_lost_engine_is_lost_in_the_ledger_at_once_however_the_clock_jitters() -> None:
    """Answers that take longer make our idea of the ledger's clock older: no reason to keep the last good report."""

    class Slower(InMemoryLedger):
        """A clock that seems two milliseconds older with every look."""

        looks = 0

        async def time_s(self) -> float:
            """The time as a later arrival would show it."""
            self.looks += 1
            return await super().time_s() - 0.002 * self.looks

    ledger = Slower(time.monotonic)
    async with emulated() as [engine], agent(ledger, endpoint(engine)) as running:
        await running.round()
        assert (await ledger.snapshot()).replicas["r0"].state == "ready"
        await engine.close()
        await running.round()
        assert (await ledger.snapshot()).replicas["r0"].state == "lost"


class Flaky(InMemoryLedger):
    """The in-memory ledger behind a wire that can be cut."""

    cut = False

    async def time_s(self) -> float:
        """Its clock, unless cut."""
        if self.cut:
            raise LedgerDown("cut")
        return await super().time_s()

    async def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float
    ) -> PublishResult:
        """Its publish, unless cut."""
        if self.cut:
            raise LedgerDown("cut")
        return await super().publish(replicas, devices, ttl_s)


async def test_a_ledger_outage_stops_nothing_but_publishing() -> None:
    """Rounds go on, health names the ledger, and the first round after it publishes again."""
    ledger = Flaky(time.monotonic)
    async with emulated() as [engine], agent(ledger, endpoint(engine)) as running:
        ledger.cut = True
        await running.round()
        assert (running.health.ready(), running.health.components["ledger"]) == (False, "down: cut")
        ledger.cut = False
        await running.round()
        ledger.cut = True
        await running.round()
        assert running.health.publish_failures == 1
        ledger.cut = False
        await running.round()
        assert running.health.ready()
        assert running.watches[0].scrapes == 4


async def test_an_agents_restart_loses_and_voids_nothing() -> None:
    """A new instance reports the same engine start, so live reservations stay."""
    ledger = InMemoryLedger(time.monotonic)
    need = Need(kv_blocks=10, input_blocks=8, kv_bytes=0, prefill_tokens=100, sequences=1)
    request = ReserveRequest(
        "rid", "lane", "envoy", "x", "k", 100, 20, 20, (Candidate("t", "r0", False, need),), lease_s=60.0
    )
    async with emulated() as [engine]:
        async with agent(ledger, endpoint(engine)) as running:
            await running.round()
        assert (await ledger.reserve(request)).chosen == 0
        async with agent(ledger, endpoint(engine), settings=replace(SETTINGS, instance="two")) as running:
            for _ in range(3):
                await running.round()
            result = running.result
        left = await ledger.reservations("r0")
    assert result is not None
    assert result.voided == {"r0": 0}
    assert [live.reservation.rid for live in left] == ["rid"]


async def test_a_second_agent_for_one_node_is_named() -> None:
    """Both tell the truth, the newest scrape counts, and both say that the other is there."""
    ledger = InMemoryLedger(time.monotonic)
    settings = replace(SETTINGS, interval_s=60.0)  # each other's reports stay young, however slow the rounds
    async with (
        emulated() as [engine],
        agent(ledger, endpoint(engine), settings=settings) as one,
        agent(ledger, endpoint(engine), settings=replace(settings, instance="two")) as two,
    ):
        for _ in range(21):
            await two.round()
            await one.round()
        snapshot = await ledger.snapshot()
    assert "another agent publishes for node-a" in (two.health.components["node"], one.health.components["node"])
    assert snapshot.replicas["r0"].state == "ready"


def card(state: DeviceState = DeviceState.OK, uuid: str = "GPU-a") -> DeviceReading:
    """An 80 GiB card with one foreign program on it."""
    return DeviceReading(
        uuid, state, "card", 80 * GIB, 50 * GIB, 30 * GIB, processes=(ProcessUse(7, 30 * GIB, "blender"),)
    )


async def test_a_lost_card_takes_only_its_own_replicas() -> None:
    """Two shards on two cards: one card lost, the replica is lost; its neighbour on a third card is not (f11)."""
    ledger = InMemoryLedger(time.monotonic)
    devices = DeviceWatch([])
    async with (
        emulated(2) as [first, second],
        agent(
            ledger,
            endpoint(first, "tp2", devices=("GPU-a", "GPU-b")),
            endpoint(second, "solo", devices=("GPU-c",)),
            devices=devices,
        ) as running,
    ):
        devices.take([card(uuid=f"GPU-{x}") for x in "abc"], time.monotonic())
        await running.round()
        before = states(running)
        devices.take([card(DeviceState.LOST, "GPU-b")], time.monotonic())
        await running.round()
        after = states(running)
        snapshot = await ledger.snapshot()
    assert (before, after) == ([ReplicaState.READY] * 2, [ReplicaState.LOST, ReplicaState.READY])
    assert (snapshot.devices["GPU-b"].state, snapshot.devices["GPU-b"].free_bytes) == ("lost", None)
    assert snapshot.devices["GPU-a"].free_bytes == 50 * GIB
    assert [alarm.kind for alarm in running.alarms] == ["foreign_process", "foreign_process"]


async def test_a_lost_card_voids_what_was_reserved_on_it_and_nothing_else() -> None:
    """At the loss, not only at the engine's next start; the neighbour's reservation stays."""
    ledger = InMemoryLedger(time.monotonic)
    devices = DeviceWatch([])
    need = Need(kv_blocks=10, input_blocks=8, kv_bytes=0, prefill_tokens=100, sequences=1)
    async with (
        emulated(2) as [first, second],
        agent(
            ledger,
            endpoint(first, "a", devices=("GPU-a",)),
            endpoint(second, "c", devices=("GPU-c",)),
            devices=devices,
        ) as running,
    ):
        devices.take([card(uuid=f"GPU-{x}") for x in "ac"], time.monotonic())
        await running.round()
        for name in ("a", "c"):
            place = Candidate("t", name, False, need)
            request = ReserveRequest(f"on-{name}", "lane", "envoy", name, "k", 100, 20, 20, (place,), lease_s=60.0)
            assert (await ledger.reserve(request)).chosen == 0
        devices.take([card(DeviceState.LOST, "GPU-a")], time.monotonic())
        await running.round()
        result = running.result
        left = [live.reservation.rid for name in ("a", "c") for live in await ledger.reservations(name)]
    assert result is not None
    assert result.voided == {"a": 1, "c": 0}
    assert left == ["on-c"]


async def test_a_remote_is_visited_seldom_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rounds, one visit; the row stands in the ledger under the target's name."""
    monkeypatch.setattr(loop, "OUTSIDE_EVERY_S", 3600.0)  # ten rounds are over before the next is due
    ledger = InMemoryLedger(time.monotonic)
    async with emulated() as [api]:
        far = Endpoint("far", "far", "openai", f"http://127.0.0.1:{api.port}")
        async with agent(ledger, far) as running:
            for _ in range(10):
                await running.round()
            visits = running.watches[0].scrapes
            view = (await ledger.snapshot()).replicas["far"]
    assert visits == 1
    assert (view.state, view.headroom_blocks) == ("ready", 0)
    assert view.report is not None
    assert (view.report.engine, view.report.capacity_blocks) == ("openai", 0)


async def test_metrics_may_have_a_port_of_their_own() -> None:
    """Health and models from one origin, /metrics from another; either one away is seen."""
    ledger = InMemoryLedger(time.monotonic)
    async with emulated(2) as [api, numbers]:
        api.faults.silent_metrics = True
        apart = replace(endpoint(api), metrics_url=f"http://127.0.0.1:{numbers.port}")
        async with agent(ledger, apart) as running:
            await running.round()
            before = states(running)
            await numbers.close()
            await running.round()
            after = states(running)
    assert (before, after) == ([ReplicaState.READY], [ReplicaState.LOST])


async def answer(running: Agent, path: str) -> tuple[int, bytes]:
    """What the admin port answers."""
    status, _, body = await routes(running)[path]("")
    return status, body


async def test_admin_port_tells_health_metrics_and_state() -> None:
    """Not ready before the first round, ready after it; metrics parse, hold no NaN, and name the state."""
    ledger = InMemoryLedger(time.monotonic)
    async with emulated() as [engine]:
        gone = Endpoint("gone", "t", "vllm", f"http://127.0.0.1:{free_port()}")
        async with agent(ledger, endpoint(engine), gone) as running:
            assert (await answer(running, "/readyz"))[0] == 503
            assert (await answer(running, "/livez"))[0] == 200
            await running.round()
            ready = await answer(running, "/readyz")
            state = json.loads((await answer(running, "/state"))[1])
            exposition = parse((await answer(running, "/metrics"))[1].decode())
    assert (ready[0], json.loads(ready[1])["components"]) == (
        200, {"ledger": "ok", "discovery": "ok", "devices": "ok", "node": "ok"},
    )  # fmt: skip
    assert [(r["replica"], r["state"], r["cause"]) for r in state["replicas"]] == [
        ("r0", "ready", None), ("gone", "lost", "refused"),
    ]  # fmt: skip
    assert exposition.bad_lines == 0
    on = {
        (s.labels["replica"], s.labels["state"]) for s in exposition.get("kvgate_agent_replica_state") if s.value == 1
    }
    assert on == {("r0", "ready"), ("gone", "lost")}
    assert [s.labels["replica"] for s in exposition.get("kvgate_agent_kv_capacity_blocks")] == ["r0"]
    assert all(s.value == s.value for series in exposition.samples.values() for s in series)


class Beats(Agent):
    """An agent that notes when its rounds begin, and whose first takes ten beats."""

    def __init__(self, discovery: Static) -> None:
        super().__init__(InMemoryLedger(time.monotonic), discovery, DeviceWatch([]), SETTINGS)
        self.began_s: list[float] = []

    async def round(self) -> None:
        """One round."""
        self.began_s.append(time.monotonic())
        if len(self.began_s) == 1:
            await asyncio.sleep(10 * self.settings.interval_s)
        await super().round()


async def test_the_beat_is_kept_and_late_rounds_do_not_pile_up() -> None:
    """``run`` makes at most one round per interval, also after a late one, and closes everything when cancelled."""
    async with emulated() as [engine]:
        running = Beats(Static([endpoint(engine)]))
        task = asyncio.create_task(running.run())
        async with asyncio.timeout(60):
            while len(running.began_s) < 8:  # noqa: ASYNC110 - the agent has no event for it
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    after = [at_s - running.began_s[1] for at_s in running.began_s[1:]]
    assert all(number <= at_s / SETTINGS.interval_s + 1 for number, at_s in enumerate(after))
    assert running.watches == []


class Stumbling:
    """A row whose reader meets what nobody thought of."""

    name = "tgi"
    outside = False
    endpoints = (EngineEndpoint("/health"),)

    def read(self, _answers: object, _hints: object) -> Reading:
        """Raise, as a reader must not."""
        raise LookupError("a surprise")


async def test_an_answer_that_cannot_be_read_blinds_one_replica_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown with its cause; all others are published in every round."""
    monkeypatch.setitem(loop.ENGINES, "tgi", Stumbling())  # type: ignore[index]
    ledger = InMemoryLedger(time.monotonic)
    async with (
        emulated(2) as [good, bad],
        agent(ledger, endpoint(bad, "bad", "tgi"), endpoint(good, "good")) as running,
    ):
        for _ in range(2):
            await running.round()
        seen = {report.replica: report.state.value for report in running.published}
        causes = {watch.origin.replica: watch.cause for watch in running.watches}
    assert seen == {"bad": "unknown", "good": "ready"}
    assert causes == {"bad": "unreadable: LookupError", "good": None}


async def test_another_engine_under_the_same_url_is_watched_as_what_it_is() -> None:
    """Kind, target and way may change in the file; the row, the name in reports and the connection follow."""

    class Changing(Static):
        """A list that the test replaces."""

        def put(self, *endpoints: Endpoint) -> None:
            """Replace the list."""
            self._endpoints = endpoints

    ledger = InMemoryLedger(time.monotonic)
    async with emulated(personality="llamacpp") as [engine]:
        listed = endpoint(engine, "a", "vllm")
        discovery = Changing([listed])
        running = Agent(ledger, discovery, DeviceWatch([]), SETTINGS)
        await running.round()
        before = [(report.engine, report.target, report.state.value) for report in running.published]
        discovery.put(replace(listed, engine="llamacpp", target="other"))
        await running.round()
        after = [(report.engine, report.target, report.state.value) for report in running.published]
        await running.close()
    assert before == [("vllm", "t", "unknown")]
    assert after == [("llamacpp", "other", "ready")]
