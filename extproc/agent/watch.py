"""What one replica is, round after round: readings in, the report for the ledger out.

Owns the state of one replica: freshness, recovery, restarts, wedging. Pure: clocks are arguments, ``mono_s`` is
the host's monotonic clock, and the round's ``offset_s`` turns it into the ledger's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from extproc.agent.engines.base import Answer, Availability, Engine, Hints, Reading
from extproc.agent.http import Cause
from extproc.agent.rates import RateMeter, Rates
from extproc.ledger.base import ReplicaReport, ReplicaState

#: Good scrapes in a row before a replica that failed takes work again.
RECOVERY_SCRAPES = 2
#: Work in flight and no counter moved: long enough for the longest prefill step, chunked or not.
WEDGED_S = 30.0
#: A queue while nothing runs; scheduling takes milliseconds, an idle engine with a queue is stuck.
WEDGED_QUEUE_S = 10.0
#: Failures that prove that nobody listens there.
GONE = frozenset({Cause.REFUSED, Cause.RESET})
#: Visits in a row that got no usable answer after which somebody else's API counts as away.
SILENT_VISITS = 2
#: Identities remembered, to tell a restart from several servers behind one URL.
IDENTITIES = 16
#: Scrapes that must meet one and the same process before alternation counts as over.
STEADY_SCRAPES = 60

#: What an engine says of itself -> what the scheduler makes of it.
STATES: Mapping[Availability, ReplicaState] = {
    Availability.SERVING: ReplicaState.READY,
    Availability.STARTING: ReplicaState.UNKNOWN,
    Availability.ASLEEP: ReplicaState.DRAINING,
    Availability.DRAINING: ReplicaState.DRAINING,
    Availability.UNHEALTHY: ReplicaState.LOST,
}


@dataclass(frozen=True, slots=True)
class Scrape:
    """One visit to an engine: answers by path, and the cause where none came; times on the monotonic clock."""

    start_mono_s: float
    end_mono_s: float
    answers: Mapping[str, Answer]
    failures: Mapping[str, Cause] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom the watched replica belongs to and who watches it."""

    replica: str
    target: str
    node: str
    instance: str


