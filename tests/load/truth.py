"""What really happened, from the engines' own logs; and what somebody who knew everything would have served.

Pure. Nothing here comes from the ledger: an engine's log gives each request's arrival, end, tokens and preemptions,
and from those follows how many blocks all requests inside were going to need at every moment.
"""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.load.clients import Attempt
from tests.load.work import Job, blocks


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its engine logged it; ``final_blocks`` is what it held at its end."""

    id: str
    engine: str
    start_s: float
    end_s: float
    input: int
    output: int
    final_blocks: int
    preemptions: int
    first_s: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Load:
    """Peaks of one engine. ``over`` are the requests whose arrival made those inside need more than the pool holds."""

    capacity: int
    peak_blocks: int
    over: tuple[str, ...]

    @property
    def over_blocks(self) -> int:
        """Blocks by which the pool was over-committed at the worst moment."""
        return max(0, self.peak_blocks - self.capacity)


def served(stats: Mapping[str, Mapping[str, Any]]) -> list[Served]:
    """Every request of every engine, by arrival."""
    found = [
        Served(row["id"], name, row["start_s"], row["end_s"], row["input_tokens"], row["output_tokens"],
               blocks(row["input_tokens"] + row["output_tokens"]), row["preemptions"], row["first_token_s"],
               row["outcome"])
        for name, figures in stats.items() for row in figures["requests"]
    ]  # fmt: skip
    return sorted(found, key=lambda one: one.start_s)


def load_of(mine: Sequence[Served], capacity: int) -> Load:
    """Replay one engine's arrivals and ends: the peak of what all requests inside needed in the end."""
    inside: list[tuple[float, int]] = []
    now = peak = 0
    over = []
    for one in sorted(mine, key=lambda one: one.start_s):
        while inside and inside[0][0] <= one.start_s:
            now -= heapq.heappop(inside)[1]
        heapq.heappush(inside, (one.end_s, one.final_blocks))
        now += one.final_blocks
        peak = max(peak, now)
        if now > capacity:
            over.append(one.id)
    return Load(capacity, peak, tuple(over))


def held_share(engine_log: Sequence[Served], capacity: int, since_s: float, until_s: float) -> float:
    """Mean share of ``capacity`` (all engines) that requests held between two moments, by what they hold at their end."""
    inside = (max(0.0, min(one.end_s, until_s) - max(one.start_s, since_s)) * one.final_blocks for one in engine_log)
    return sum(inside) / (capacity * (until_s - since_s))


@dataclass(frozen=True, slots=True)
class Packing:
    """What the packer served, as a set of job ids."""

    ids: frozenset[str]
    token_s: float


def token_time_s(engine_log: Sequence[Served]) -> float:
    """The engines' median time per output token, which stands for how long a request runs that nobody ran."""
    return statistics.median((one.end_s - one.start_s) / max(1, one.output) for one in engine_log)


def pack(
    arrivals: Sequence[Attempt], jobs: Mapping[str, Job], engine_log: Sequence[Served], capacities: Sequence[int]
) -> Packing:
    """The offline packer: every arrival in its order, on the engine with most free room, if its reserved size fits.

    It knows at every moment what is in the engines (a request occupies its reserved size from its arrival to the very
    instant of its end, no lag, no cooling, no watermark), and how long each request will run: as long as it ran, or,
    where kvgate refused it, its answer's length times the engines' median time per token. One try per arrival, as the
    clients have.
    """
    token_s = token_time_s(engine_log)
    ran = {one.id: one.end_s - one.start_s for one in engine_log}
    free = list(capacities)
    ends: list[tuple[float, int, int]] = []
    taken: set[str] = set()
    for arrival in arrivals:
        while ends and ends[0][0] <= arrival.sent_s:
            _, at, size = heapq.heappop(ends)
            free[at] += size
        job = jobs[arrival.id]
        best = max(range(len(free)), key=free.__getitem__)
        if free[best] < job.reserved_blocks:
            continue
        free[best] -= job.reserved_blocks
        taken.add(job.id)
        lasts = ran.get(job.id, job.output * token_s)
        heapq.heappush(ends, (arrival.sent_s + lasts, best, job.reserved_blocks))
    return Packing(frozenset(taken), token_s)


def refused_while_idle(
    attempts: Sequence[Attempt],
    engine_log: Sequence[Served],
    names: Sequence[str],
    fits: Callable[[Attempt], bool],
    lag_s: float,
) -> list[tuple[Attempt, list[str]]]:
    """Refusals given while some engine had nothing inside: not from ``lag_s`` before it was sent until its answer; with those engines.

    ``lag_s`` is how long an end takes to be known; ``fits`` whether an empty engine would hold the request.
    """  # fmt: skip
    busy = {name: _merged([one for one in engine_log if one.engine == name]) for name in names}

    def idle(name: str, since_s: float, until_s: float) -> bool:
        starts, ends = busy[name]
        at = bisect_right(starts, until_s)
        return at == 0 or bisect_left(ends, since_s, hi=at) == at

    found = [
        (attempt, [name for name in names if idle(name, attempt.sent_s - lag_s, attempt.over_s)])
        for attempt in attempts if attempt.refused and fits(attempt)
    ]  # fmt: skip
    return [(attempt, free) for attempt, free in found if free]


def _merged(mine: Sequence[Served]) -> tuple[list[float], list[float]]:
    """Disjoint busy intervals as starts and ends."""
    starts: list[float] = []
    ends: list[float] = []
    for one in sorted(mine, key=lambda one: one.start_s):
        if ends and one.start_s <= ends[-1]:
            ends[-1] = max(ends[-1], one.end_s)
        else:
            starts.append(one.start_s)
            ends.append(one.end_s)
    return starts, ends
