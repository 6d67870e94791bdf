"""A world in virtual time around the ledger: engines that count true blocks, Envoys, sidecars, agents, clients.

Everything random comes from one seed; a run is a function of its ``Scenario``. The engine's own count is the truth:
the ledger is right if that count never exceeds the pool although only the ledger guards it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from extproc.ledger.base import (
    Candidate,
    End,
    Ended,
    ReplicaReport,
    ReplicaState,
    Reservation,
    ReserveRequest,
    ReserveResult,
    Upsert,
)
from extproc.types import Need

START_S = 1_764_426_148.0
PERIODIC_S = 1.0
#: A reply later than this counts as none.
DEADLINE_S = 0.05
MESSAGE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Scenario:
    """What happens in one run; probabilities per event, ``*_every_s`` mean gaps between faults (0: never).

    ``tight``: every request holds all it reserved from its start to its end, so that nothing hides a mistake.
    ``strangers``: requests that reach an engine past kvgate; with them the pool may overflow, by how much is measured.
    ``oracle``: an offline first-fit packer that knows the true state decides instead of the ledger; ``long``: requests
    take 5 s and more.
    """

    seed: int
    requests: int = 30
    span_s: float = 15.0
    replicas: int = 1
    capacity: int = 60
    slots: int | None = None
    aborts: float = 0.5
    left_while_deciding: float = 0.05
    record_loss: float = 0.0
    record_duplicate: float = 0.0
    record_lag_s: float = 0.1
    scrape_loss: float = 0.0
    scrape_lag_s: float = 0.2
    crash_every_s: float = 0.0
    pause_every_s: float = 0.0
    outage_every_s: float = 0.0
    loss_every_s: float = 0.0
    restart_every_s: float = 0.0
    agent_away_every_s: float = 0.0
    same_request_ids: bool = False
    shows_used: bool = True
    tight: bool = False
    lease_s: float = 10.0
    strangers: int = 0
    oracle: bool = False
    long: bool = False

    @staticmethod
    def draw(seed: int) -> Scenario:
        """A scenario of moderate trouble; each fault is on in about a third of the runs."""
        rng = random.Random(seed)

        def sometimes(value: float) -> float:
            return value if rng.random() < 0.35 else 0.0

        return Scenario(
            seed=seed, requests=rng.choice((10, 20, 40)), span_s=rng.choice((4.0, 10.0, 20.0)), replicas=rng.choice((1, 1, 2)),
            capacity=rng.choice((40, 60, 120)), slots=rng.choice((None, None, 4)), aborts=rng.choice((0.0, 0.3, 0.6)),
            left_while_deciding=sometimes(0.1), record_loss=sometimes(0.3), record_duplicate=sometimes(0.2),
            record_lag_s=rng.choice((0.02, 0.3, 1.5)), scrape_loss=sometimes(0.3), scrape_lag_s=rng.choice((0.05, 0.5, 2.0)),
            crash_every_s=sometimes(6.0), pause_every_s=sometimes(6.0), outage_every_s=sometimes(6.0),
            loss_every_s=sometimes(12.0), restart_every_s=sometimes(8.0), agent_away_every_s=sometimes(8.0),
            same_request_ids=rng.random() < 0.2, shows_used=rng.random() < 0.8, tight=rng.random() < 0.7, lease_s=rng.choice((10.0, 10.0, 4.0)),
        )  # fmt: skip


class Violation(AssertionError):
    """An invariant did not hold."""


@dataclass(eq=False)
class Work:
    """One request inside an engine, with the blocks it truly holds."""

    inputs: int
    total: int
    prefill_s: float
    decode_s: float
    started_s: float | None = None
    stranger: bool = False
    gone: bool = False

    def blocks(self, now_s: float) -> int:
        """Blocks held now: the prompt's from its start, the rest as it decodes."""
        if self.started_s is None:
            return 0
        share = min(1.0, max(0.0, (now_s - self.started_s - self.prefill_s) / self.decode_s))
        return self.inputs + math.ceil((self.total - self.inputs) * share)


