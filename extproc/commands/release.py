"""``kvgate release RID``: ends one reservation by hand, for an operator who knows that nothing holds it any more."""

from __future__ import annotations

import argparse
import asyncio
import sys

from extproc.config import load
from extproc.ledger.base import End, Ended
from extproc.ledger.redis import RedisLedger
from extproc.local.reach import reached

HELP = "end one reservation by hand"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "rid", metavar="RID", help="the reservation's id, RID in `kvgate status`, or its request's x-request-id"
    )
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")


def run(args: argparse.Namespace) -> int:
    """0 released, 1 no such reservation, or several of one request id."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with reached(load(args.config)) as ledger:
        named = await _of_request(ledger, args.rid)
        if len(named) > 1:
            rids = ", ".join(named)
            print(f"{args.rid}: {len(named)} live reservations have this request id; name one: {rids}", file=sys.stderr)
            return 1
        rid = named[0] if named else args.rid
        (result,) = await ledger.end([End(rid, "", "", Ended.OPERATOR, cool_s=0.0)])
    if not result.released:
        print(f"{args.rid}: no live reservation has this id; see RID in `kvgate status`", file=sys.stderr)
        return 1
    print(f"{rid}: released")
    return 0


async def _of_request(ledger: RedisLedger, request_id: str) -> list[str]:
    """Ids of the live reservations whose client sent this request id."""
    replicas = (await ledger.snapshot()).replicas
    held = [live.reservation for name in replicas for live in await ledger.reservations(name)]
    return [each.rid for each in held if each.request_id == request_id]
