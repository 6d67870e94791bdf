"""Traffic past kvgate: by how much can the pool be over-committed, and whom does it hurt?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.load import truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack


@dataclass(frozen=True, slots=True)
class Size:
    """``arrivals`` per second for ``seconds`` at one engine, half of them straight at it."""

    shape: Shape
    arrivals: float
    seconds: float


#: Both halves together ask for about 1.5 times what the engine holds; the half past kvgate alone fits.
FULL = Size(Shape(1, 512), 8.0, 45.0)
SMALL = Size(Shape(1, 512), 8.0, 12.0)
#: Parts of a run: who goes where.
HALF, NONE, ALL = "half past kvgate", "none past kvgate", "all past kvgate"


@dataclass(frozen=True, slots=True)
class Part:
    """What one part showed; ``via`` and ``past`` are (served, preempted at least once)."""

    peak_over: int
    over: int
    preempted: int
    served: int
    via: tuple[int, int]
    past: tuple[int, int]
    refused: int


async def _run(stack: Stack, jobs: list[work.Job], direct: list[work.Job]) -> list[Attempt]:
    engine = next(iter(stack.engines.values()))
    through, past = await asyncio.gather(
        drive(stack.envoy.port, [Order(jobs=jobs)]), drive(engine.port, [Order(jobs=direct)])
    )
    await stack.until_empty(15)
    return through + past


def _part(size: Size, which: str) -> Part:
    jobs = work.steady(size.arrivals, size.seconds, seed=11)
    direct = [job for job in jobs if which == ALL or (which == HALF and job.direct)]
    via = [job for job in jobs if job not in direct]
    with fleet(size.shape, serves=1) as stack:
        attempts = asyncio.run(_run(stack, via, direct))
        log = truth.served(stats_of(stack))
    load = truth.load_of(log, size.shape.blocks)
    names = {job.id for job in direct}

    def of(mine: bool) -> tuple[int, int]:
        found = [one for one in log if (one.id in names) is mine]
        return len(found), sum(one.preemptions > 0 for one in found)

    return Part(
        load.over_blocks, len(load.over), sum(one.preemptions > 0 for one in log), len(log), of(False), of(True),
        sum(attempt.refused for attempt in attempts),
    )  # fmt: skip


def run(size: Size, command: str) -> Report:
    """The whole scenario: the same arrivals three times."""
    parts = {which: _part(size, which) for which in (NONE, HALF, ALL)}
    report = Report(
        "bypass", "Traffic past kvgate: the measured bound",
        f"{size.arrivals:g} requests a second for {size.seconds:g} s, about 1.5 times what one engine of "
        f"{size.shape.blocks} blocks holds; the same arrivals with none, half and all of them sent straight to the engine. "
        "Over-committed are blocks that those inside will need beyond the pool. Foreign growth between two scrapes (0.3 s "
        "apart here) cannot be seen, so with half past kvgate the figure is a bound, not zero.",
        command,
    )  # fmt: skip
    for which, part in parts.items():
        over = f"{part.peak_over} blocks ({100 * part.peak_over / size.shape.blocks:.0f} % of the pool)"
        clean = which != NONE or part.peak_over == part.preempted == 0
        report.figure(f"{which}: largest over-commit", over, "0" if which == NONE else "", holds=clean)
        report.figure(f"{which}: preempted", f"{share(part.preempted, part.served)} of {part.served} served")
        report.figure(f"{which}: refused by kvgate", part.refused)
    half, every = parts[HALF], parts[ALL]
    report.figure("half past kvgate: preempted among those admitted by kvgate", share(half.via[1], half.via[0]))
    report.figure("half past kvgate: preempted among the others", share(half.past[1], half.past[0]))
    less = half.peak_over < every.peak_over and half.preempted * every.served <= every.preempted * half.served
    report.figure(
        "half past kvgate against all past it", f"{half.peak_over} to {every.peak_over} blocks", "less", holds=less
    )
    return report