@dataclass(eq=False)
class Engine:
    """A paged engine: ``peak`` is the most blocks it ever held at once, ``own_peak`` without the strangers'."""

    name: str
    capacity: int
    slots: int | None
    up: bool = True
    started_s: float = START_S - 1000.0
    running: list[Work] = field(default_factory=list)
    waiting: list[Work] = field(default_factory=list)
    peak: int = 0
    own_peak: int = 0

    def used(self, now_s: float) -> int:
        """Blocks in use now."""
        own = sum(w.blocks(now_s) for w in self.running if not w.stranger)
        used = own + sum(w.blocks(now_s) for w in self.running if w.stranger)
        self.peak, self.own_peak = max(self.peak, used), max(self.own_peak, own)
        return used


@dataclass(eq=False)
class Stream:
    """One client's request at one Envoy."""

    number: int
    envoy: int
    request_id: str
    began_s: float
    rid: str | None = None
    reservation: Reservation | None = None
    work: Work | None = None
    first_byte_s: float | None = None
    open: bool = True
    decided: bool = False


@dataclass(eq=False)
class Sidecar:
    """One kvgate instance, the one its Envoy talks to."""

    number: int
    up: bool = True
    paused_until_s: float = 0.0
    listening_since_s: float = START_S
    life: int = 0
    renewals: dict[str, tuple[float, Upsert]] = field(default_factory=dict)
    ends: list[tuple[float, End]] = field(default_factory=list)
    inbox: list[Callable[[], None]] = field(default_factory=list)


