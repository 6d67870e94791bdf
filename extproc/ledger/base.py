"""The ledger's contract: what callers hand in, what they get back, what every implementation must keep.

Owns the types and the Protocol; knows neither Redis nor asyncio. Every ``_at_s`` is on the ledger's clock
(Redis ``TIME``; an injected clock in the in-memory reference), every ``_age_s`` is "that long before the
host's now", which an implementation turns into the ledger's clock as ``now - age``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from extproc.ledger.lessons import Lesson
from extproc.ledger.line import NOTHING, Promised, Turn
from extproc.types import Need

#: Version of the stored layout; two releases that share a ledger must agree on it.
SCHEMA_VERSION = 1
#: An ended reservation is remembered this long, so that a late record cannot resurrect it.
TOMBSTONE_S = 60.0
#: The engine frees a request later than the client leaves (abort lag and the way to the engine).
COOLING_S = 1.5
#: A reservation is part of a scrape's truth if it had not ended this long before the scrape began.
SCRAPE_GRACE_S = 1.5
#: Bypass once seen is assumed for this long.
BYPASS_MEMORY_S = 30.0
#: Who has listened this long without a pause and heard nothing of an orphan may end it (5 s were too short).
SILENCE_S = 10.0
#: After lost data a replica is unknown at most this long.
LOSS_UNKNOWN_S = 60.0
#: A scrape proves a replica after lost data if it began this many periodic intervals after the loss.
LOSS_PERIODS = 3
#: An orphan is gone if an idle engine's scrape began this long after it was made ...
IDLE_AFTER_S = 5.0
#: ... and no record of it was seen in this long before that scrape.
IDLE_SILENT_S = 2.5
#: The lane's keep-free blocks are at most this share of the pool.
KEEP_FREE_SHARE = 0.25
#: A refused candidate's retry time looks at most at this many reservations, earliest expected end first.
RETRY_WALK = 64


class State(StrEnum):
    """States of a live reservation; released, moved and voided leave only a tombstone."""

    RESERVED = "reserved"
    COOLING = "cooling"
    ORPHANED = "orphaned"


class Ended(StrEnum):
    """How a reservation came to its end."""

    COMPLETE = "complete"
    CLIENT_ABORT = "client_abort"
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_ERROR = "upstream_error"
    TIMEOUT = "timeout"
    MOVED = "moved"
    VOIDED = "voided"
    ORPHANED = "orphaned"
    #: The body answer was never written, so no engine ever saw the request: released at once, no cooling.
    UNSENT = "unsent"
    #: An operator's ``kvgate release``.
    OPERATOR = "operator"


#: Ends after which the engine holds nothing any more, so that nothing has to cool.
CLEAN_ENDS = frozenset({Ended.COMPLETE, Ended.UNSENT, Ended.VOIDED, Ended.OPERATOR})


class ReplicaState(StrEnum):
    """What a replica is to the scheduler; everything but ``ready`` and ``stale`` admits nothing.

    ``stale``: the last report is between ``fresh_s`` and ``unknown_s`` old, so the ledger alone decides, with the last
    foreign figure and without the engine's queue.
    """

    READY = "ready"
    DRAINING = "draining"
    STALE = "stale"
    WEDGED = "wedged"
    LOST = "lost"
    UNKNOWN = "unknown"


class Reservation(Struct, frozen=True):
    """Everything that renewing, rebuilding or ending a reservation needs; it travels in Envoy's metadata too.

    ``need`` is what was reserved; ``cap_blocks`` what the request takes if it runs to its cap (on engines whose
    overflow is fatal both are equal); ``cap_s`` the longest it can run: its cap at the replica's slowest
    measured rate, after which an orphan is given up. ``devices`` are the UUIDs that ``need.vram_bytes`` is
    taken from, in the same order. ``expected_s`` is how long it is expected to run (for retry times only).
    """

    rid: str
    target: str
    replica: str
    lane: str
    owner: str
    request_id: str
    klass: str
    reserved_at_s: float
    need: Need
    input_tokens: int
    expected_output_tokens: int
    max_output_tokens: int | None
    cap_blocks: int
    cap_s: float
    devices: tuple[str, ...] = ()
    expected_s: float = 0.0


class Candidate(Struct, frozen=True):
    """One place a request could go, in order of preference, with what it would take there and the limits there.

    A remote candidate takes nothing and always fits. ``static_capacity_blocks`` stands in where no agent reports
    and the operator declared ``noAgent: ledgerOnly``; ``keep_free_blocks`` is the lane's kvReserve (an
    implementation caps it at 25 % of the pool); ``prefill_rate`` tokens/s and ``prefill_capacity_tokens``
    (TTFT budget x rate) bound the leaky bucket, None turns it off; ``lane_share`` and ``lane_yields_at`` are
    fractions of the pool, the latter of what all other lanes hold. ``expected_s`` is how long the request is expected
    to run there; None derives it from ``cap_s`` and the expected share of the cap. ``promised`` is what others who
    were refused were told: room is left for those before this request, unless the replica holds nothing at all.
    """

    target: str
    replica: str
    remote: bool
    need: Need
    cap_blocks: int = 0
    cap_s: float = 600.0
    devices: tuple[str, ...] = ()
    device_guard_bytes: int = 0
    static_capacity_blocks: int | None = None
    static_max_sequences: int | None = None
    watermark: float = 0.02
    keep_free_blocks: int = 0
    prefill_rate: float | None = None
    prefill_capacity_tokens: float | None = None
    max_waiting: int | None = None
    lane_share: float | None = None
    lane_yields_at: float | None = None
    expected_s: float | None = None
    promised: Promised = NOTHING


class ReserveRequest(Struct, frozen=True):
    """One decision: reserve on the first candidate that has room for everything, or on none.

    ``force`` (shadow mode) reserves on the first local candidate whatever its headroom; the verdicts stay those of a
    normal decision (the first without ``refused_by`` is what it would have been). ``lease_s`` starts now. ``rid`` holds
    no control character and no ``~`` (the ledger's own suffix).
    ``fresh_s``/``unknown_s`` are the ages at which a replica's report stops being fresh and becomes unknown.
    """

    rid: str
    lane: str
    owner: str
    request_id: str
    klass: str
    input_tokens: int
    expected_output_tokens: int
    max_output_tokens: int | None
    candidates: Sequence[Candidate]
    lane_concurrency: int | None = None
    lease_s: float = 10.0
    fresh_s: float = 5.0
    unknown_s: float = 15.0
    force: bool = False


class Verdict(Struct, frozen=True):
    """What one candidate looked like at the moment of the decision.

    ``refused_by`` is the first resource without room (a ``types.Reason`` value), None where it fits, and
    ``not_tried`` where an earlier candidate was taken. Figures are None where the state is unknown or the
    candidate is remote. ``headroom_blocks`` = capacity - committed, before this request; ``retry_after_s`` the
    earliest time at which the binding resource fits, from what is in flight (None: unknown).
    """

    refused_by: str | None
    state: str
    capacity_blocks: int | None = None
    committed_blocks: int | None = None
    headroom_blocks: int | None = None
    retry_after_s: float | None = None


class ReserveResult(Struct, frozen=True):
    """``chosen`` indexes the candidates (None: refused everywhere); a repeated rid returns its first choice.

    Refusals are not remembered: the same rid may try again. ``ended``: the rid has ended (an end record or a
    compensating release came first), so nothing was reserved and the request is not to be sent.
    """

    chosen: int | None
    verdicts: tuple[Verdict, ...]
    now_s: float
    degraded: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Upsert:
    """A periodic record of a live request: renews the lease, or rebuilds a reservation the ledger lost.

    ``seen_age_s`` is how old the record is; ``first_byte_age_s`` when the engine's first byte came, None before;
    ``current_blocks`` what it holds by now where that is known and above its need (it outgrew its prediction).
    """

    reservation: Reservation
    lease_s: float
    seen_age_s: float = 0.0
    first_byte_age_s: float | None = None
    current_blocks: int | None = None


class End(Struct, frozen=True):
    """An end record, idempotent by rid; ``rid`` None joins by (owner, request_id).

    ``ended_age_s`` is how long ago it ended; ``cool_s`` how long anything but a complete answer goes on counting.
    ``replica`` restricts the end to the reservation on that replica (an attempt that was retried elsewhere).
    A client may send the same request id for everything, so a join by request id finds only the one reservation made
    since the exchange began (``began_age_s``) that had no record yet, does nothing where two would match, and never
    releases: it makes an orphan, which the request's next record brings back and rules 4 and 6 end.
    """

    rid: str | None
    owner: str
    request_id: str
    how: Ended
    ended_age_s: float = 0.0
    replica: str | None = None
    cool_s: float = COOLING_S
    first_byte_age_s: float | None = None
    began_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class EndResult:
    """Whether this call was the one that ended it.

    ``kept``: the ledger was away; the end is remembered here and sent when it is back.
    """

    released: bool
    kept: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One scrape of one engine. None means "the engine does not show it", never zero.

    ``scrape_start_at_s``/``scrape_end_at_s`` are on the ledger's clock. ``shows_used`` says whether this engine
    can show used blocks at all (llama.cpp cannot). ``engine_started_at_s`` is the engine's start where known;
    a later one than last time voids what was reserved before it. Rates are tokens/s.
    """

    replica: str
    target: str
    engine: str
    node: str
    instance: str
    state: ReplicaState
    scrape_start_at_s: float
    scrape_end_at_s: float
    capacity_blocks: int | None
    block_tokens: int
    used_blocks: int | None = None
    shows_used: bool = False
    running: int | None = None
    waiting: int | None = None
    max_sequences: int | None = None
    max_model_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    engine_started_at_s: float | None = None
    preemptions_total: float | None = None
    prefix_hit_share: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device as its node agent sees it; ``state`` is ok, lost, unknown or unified."""

    uuid: str
    node: str
    instance: str
    scrape_start_at_s: float
    state: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Per replica: the foreign blocks found, whether bypass is seen, how many reservations an engine restart voided."""

    foreign_blocks: dict[str, int | None]
    bypass: dict[str, bool]
    voided: dict[str, int]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica in a snapshot: its last report and the ledger's own sums.

    ``headroom_blocks`` is against the whole pool: a candidate's watermark is not known here. ``over_admissions`` is
    the sum of its three causes: adopted or moved reservations that did not fit, reservations that outgrew their
    prediction, foreign growth.
    """

    report: ReplicaReport | None
    replica: str
    target: str
    state: str
    age_s: float | None
    reserved_blocks: int
    foreign_blocks: int | None
    committed_blocks: int | None
    headroom_blocks: int | None
    sequences: int
    prefill_level_tokens: float
    reservations: int
    orphaned: int
    over_admissions: int
    drained_by_operator: bool = False
    bypass: bool = False
    over_adopted: int = 0
    over_grew: int = 0
    over_foreign: int = 0
    lane_blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The whole pool at one moment, for pre-selection, status and explain."""

    now_s: float
    replicas: dict[str, ReplicaView]
    lanes: dict[str, int]
    devices: dict[str, DeviceReport]
    device_reserved_bytes: dict[str, int]
    epoch: str
    live_sidecars: int = 0
    loss_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class LiveReservation:
    """A reservation as stored, for status, explain and audit."""

    reservation: Reservation
    state: State
    lease_at_s: float
    current_blocks: int
    first_byte_at_s: float | None


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One sum recomputed from its parts; ``stored`` differs from ``recomputed`` only if the ledger is wrong."""

    what: str
    stored: float
    recomputed: float


class Ledger(Protocol):
    """Reservations of one pool. Every call is idempotent by rid; ``LedgerDown`` means "outcome unknown"."""

    async def time_s(self) -> float:
        """The ledger's clock."""
        ...

    async def reserve(self, request: ReserveRequest) -> ReserveResult:
        """Atomically reserve on the first candidate with room for everything."""
        ...

    async def renew(self, records: Sequence[Upsert]) -> list[bool]:
        """Renew or rebuild; False where the rid had ended."""
        ...

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """End reservations; each leaves a tombstone, known or not."""
        ...

    async def reap(self, *, listened_s: float | None = None, owners: Sequence[str] = ()) -> int:
        """Orphan expired leases, release what rules 4, 5 and 6 allow; returns how many were released.

        ``listened_s`` is how long this instance has run without a pause and with Redis reachable while it received
        the access log of ``owners`` (None: it does not listen, so silence proves nothing).
        """
        ...

    async def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float
    ) -> PublishResult:
        """Store one agent round and recompute what foreign load it shows."""
        ...

    async def snapshot(self) -> LedgerSnapshot:
        """Sums and reports of the whole pool."""
        ...

    async def reservations(self, replica: str) -> list[LiveReservation]:
        """Every live reservation of one replica."""
        ...

    async def drain(self, replica: str, on: bool) -> None:
        """Stop (or resume) new work on a replica; running work ends by itself."""
        ...

    async def audit(self) -> list[AuditLine]:
        """Every stored sum beside the same sum recomputed from the reservations."""
        ...

    async def heartbeat(self, instance: str, ttl_s: float) -> int:
        """This sidecar lives for ``ttl_s`` more (0: it leaves); returns how many live, for posture ``share``."""
        ...

    async def lessons(self, told: Sequence[Lesson]) -> list[Lesson]:
        """Tell what this sidecar learned; hear what all know. Of one name the lesson of most weight stays while it is told."""
        ...

    async def turn(self, token: str) -> Turn:
        """The request ``token`` comes (for the first time or again): its place in line, which it gives up by coming."""
        ...

    async def promise(
        self, token: str, replica: str, blocks: int, wait_s: float, since_at_s: float | None, run_s: float | None = None
    ) -> None:
        """It was refused and told to come back to ``replica`` in ``wait_s``, and will run for ``run_s`` there.

        ``since_at_s`` is its former turn's.
        """
        ...

    async def close(self) -> None:
        """Give connections back; releases no reservation."""
        ...
