"""A recorded day's traffic at three times its speed, three times: the ledger ends at zero, the last pass costs nothing.

Memory of a process that has just begun grows for reasons that end: logs, tombstones and learned lengths fill up, and
allocators reach what the trace's densest moments need. A slope over some minutes cannot tell that from a loss. So the
first pass only fills; then the same traffic is played twice, and each moment of the last pass is compared with the same
moment of the one before: what the load itself needs is equal on both sides, and what every request leaves is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.load import truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack
from tests.support.valkey import command as ask

SPEED = 3.0
PASSES = 3
#: So little per minute between the last two passes counts as none: 55 bytes for each request.
FLAT_MIB = 0.1
RETRIES = 2
#: Clients start within this; the first request is due then.
LEAD_S = 2.0
#: Settings of the stack that a soak of minutes can fill: everything bounded reaches its bound early.
BOUNDED: dict[str, Any] = {"telemetry": {"decisionLog": 500}}
TARGET: dict[str, Any] = {"maxWaiting": 16, "ttftBudgetMs": 2000}


@dataclass(frozen=True, slots=True)
class Size:
    """``seconds`` of play per pass, memory read every ``every_s``; ``judged``: long enough to say anything of memory."""

    shape: Shape
    seconds: float
    every_s: float
    judged: bool


SHAPE = Shape(4, 2048, step_s=0.03, prefill_tokens_per_s=20_000, chunk_s=0.5, max_model_tokens=16_384)
FULL = Size(SHAPE, 360.0, 2.0, judged=True)
SMALL = Size(SHAPE, 20.0, 2.0, judged=False)
#: Long enough for a ledger that leaks.
TEST = Size(SHAPE, 3.0, 1.0, judged=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """MiB by what they are of, read ``at_s`` after the first request was due."""

    at_s: float
    mib: dict[str, float]


async def _watch(stack: Stack, every_s: float, until: asyncio.Event, samples: list[Sample]) -> None:
    """One sample every ``every_s`` from LEAD_S on; one that comes late is not left out, so that places stay places."""
    pids = {f"serve {number}": process.pid for number, process in enumerate(stack.serves)}
    began = time.monotonic() + LEAD_S
    while not until.is_set():
        due_s = len(samples) * every_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(began + due_s - time.monotonic()):
                await until.wait()
        mib = {f"{name} resident": resident_mib(pid) for name, pid in pids.items()}
        mib["valkey resident"] = resident_mib(stack.valkey.pid)
        mib["valkey used"] = await asyncio.to_thread(used_mib, stack.valkey.port)
        samples.append(Sample(due_s, mib))


def used_mib(port: int) -> float:
    """What a Valkey holds by its own account, without what its allocator keeps free."""
    found = re.search(rb"^used_memory:(\d+)", ask(port, "INFO", "memory"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 2**20


def resident_mib(pid: int) -> float:
    """Resident memory of a process (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def passes(seconds: float) -> list[work.Job]:
    """The trace's first ``seconds`` of play, again and again."""
    jobs = work.trace(seconds, SPEED)
    return [
        replace(job, id=f"{job.id}.{turn}", at_s=job.at_s + turn * seconds) for turn in range(PASSES) for job in jobs
    ]


async def _run(stack: Stack, size: Size, samples: list[Sample]) -> tuple[list[Attempt], float, dict[str, int]]:
    over = asyncio.Event()
    watch = asyncio.create_task(_watch(stack, size.every_s, over, samples))
    orders = [Order(jobs=mine, retries=RETRIES) for mine in work.dealt(passes(size.seconds), 2)]
    attempts = await drive(stack.envoy.port, orders, LEAD_S)
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
        f"for {size.seconds:g} s, played {PASSES} times: {jobs} requests with caps of four times their answers, streams of at most 2 chunks a second, "
        f"{size.shape.engines} engines of {size.shape.blocks} blocks, up to {RETRIES} retries when told. The first pass "
        "fills what is bounded; growth is what each moment of the last pass needs more than the same moment of the one before.",
        command,
    )  # fmt: skip
    done = {attempt.id for attempt in attempts if attempt.whole}
    report.figure("served whole", f"{share(len(done), jobs)} of {jobs}")
    report.figure("answers", ", ".join(f"{n} x {k}" for k, n in sorted(Counter(_kind(a) for a in attempts).items())))
    tried_in = (sum(attempt.id.endswith(f".{turn}") for attempt in attempts) for turn in range(PASSES))
    report.figure("attempts in each pass", ", ".join(map(str, tried_in)))
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
    _memory(report, samples, size)
    return report


def _kind(attempt: Attempt) -> str:
    return f"{attempt.status} {attempt.reason}".strip()


def grown(samples: list[Sample], name: str, seconds: float) -> list[float]:
    """MiB per minute from the last pass but one to the last, for every moment of a pass."""
    known = {sample.at_s: sample.mib[name] for sample in samples}
    first_s = (PASSES - 2) * seconds
    return [
        (known[at_s + seconds] - mib) / (seconds / 60)
        for at_s, mib in known.items()
        if first_s <= at_s < first_s + seconds and at_s + seconds in known
    ]


def _memory(report: Report, samples: list[Sample], size: Size) -> None:
    """What memory was over time, and what the last pass needed more than the one before at the same moments."""
    for name in samples[0].mib:
        shown = [f"{sample.mib[name]:.1f}" for sample in samples[:: max(1, len(samples) // 12)]]
        report.figure(f"{name}, MiB over time", " ".join(shown))
        if size.judged:
            found = grown(samples, name, size.seconds)
            median = statistics.median(found)
            report.figure(
                f"{name}, from the last pass but one to the last, MiB/min", f"{median:+.3f} ({min(found):+.3f} to {max(found):+.3f})",
                f"<= {FLAT_MIB:g}", holds=median <= FLAT_MIB,
            )  # fmt: skip
