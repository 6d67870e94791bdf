"""Retry-After under steady overload: of those who come back exactly when told, how many are admitted?"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from tests.load import truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share, spread
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack

OUTPUT = (60, 150)
#: Blocks of a mean request of ``work.looping``: 230 tokens in, 105 out, each rounded up to blocks.
MEAN_BLOCKS = 15 + 7


@dataclass(frozen=True, slots=True)
class Size:
    """``over`` times as many clients as fit at once, for ``seconds`` after ``warm_s``.

    ``aim`` is the share of returns that must be admitted; None: too few to judge a share.
    """

    shape: Shape
    serves: int
    processes: int
    seconds: float
    warm_s: float
    over: float = 1.3
    aim: float | None = 0.8

    @property
    def clients(self) -> int:
        """How many ask at any moment."""
        return round(self.over * self.shape.engines * self.shape.blocks / MEAN_BLOCKS)


FULL = Size(Shape(3, 192), serves=2, processes=4, seconds=150.0, warm_s=30.0)
ONE = Size(Shape(3, 192), serves=1, processes=4, seconds=150.0, warm_s=30.0)
SMALL = Size(Shape(2, 192), serves=2, processes=2, seconds=14.0, warm_s=12.0)
#: A dozen returns on a machine that does other things as well say nothing of a share; tests/cases/test_steady_overload.py
#: judges it in virtual time.
TEST = Size(Shape(1, 192), serves=2, processes=1, seconds=8.0, warm_s=7.0, aim=None)


async def _run(stack: Stack, size: Size, *, known: bool) -> list[Attempt]:
    loops = work.dealt(work.looping(size.clients, 100, 3, OUTPUT, exact=known), size.processes)
    orders = [Order(loops=mine, stop_s=size.warm_s + size.seconds, retries=100) for mine in loops]
    attempts = await drive(stack.envoy.port, orders)
    await stack.until_empty(15)
    return attempts


def run(size: Size, command: str) -> Report:
    """The whole scenario, once with answers that run to their caps, and where a share is judged once with others."""
    lengths = "" if size.aim is None else "; then again with caps of four times the answers, whose lengths are learned"
    report = Report(
        "retry", "Who comes back when told is admitted",
        f"{size.clients} clients, {size.over:g} times what {size.shape.engines} engines of {size.shape.blocks} blocks hold "
        f"at once, each asking again as soon as it is answered (2.4 to 6 s), for {size.seconds:g} s of steady load through "
        f"{size.serves} `serve` process(es). A refused client comes back after exactly `retry-after-ms`, as often as it "
        f"takes. Every answer runs to its cap{lengths}.",
        command,
    )  # fmt: skip
    _once(report, size, "", known=True)
    if size.aim is not None:
        _once(report, size, "lengths unknown: ", known=False)
    return report


def _once(report: Report, size: Size, what: str, *, known: bool) -> None:
    with fleet(size.shape, serves=size.serves) as stack:
        attempts = asyncio.run(_run(stack, size, known=known))
        log = truth.served(stats_of(stack))
    since_s = attempts[0].sent_s + size.warm_s
    until_s = since_s + size.seconds
    steady = [a for a in attempts if since_s <= a.sent_s < until_s]
    back, new = [a for a in steady if a.tries], [a for a in steady if not a.tries]
    admitted = sum(not a.refused for a in back)
    report.figure(f"{what}came back when told", len(back))
    report.figure(
        f"{what}admitted of those",
        share(admitted, len(back)),
        "some" if size.aim is None else f">= {size.aim:.0%}",
        holds=admitted > 0 and admitted >= (size.aim or 0.0) * len(back),
    )
    untold = sum(a.refused and not a.retry_ms for a in attempts)
    report.figure(f"{what}refused without a time to come back at", untold, "0", holds=untold == 0)
    strange = sum(not a.refused and not a.whole for a in attempts)
    report.figure(f"{what}neither whole nor refused", strange, "0", holds=strange == 0)
    report.figure(f"{what}admitted of first attempts", share(sum(not a.refused for a in new), len(new)))
    waits = spread([a.retry_ms / 1000 for a in steady if a.refused and a.retry_ms])
    report.figure(f"{what}waits given", waits)
    reasons = Counter(a.reason for a in steady if a.refused)
    report.figure(f"{what}reasons", ", ".join(f"{n} x {reason}" for reason, n in reasons.items()))
    tries = Counter(a.tries for a in steady if not a.refused)
    report.figure(f"{what}attempts until admitted", ", ".join(f"{k + 1}: {n}" for k, n in sorted(tries.items())))
    held = truth.held_share(log, size.shape.blocks * size.shape.engines, since_s, until_s)
    report.figure(f"{what}blocks held by running requests, mean share of the pools", f"{100 * held:.1f} %")
