"""What every engine row offers: which endpoints to read, and how their answers become one ``Reading``.

Owns the shapes shared by the rows and the helpers that combine series. Knows no clock and no network.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from extproc.agent.exposition import Exposition, Sample, normalise
from extproc.memory import KvModel

#: No engine has more blocks, tokens or requests than this; a larger figure is a fault, not a reading.
ABSURD = 2.0**48


class Availability(StrEnum):
    """Whether the engine takes work, as far as it says itself."""

    SERVING = "serving"
    STARTING = "starting"  # process up, model not loaded
    ASLEEP = "asleep"  # vLLM asleep or paused: requests hang without an error
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"  # answers, but says it is broken


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer as a row sees it; ``headers`` have lower-case names."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body's JSON value, or None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path to read; ``every`` counts rounds (facts that change only with a restart are read rarely).

    ``metrics``: may stand under a URL of its own (a replica's ``metricsUrl``).
    """

    path: str
    every: int = 1
    required: bool = True
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Hints:
    """What the configuration says about a replica; it fills in what the engine does not show.

    ``kv`` is the cost model by which requests are counted, for a reported block size; None where no geometry is named
    or it cannot be read on this host. ``by_geometry``: one is named, so requests are counted by it elsewhere.
    """

    served_model: str | None = None
    kv_tokens: int | None = None
    max_sequences: int | None = None
    max_model_tokens: int | None = None
    kv: Callable[[int | None], KvModel] | None = None
    by_geometry: bool = False


@dataclass(frozen=True, slots=True)
class Counters:
    """Monotonic totals since the engine's start, the raw material of rates; None where not shown.

    ``computed_tokens`` are prompt tokens that were really prefilled, ``cached_tokens`` those taken from the
    prefix cache, ``looked_up_tokens`` those for which the cache was asked. ``prefill_s`` sums per-request
    prefill times of ``prefilled_tokens``; ``decode_s`` sums the gaps between ``decode_steps`` tokens of one
    sequence. ``progress`` is any total that must move while work is in flight.
    """

    prompt_tokens: float | None = None
    computed_tokens: float | None = None
    cached_tokens: float | None = None
    looked_up_tokens: float | None = None
    output_tokens: float | None = None
    prefilled_tokens: float | None = None
    prefill_s: float | None = None
    decode_steps: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    ttft_count: float | None = None
    queue_s: float | None = None
    queue_count: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    progress: float | None = None


@dataclass(frozen=True, slots=True)
class PoolView:
    """One of several KV pools of a replica (data-parallel engines), for status and metrics."""

    label: str
    capacity_blocks: int | None
    used_blocks: int | None
    running: int | None
    waiting: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine at one moment; None is "not shown", never zero.

    ``identity`` differs between two processes of the same engine; ``started_unix_s`` is the process' start on
    its host's wall clock. ``missing`` names required signals that were not there; ``notes`` are hints for the
    operator (stable strings); ``aliases`` which of several names a signal was found under. ``closed_for_s``: the
    engine wants no more for so long. ``formula_ratio``: requests of full length that fit by the engine's report, over
    those that fit by the geometry. ``wedged_after_s``: how long its progress may stand still, where that is unusual.
    """

    availability: Availability
    block_tokens: int = 1
    capacity_blocks: int | None = None
    used_blocks: int | None = None
    shows_used: bool = False
    running: int | None = None
    waiting: int | None = None
    max_sequences: int | None = None
    max_model_tokens: int | None = None
    counters: Counters = Counters()
    identity: str | None = None
    started_unix_s: float | None = None
    pools: tuple[PoolView, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    bad_lines: int = 0
    kv_bytes_per_block: int | None = None
    closed_for_s: float | None = None
    formula_ratio: float | None = None
    wedged_after_s: float | None = None


class Engine(Protocol):
    """One row of the engine table; stateless."""

    @property
    def name(self) -> str:
        """The engine's name in the configuration."""
        ...

    @property
    def outside(self) -> bool:
        """Somebody else's API: seldom visited, nothing required of it, and silent twice is away."""
        ...

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """What to read, in order."""
        ...

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """The answers by path (those not read this round are the last ones) as one reading; never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric under all the names it ever had, newest first; ``name{label=value}`` selects among its series.

    Several present at once (a transition between releases) are all taken, and the largest counts.
    """

    names: tuple[str, ...]
    where: Mapping[str, str] = field(default_factory=dict)

    def samples(self, exposition: Exposition) -> tuple[tuple[Sample, ...], str | None]:
        """Every finite sample under any of the names, and the names found, joined by "+"."""
        found: list[Sample] = []
        used: list[str] = []
        for name in self.names:
            metric, labels = _selector(name)
            series = [
                sample
                for sample in exposition.get(metric)
                if math.isfinite(sample.value)
                and all(sample.labels.get(key) == value for key, value in (*labels, *self.where.items()))
            ]
            if series:
                found += series
                used.append(name)
        return tuple(found), ("+".join(used) or None)


