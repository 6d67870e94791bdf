"""The same traffic without admission and with it: who gets the first token within two seconds and is never preempted?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.load import soak, truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share, spread
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack

TTFT_S = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """``seconds`` of the trace at ``speed``."""

    shape: Shape
    seconds: float
    speed: float


#: Smaller pools than the soak's: about twice what they hold.
SHAPE = Shape(4, 1024, step_s=0.03, prefill_tokens_per_s=10_000, chunk_s=0.5, max_model_tokens=16_000)
FULL = Size(SHAPE, 75.0, 3.0)
SMALL = Size(SHAPE, 20.0, 3.0)


async def _through(stack: Stack, jobs: list[work.Job]) -> list[Attempt]:
    attempts = await drive(stack.envoy.port, [Order(jobs=mine) for mine in work.dealt(jobs, 2)])
    await stack.until_empty(15)
    return attempts


async def _around(stack: Stack, jobs: list[work.Job]) -> list[Attempt]:
    """Straight to the engines, each in turn."""
    ports = [engine.port for engine in stack.engines.values()]
    parts = work.dealt(jobs, len(ports))
    found = await asyncio.gather(*(drive(port, [Order(jobs=mine)]) for port, mine in zip(ports, parts, strict=True)))
    return [attempt for mine in found for attempt in mine]


def run(size: Size, command: str) -> Report:
    """Both arms."""
    report = Report(
        "policies", "With and without admission",
        f"{size.seconds:g} s of the Azure conversation trace 2023 at {size.speed:g} times its speed, {size.shape.engines} "
        f"engines of {size.shape.blocks} blocks, no retries. Good is a request whose first token came within {TTFT_S:g} s and "
        "that the engine never preempted; a refused one is not good.",
        command,
    )  # fmt: skip
    jobs, good = work.trace(size.seconds, size.speed), []
    for name, go in (("no admission", _around), ("kvgate", _through)):
        with fleet(size.shape, serves=1, target=soak.TARGET) as stack:
            attempts = asyncio.run(go(stack, jobs))
            log = truth.served(stats_of(stack))
        calm = {one.id for one in log if not one.preemptions}
        first = {a.id: a.first_s for a in attempts if a.whole and a.first_s is not None}
        good.append(sum(i in calm and first_s <= TTFT_S for i, first_s in first.items()))
        report.figure(f"{name}: good", share(good[-1], len(jobs)))
        report.figure(f"{name}: served whole, preempted", f"{len(first)}, {len(log) - len(calm)} of {len(jobs)}")
        report.figure(f"{name}: time to the first token of those served", spread(list(first.values())))
    report.figure("good with kvgate against without", f"{good[1]} to {good[0]}", "more", holds=good[1] > good[0])
    return report
