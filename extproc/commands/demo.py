"""``kvgate demo``: what ``make demo`` runs; the same load without and with kvgate on real engines."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from extproc.errors import ConfigError, DependencyDown
from extproc.local.demo_report import table
from extproc.local.demo_run import Result, Size
from extproc.local.demo_run import run as run_demo
from extproc.local.lifetime import Stopped, keep, run_directory, stopping_on_signals
from extproc.local.supervisor import ChildFailed

HELP = "the same load without and with kvgate, on real llama.cpp engines"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    size = Size()
    parser.add_argument(
        "--requests", type=int, default=size.requests, metavar="N", help="requests per run (default %(default)s)"
    )
    parser.add_argument(
        "--burst", type=int, default=size.burst, metavar="N", help="requests per burst (default %(default)s)"
    )
    parser.add_argument(
        "--pause", type=float, default=size.pause_s, metavar="S", help="seconds between bursts (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=size.seed, help="another load (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """0 if everything that the demo claims holds, 1 if not or if a process failed."""
    if args.requests < 1 or args.burst < 1 or args.pause < 0:
        print("kvgate demo: --requests and --burst must be at least 1, --pause at least 0", file=sys.stderr)
        return 2
    try:
        with stopping_on_signals() as stopping, run_directory() as directory:
            size = Size(args.requests, args.burst, args.pause, args.seed)
            result = run_demo(directory, size, _progress, stopping)
            if not result.holds:
                keep(directory)
                _progress(f"not everything holds; the logs stay in {directory / 'logs'}")
    except Stopped as stopped:
        print(f"kvgate demo: stopped by {stopped}", file=sys.stderr)
        return 1
    except (ChildFailed, ConfigError, DependencyDown) as error:
        print(f"kvgate demo: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({**asdict(result), "holds": result.holds}, indent=2))
    else:
        _show(result)
    return 0 if result.holds else 1


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(result: Result) -> None:
    print(f"\nThe last decisions (kvgate status --recent):\n{result.decisions}\n")
    print(f"Engines: {result.engines}. Offered: {result.offered_tokens} KV cells in all.\n")
    print("\n".join(table(result.without, result.with_)))
    figures = ", ".join(f"{name} {value}" for name, value in result.ledger.items())
    print(f"\nLedger at the end: {figures}")
    print(f"Inputs that kvgate counted below the engine's own figure: {result.undercounted}\n")
    for line in result.broken:
        print(f"broken: {line}")
    for check in result.checks:
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.name}: {check.figure}")
