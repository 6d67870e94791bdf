"""The ledger's arithmetic, free of storage: what a replica's state is, what a candidate is refused by, what is foreign.

Owns pure functions over plain figures; the reference implementation calls them, the Lua scripts state the same
and the contract, property and model tests hold the two together. Times are whole microseconds on the ledger's
clock (``*_us``); -1 stands for "not known" as it does in the scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from extproc.ledger.base import (
    BYPASS_MEMORY_S,
    KEEP_FREE_SHARE,
    LOSS_UNKNOWN_S,
    Candidate,
    ReplicaReport,
    ReserveRequest,
)
from extproc.ledger.line import Due
from extproc.types import Reason

#: Separates the parts of an index entry; no name holds it.
SEPARATOR = "\x1f"
BYPASS_US = round(BYPASS_MEMORY_S * 1e6)
LOSS_US = round(LOSS_UNKNOWN_S * 1e6)
#: A reservation past its expected end is given these parts of its overrun and of the asker's own expected run more,
#: whichever is longer, and at least OVERDUE_MIN_US. With a twentieth of the overrun alone, whoever waited for an answer
#: of unknown length was sent back a dozen times a second: half of all returns were refused (tests/cases/
#: test_steady_overload.py), and three in four are admitted with these, for 2 % less served.
OVERDUE_PART, OWN_PART = 2, 5
OVERDUE_MIN_US = 100_000


def to_us(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * 1e6)


def whole(value: float | None) -> int:
    """A count as the scripts carry it: -1 where it is missing, NaN or infinite."""
    if value is None or not math.isfinite(value):
        return -1
    return int(value)


def expected_s(candidate: Candidate, request: ReserveRequest) -> float:
    """How long the request is expected to run: as told, else its share of the time its cap may take."""
    if candidate.expected_s is not None:
        return candidate.expected_s
    if not request.max_output_tokens:
        return candidate.cap_s
    return candidate.cap_s * min(1.0, request.expected_output_tokens / request.max_output_tokens)


@dataclass(slots=True)
class Sums:
    """What the live reservations of one replica take together, and its prefill bucket."""

    kv: int = 0
    sequences: int = 0
    reservations: int = 0
    orphans: int = 0
    level: float = 0.0
    level_at_us: int = 0
    rate: float = 0.0
    over_adopted: int = 0
    over_grew: int = 0
    over_foreign: int = 0
    drained: bool = False
    lanes: dict[str, int] = field(default_factory=dict)

    def level_now(self, rate: float, now_us: int) -> float:
        """Prefill tokens not yet served at ``rate`` tokens/s."""
        return max(0.0, self.level - rate * (now_us - self.level_at_us) / 1000000)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a scrape after lost data counted inside the engine (``load``, -1 unknown), to be confirmed by later records."""

    start_us: int
    stop_us: int
    load: int


@dataclass(slots=True)
class Scrape:
    """The last accepted report of one replica and what followed from it.

    ``proven`` is the epoch it was proven in, ``trial`` the scrape that is to prove it.
    """

    report: ReplicaReport
    start_us: int
    end_us: int
    capacity: int
    waiting: int
    max_sequences: int
    expires_us: int
    foreign: int
    bypass_at_us: int
    bypass_formula: bool
    proven: str
    trial: Trial | None = None

    def bypass(self, now_us: int) -> bool:
        """Whether traffic past kvgate was seen within the last 30 s."""
        return self.bypass_at_us >= 0 and now_us - self.bypass_at_us <= BYPASS_US


@dataclass(frozen=True, slots=True)
class Epoch:
    """The identity of the ledger's data and when data was last found lost (0: never)."""

    name: str
    loss_us: int


@dataclass(frozen=True, slots=True)
class Health:
    """State, the refusal that follows from the state alone, and the pool's whole size (-1: unknown)."""

    state: str
    refused_by: str | None
    size: int


