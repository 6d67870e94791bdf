"""Rates from counters: windows between two readings, resets, and the percentiles that mean something.

Owns arithmetic over ``Counters``; time is an argument. A counter that fell is a restart: that window is
dropped, never read as negative or as the new value.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields

from extproc.agent.engines.base import Counters

#: Busy windows remembered: five minutes of work at one scrape a second.
WINDOWS = 300
#: Windows needed before a percentile is told.
MIN_WINDOWS = 3
#: A window that prefilled fewer tokens says nothing about what the engine could prefill.
MIN_PREFILL_TOKENS = 256
#: A window with fewer decode steps says nothing about decode speed.
MIN_DECODE_STEPS = 16
#: The prefill rate is a capacity: what the engine reached in its better busy windows.
PREFILL_PERCENTILE = 0.90
#: The decode rate bounds how long a request can run: what a sequence gets in the slower windows.
DECODE_PERCENTILE = 0.10
#: Tokens looked up before a hit share is told.
MIN_LOOKED_UP_TOKENS = 1024
#: Counters that only grow within one engine process (``progress`` may not).
MONOTONIC = tuple(field.name for field in fields(Counters) if field.name != "progress")


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured lately; None until enough work was seen.

    ``decode_tokens_per_s`` is per sequence, ``output_tokens_per_s`` the whole engine's; ``preemptions_per_finished``
    and ``prefix_hit_share`` cover the remembered windows; ``ttft_s`` and ``queue_s`` are means over them.
    """

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_s: float | None = None
    queue_s: float | None = None
    prefix_hit_share: float | None = None
    preemptions_per_finished: float | None = None


@dataclass(frozen=True, slots=True)
class _Window:
    """Differences between two readings of one process."""

    duration_s: float
    prefill_rate: float | None
    decode_rate: float | None
    delta: Counters


def _difference(old: Counters, new: Counters, name: str) -> float | None:
    before, after = getattr(old, name), getattr(new, name)
    return None if before is None or after is None else after - before


def was_reset(old: Counters, new: Counters) -> bool:
    """Whether any counter fell: another process answers, or the engine lost its totals."""
    return any((change := _difference(old, new, name)) is not None and change < 0 for name in MONOTONIC)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole or whole <= 0 else part / whole


class RateMeter:
    """Rates of one engine process; ``add`` readings in order, ``restart`` when another process answers."""

    def __init__(self) -> None:
        self._last: tuple[float, Counters, bool] | None = None
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)

    def restart(self) -> None:
        """Forget the last reading, keep the windows: the same engine on the same device is as fast as before."""
        self._last = None

    def add(self, at_s: float, counters: Counters, *, busy: bool) -> bool:
        """Take one reading made at ``at_s`` (any monotonic clock); True where the counters were reset.

        ``busy``: work was in flight at the reading. A window counts as busy if it was at either end.
        """
        last, self._last = self._last, (at_s, counters, busy)
        if last is None:
            return False
        then_s, old, was_busy = last
        if was_reset(old, counters):
            return True
        duration_s = at_s - then_s
        delta = Counters(**{name: _difference(old, counters, name) for name in MONOTONIC})
        worked = any(value for value in (delta.prompt_tokens, delta.output_tokens, delta.finished))
        if duration_s > 0 and (busy or was_busy or worked):
            self._windows.append(_Window(duration_s, _prefill(delta, duration_s), _decode(delta), delta))
        return False

    def rates(self) -> Rates:
        """The figures over the remembered windows."""
        sums = {name: self._sum(name) for name in MONOTONIC}
        duration_s = math.fsum(window.duration_s for window in self._windows)
        looked_up = sums["looked_up_tokens"]
        enough = looked_up is not None and looked_up >= MIN_LOOKED_UP_TOKENS
        share = _ratio(sums["cached_tokens"], looked_up) if enough else None
        return Rates(
            prefill_tokens_per_s=_percentile([w.prefill_rate for w in self._windows], PREFILL_PERCENTILE),
            decode_tokens_per_s=_percentile([w.decode_rate for w in self._windows], DECODE_PERCENTILE),
            output_tokens_per_s=_ratio(sums["output_tokens"], duration_s),
            ttft_s=_ratio(sums["ttft_s"], sums["ttft_count"]),
            queue_s=_ratio(sums["queue_s"], sums["queue_count"]),
            prefix_hit_share=None if share is None else min(1.0, share),
            preemptions_per_finished=_ratio(sums["preemptions"], sums["finished"]),
        )

    def _sum(self, name: str) -> float | None:
        values = [value for window in self._windows if (value := getattr(window.delta, name)) is not None]
        return math.fsum(values) if values else None


def _prefill(delta: Counters, duration_s: float) -> float | None:
    """Prefill speed of one window, tokens/s.

    Two figures, both below what the engine can do, so the larger is the better one: tokens over the whole
    window, and tokens over the requests' own prefill times (which overlap and hold the decode of others).
    """
    candidates = []
    if delta.computed_tokens is not None and delta.computed_tokens >= MIN_PREFILL_TOKENS:
        candidates.append(delta.computed_tokens / duration_s)
    if delta.prefilled_tokens is not None and delta.prefilled_tokens >= MIN_PREFILL_TOKENS and delta.prefill_s:
        candidates.append(delta.prefilled_tokens / delta.prefill_s)
    return max(candidates, default=None)


def _decode(delta: Counters) -> float | None:
    if delta.decode_steps is None or delta.decode_steps < MIN_DECODE_STEPS:
        return None
    return _ratio(delta.decode_steps, delta.decode_s)


def _percentile(values: list[float | None], share: float) -> float | None:
    """Nearest-rank percentile of those that are there; None below ``MIN_WINDOWS`` of them."""
    known = sorted(value for value in values if value is not None)
    if len(known) < MIN_WINDOWS:
        return None
    return known[min(len(known) - 1, max(0, math.ceil(share * len(known)) - 1))]