class World:
    """Runs one scenario on one ledger (``adapters``); ``run`` raises ``Violation``."""

    def __init__(self, scenario: Scenario, ledger: Any) -> None:
        self.s, self.ledger = scenario, ledger
        self.rng = random.Random(scenario.seed * 7919 + 1)
        self.now_s = START_S
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.engines = [Engine(f"e{i}", scenario.capacity, scenario.slots) for i in range(scenario.replicas)]
        self.sidecars = [Sidecar(i) for i in range(2)]
        self.streams: list[Stream] = []
        self.ledger_up = True
        self.agent_up = True
        self.admitted = self.refused = self.needless = self.bursts = 0
        self.block_seconds = 0.0
        self.strangers_inside = 0
        self.quiet_s = START_S + scenario.span_s
        self.calm_s = START_S

    # -- time -------------------------------------------------------------------------------------------------

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Do it that much later."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + max(0.0, seconds), self._count, what))

    def run(self) -> None:
        """Everything that happens, then the proof that nothing is left."""
        self.ledger.init(self.now_s)
        for i in range(self.s.requests):
            self.at(self.rng.random() * self.s.span_s, self._arrive)
            if i % 5 == 0:
                self.at(self.rng.random() * self.s.span_s, self._burst)
        for _ in range(self.s.strangers):
            self.at(self.rng.random() * self.s.span_s, self._stranger)
        for engine in self.engines:
            self.at(self.rng.random() * 0.3, lambda e=engine: self._scrape(e))
        for sidecar in self.sidecars:
            self.at(self.rng.random(), lambda c=sidecar: self._tick(c))
        for every_s, fault in (
            (self.s.crash_every_s, self._crash), (self.s.pause_every_s, self._pause), (self.s.outage_every_s, self._outage),
            (self.s.loss_every_s, self._lose), (self.s.restart_every_s, self._restart),
            (self.s.agent_away_every_s, self._agent_away),
        ):  # fmt: skip
            if every_s:
                self._fault_later(every_s, fault)
        self._until(lambda: self.now_s >= self.quiet_s and not any(s.open for s in self.streams))
        self._settle()

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            at_s, _, what = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            self._check()
            what()

    def _check(self) -> None:
        for engine in self.engines:
            used = engine.used(self.now_s)
            if not self.s.oracle and (engine.own_peak if self.s.strangers else used) > engine.capacity:
                raise Violation(
                    f"{engine.name} holds {engine.used(self.now_s)} of {engine.capacity} blocks at {self.now_s - START_S:.3f} s"
                )

    def _settle(self) -> None:
        """15 s after the last stream and the last fault nothing counts any more; a minute later nothing is remembered."""
        self._until(lambda: not self.strangers_inside)
        end_s = max(self.now_s, self.calm_s) + 15.0 + 2 * self.s.record_lag_s + (3.0 if self.s.loss_every_s else 0.0)
        self._until(lambda: self.now_s >= end_s)
        self._audit()
        left = {n: v.reserved_blocks for n, v in self.ledger.snapshot(self.now_s).replicas.items() if v.reserved_blocks}
        if left:
            raise Violation(f"15 s after the last stream the ledger still holds {left}")
        end_s = self.now_s + 61.0
        self._queue = [item for item in self._queue if item[0] < end_s]
        self.now_s = end_s
        while self.ledger.reap(self.now_s)[1]:
            pass
        rest = {line.what: line.recomputed for line in self.ledger.audit() if line.recomputed}
        if rest:
            raise Violation(f"a minute later the ledger still remembers {rest}")

    def _audit(self) -> None:
        wrong = [line for line in self.ledger.audit() if line.stored != line.recomputed]
        if wrong:
            raise Violation(f"sums differ from their parts: {wrong}")

    # -- clients and Envoys -----------------------------------------------------------------------------------

    def _burst(self) -> None:
        self.bursts += 1
        for _ in range(4):
            self._arrive()

    def _arrive(self) -> None:
        number = len(self.streams)
        request_id = "same" if self.s.same_request_ids and self.rng.random() < 0.5 else f"x{number}"
        stream = Stream(number, self.rng.randrange(len(self.sidecars)), request_id, self.now_s)
        self.streams.append(stream)
        sidecar = self.sidecars[stream.envoy]
        if not sidecar.up:
            stream.open = False
            return
        if self.rng.random() < self.s.left_while_deciding:
            self.at(self.rng.random() * 0.06, lambda: self._leave_undecided(stream))
        self.at(MESSAGE_TIMEOUT_S, lambda: self._leave_undecided(stream))
        life = sidecar.life
        self._when_awake(sidecar, life, 0.002 + self.rng.random() * 0.03, lambda: self._decide(stream, sidecar))

    def _leave_undecided(self, stream: Stream) -> None:
        """The client is gone, or Envoy gave up on us, before any answer was written."""
        if not stream.open or stream.decided:
            return
        stream.open = False
        end = End(None, f"envoy-{stream.envoy}", stream.request_id, Ended.CLIENT_ABORT, began_age_s=0.0)
        self._log(stream, lambda: self._took_end(stream, end, self.now_s, stream.began_s))

    def _decide(self, stream: Stream, sidecar: Sidecar) -> None:
        rng, inputs = self.rng, self.rng.randint(1, 12)
        total = inputs + rng.randint(1, 14)
        actual = total if self.s.tight else inputs + rng.randint(0, total - inputs)
        decode_s = (
            round(5.0 + 15.0 * rng.random(), 6)
            if self.s.long
            else round(rng.choice((0.3, 2.0, 6.0, 20.0)) * rng.random() + 0.05, 6)
        )
        work = Work(actual if self.s.tight else inputs, actual, rng.random() * 0.8, decode_s)
        need = Need(total, inputs, 0, inputs * 16, 1)
        order = list(self.engines)
        rng.shuffle(order)
        rid = f"{stream.number}-{rng.randrange(10**6)}"
        request = ReserveRequest(
            rid, "fast", f"envoy-{stream.envoy}", stream.request_id, "chat", inputs * 16, 100, 200,
            [Candidate("t", e.name, False, need, cap_blocks=total, cap_s=40.0, expected_s=decode_s, watermark=0.0,
                       max_waiting=16) for e in order], lease_s=self.s.lease_s,
        )  # fmt: skip
        life = sidecar.life
        if not self.ledger_up:
            stream.open = False
            return
        if self.s.outage_every_s and rng.random() < 0.05:  # no answer in time; it lands later, or never
            stream.open = False
            late_s = rng.random() * 0.5
            if rng.random() < 0.7:
                self.at(late_s, lambda: self._quietly(lambda: self.ledger.reserve(request, self.now_s)))
            self.at(DEADLINE_S, lambda: self._abandon(sidecar, life, request))
            return
        result = self._oracle(order, total) if self.s.oracle else self.ledger.reserve(request, self.now_s)
        if result.chosen is None:
            self.refused += 1
            self.needless += any(self._held(e) + total <= e.capacity and e.up for e in self.engines)
            stream.open = False
            return
        engine = order[result.chosen]
        stream.rid, stream.work = rid, work
        stream.reservation = Reservation(
            rid, "t", engine.name, "fast", request.owner, request.request_id, "chat", result.now_s, need, inputs * 16, 100,
            200, total, 40.0, (), decode_s,
        )  # fmt: skip
        self._when_awake(sidecar, life, rng.random() * 0.01, lambda: self._answer(stream, sidecar, engine, request))

    def _oracle(self, order: list[Engine], blocks: int) -> ReserveResult:
        fits = (i for i, e in enumerate(order) if e.up and self._held(e) + blocks <= e.capacity)
        return ReserveResult(next(fits, None), (), self.now_s)

    def _held(self, engine: Engine) -> int:
        """What an offline packer knows to be taken: the reserved sizes of everything on its way to, or in, the engine."""
        return sum(
            s.reservation.need.kv_blocks
            for s in self.streams
            if s.reservation is not None
            and s.work is not None
            and s.reservation.replica == engine.name
            and not s.work.gone
        ) + sum(w.total for w in engine.running if w.stranger)

    def _stranger(self) -> None:
        """A request that nobody asked kvgate about."""
        engine, total = self.rng.choice(self.engines), self.rng.randint(2, 20)
        if not engine.up:
            return
        work = Work(total, total, 0.0, 0.1 + self.rng.random() * 6.0, stranger=True)
        engine.waiting.append(work)
        self._start_waiting(engine)
        self.strangers_inside += 1

        def leave() -> None:
            self.strangers_inside -= 1
            self._free(engine, work)

        self.at(work.decode_s, leave)

    def _abandon(self, sidecar: Sidecar, life: int, request: ReserveRequest) -> None:
        if sidecar.life == life:
            end = End(request.rid, request.owner, request.request_id, Ended.UNSENT, cool_s=0.0)
            sidecar.ends.append((self.now_s, end))
            self.at(0.001, lambda: self._flush(sidecar))

    def _answer(self, stream: Stream, sidecar: Sidecar, engine: Engine, request: ReserveRequest) -> None:
        if not stream.open:
            self._abandon(sidecar, sidecar.life, request)
            return
        stream.decided = True
        self.admitted += 1
        self.at(self.rng.random() * 0.1, lambda: self._reach(stream, engine))
        self.at(PERIODIC_S * self.rng.random(), lambda: self._periodic(stream))
        if self.rng.random() < self.s.aborts:
            work = stream.work
            life_s = work.decode_s if self.s.long and work is not None else 4.0
            self.at(self.rng.random() * life_s, lambda: self._abort(stream, engine))

    def _periodic(self, stream: Stream) -> None:
        if not stream.open:
            return
        sent_s, first_s = self.now_s, stream.first_byte_s
        self._log(stream, lambda: self._took_record(stream, sent_s, first_s))
        self.at(PERIODIC_S, lambda: self._periodic(stream))

    def _abort(self, stream: Stream, engine: Engine) -> None:
        if not stream.open:
            return
        self._ended(stream, Ended.CLIENT_ABORT)
        work = stream.work
        if work is not None:
            self.at(self.rng.random() * 1.3, lambda: self._free(engine, work))

    def _ended(self, stream: Stream, how: Ended) -> None:
        """Envoy writes its end record, and the attempt's."""
        stream.open = False
        at_s, first_s = self.now_s, stream.first_byte_s
        assert stream.reservation is not None
        r = stream.reservation
        self.block_seconds += r.need.kv_blocks * (at_s - stream.began_s)
        for replica in (r.replica, None):
            end = End(r.rid, r.owner, r.request_id, how, replica=replica)
            self._log(stream, lambda e=end: self._took_end(stream, e, at_s, stream.began_s, first_s))

    def _log(self, stream: Stream, deliver: Callable[[], None]) -> None:
        """An access-log entry on its way to the Envoy's sidecar: late, twice, or never."""
        sidecar = self.sidecars[stream.envoy]
        if self.rng.random() < self.s.record_loss:
            return
        for _ in range(2 if self.rng.random() < self.s.record_duplicate else 1):
            life = sidecar.life if sidecar.up else None
            self._when_awake(sidecar, life, self.rng.random() * self.s.record_lag_s, deliver)

    # -- engines ----------------------------------------------------------------------------------------------

    def _reach(self, stream: Stream, engine: Engine) -> None:
        if not engine.up:
            if stream.open:
                self._ended(stream, Ended.UPSTREAM_ERROR)
            return
        work = stream.work
        assert work is not None
        engine.waiting.append(work)
        if not stream.open:  # the client left while the request was on its way
            self.at(self.rng.random() * 0.3, lambda: self._free(engine, work))
        self._start_waiting(engine)
        self._watch(stream, engine, work)

    def _watch(self, stream: Stream, engine: Engine, work: Work) -> None:
        """Follow one request to its first byte and its end."""
        if work not in engine.running and work not in engine.waiting:
            return
        if work.started_s is None:
            self.at(0.05, lambda: self._watch(stream, engine, work))
            return
        first_s = work.started_s + work.prefill_s
        done_s = first_s + work.decode_s
        if self.now_s < first_s:
            self.at(first_s - self.now_s, lambda: self._watch(stream, engine, work))
            return
        if stream.first_byte_s is None:
            stream.first_byte_s = self.now_s
        if self.now_s < done_s:
            self.at(done_s - self.now_s + 1e-6, lambda: self._watch(stream, engine, work))
            return
        self._free(engine, work)
        if stream.open:
            self._ended(stream, Ended.COMPLETE)

    def _free(self, engine: Engine, work: Work) -> None:
        work.gone = True
        for held in (engine.running, engine.waiting):
            if work in held:
                held.remove(work)
        self._start_waiting(engine)

    def _start_waiting(self, engine: Engine) -> None:
        while engine.waiting and (engine.slots is None or len(engine.running) < engine.slots):
            work = engine.waiting.pop(0)
            work.started_s = self.now_s
            engine.running.append(work)

    def _scrape(self, engine: Engine) -> None:
        self.at(0.8 + self.rng.random() * 0.4, lambda: self._scrape(engine))
        if not self.agent_up or not engine.up:
            return
        start_s, took_s = self.now_s, self.rng.random() * 0.1
        self.at(self.rng.random() * took_s, lambda: self._read(engine, start_s, start_s + took_s))

    def _read(self, engine: Engine, start_s: float, end_s: float) -> None:
        if not engine.up:
            return
        used = engine.used(self.now_s) if self.s.shows_used else None
        report = ReplicaReport(
            engine.name, "t", "sim", "n", "i", ReplicaState.READY, start_s, end_s, engine.capacity, 16, used,
            self.s.shows_used, len(engine.running), len(engine.waiting), engine.slots,
            engine_started_at_s=engine.started_s,
        )  # fmt: skip
        if self.rng.random() >= self.s.scrape_loss:
            lag_s = end_s - self.now_s + self.rng.random() * self.s.scrape_lag_s
            self.at(lag_s, lambda: self._quietly(lambda: self.ledger.publish([report], [], 30.0, self.now_s)))

    # -- sidecars ---------------------------------------------------------------------------------------------

    def _when_awake(self, sidecar: Sidecar, life: int | None, seconds: float, what: Callable[[], None]) -> None:
        """Later, in this life of the sidecar, once it is not stopped; ``life`` None: whichever then lives."""

        def deliver() -> None:
            if not sidecar.up or (life is not None and sidecar.life != life):
                return
            if sidecar.paused_until_s > self.now_s:
                self.at(sidecar.paused_until_s - self.now_s, deliver)
                return
            what()

        self.at(seconds, deliver)

    def _took_record(self, stream: Stream, sent_s: float, first_s: float | None) -> None:
        sidecar, r = self.sidecars[stream.envoy], stream.reservation
        assert r is not None
        sidecar.renewals[r.rid] = (sent_s, Upsert(r, self.s.lease_s, 0.0, first_s))
        self._when_awake(sidecar, sidecar.life, 0.02, lambda: self._flush(sidecar))

    def _took_end(self, stream: Stream, end: End, at_s: float, began_s: float, first_s: float | None = None) -> None:
        sidecar = self.sidecars[stream.envoy]
        fields = {"began_age_s": at_s - began_s, "first_byte_age_s": None if first_s is None else at_s - first_s}
        sidecar.ends.append(
            (at_s, End(end.rid, end.owner, end.request_id, end.how, 0.0, end.replica, end.cool_s, **fields))
        )  # type: ignore[arg-type]
        self._when_awake(sidecar, sidecar.life, 0.02, lambda: self._flush(sidecar))

    def _flush(self, sidecar: Sidecar) -> None:
        if not self.ledger_up or not sidecar.up:
            sidecar.renewals.clear()
            return
        now_s = self.now_s
        ends, sidecar.ends = sidecar.ends, []
        renewals, sidecar.renewals = sidecar.renewals, {}
        if ends:
            self.ledger.end(
                [
                    End(
                        e.rid, e.owner, e.request_id, e.how, now_s - at_s, e.replica, e.cool_s,
                        None if e.first_byte_age_s is None else e.first_byte_age_s + now_s - at_s,
                        None if e.began_age_s is None else e.began_age_s + now_s - at_s,
                    )
                    for at_s, e in ends
                ],
                now_s,
            )  # fmt: skip
        if renewals:
            self.ledger.renew(
                [
                    Upsert(
                        u.reservation, u.lease_s, now_s - sent_s, None if u.first_byte_age_s is None else now_s - u.first_byte_age_s
                    )
                    for sent_s, u in renewals.values()
                ],
                now_s,
            )  # fmt: skip

    def _tick(self, sidecar: Sidecar) -> None:
        """Once a second: kept ends go out, silence is judged."""
        self.at(1.0, lambda: self._tick(sidecar))
        if not sidecar.up or sidecar.paused_until_s > self.now_s:
            return
        self._flush(sidecar)
        if self.ledger_up:
            self.ledger.reap(
                self.now_s, listened_s=self.now_s - sidecar.listening_since_s, owners=[f"envoy-{sidecar.number}"]
            )
        else:
            sidecar.listening_since_s = self.now_s

    # -- faults -----------------------------------------------------------------------------------------------

    def _quietly(self, what: Callable[[], Any]) -> None:
        if self.ledger_up:
            what()

    def _mend(self, seconds: float, what: Callable[[], None]) -> None:
        """The fault is over that much later."""
        self.calm_s = max(self.calm_s, self.now_s + seconds)
        self.at(seconds, what)

    def _fault_later(self, every_s: float, fault: Callable[[], None]) -> None:
        delay_s = self.rng.expovariate(1.0 / every_s)

        def strike() -> None:
            if self.now_s < self.quiet_s:
                fault()
                self._fault_later(every_s, fault)

        self.at(delay_s, strike)

    def _crash(self) -> None:
        """kill -9: what was decided but not written, kept ends and unsent renewals are gone."""
        sidecar = self.rng.choice(self.sidecars)
        if not sidecar.up:
            return
        sidecar.up = False
        sidecar.life += 1
        sidecar.renewals, sidecar.ends = {}, []
        for stream in self.streams:
            if stream.open and not stream.decided and stream.envoy == sidecar.number:
                stream.open = False

        def back() -> None:
            sidecar.up, sidecar.listening_since_s, sidecar.paused_until_s = True, self.now_s, 0.0

        self._mend(self.rng.choice((0.3, 2.0, 4.5)), back)

    def _pause(self) -> None:
        """SIGSTOP: entries wait in the socket and come all at once."""
        sidecar = self.rng.choice(self.sidecars)
        seconds = self.rng.choice((0.2, 3.0, 9.0))
        sidecar.paused_until_s = self.now_s + seconds

        def resume() -> None:
            sidecar.listening_since_s = self.now_s

        self._mend(seconds, resume)

    def _outage(self) -> None:
        self.ledger_up = False

        def back() -> None:
            self.ledger_up = True
            for sidecar in self.sidecars:
                sidecar.listening_since_s = self.now_s

        self._mend(self.rng.choice((0.1, 1.0, 6.0)), back)

    def _lose(self) -> None:
        self.ledger.wipe()
        self.ledger.init(self.now_s)

    def _restart(self) -> None:
        engine = self.rng.choice(self.engines)
        if not engine.up:
            return
        engine.up = False
        dead = {id(w) for w in (*engine.running, *engine.waiting)}
        engine.running, engine.waiting = [], []
        for stream in self.streams:
            if stream.open and stream.decided and id(stream.work) in dead:
                self._ended(stream, Ended.UPSTREAM_RESET)

        def back() -> None:
            engine.up, engine.started_s = True, self.now_s - 0.5

        self._mend(self.rng.choice((1.0, 3.0)), back)

    def _agent_away(self) -> None:
        self.agent_up = False

        def back() -> None:
            self.agent_up = True

        self._mend(self.rng.choice((2.0, 7.0, 20.0)), back)