def health(
    scrape: Scrape | None, sums: Sums, static: int, epoch: Epoch, fresh_us: int, unknown_us: int, now_us: int
) -> Health:
    """What a replica is at this moment; unknown is never empty.

    ``static`` is the operator's size of the pool where no agent shows one, -1 for none.
    """
    known = scrape if scrape is not None and scrape.expires_us > now_us else None
    size = known.capacity if known is not None and known.capacity >= 0 else static
    unknown = Health("unknown", Reason.UNKNOWN_STATE, -1)
    if sums.drained:
        return Health("draining", Reason.NOT_READY, size)
    if (
        epoch.loss_us > 0
        and now_us < epoch.loss_us + LOSS_US
        and not (known is not None and known.proven == epoch.name)
    ):
        return unknown
    if known is None:
        return Health("ready", None, size) if size >= 0 else unknown
    state, age = known.report.state.value, now_us - known.start_us
    if state == "draining":
        return Health(state, Reason.NOT_READY, size)
    if state not in ("ready", "stale"):
        return Health(state, Reason.UNKNOWN_STATE, -1)
    if age > unknown_us or size < 0 or known.foreign < 0:
        return unknown
    if age <= fresh_us:
        return Health("ready", None, size)
    return unknown if known.bypass(now_us) else Health("stale", None, size)


@dataclass(frozen=True, slots=True)
class Room:
    """Everything ``refusal`` looks at for one candidate.

    ``room`` is the pool without the watermark; ``frees_in(blocks, sequences, lane, others)`` the time until that
    much is free again; ``starts_in(free, need, promised)`` the time from which ``need`` fits beside what is promised; ``device_refusal`` and ``lane_live`` are asked only when the check gets that far.
    """

    room: int
    committed: int
    sums: Sums
    scrape: Scrape | None
    fresh: bool
    now_us: int
    lane: str
    lane_limit: int
    lane_live: Callable[[], int]
    lane_frees_in: Callable[[], int]
    frees_in: Callable[[int, bool, str | None, bool], int]
    starts_in: Callable[[int, int, Sequence[Due]], int]
    device_refusal: Callable[[], str | None]


def refusal(c: Candidate, r: Room) -> tuple[str | None, int]:
    """The first resource without room and the microseconds until it fits (-1: unknown); (None, -1) where all fit."""
    checks = (_pool, _prefill, _sequences, _lane, _share, _device, _queue)
    for check in checks:
        refused, retry_us = check(c, r)
        if refused is not None:
            return refused, retry_us
    return None, -1


def _pool(c: Candidate, r: Room) -> tuple[str | None, int]:
    need, keep = c.need.kv_blocks, min(c.keep_free_blocks, math.floor(r.room * KEEP_FREE_SHARE))
    if need > 0 >= r.room:
        # An engine that is still loading reports a pool without blocks; that is no size to refuse by for good.
        return Reason.UNKNOWN_STATE, -1
    if need > r.room - keep or (c.lane_share is not None and need > math.floor(c.lane_share * r.room)):
        return Reason.EXCEEDS_POOL, -1
    head = r.room - r.committed
    # An idle replica takes whoever comes.
    before, after = (c.promised.before, c.promised.after) if r.sums.reservations > 0 else ((), ())
    if not before and not after:
        short = need + keep - head
        return (Reason.INSUFFICIENT_HEADROOM, r.frees_in(short, True, None, False)) if short > 0 else (None, -1)
    if head - need >= keep and r.starts_in(head - keep, need, before) == 0:
        return None, -1
    return Reason.INSUFFICIENT_HEADROOM, r.starts_in(head - keep, need, (*before, *after))


def _prefill(c: Candidate, r: Room) -> tuple[str | None, int]:
    rate, capacity, charge = c.prefill_rate, c.prefill_capacity_tokens, c.need.prefill_tokens
    if not rate or rate <= 0 or capacity is None or charge <= 0 or r.sums.reservations == 0:
        return None, -1
    over = r.sums.level_now(rate, r.now_us) + charge - capacity
    if over <= 0:
        return None, -1
    if charge <= capacity:
        return Reason.PREFILL_BUSY, math.floor(over / rate * 1000000)
    return Reason.PREFILL_BUSY, r.frees_in(r.sums.sequences, False, None, False)