@functools.cache
def _selector(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """``name{key=value}`` as the parser's name and the labels to match."""
    metric, _, rest = name.partition("{")
    pairs = (pair.partition("=") for pair in rest.rstrip("}").split(",") if pair)
    return normalise(metric), tuple((key, value) for key, _, value in pairs)


def grouped(samples: Iterable[Sample], rank: str) -> dict[str, float]:
    """The largest value per value of the label ``rank`` (ranks inside a group repeat one figure)."""
    groups: dict[str, float] = {}
    for sample in samples:
        key = sample.labels.get(rank, "")
        groups[key] = max(groups.get(key, -math.inf), sample.value)
    return groups


def total(exposition: Exposition, names: Sequence[str], **where: str) -> float | None:
    """Sum over all series of the first of ``names`` that is there; None where none is, or a value is not finite."""
    for name in names:
        series = [
            sample
            for sample in exposition.get(normalise(name))
            if all(sample.labels.get(key) == value for key, value in where.items())
        ]
        if series:
            value = added(*(sample.value for sample in series))
            return value if value is not None and value >= 0 else None
    return None


def count(value: float | None) -> int | None:
    """A gauge as a count; None for NaN, negative and absurd values."""
    if value is None or not math.isfinite(value) or value < 0 or value > ABSURD:
        return None
    return round(value)


def whole(value: Any) -> int | None:
    """A JSON value or label as a positive whole number; None for anything else ("None", "", 0, 1.5, true)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 16 else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 < value <= ABSURD else None


def number(value: Any) -> float | None:
    """A JSON value or label as a finite, not negative number; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        parsed = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) and 0 <= parsed <= ABSURD else None


def dig(value: Any, *path: str | int) -> Any:
    """The member of nested JSON at ``path``, or None where any step is missing or of another type."""
    for step in path:
        if isinstance(step, str) and isinstance(value, dict):
            value = value.get(step)
        elif isinstance(step, int) and isinstance(value, list) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def added(*values: float | None) -> float | None:
    """The sum of those that are there; None where none is, or the sum is not finite."""
    there = [value for value in values if value is not None]
    value = float(sum(there)) if there else math.nan  # fsum raises where this is infinite
    return value if math.isfinite(value) else None


def ok(answer: Answer | None) -> bool:
    """Whether an answer came and was a success."""
    return answer is not None and 200 <= answer.status < 300


def normalise_names(names: Iterable[str]) -> frozenset[str]:
    """Names as the parser files them."""
    return frozenset(_selector(name)[0] for name in names)


def summed(values: Iterable[int | None]) -> int | None:
    """The sum, or None where any is unknown or there is none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def roomiest(views: Sequence[PoolView]) -> tuple[int | None, int | None]:
    """Capacity of all pools together, and used such that capacity - used is the roomiest pool's room.

    A request must fit into one pool; the sum of several rooms would admit what fits nowhere.
    """
    capacity = summed(view.capacity_blocks for view in views)
    if capacity is None or any(view.used_blocks is None for view in views):
        return capacity, None
    return capacity, capacity - max((view.capacity_blocks or 0) - (view.used_blocks or 0) for view in views)
