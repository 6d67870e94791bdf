"""What past answers teach: how long outputs are, and how many response bytes a token takes.

Owns bounded, decaying histograms in this process, and what the pool's other sidecars learned where it has too little of
its own: an answer's end is heard by one of them. Pure: no clock, no I/O. Settling never changes stock in the ledger; it
only comes here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from extproc.ledger.lessons import Lesson

#: Below this many samples a prediction stays with the cap; a time, by which nothing is reserved, needs fewer.
MIN_SAMPLES, MIN_RUNS = 20, 5
#: Histograms halve when they hold this many samples, so that yesterday fades.
FULL_SAMPLES = 512
#: Distinct keys kept; the least recently used is dropped.
MAX_KEYS = 4096
#: Buckets per doubling: a quantile is read at most 9 % too high.
PER_DOUBLING = 8
#: Share of outputs that a reservation must cover.
QUANTILE = 0.9
#: Share of answers that are over by the time a refused request is told to come back at. With the median half of those
#: who waited for answers of unknown length came too early; a higher share keeps room free for them for longer than it
#: pays (tests/cases/test_steady_overload.py).
TIME_QUANTILE = 0.6

#: An answer shorter than this says little about the time a token takes.
MIN_PACE_TOKENS = 8
#: Weight of one answer in the mean time per token.
PACE_WEIGHT = 1 / 32
PACE = "pace"

#: Parts of a lesson's name: what kind it is, then its key.
SEPARATOR = "\x1f"

Key = TypeVar("Key", bound=tuple[object, ...])

OutputKey = tuple[str, str, str]
BytesKey = tuple[str, bool, bool]


#: A run is kept in milliseconds.
MS = 1000.0


class Histogram:
    """Counts over logarithmic buckets of positive numbers; reading a quantile rounds up to the bucket's end."""

    __slots__ = ("_counts", "_read", "samples")

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        #: Quantiles read since the last observation, by share.
        self._read: dict[float, float] = {}
        self.samples = 0.0

    def add(self, value: float) -> None:
        """Take one observation; values below 1 count as 1."""
        bucket = math.ceil(math.log2(max(1.0, value)) * PER_DOUBLING - 1e-9)
        self._counts[bucket] = self._counts.get(bucket, 0.0) + 1.0
        self.samples += 1.0
        self._read.clear()
        if self.samples >= FULL_SAMPLES:
            self._counts = {key: count / 2 for key, count in self._counts.items() if count >= 0.25}
            self.samples = sum(self._counts.values())

    def quantile(self, share: float) -> float:
        """The smallest bucket end that covers ``share`` of the samples; 0 without samples."""
        known = self._read.get(share)
        if known is None:
            known = self._read[share] = self._quantile(share)
        return known

    def _quantile(self, share: float) -> float:
        needed, seen = share * self.samples, 0.0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= needed:
                return float(2.0 ** (bucket / PER_DOUBLING))
        return 0.0


class Learned(Generic[Key]):
    """A bounded set of histograms by key, the key least recently used goes first, of which ``shares`` are read."""

    __slots__ = ("_heard", "_items", "_kind", "_least", "_shares", "_untold")

    def __init__(self, kind: str, *shares: float, least: int = MIN_SAMPLES) -> None:
        self._kind = kind
        self._least = least
        self._shares = shares
        self._items: OrderedDict[Key, Histogram] = OrderedDict()
        self._untold: set[Key] = set()
        self._heard: Mapping[str, tuple[float, ...]] = {}

    def add(self, key: Key, value: float) -> None:
        """Teach one value of ``key``."""
        histogram = self._items.get(key)
        if histogram is None:
            histogram = self._items[key] = Histogram()
            if len(self._items) > MAX_KEYS:
                self._untold.discard(self._items.popitem(last=False)[0])
        self._items.move_to_end(key)
        histogram.add(value)
        self._untold.add(key)

    def quantile(self, key: Key, share: float) -> float | None:
        """The quantile of ``key``: of ``least`` and more samples of our own, else as heard, else None."""
        histogram = self._items.get(key)
        if histogram is not None and histogram.samples >= self._least:
            return histogram.quantile(share)
        heard = self._heard.get(_name(self._kind, key)) if self._heard else None
        return None if heard is None else heard[self._shares.index(share)]

    def tell(self) -> Iterator[Lesson]:
        """What was learned since it was last told."""
        for key in self._untold:
            histogram = self._items[key]
            if histogram.samples >= self._least:
                yield Lesson(
                    _name(self._kind, key), int(histogram.samples), tuple(map(histogram.quantile, self._shares))
                )
        self._untold.clear()

    def hear(self, lessons: Iterable[Lesson]) -> None:
        """Take what the pool knows in place of what was heard before."""
        self._heard = _of_kind(self._kind, len(self._shares), lessons)


