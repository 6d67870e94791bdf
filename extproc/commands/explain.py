"""``kvgate explain``: the whole decision for one request body, against a given or the live fleet; changes nothing.

The fleet's state is copied into an in-memory ledger and the ordinary admission runs on it, so that what is shown is
what would be decided, not a second opinion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from extproc.admission import Admission
from extproc.candidates import Planner
from extproc.config import Config, load
from extproc.counting import Counting
from extproc.errors import ConfigError
from extproc.fleet import Fleet
from extproc.holding import Holding
from extproc.learning import Learning
from extproc.ledger.base import Ledger, LedgerSnapshot, LiveReservation, Upsert
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.posture import LocalShare
from extproc.local.reach import reached
from extproc.modelset import ModelSet
from extproc.telemetry.record import Record, decision_record
from extproc.telemetry.state import load_state
from extproc.telemetry.tables import size, table
from extproc.types import RequestHead

HELP = "the whole decision for one request body; changes nothing"
#: The middle of the spread of Retry-After, so that two runs print the same.
MIDDLE = 0.5
#: Leases of copied reservations: longer than any explanation takes.
LEASE_S = 3600.0

Reservations = dict[str, list[LiveReservation]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("body", metavar="BODY", help="the request body, a file or - for standard input")
    parser.add_argument("--path", required=True, metavar="P", help="the request's path, such as /v1/chat/completions")
    parser.add_argument("--header", action="append", default=[], metavar="K:V", help="a request header (repeatable)")
    parser.add_argument("--method", default="POST", help="the request's method (default POST)")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")
    parser.add_argument(
        "--state", metavar="FILE", help="STATE.json as `status --json` prints it (default: the live fleet)"
    )
    parser.add_argument("--json", action="store_true", help="print the decision record as JSON")


def run(args: argparse.Namespace) -> int:
    """0 the decision was made, whatever it is; 1 it could not be made."""
    config = load(args.config)
    head = RequestHead(args.method, args.path.partition("?")[0], _headers(args.header))
    try:
        body = sys.stdin.buffer.read() if args.body == "-" else Path(args.body).read_bytes()
    except OSError as error:
        raise ConfigError([f"{args.body}: cannot be read ({error.strerror}); name a readable file or -"]) from error
    record = asyncio.run(_explain(config, args, head, body))
    print(json.dumps(record, indent=2) if args.json else decision_text(record))
    return 0


async def _explain(config: Config, args: argparse.Namespace, head: RequestHead, body: bytes) -> Record:
    snapshot, reservations = load_state(args.state) if args.state else await _live(config)
    ledger = await copy_of(snapshot, reservations)
    fleet = Fleet(ledger)
    await fleet.refresh()
    models = ModelSet.load(config, where=args.config)
    counting = Counting.from_config(config)
    admission = Admission(
        config,
        planner=Planner(config, models.kv),
        counting=counting,
        ledger=ledger,
        fleet=fleet,
        learning=Learning(),
        share=LocalShare(),
        holding=Holding({}),
        clock_s=time.perf_counter,
        spread=lambda: MIDDLE,
    )
    pending = admission.begin(head, "explain")
    started = time.perf_counter()
    decision = await admission.decide(pending, body)
    elapsed_ms = (time.perf_counter() - started) * 1000.0
    counting.close()
    count_ms = pending.timings_ms.get("count", 0.0)
    record = decision_record(decision, at_s=time.time(), decision_ms=elapsed_ms, count_ms=count_ms)
    return record | {"rid": None}


async def _live(config: Config) -> tuple[LedgerSnapshot, Reservations]:
    async with reached(config) as ledger:
        snapshot = await ledger.snapshot()
        return snapshot, {name: await ledger.reservations(name) for name in snapshot.replicas}


async def copy_of(snapshot: LedgerSnapshot, reservations: Reservations) -> Ledger:
    """An in-memory ledger in the state of ``snapshot``, with its clock standing still."""
    ledger = InMemoryLedger(lambda: snapshot.now_s)
    upserts = [
        Upsert(
            live.reservation,
            LEASE_S,
            first_byte_age_s=None if live.first_byte_at_s is None else snapshot.now_s - live.first_byte_at_s,
            current_blocks=live.current_blocks,
        )
        for held in reservations.values()
        for live in held
    ]
    await ledger.renew(upserts)
    reports = [view.report for view in snapshot.replicas.values() if view.report is not None]
    await ledger.publish(reports, list(snapshot.devices.values()), LEASE_S)
    for view in snapshot.replicas.values():
        if view.drained_by_operator:
            await ledger.drain(view.replica, True)
    return ledger


def decision_text(record: Record) -> str:
    """The decision for a person: the outcome, then every candidate with its three figures and why it was refused."""
    counted = (
        f"{record['input_tokens']} input tokens ({record['count_source']})"
        if record["input_tokens"] is not None
        else "not counted"
    )
    lines = [
        (
            f"{record['outcome']}   lane {record['lane'] or '-'}, model {record['model'] or '-'}, {counted}, "
            f"cap {record['max_output_tokens'] if record['max_output_tokens'] is not None else 'none'}, "
            f"expected output {record['expected_output_tokens'] if record['expected_output_tokens'] is not None else '-'}"
        )
    ]
    if record["status"] is not None:
        wait = (
            f", retry after {record['retry_after_ms']} ms"
            if record["retry_after_ms"] is not None
            else ", a retry cannot help"
        )
        lines.append(f"status {record['status']}{wait}")
    rows = [
        (
            c["target"],
            c["replica"],
            c["need"]["kv_blocks"] if c["need"] else None,
            size(c["need"]["kv_bytes"] or None) if c["need"] else None,
            c["free_before"]["kv_blocks"],
            c["free_after"]["kv_blocks"],
            c["refused_by"] or "fits",
        )
        for c in record["candidates"]
    ]
    text = table(("TARGET", "REPLICA", "NEEDS", "BYTES", "FREE BEFORE", "FREE AFTER", "VERDICT"), rows)
    return "\n".join([*lines, *(("", text) if text else ()), *(f"note: {line}" for line in record["warnings"])])


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon or not name.strip():
            raise ConfigError([f"--header: {pair!r} is not NAME:VALUE; write it like content-type:application/json"])
        headers[name.strip().lower()] = value.strip()
    return headers
