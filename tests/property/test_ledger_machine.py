"""A Hypothesis machine drives the reference and the real scripts side by side: same answers, true sums, zero at the end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from extproc.ledger.base import Ended, ReplicaState, Reservation, State
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.line import Due, Promised
from extproc.ledger.redis import RedisLedger
from extproc.ledger.rules import to_us
from tests.support.ledgers import Clock, ask, candidate, device, end, need, record, report, reservation
from tests.support.valkey import ValkeyServer, redis_binary

RIDS = st.sampled_from([f"r{i}" for i in range(8)])
REPLICAS = st.sampled_from(["a", "b"])
AGES = st.sampled_from([0.0, 0.001, 0.4, 1.5, 2.5, 9.0, 61.0])
#: Due in so many seconds, blocks, for so long.
DUES = st.lists(
    st.tuples(
        st.sampled_from([-0.4, 0.0, 1.5, 3.0, 9.0]), st.sampled_from([5, 30]), st.sampled_from([-1e-6, 0.0, 2.0, 9.0])
    ),
    max_size=3,
)
CAPACITY = {"a": 100, "b": 40}


@pytest.fixture(scope="module", params=["valkey", *(["redis"] if redis_binary() else [])])
def server(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    """The server whose scripts are compared."""
    with ValkeyServer(binary=redis_binary() if request.param == "redis" else None) as running:
        yield running


class LedgerMachine(RuleBasedStateMachine):
    """Random reserve, extend, end, expire, publish, restart; duplicated, late and reordered."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.clock = Clock()
        self.runner = asyncio.Runner()
        self.memory = InMemoryLedger(self.clock)
        connecting = RedisLedger.connect(
            url,
            uuid.uuid4().hex,
            deadline_s=30.0,
            background_deadline_s=30.0,
            wait_s=60.0,
            fresh=True,
            test_clock=self.clock,
        )
        self.real = self.runner.run(connecting)
        self.seen: dict[str, Reservation] = {}
        self.may_exceed = {"a": False, "b": False}
        for replica, blocks in CAPACITY.items():
            self.both("publish", [report(self.clock(), replica, capacity_blocks=blocks)], [device(self.clock())], 60.0)

    def both(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask both; their answers are one."""
        expected = self.runner.run(getattr(self.memory, method)(*args, **kwargs))
        actual = self.runner.run(getattr(self.real, method)(*args, **kwargs))
        assert actual == expected
        return actual

    @rule(
        rid=RIDS, order=st.permutations(["a", "b", "far"]), blocks=st.integers(1, 60), sequences=st.integers(1, 3),
        prefill=st.sampled_from([0, 300, 900, 5000]), lane=st.sampled_from(["fast", "batch"]),
        limit=st.sampled_from([None, 1, 3]), lease=st.sampled_from([0.5, 10.0]), force=st.sampled_from([False] * 7 + [True]),
        vram=st.sampled_from([(), (0,), (300,)]), share=st.sampled_from([None, 0.4]), queue=st.sampled_from([None, 1]),
        promised=st.one_of(st.just(([], [])), st.tuples(DUES, DUES)),
    )  # fmt: skip
    def reserve(
        self, rid: str, order: list[str], blocks: int, sequences: int, prefill: int, lane: str, limit: int | None,
        lease: float, force: bool, vram: tuple[int, ...], share: float | None, queue: int | None,
        promised: tuple[list[tuple[float, int, float]], list[tuple[float, int, float]]],
    ) -> None:  # fmt: skip
        """Reserve over up to three candidates."""
        before, after = (
            tuple(Due(to_us(self.clock() + due_s), size, to_us(run_s)) for due_s, size, run_s in dues)
            for dues in promised
        )
        places = [
            candidate(
                name, remote=name == "far", cap_s=30.0, expected_s=round(blocks / 7, 6), watermark=0.03, keep_free_blocks=2,
                n=need(blocks, prefill=prefill, sequences=sequences, vram_bytes=vram if any(vram) else ()),
                devices=("GPU-1",) if vram else (), device_guard_bytes=100, prefill_rate=333.0,
                prefill_capacity_tokens=1000.0, lane_share=share, lane_yields_at=0.8 if lane == "batch" else None,
                max_waiting=queue, promised=Promised(before, after),
            )
            for name in order
        ]  # fmt: skip
        request = ask(
            rid,
            *places,
            lane=lane,
            lane_concurrency=limit,
            lease_s=lease,
            force=force,
            request_id=f"x-{int(rid[1:]) // 2}",
        )
        result = self.both("reserve", request)
        if result.chosen is None or places[result.chosen].remote:
            return
        chosen = places[result.chosen]
        if force and result.verdicts[result.chosen].refused_by is not None:
            self.may_exceed[chosen.replica] = True
        if rid not in self.seen:
            live = self.runner.run(self.memory.reservations(chosen.replica))
            self.seen[rid] = next(r.reservation for r in live if r.reservation.rid == rid)

    @rule(
        rid=RIDS, replica=REPLICAS, blocks=st.integers(1, 30), age=AGES, first=st.sampled_from([None, 0.0, 0.7, 3.0]),
        current=st.sampled_from([None, 5, 35]), lease=st.sampled_from([0.0, 0.5, 10.0]), moved=st.booleans(),
    )  # fmt: skip
    def renew(
        self, rid: str, replica: str, blocks: int, age: float, first: float | None, current: int | None, lease: float,
        moved: bool,
    ) -> None:  # fmt: skip
        """A record of a request that either side may or may not know, sometimes on another replica."""
        known = self.seen.get(rid)
        if known is None or moved:
            made = known.reserved_at_s if known else round((self.clock() - age) * 1e6) / 1e6
            known = reservation(rid, made, replica, need(blocks), cap_s=30.0, request_id=f"x-{int(rid[1:]) // 2}")
        up = record(known, seen_age_s=age, first_byte_age_s=first, current_blocks=current, lease_s=lease)
        self.both("renew", [up, up])

    @rule(
        rid=st.one_of(RIDS, st.none()), how=st.sampled_from(Ended), age=AGES, replica=st.sampled_from([None, None, "a", "b"]),
        first=st.sampled_from([None, 0.1]), request=st.integers(0, 3), cool=st.sampled_from([0.0, 1.5]), began=st.sampled_from([None, 0.2, 20.0]),
    )  # fmt: skip
    def finish(
        self,
        rid: str | None,
        how: Ended,
        age: float,
        replica: str | None,
        first: float | None,
        request: int,
        cool: float,
        began: float | None,
    ) -> None:
        """An end record, by rid or by request id, perhaps of the wrong attempt, perhaps twice."""
        one = end(
            rid,
            how,
            ended_age_s=age,
            replica=replica,
            first_byte_age_s=first,
            request_id=f"x-{request}",
            cool_s=cool,
            began_age_s=began,
        )
        self.both("end", [one, one])

    @rule(seconds=st.sampled_from([0.000001, 0.05, 0.4, 1.5, 2.6, 5.0, 11.0, 61.0]))
    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.clock.tick(seconds)

    @rule(listened=st.sampled_from([None, 5.0, 12.0]))
    def reap(self, listened: float | None) -> None:
        """Somebody reaps, perhaps having listened."""
        self.both("reap", listened_s=listened, owners=["envoy-1"])

    @rule(
        replica=REPLICAS, age=st.sampled_from([0.0, 0.1, 0.6, 4.0, -3.0]), used=st.sampled_from([None, 0, 20, 39, 99]),
        running=st.sampled_from([None, 0, 1, 3]), waiting=st.sampled_from([None, 0, 2]), shows=st.booleans(),
        started=st.sampled_from([None, None, 0.2, 30.0]), slots=st.sampled_from([None, 4]),
        state=st.sampled_from([ReplicaState.READY] * 5 + list(ReplicaState)), ttl=st.sampled_from([3.0, 60.0]),
        free=st.sampled_from([None, 50, 900]),
    )  # fmt: skip
    def publish(
        self, replica: str, age: float, used: int | None, running: int | None, waiting: int | None, shows: bool,
        started: float | None, slots: int | None, state: ReplicaState, ttl: float, free: int | None,
    ) -> None:  # fmt: skip
        """An agent's round: late, early, of a restarted engine, with signals missing."""
        at = self.clock() - age
        one = report(
            at, replica, capacity_blocks=CAPACITY[replica], used_blocks=used, running=running, waiting=waiting,
            shows_used=shows, max_sequences=slots, state=state,
            engine_started_at_s=None if started is None else self.clock() - started,
        )  # fmt: skip
        self.both("publish", [one], [device(at, free_bytes=free)], ttl)

    @rule(replica=REPLICAS, on=st.booleans())
    def drain(self, replica: str, on: bool) -> None:
        """An operator drains or resumes."""
        self.both("drain", replica, on)

    @rule(name=st.sampled_from(["one", "two"]), ttl=st.sampled_from([0.0, 5.0]))
    def heartbeat(self, name: str, ttl: float) -> None:
        """A sidecar lives or leaves."""
        self.both("heartbeat", name, ttl)

    @invariant()
    def same_state(self) -> None:
        """Both hold the same, every sum equals its parts, and what exceeds the pool was forced or is counted."""
        snapshot = self.both("snapshot")
        for replica in CAPACITY:
            self.both("reservations", replica)
        lines = self.runner.run(self.real.audit())
        assert [line for line in lines if line.stored != line.recomputed] == []
        lines = self.runner.run(self.memory.audit())
        assert [line for line in lines if line.stored != line.recomputed] == []
        for name, view in snapshot.replicas.items():
            over = view.headroom_blocks is not None and view.headroom_blocks < 0
            assert not over or self.may_exceed.get(name) or view.over_admissions > 0

    def teardown(self) -> None:
        """When every cap and every tombstone is over, nothing is left."""
        try:
            for seconds in (31.0, 31.0, 61.0):
                self.clock.tick(seconds)
                self.both("reap")
            self.clock.tick(1)
            self.both("publish", [], [device(self.clock())], 60.0)
            snapshot = self.both("snapshot")
            assert {v.reserved_blocks for v in snapshot.replicas.values()} <= {0}
            assert (snapshot.lanes, snapshot.device_reserved_bytes) == ({}, {})
            assert [line for line in self.runner.run(self.real.audit()) if line.recomputed != 0] == []
        finally:
            self.runner.run(self.real.close())
            self.runner.close()


@pytest.mark.fuzz
@pytest.mark.timeout(900)
def test_memory_and_scripts_agree(server: ValkeyServer) -> None:
    """Random histories give the same answers, sums that equal their parts, and zero at the end."""
    settings = hypothesis.settings(
        max_examples=hypothesis.settings.default.max_examples // 2, stateful_step_count=40, deadline=None,
        phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(lambda: LedgerMachine(server.url), settings=settings)  # type: ignore[no-untyped-call]


def test_every_state_is_reachable_by_the_machines_own_rules(server: ValkeyServer) -> None:
    """Guards the machine: its vocabulary does produce reserved, cooling and orphaned reservations."""
    machine = LedgerMachine(server.url)
    reserve = {
        "order": ["a", "b", "far"], "blocks": 5, "sequences": 1, "prefill": 300, "lane": "fast", "limit": None,
        "lease": 0.5, "force": False, "vram": (300,), "share": None, "queue": None, "promised": ([], []),
    }  # fmt: skip
    machine.reserve(rid="r0", **reserve)
    machine.tick(seconds=1.5)
    machine.reap(listened=None)
    machine.reserve(rid="r2", **reserve)
    machine.reserve(rid="r4", **reserve)
    machine.finish(rid="r4", how=Ended.CLIENT_ABORT, age=0.0, replica=None, first=None, request=0, cool=1.5, began=None)
    live = machine.both("reservations", "a")
    machine.teardown()
    assert {r.state for r in live} == {State.RESERVED, State.COOLING, State.ORPHANED}