def _name(kind: str, key: Iterable[object]) -> str:
    return SEPARATOR.join((kind, *map(str, key)))


def _of_kind(kind: str, count: int, lessons: Iterable[Lesson]) -> dict[str, tuple[float, ...]]:
    """The lessons of one kind by name; what this release cannot read is none."""
    return {
        lesson.name: lesson.figures
        for lesson in lessons
        if lesson.name.startswith(kind + SEPARATOR)
        and len(lesson.figures) == count
        and all(math.isfinite(figure) and figure > 0 for figure in lesson.figures)
    }


class Learning:
    """Output lengths and runs per (lane, target, class), bytes per token per (target, stream, tools), seconds per token."""

    __slots__ = ("_bytes", "_outputs", "_pace_s", "_pace_told", "_paces_heard", "_runs_ms")

    def __init__(self) -> None:
        self._outputs: Learned[OutputKey] = Learned("output", QUANTILE)
        self._runs_ms: Learned[OutputKey] = Learned("run", TIME_QUANTILE, least=MIN_RUNS)
        self._bytes: Learned[BytesKey] = Learned("bytes", 0.5)
        #: Target -> seconds per token, and from how many answers.
        self._pace_s: dict[str, tuple[float, int]] = {}
        self._pace_told: dict[str, int] = {}
        self._paces_heard: Mapping[str, tuple[float, ...]] = {}

    def tell(self) -> list[Lesson]:
        """What was learned since it was last told, for the other sidecars of the pool."""
        paces = [
            Lesson(_name(PACE, (target,)), min(count, FULL_SAMPLES), (pace_s,))
            for target, (pace_s, count) in self._pace_s.items()
            if count != self._pace_told.get(target)
        ]
        self._pace_told = {target: count for target, (_, count) in self._pace_s.items()}
        return [*self._outputs.tell(), *self._runs_ms.tell(), *self._bytes.tell(), *paces]

    def hear(self, lessons: Sequence[Lesson]) -> None:
        """Take what the pool's sidecars know; used where this process learned too little itself."""
        self._outputs.hear(lessons)
        self._runs_ms.hear(lessons)
        self._bytes.hear(lessons)
        self._paces_heard = _of_kind(PACE, 1, lessons)

    def expected_output(self, key: OutputKey) -> int | None:
        """The 90th percentile of past outputs in tokens, or None while too few were seen."""
        value = self._outputs.quantile(key, QUANTILE)
        return None if value is None else math.ceil(value)

    def typical_run_s(self, key: OutputKey) -> float | None:
        """The seconds within which most past answers were over, for times; None while too few were seen."""
        value = self._runs_ms.quantile(key, TIME_QUANTILE)
        return None if value is None else value / MS

    def token_s(self, target: str) -> float | None:
        """Mean seconds per output token over a target's whole answers, prefill included; None before the first."""
        own = self._pace_s.get(target)
        if own is not None:
            return own[0]
        heard = self._paces_heard.get(_name(PACE, (target,))) if self._paces_heard else None
        return None if heard is None else heard[0]

    def observe_pace(self, target: str, duration_s: float, output_tokens: int) -> None:
        """Learn how long one complete answer took; ``target`` is one of the configuration's."""
        if output_tokens >= MIN_PACE_TOKENS and duration_s > 0:
            pace_s = duration_s / output_tokens
            known_s, count = self._pace_s.get(target, (pace_s, 0))
            self._pace_s[target] = known_s + (pace_s - known_s) * PACE_WEIGHT, count + 1

    def observe_run(self, key: OutputKey, duration_s: float) -> None:
        """Learn how long one complete answer took, whether or not its length is known."""
        self._runs_ms.add(key, duration_s * MS)

    def observe_output(self, key: OutputKey, output_tokens: int) -> None:
        """Learn one finished answer."""
        self._outputs.add(key, float(output_tokens))

    def observe_bytes(self, key: BytesKey, response_bytes: int, output_tokens: int) -> None:
        """Learn how many body bytes one output token took, from an answer that carried its usage."""
        if output_tokens > 0 and response_bytes > 0:
            self._bytes.add(key, response_bytes / output_tokens)

    def tokens_from_bytes(self, key: BytesKey, response_bytes: int) -> int | None:
        """Output tokens guessed from body bytes, or None while too few answers carried their usage."""
        per_token = self._bytes.quantile(key, 0.5)
        return None if per_token is None else max(0, round(response_bytes / per_token))
