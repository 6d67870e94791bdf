"""``kvgate ledger audit``: recomputes every sum of the ledger from its reservations and compares."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json

from extproc.config import load
from extproc.ledger.base import AuditLine
from extproc.local.reach import reached

HELP = "audit the ledger's sums against its reservations"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("action", choices=["audit"], help="what to do")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")


def run(args: argparse.Namespace) -> int:
    """0 every sum equals its parts, 1 one differs."""
    lines = asyncio.run(_audit(args.config))
    wrong = [line for line in lines if line.stored != line.recomputed]
    if args.json:
        print(json.dumps({"ok": not wrong, "lines": [dataclasses.asdict(line) for line in lines]}))
        return 1 if wrong else 0
    for line in lines:
        verdict = "ok" if line.stored == line.recomputed else "DIFFERS"
        print(f"{verdict:8} {line.what:48} stored {line.stored:>14g} recomputed {line.recomputed:>14g}")
    print(f"{len(lines)} sums, {len(wrong)} differ")
    return 1 if wrong else 0


async def _audit(path: str) -> list[AuditLine]:
    async with reached(load(path)) as ledger:
        return await ledger.audit()