class ReplicaWatch:
    """The state machine of one replica; feed ``observe``, read ``report``."""

    def __init__(self, origin: Origin, engine: Engine, hints: Hints, *, unknown_s: float) -> None:
        self.origin = origin
        self.engine = engine
        self.hints = hints
        self.leaving = False
        self._device_lost = False
        self.reading: Reading | None = None
        self.cause: str | None = None
        self.scrapes = self.failures = self.restarts = 0
        self._unknown_s = unknown_s
        self._meter = RateMeter()
        self._cached: dict[str, Answer] = {}
        self._span: tuple[float, float] | None = None
        self._told: tuple[float, float] | None = None
        self._state = ReplicaState.UNKNOWN
        self._trusted = False
        self._had_trust = False
        self._good = 0
        self._gone_at: float | None = None
        self._identity: str | None = None
        self._identities: list[str] = []
        self._started_at_s: float | None = None
        self._flat_since: float | None = None
        self._last_progress: float | None = None
        self._due: dict[str, int] = {}
        self._alternating = 0
        self._silent = 0

    def devices(self, *, lost: bool, mono_s: float, offset_s: float) -> None:
        """Whether a device of the replica is lost now.

        What was reserved before the loss is void: the engine's memory went with the device, and until the device is
        believed again nothing new is admitted.
        """
        if lost and not self._device_lost:
            self._void_before(mono_s + offset_s)
        self._device_lost = lost

    def due(self) -> list[str]:
        """The paths to read this round: the quick ones always, the others when their turn comes."""
        paths = []
        for endpoint in self.engine.endpoints:
            left = self._due.get(endpoint.path, 0)
            if left <= 0:
                paths.append(endpoint.path)
            self._due[endpoint.path] = left - 1 if left > 0 else endpoint.every - 1
        return paths

    def observe(self, scrape: Scrape, *, offset_s: float, wall_s: float) -> None:
        """Take one scrape; ``offset_s`` is ledger clock minus monotonic clock, ``wall_s`` the host's wall clock now."""
        self.scrapes += 1
        failed = {
            e.path: scrape.failures[e.path] for e in self.engine.endpoints if e.required and e.path in scrape.failures
        }
        if failed:
            self._failed(next(iter(failed.values())), scrape)
            return
        self._silent = 0
        self._cached.update(scrape.answers)
        for path in scrape.failures:  # an optional endpoint: its old answer is no longer true
            self._cached.pop(path, None)
        reading = self.engine.read(self._cached, self.hints)
        changed = self._follow_identity(reading, scrape, offset_s=offset_s, wall_s=wall_s)
        self.reading, self._span, self.cause = reading, (scrape.start_mono_s, scrape.end_mono_s), None
        # Put on the ledger's clock once: our idea of that clock moves by milliseconds from round to round, and the
        # ledger refuses a report whose scrape began before the last one's, a lost replica's among them.
        self._told = (scrape.start_mono_s + offset_s, scrape.end_mono_s + offset_s)
        busy = (reading.running or 0) + (reading.waiting or 0) > 0
        if self._meter.add(scrape.end_mono_s, reading.counters, busy=busy) and not changed:
            self._due.clear()  # read the slow facts again: they say whether the process is another one
            if reading.identity is None:
                self._restarted(scrape, None, offset_s=offset_s, wall_s=wall_s)
        self._settle(self._judge(reading, scrape.end_mono_s))
        self._gone_at = None

    def unreadable(self, error: Exception) -> None:
        """An answer that our reader stumbled over: what it says is not known."""
        self.failures += 1
        self.cause = f"unreadable: {type(error).__name__}"
        self._good, self._trusted, self._state = 0, False, ReplicaState.UNKNOWN
        self._due.clear()

    def report(self, *, mono_s: float, offset_s: float) -> ReplicaReport:
        """The report to publish now; scrape times are those of the last scrape that succeeded."""
        reading = self.reading or Reading(Availability.STARTING)
        state = self.state(mono_s)
        rates = self.rates()
        start, end = self._told or (mono_s + offset_s, mono_s + offset_s)
        if state is ReplicaState.LOST or (self.age_s(mono_s) or 0.0) > self._unknown_s:
            # What a dead engine last showed is neither load nor room; only what it was made with stays.
            reading = replace(reading, used_blocks=None, running=None, waiting=None)
        if self.engine.outside:
            # Nothing of it is ours and nothing is reserved there, so after lost data nothing has to be proven either.
            reading = replace(reading, capacity_blocks=0, running=0, waiting=0)
        return ReplicaReport(
            replica=self.origin.replica,
            target=self.origin.target,
            engine=self.engine.name,
            node=self.origin.node,
            instance=self.origin.instance,
            state=state,
            scrape_start_at_s=start,
            scrape_end_at_s=end,
            # A pool of no blocks is an engine that is still loading: unknown, never full for ever.
            capacity_blocks=reading.capacity_blocks if self.engine.outside else reading.capacity_blocks or None,
            block_tokens=reading.block_tokens,
            used_blocks=reading.used_blocks,
            shows_used=reading.shows_used,
            running=reading.running,
            waiting=reading.waiting,
            max_sequences=reading.max_sequences,
            max_model_tokens=reading.max_model_tokens,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            engine_started_at_s=self._started_at_s,
            preemptions_total=reading.counters.preemptions,
            prefix_hit_share=rates.prefix_hit_share,
        )

    def state(self, mono_s: float) -> ReplicaState:
        """What the replica is at ``mono_s``; an old reading makes it unknown, never empty."""
        if self._device_lost:
            return ReplicaState.LOST
        if self._state is ReplicaState.READY:
            if self._span is None or mono_s - self._span[1] > self._unknown_s:
                return ReplicaState.UNKNOWN
            if self.leaving:
                return ReplicaState.DRAINING
            return ReplicaState.READY if self._trusted else ReplicaState.UNKNOWN
        return self._state

    def rates(self) -> Rates:
        """What was measured lately."""
        return self._meter.rates()

    def idle(self) -> bool:
        """Whether nothing is known to run there any more, so that a leaving replica can be forgotten."""
        if self._state is ReplicaState.LOST or self.reading is None:
            return True
        return not (self.reading.running or 0) + (self.reading.waiting or 0)

    def age_s(self, mono_s: float) -> float | None:
        """Seconds since the last scrape that succeeded ended."""
        return None if self._span is None else mono_s - self._span[1]

    def _failed(self, cause: Cause, scrape: Scrape) -> None:
        self.failures += 1
        self.cause = cause.value
        self._good = 0
        self._due.clear()
        self._silent += 1
        if cause in GONE or (self.engine.outside and self._silent >= SILENT_VISITS):
            self._state, self._trusted = ReplicaState.LOST, False
            self._gone_at = scrape.start_mono_s if cause is Cause.REFUSED else self._gone_at
            self._cached.clear()
        elif self._state is not ReplicaState.READY:
            self._trusted = False
        # A late or garbled answer proves nothing: the last reading ages until it is unknown.

    def _judge(self, reading: Reading, mono_s: float) -> ReplicaState:
        state = STATES[reading.availability]
        flat_s = self._flat_for(reading, mono_s)
        if state is not ReplicaState.READY:
            return state
        if reading.missing or self._several() or (reading.capacity_blocks == 0 and not self.engine.outside):
            return ReplicaState.UNKNOWN
        limit_s = WEDGED_QUEUE_S if reading.running == 0 else reading.wedged_after_s or WEDGED_S
        return ReplicaState.WEDGED if flat_s is not None and flat_s >= limit_s else ReplicaState.READY

    def _flat_for(self, reading: Reading, mono_s: float) -> float | None:
        """How long work has been in flight without any counter moving; None where it moves or cannot be told."""
        progress = reading.counters.progress
        in_flight = (reading.running or 0) + (reading.waiting or 0) > 0
        if progress is None or not in_flight or progress != self._last_progress:
            self._flat_since = None
        elif self._flat_since is None:
            self._flat_since = mono_s
        if in_flight and progress is not None and self._flat_since is None:
            self._flat_since = mono_s
        self._last_progress = progress
        return None if self._flat_since is None else mono_s - self._flat_since

    def _settle(self, state: ReplicaState) -> None:
        """Recovery: trust comes back only after good scrapes in a row; the very first one needs no second."""
        if state is not ReplicaState.READY:
            self._good, self._trusted, self._state = 0, False, state
            return
        self._good += 1
        self._state = ReplicaState.READY
        # A remote's visits are far apart: one good one is proof enough.
        if not self._had_trust or self._good >= (1 if self.engine.outside else RECOVERY_SCRAPES):
            self._trusted = self._had_trust = True

    def _follow_identity(self, reading: Reading, scrape: Scrape, *, offset_s: float, wall_s: float) -> bool:
        """Notice another process under the same URL; True where it is one."""
        identity = reading.identity
        if identity is None:
            return False
        before, self._identity = self._identity, identity
        if before == identity:
            self._alternating = max(0, self._alternating - 1)
            return False
        if identity not in self._identities:
            self._identities = [*self._identities, identity][-IDENTITIES:]
            if before is None:
                self._date_start(reading, scrape, offset_s=offset_s, wall_s=wall_s)
                return False
            self._restarted(scrape, reading, offset_s=offset_s, wall_s=wall_s)
            return True
        self._alternating = STEADY_SCRAPES
        return False

    def _several(self) -> bool:
        """Whether processes alternate under one URL; their figures are then parts of an unknown whole."""
        return self._alternating > 0

    def _restarted(self, scrape: Scrape, reading: Reading | None, *, offset_s: float, wall_s: float) -> None:
        self.restarts += 1
        self._meter.restart()
        self._due.clear()
        self._had_trust, self._good = True, 0
        self._trusted = False
        self._date_start(reading, scrape, offset_s=offset_s, wall_s=wall_s)

    def _date_start(self, reading: Reading | None, scrape: Scrape, *, offset_s: float, wall_s: float) -> None:
        """When the process started, on the ledger's clock; found once per process so that it does not jitter.

        Where no start time is shown: the latest moment at which it was certainly not yet there. Too early only
        keeps a dead reservation until its own end record; too late would void a live one.
        """
        if reading is not None and reading.started_unix_s is not None:
            started = scrape.end_mono_s + offset_s - max(0.0, wall_s - reading.started_unix_s)
        else:
            known = [moment for moment in (self._gone_at, self._span[1] if self._span else None) if moment is not None]
            if not known:
                return
            started = max(known) + offset_s
        self._void_before(started)

    def _void_before(self, at_s: float) -> None:
        self._started_at_s = at_s if self._started_at_s is None else max(self._started_at_s, at_s)
