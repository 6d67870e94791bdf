"""Half of all clients leave: what does the room that cools after them cost?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.load import truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack

AIM = 0.95
SHARE = 0.5
#: 5 to 8 s at the engine's step.
OUTPUT = (130, 190)


@dataclass(frozen=True, slots=True)
class Size:
    """``clients`` in closed loops for ``seconds`` after ``warm_s``."""

    shape: Shape
    clients: int
    processes: int
    seconds: float
    warm_s: float


FULL = Size(Shape(3, 192), 36, 2, 100.0, 15.0)
SMALL = Size(Shape(1, 192), 12, 1, 16.0, 4.0)


async def _run(stack: Stack, size: Size, aborts: float) -> tuple[list[Attempt], float]:
    token_s = size.shape.step_s + 0.001
    loops = work.dealt(work.looping(size.clients, 200, 4, OUTPUT, aborts=aborts, token_s=token_s), size.processes)
    orders = [Order(loops=mine, stop_s=size.warm_s + size.seconds, retries=100) for mine in loops]
    attempts = await drive(stack.envoy.port, orders)
    return attempts, await stack.until_empty(15)


@dataclass(frozen=True, slots=True)
class Part:
    """Admitted per second in requests and in reserved blocks, the pools' share in use, and how the run ended."""

    requests: float
    blocks: float
    held: float
    aborted: int
    admitted: int
    empty_after_s: float
    shortest_s: float


def _part(size: Size, aborts: float) -> Part:
    with fleet(size.shape, serves=1) as stack:
        attempts, empty_after_s = asyncio.run(_run(stack, size, aborts))
        log = truth.served(stats_of(stack))
    since_s = attempts[0].sent_s + size.warm_s
    until_s = since_s + size.seconds
    reserved = sizes(size, aborts)
    mine = [one for one in log if since_s <= one.start_s < until_s]
    whole = [one.end_s - one.start_s for one in mine if one.outcome == "complete"]
    return Part(
        len(mine) / size.seconds,
        # What a request was admitted with: its whole answer, whether or not its client stayed for it.
        sum(reserved[one.id] for one in mine) / size.seconds,
        truth.held_share(log, size.shape.blocks * size.shape.engines, since_s, until_s),
        sum(one.outcome == "aborted" for one in mine), len(mine), empty_after_s, min(whole, default=0.0),
    )  # fmt: skip


def sizes(size: Size, aborts: float) -> dict[str, int]:
    """Reserved blocks of every job."""
    token_s = size.shape.step_s + 0.001
    loops = work.looping(size.clients, 200, 4, OUTPUT, aborts=aborts, token_s=token_s)
    return {job.id: job.reserved_blocks for loop in loops for job in loop}


def run(size: Size, command: str) -> Report:
    """The whole scenario, without and with aborts."""
    calm, left = _part(size, 0.0), _part(size, SHARE)
    report = Report(
        "aborts", "Half of all clients leave",
        f"{size.clients} clients ask {size.shape.engines} engine(s) of {size.shape.blocks} blocks, each again as soon as it is "
        f"done, for {size.seconds:g} s; answers take 5 s and more. In the second run half of them leave at a moment drawn "
        "evenly from the answer's whole life; their blocks stay counted for 1.5 s (`abortLagMs`).",
        command,
    )  # fmt: skip
    report.figure("shortest complete answer", f"{min(calm.shortest_s, left.shortest_s):.1f} s", ">= 5 s")
    report.figure("aborted", f"{left.aborted} of {left.admitted} admitted")
    for name, part in (("without aborts", calm), ("with aborts", left)):
        report.figure(f"{name}: admitted", f"{part.requests:.2f} requests/s, {part.blocks:.1f} blocks/s")
        report.figure(f"{name}: blocks held by running requests, mean share", f"{100 * part.held:.1f} %")
        report.figure(
            f"{name}: ledger empty after the last client", f"{part.empty_after_s:.1f} s", "0 left", holds=True
        )
    ratio = left.blocks / calm.blocks
    report.figure("admitted load with aborts", f"{100 * ratio:.1f} % of that without", ">= 95 %", holds=ratio >= AIM)
    return report
