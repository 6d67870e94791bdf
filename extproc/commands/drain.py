"""``kvgate drain REPLICA``: no new work for a replica; what runs there ends by itself."""

from __future__ import annotations

import argparse
import asyncio
import sys

from extproc.config import Config, load
from extproc.gateway.names import replica_cluster
from extproc.local.reach import reached

HELP = "stop or resume new work on a replica"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("replica", metavar="REPLICA", help="the replica's name in the configuration")
    parser.add_argument("--resume", action="store_true", help="take new work again")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")


def run(args: argparse.Namespace) -> int:
    """0 done, 1 no such replica."""
    config = load(args.config)
    known = [replica.name for _, _, replica in config.local_replicas()]
    if replica_cluster(args.replica, config.discovered()) not in known:
        choice = f"choose from {', '.join(known)}" if known else "the file has no local replica at all; add one"
        print(f"{args.config}: no replica is named {args.replica!r}; {choice}", file=sys.stderr)
        return 1
    asyncio.run(_run(config, args))
    print(f"{args.replica}: {'takes new work again' if args.resume else 'draining, running work ends by itself'}")
    return 0


async def _run(config: Config, args: argparse.Namespace) -> None:
    async with reached(config) as ledger:
        await ledger.drain(args.replica, not args.resume)
