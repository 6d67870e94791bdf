"""``kvgate release RID``: ends one reservation by hand, for an operator who knows that nothing holds it any more."""

from __future__ import annotations

import argparse
import asyncio
import sys

from extproc.config import load
from extproc.ledger.base import End, Ended
from extproc.local.reach import reached

HELP = "end one reservation by hand"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("rid", metavar="RID", help="the reservation's id, as shown by `kvgate status`")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")


def run(args: argparse.Namespace) -> int:
    """0 released, 1 no such reservation."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with reached(load(args.config)) as ledger:
        (result,) = await ledger.end([End(args.rid, "", "", Ended.OPERATOR, cool_s=0.0)])
    if not result.released:
        print(f"{args.rid}: no live reservation has this id; see `kvgate status`", file=sys.stderr)
        return 1
    print(f"{args.rid}: released")
    return 0
