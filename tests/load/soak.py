"""A recorded day's traffic at three times its speed: the ledger ends at zero and nothing grows."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.load import truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack

SPEED = 3.0
#: Everything bounded (decision log, tombstones, the first answers that lengths are learned from) is full long before the
#: second half; from then on memory has no reason to grow. So little per minute counts as none.
FLAT_MIB = 0.1
RETRIES = 2
#: Settings of the stack that a soak of minutes can fill: everything bounded reaches its bound early.
BOUNDED: dict[str, Any] = {"telemetry": {"decisionLog": 500}}
TARGET: dict[str, Any] = {"maxWaiting": 16, "ttftBudgetMs": 2000}


@dataclass(frozen=True, slots=True)
class Size:
    """``seconds`` of play, memory read every ``every_s``; ``judged``: long enough to say anything of memory."""

    shape: Shape
    seconds: float
    every_s: float
    judged: bool


SHAPE = Shape(4, 2048, step_s=0.03, prefill_tokens_per_s=20_000, chunk_s=0.5, max_model_tokens=16_384)
FULL = Size(SHAPE, 360.0, 2.0, judged=True)
SMALL = Size(SHAPE, 20.0, 2.0, judged=False)
#: Long enough for a ledger that leaks.
TEST = Size(SHAPE, 5.0, 1.0, judged=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident MiB of each watched process at ``at_s`` after the start."""

    at_s: float
    mib: dict[str, float]


async def _watch(stack: Stack, every_s: float, until: asyncio.Event, samples: list[Sample]) -> None:
    pids = {f"serve {number}": process.pid for number, process in enumerate(stack.serves)}
    pids["valkey"] = stack.valkey.pid
    began = time.monotonic()
    while not until.is_set():
        samples.append(Sample(time.monotonic() - began, {name: resident_mib(pid) for name, pid in pids.items()}))
        try:
            async with asyncio.timeout(every_s):
                await until.wait()
        except TimeoutError:
            continue


def resident_mib(pid: int) -> float:
    """Resident memory of a process (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def trend(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares slope and twice its standard error; 0 for fewer than three points."""
    if len(points) < 3:
        return 0.0, 0.0
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    below = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / below
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, 2.0 * math.sqrt(left / (len(points) - 2) / below)


async def _run(stack: Stack, size: Size, samples: list[Sample]) -> tuple[list[Attempt], float, dict[str, int]]:
    over = asyncio.Event()
    watch = asyncio.create_task(_watch(stack, size.every_s, over, samples))
    jobs = work.trace(size.seconds, SPEED)
    attempts = await drive(stack.envoy.port, [Order(jobs=mine, retries=RETRIES) for mine in work.dealt(jobs, 2)])
    over.set()
    await watch
    empty_s = await stack.until_empty(15)
    ledger = await stack.ledger()
    try:
        wrong = [line for line in await ledger.audit() if line.stored != line.recomputed]
        left = await ledger.snapshot()
    finally:
        await ledger.close()
    blocks = {name: view.reserved_blocks + view.sequences for name, view in left.replicas.items()}
    return attempts, empty_s, {"wrong": len(wrong), "left": sum(blocks.values()), "lanes": sum(left.lanes.values())}


def run(size: Size, command: str) -> Report:
    """The whole scenario."""
    samples: list[Sample] = []
    with fleet(size.shape, serves=1, target=TARGET, **BOUNDED) as stack:
        attempts, empty_s, end = asyncio.run(_run(stack, size, samples))
        stats = stats_of(stack)
    log = truth.served(stats)
    jobs = len({attempt.id for attempt in attempts})
    report = Report(
        "soak", "Soak",
        f"The Azure conversation trace 2023 (`tests/data/azure_conv_18min.csv`, CC-BY 4.0) at {SPEED:g} times its speed "
        f"for {size.seconds:g} s: {jobs} requests with caps of four times their answers, streams of at most 2 chunks a second, "
        f"{size.shape.engines} engines of {size.shape.blocks} blocks, up to {RETRIES} retries when told.",
        command,
    )  # fmt: skip
    done = {attempt.id for attempt in attempts if attempt.whole}
    report.figure("served whole", f"{share(len(done), jobs)} of {jobs}")
    report.figure("answers", ", ".join(f"{n} x {k}" for k, n in sorted(Counter(_kind(a) for a in attempts).items())))
    # Open arrivals above what fits: the line of those who come back grows, whatever they are told.
    for name, tried in (("first attempts", False), ("those who came back when told", True)):
        some = [a for a in attempts if bool(a.tries) is tried]
        report.figure(f"admitted of {name}", f"{share(sum(not a.refused for a in some), len(some))} of {len(some)}")
    strange = sum(not a.whole and not (a.status == 429 and a.retry_ms) for a in attempts)
    report.figure("neither whole nor a well-formed 429", strange, "0", holds=strange == 0)
    report.figure("preempted by the engines", f"{sum(one.preemptions > 0 for one in log)} of {len(log)}")
    report.figure("ledger at the end", f"{end['left']} blocks and sequences, {end['lanes']} in lanes", "0",
                  holds=end["left"] == end["lanes"] == 0)  # fmt: skip
    report.figure("empty after the last answer", f"{empty_s:.1f} s")
    report.figure("sums that differ from their parts (`ledger audit`)", end["wrong"], "0", holds=end["wrong"] == 0)
    _memory(report, samples, judged=size.judged)
    return report


def _kind(attempt: Attempt) -> str:
    return f"{attempt.status} {attempt.reason}".strip()


def _memory(report: Report, samples: list[Sample], *, judged: bool) -> None:
    """Resident memory over time, and how it grew in the second half."""
    late = [sample for sample in samples if sample.at_s >= samples[-1].at_s / 2]
    for name in samples[0].mib:
        shown = [f"{sample.mib[name]:.1f}" for sample in samples[:: max(1, len(samples) // 12)]]
        report.figure(f"{name}: resident MiB over time", " ".join(shown))
        slope, noise = trend([(sample.at_s / 60, sample.mib[name]) for sample in late])
        report.figure(
            f"{name}: growth in the second half, MiB/min", f"{slope:+.3f} ± {noise:.3f}", f"<= {FLAT_MIB:g}" if judged else "",
            holds=not judged or slope <= FLAT_MIB,
        )  # fmt: skip