def _sequences(c: Candidate, r: Room) -> tuple[str | None, int]:
    slots = r.scrape.max_sequences if r.scrape is not None and r.scrape.expires_us > r.now_us else -1
    if slots < 0:
        slots = whole(c.static_max_sequences)
    over = r.sums.sequences + min(c.need.sequences, slots) - slots
    if slots >= 0 and over > 0:
        return Reason.SEQUENCES_FULL, r.frees_in(over, False, None, False)
    return None, -1


def _lane(_c: Candidate, r: Room) -> tuple[str | None, int]:
    if r.lane_limit >= 0 and r.lane_live() + 1 > r.lane_limit:
        return Reason.LANE_FULL, r.lane_frees_in()
    return None, -1


def _share(c: Candidate, r: Room) -> tuple[str | None, int]:
    own, need = r.sums.lanes.get(r.lane, 0), c.need.kv_blocks
    if c.lane_share is not None:
        share = math.floor(c.lane_share * r.room)
        if own + need > share:
            return Reason.LANE_SHARE, r.frees_in(own + need - share, True, r.lane, False)
    if c.lane_yields_at is not None and r.sums.kv - own >= c.lane_yields_at * r.room:
        over = math.floor(r.sums.kv - own - c.lane_yields_at * r.room) + 1
        return Reason.LANE_SHARE, r.frees_in(over, True, r.lane, True)
    return None, -1


def _device(_c: Candidate, r: Room) -> tuple[str | None, int]:
    return r.device_refusal(), -1


def _queue(c: Candidate, r: Room) -> tuple[str | None, int]:
    if c.max_waiting is None or r.scrape is None or not r.fresh or r.scrape.expires_us <= r.now_us:
        return None, -1
    return (Reason.ENGINE_QUEUE, -1) if r.scrape.waiting >= max(1, c.max_waiting) else (None, -1)


def frees_in_us(
    entries: Sequence[tuple[int, int, str]], wanted: int, lane: str | None, others: bool, now_us: int, own_us: int
) -> int:
    """Microseconds until ``wanted`` is free again; -1 if these entries do not free that much.

    ``entries`` are (expected end, amount, lane), earliest end first; with a ``lane`` only its own entries count, or
    with ``others`` only everybody else's.
    """
    t = 0
    for end_us, amount, of in entries:
        if lane is not None and (of == lane) == others:
            continue
        t = max(t, _left_us(end_us, now_us, own_us))
        wanted -= amount
        if wanted <= 0:
            return t
    return -1


def _left_us(end_us: int, now_us: int, own_us: int) -> int:
    """How much longer a reservation that should end at ``end_us`` is expected to run."""
    left = end_us - now_us
    return left if left >= 0 else max(-left // OVERDUE_PART, own_us // OWN_PART, OVERDUE_MIN_US)


def starts_in_us(
    entries: Sequence[tuple[int, int, str]], promised: Sequence[Due], free: int, need: int, now_us: int, own_us: int
) -> int:
    """Microseconds until ``need`` blocks fit for the whole of a run of ``own_us`` beside all that is promised; -1: never.

    ``free`` is what is free now, ``entries`` as in ``frees_in_us``. This is conservative backfilling with forecasts for
    run times (Mu'alem and Feitelson, IEEE TPDS 12(6), 2001): whoever is over before a promise is due, or leaves enough
    for it by then, delays nobody.
    """
    change: dict[int, int] = {}
    for end_us, amount, _of in entries:
        at = _left_us(end_us, now_us, own_us)
        change[at] = change.get(at, 0) + amount
    for due in promised:
        at = max(0, due.due_us - now_us)
        over = at + max(1, due.run_us if due.run_us >= 0 else own_us)
        change[at] = change.get(at, 0) - due.blocks
        change[over] = change.get(over, 0) + due.blocks
    free += change.pop(0, 0)
    start = 0 if free >= need else -1
    for at in sorted(change):
        if start >= 0 and at - start >= own_us:
            break
        free += change[at]
        if free < need:
            start = -1
        elif start < 0:
            start = at
    return start


def foreign_blocks(used: int, shows_used: bool, bypass: bool, ours_blocks: int, ours_input_blocks: int) -> int:
    """Blocks in use that no reservation explains; -1 where that cannot be known."""
    if not shows_used:
        return -1 if bypass else 0
    if used < 0:
        return -1
    return max(0, used - (ours_input_blocks if bypass else ours_blocks))
