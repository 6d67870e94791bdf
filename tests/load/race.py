"""The race: client processes against two deciders through one Envoy, judged by the engines and by a packer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from extproc.config import load
from tests.load import told, truth, work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share, spread
from tests.load.fleet import Shape, fleet, stats_of
from tests.support.stack import Stack

#: How long the end of a request may take to reach the ledger before an engine counts as idle for everybody.
END_KNOWN_S = 0.25
#: The decision log is written behind the requests: its last entries come later, at most by this much.
LOG_WRITTEN_S = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """``requests`` in ``rounds`` of ``round_s`` from ``processes`` clients."""

    requests: int
    processes: int
    rounds: int
    round_s: float
    shape: Shape
    aim: float = 0.9


FULL = Size(10_000, 8, 50, 4.0, Shape(6, 192))
SMALL = Size(600, 4, 3, 4.0, Shape(6, 192))
#: On a machine that runs other tests too a decision, and the news of an end, take long enough for the packer, who needs
#: no time for either, to be far ahead. Whether a refusal could have been an admission is judged one by one all the same.
TEST = Size(320, 4, 2, 3.0, Shape(5, 128), aim=0.3)


async def _run(stack: Stack, size: Size) -> tuple[list[Attempt], dict[str, work.Job]]:
    dealt = work.racing(size.requests, size.processes, size.rounds, size.round_s, seed=5)
    attempts = await drive(stack.envoy.port, [Order(jobs=jobs) for jobs in dealt])
    await stack.until_empty(15)
    return attempts, {job.id: job for jobs in dealt for job in jobs}


def run(size: Size, command: str) -> Report:
    """The whole scenario."""
    with fleet(size.shape, telemetry={"decisionLog": 2 * size.requests}) as stack:
        attempts, jobs = asyncio.run(_run(stack, size))
        stats = stats_of(stack)
        words = _words(stack, {attempt.id for attempt in attempts if attempt.decision})
    log = truth.served(stats)
    report = Report(
        "race", "No request over capacity, and not by refusing",
        f"{len(jobs)} requests race from {size.processes} client processes through one Envoy to two `serve` processes; "
        f"{size.shape.engines} engines of {size.shape.blocks} blocks, watermark 2 %. Over-admission is counted from the "
        "engines' own logs: a request is over-admitted when those inside with it will need more blocks than the pool has. "
        "The offline packer (`tests/load/truth.py`) replays the same arrivals in order, one try each, onto the engine with "
        "most free room, with the reserved sizes, true ends without any lag, and no watermark.",
        command,
    )  # fmt: skip
    _over(report, stats, log, len(jobs))
    _answers(report, attempts)
    packing = truth.pack(attempts, jobs, log, [size.shape.blocks] * size.shape.engines)
    mine = {one.id for one in log}
    ratio = len(mine) / len(packing.ids)
    report.figure("served", f"{len(mine)} of {len(jobs)}")
    report.figure("served by the packer", len(packing.ids))
    report.figure(
        "served, share of the packer's", f"{100 * ratio:.1f} %", f">= {size.aim:.0%}", holds=ratio >= size.aim
    )
    tokens = sum(jobs[i].input + jobs[i].output for i in mine) / sum(
        jobs[i].input + jobs[i].output for i in packing.ids
    )
    report.figure("the same in tokens", f"{100 * tokens:.1f} %")
    _idle(report, size, attempts, jobs, log, words)
    return report


def _words(stack: Stack, decided: set[str]) -> dict[str, told.Told]:
    """The decision log, once it holds every decision that a client was told."""
    pool = load(stack.config_path).ledger.pool
    until_s = time.monotonic() + LOG_WRITTEN_S
    while decided - (words := told.decisions(stack.valkey.url, pool)).keys() and time.monotonic() < until_s:
        time.sleep(0.2)
    return words


def _idle(
    report: Report,
    size: Size,
    attempts: list[Attempt],
    jobs: dict[str, work.Job],
    log: list[truth.Served],
    words: dict[str, told.Told],
) -> None:
    """Refusals while an engine was idle: all of them, what could have been known, and how late ends were known."""
    usable = int(size.shape.blocks * 0.98)
    need = {name: job.reserved_blocks for name, job in jobs.items()}
    found = truth.refused_while_idle(
        attempts, log, size.shape.names, lambda a: need[a.id] <= usable, END_KNOWN_S
    )  # fmt: skip
    ended = {one.id: one.end_s for one in log}
    admitted = [one for one in words.values() if one.replica is not None and one.id in ended]
    lags = [one.heard_s - ended[one.id] for one in admitted if one.heard_s is not None]
    verdicts = [
        told.judge(words[attempt.id], name, need[attempt.id], usable, admitted, need, ended)
        for attempt, names in found for name in names if attempt.id in words
    ]  # fmt: skip
    faults = {one.id for one in verdicts if not one.excused} | {a.id for a, _ in found if a.id not in words}
    report.figure("from an engine's end until a process heard of it", spread(lags))
    report.figure("refused while an engine was idle that would hold it", len(found))
    why = Counter(one.why for one in verdicts)
    report.figure("of those, where that could have been known", len(faults), "0", holds=not faults)
    report.figure(
        "why each of those engines was not used", ", ".join(f"{n} x {w}" for w, n in why.items()) or "none idle"
    )
    for one in (one for one in verdicts if not one.excused):
        seen = words[one.id]
        report.figure(f"  {one.id} and {one.engine}", f"{one}, {seen.refused_by}, free {seen.free_blocks}")


def _over(report: Report, stats: dict[str, dict[str, object]], log: list[truth.Served], total: int) -> None:
    over, peaks, preempted = 0, [], 0
    for name, figures in stats.items():
        load = truth.load_of([one for one in log if one.engine == name], int(str(figures["capacity_blocks"])))
        over += len(load.over)
        peaks.append(f"{figures['peak_final_blocks']}/{load.capacity}")
        preempted += int(str(figures["preemptions"])) + int(str(figures["over_capacity_events"]))
        if int(str(figures["peak_final_blocks"])) > load.capacity and not load.over:
            over += 1  # the engine's own peak knows better than our replay of its log
    report.figure("over-admitted requests", f"{over} of {total} (rate {over / total:g})", "0", holds=over == 0)
    report.figure("peak blocks by the engines' own count", ", ".join(peaks), "never above")
    report.figure("preemptions", preempted, "0", holds=preempted == 0)


def _answers(report: Report, attempts: list[Attempt]) -> None:
    kinds = Counter((a.status, a.reason or a.error or "") for a in attempts)
    report.figure("answers", ", ".join(f"{n} x {s} {r}".rstrip() for (s, r), n in sorted(kinds.items())))
    strange = [a for a in attempts if not a.whole and not (a.status == 429 and a.retry_ms)]
    report.figure("neither whole nor a well-formed 429", share(len(strange), len(attempts)), "none", holds=not strange)
