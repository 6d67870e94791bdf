"""``kvgate status``: what the shared ledger holds now, and the last decisions.

Reads the ledger, not ``kvgate serve``: what it shows is what every sidecar of the pool decides by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

from extproc.config import Config, load
from extproc.errors import ConfigError, LedgerDown
from extproc.gateway.names import replica_cluster
from extproc.ledger.base import LedgerSnapshot, LiveReservation, ReplicaState, ReplicaView
from extproc.ledger.redis import RedisLedger
from extproc.local.reach import away, reached
from extproc.modelset import ModelSet
from extproc.telemetry.decisionlog import StreamLog
from extproc.telemetry.state import state_json
from extproc.telemetry.tables import status_text

HELP = "headroom per replica, device and lane; recent decisions"

#: Decisions shown unless told otherwise.
RECENT = 10
#: Seconds between two pages of ``--watch``.
WATCH_S = 2.0
CLEAR = "\x1b[H\x1b[2J"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("-c", "--config", metavar="FILE", help="the configuration, kvgate.yaml (default: all defaults)")
    parser.add_argument("--ledger", metavar="URL", help="the ledger's address (default: ledger.url)")
    parser.add_argument(
        "--recent", type=int, default=RECENT, metavar="N", help=f"decisions to show (default: {RECENT})"
    )
    parser.add_argument("--watch", action="store_true", help=f"show again every {WATCH_S:.0f} s until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per page")


def run(args: argparse.Namespace) -> int:
    """0 shown, 1 the ledger cannot be read, 2 wrong usage."""
    if args.recent < 0:
        print(f"--recent: {args.recent} is not a number of decisions; give 0 or more", file=sys.stderr)
        return 2
    config = load(args.config) if args.config else Config()
    url = args.ledger or config.ledger.url
    where = "--ledger" if args.ledger else f"{args.config or 'defaults'}: ledger.url"
    try:
        return asyncio.run(_show(config, url, where, args))
    except KeyboardInterrupt:
        return 0


async def _show(config: Config, url: str, where: str, args: argparse.Namespace) -> int:
    async with reached(config, url=url, where=where, wait=False) as ledger:
        log = StreamLog(url, config.ledger.pool, config.telemetry.decision_log)
        try:
            while True:
                shown = await _page(config, ledger, log, where, args)
                if not args.watch:
                    return 0 if shown else 1
                await asyncio.sleep(WATCH_S)
        finally:
            await log.close()


async def _page(config: Config, ledger: RedisLedger, log: StreamLog, where: str, args: argparse.Namespace) -> bool:
    """Print one page; False where the ledger did not answer, which is said on stderr."""
    try:
        page = await status(config, ledger, log, args.recent)
    except LedgerDown as error:
        print(away(where, error), file=sys.stderr, flush=True)
        return False
    clear = CLEAR if args.watch and not args.json and sys.stdout.isatty() else ""
    print(clear + (json.dumps(page) if args.json else status_text(page, _block_bytes(config, page))), flush=True)
    return True


async def status(config: Config, ledger: RedisLedger, log: StreamLog, recent: int) -> dict[str, Any]:
    """The object of ``kvgate status --json``; ``LedgerDown`` where it cannot be had."""
    snapshot = _complete(await ledger.snapshot(), config)
    held: dict[str, list[LiveReservation]] = {
        name: await ledger.reservations(name) if view.reservations else [] for name, view in snapshot.replicas.items()
    }
    views = snapshot.replicas.values()
    rows = await log.recent(recent) if recent else []
    return {
        "ledger": {
            "state": ledger.status.state,
            "latency_ms": round(ledger.status.latency_ms, 2),
            "pool": config.ledger.pool,
            "live_sidecars": snapshot.live_sidecars,
            "reservations": sum(view.reservations for view in views),
            "orphaned": sum(view.orphaned for view in views),
            "over_admissions": sum(view.over_admissions for view in views),
        },
        "state": state_json(snapshot, held),
        "recent": rows,
    }


def _complete(snapshot: LedgerSnapshot, config: Config) -> LedgerSnapshot:
    """The snapshot as people read it: every configured replica, always in one order, headroom without the watermark.

    The ledger knows no watermark, and shows the whole pool; what admissions can use is smaller.
    """
    targets = {replica.name: target for target, _, replica in config.local_replicas()}
    found = {name: replace(v, target=v.target or targets.get(name, "")) for name, v in snapshot.replicas.items()}
    absent = set(targets) - {replica_cluster(name, config.discovered()) for name in found}
    for name, target in targets.items():
        if name in absent:
            found[name] = ReplicaView(
                report=None,
                replica=name,
                target=target,
                state=ReplicaState.UNKNOWN,
                age_s=None,
                reserved_blocks=0,
                foreign_blocks=None,
                committed_blocks=0,
                headroom_blocks=None,
                sequences=0,
                prefill_level_tokens=0.0,
                reservations=0,
                orphaned=0,
                over_admissions=0,
            )
    ordered = sorted(found.items(), key=lambda item: (item[1].target, item[0]))
    return replace(
        snapshot,
        replicas={name: _usable(view, config) for name, view in ordered},
        lanes=dict.fromkeys(config.lanes, 0) | dict(sorted(snapshot.lanes.items())),
        devices=dict(sorted(snapshot.devices.items())),
    )


def _usable(view: ReplicaView, config: Config) -> ReplicaView:
    """The view as admissions see it: a remote open between two visits, headroom less the target's watermark."""
    target = config.targets.get(view.target)
    if target is not None and target.remote and view.state == ReplicaState.STALE:
        # Visited every ten seconds, and only what was seen against it closes it.
        return replace(view, state=ReplicaState.READY)
    if view.headroom_blocks is None or view.report is None or target is None:
        return view
    return replace(view, headroom_blocks=view.headroom_blocks - target.watermark_blocks(view.report.capacity_blocks))


def _block_bytes(config: Config, page: dict[str, Any]) -> dict[str, float]:
    """Replica -> bytes of one KV block over all shards, where the configuration names a geometry that can be read here."""
    try:
        models = ModelSet.load(config, where=config.where)
    except ConfigError:
        return {}  # the files may lie where `serve` runs; what reservations tell is shown
    found = {}
    for row in page["state"]["replicas"]:
        target = config.targets.get(row["target"])
        if target is not None and not target.remote:
            block_bytes = models.kv(row["target"], row.get("block_tokens")).bytes_per_block
            found[row["replica"]] = float(block_bytes)
    return {replica: block_bytes for replica, block_bytes in found.items() if block_bytes}
