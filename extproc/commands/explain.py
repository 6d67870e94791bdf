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
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from extproc.admission import Admission
from extproc.candidates import Planner
from extproc.config import Config, load
from extproc.counting import Counting
from extproc.fleet import Fleet
from extproc.holding import Holding
from extproc.learning import Learning
from extproc.ledger.base import LedgerSnapshot, LiveReservation, Reservation, Upsert
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.posture import LocalShare
from extproc.ledger.rules import to_us
from extproc.local.bodies import read_body
from extproc.local.reach import reached
from extproc.modelset import ModelSet
from extproc.telemetry.record import Record, clean, decision_record
from extproc.telemetry.state import load_state
from extproc.telemetry.tables import size, table
from extproc.types import Need, RequestHead

HELP = "the whole decision for one request body; changes nothing"
#: The middle of the spread of Retry-After, so that two runs print the same.
MIDDLE = 0.5
#: Longest message shown of an answer.
MAX_MESSAGE = 1000
#: Replica of what a lane holds that the state does not name, and the rids of all that is filled up.
ELSEWHERE = "(elsewhere)"
#: Leases of copied reservations: longer than any explanation takes.
LEASE_S = 3600.0

#: When something ends of which only the size is known, for retry times.
UNKNOWN_END_S = 5.0

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
    """0 the decision was made, whatever it is; 1 it could not be made; 2 wrong usage."""
    headers = _headers(args.header)
    if headers is None:
        return 2
    config = load(args.config)
    head = RequestHead(args.method, args.path.partition("?")[0], headers)
    body = read_body(args.body, config.serve.max_body_bytes)
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
    refusal = decision.refusal
    answer = {
        "code": refusal.code if refusal else None,
        "param": refusal.param if refusal else None,
        "message": clean(refusal.message, MAX_MESSAGE) if refusal else None,
    }
    return record | {"rid": None} | answer


async def _live(config: Config) -> tuple[LedgerSnapshot, Reservations]:
    async with reached(config) as ledger:
        snapshot = await ledger.snapshot()
        return snapshot, {name: await ledger.reservations(name) for name in snapshot.replicas}


async def copy_of(snapshot: LedgerSnapshot, reservations: Reservations) -> InMemoryLedger:
    """An in-memory ledger in the state of ``snapshot``, with its clock standing still.

    Sums of the snapshot that its reservations do not add up to are filled up, for a state may be told by its sums.
    """
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
    await ledger.renew([*upserts, *_fillers(snapshot, reservations)])
    reports = [view.report for view in snapshot.replicas.values() if view.report is not None]
    await ledger.publish(reports, list(snapshot.devices.values()), LEASE_S)
    for view in snapshot.replicas.values():
        if view.drained_by_operator:
            await ledger.drain(view.replica, True)
    _as_seen(ledger, snapshot)
    return ledger


def _fillers(snapshot: LedgerSnapshot, reservations: Reservations) -> Iterator[Upsert]:
    """Reservations that stand for what is held beside the known ones: a pool's blocks and sequences, a lane's requests."""
    numbers = count()
    in_lane: Counter[str] = Counter()
    for name, view in snapshot.replicas.items():
        held = reservations.get(name, [])
        in_lane.update(each.reservation.lane for each in held)
        blocks = view.reserved_blocks - sum(each.current_blocks for each in held)
        sequences = view.sequences - sum(each.reservation.need.sequences for each in held)
        known: Counter[str] = Counter()
        for each in held:
            known[each.reservation.lane] += each.current_blocks
        for lane, share in view.lane_blocks.items():
            part = min(blocks, share - known[lane])
            if part > 0:
                blocks -= part
                in_lane[lane] += 1
                yield _filler(next(numbers), name, lane, snapshot.now_s, blocks=part)
        if blocks > 0 or sequences > 0:
            yield _filler(next(numbers), name, "", snapshot.now_s, blocks=max(0, blocks), sequences=max(0, sequences))
    for lane, in_flight in snapshot.lanes.items():
        for _ in range(in_flight - in_lane[lane]):
            yield _filler(next(numbers), ELSEWHERE, lane, snapshot.now_s)


def _filler(number: int, replica: str, lane: str, now_s: float, *, blocks: int = 0, sequences: int = 0) -> Upsert:
    need = Need(kv_blocks=blocks, input_blocks=0, kv_bytes=0, prefill_tokens=0, sequences=sequences)
    rid = f"{ELSEWHERE}-{number}"
    held = Reservation(
        rid, "", replica, lane, "", rid, "", now_s, need, 0, 0, None, blocks, LEASE_S, expected_s=UNKNOWN_END_S
    )
    return Upsert(held, LEASE_S, current_blocks=blocks)


def _as_seen(ledger: InMemoryLedger, snapshot: LedgerSnapshot) -> None:
    """Put figures that have a history (foreign blocks, the prefill bucket, pending device memory) to what was seen."""
    book = ledger.reference.book
    for name, view in snapshot.replicas.items():
        sums, scrape = book.sum_of(name), book.scrapes.get(name)
        sums.level, sums.level_at_us = view.prefill_level_tokens, to_us(snapshot.now_s)
        if scrape is not None and view.foreign_blocks is not None:
            scrape.foreign = view.foreign_blocks
    for device, pending in snapshot.device_reserved_bytes.items():
        book.pending_bytes[device] = max(pending, book.pending_bytes.get(device, 0))


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
        code = f"{record['code']}: " if record.get("code") else ""
        where = f" ({record['param']})" if record.get("param") else ""
        if record.get("message"):
            lines.append(f"answer {code}{record['message']}{where}")
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


def _headers(pairs: Sequence[str]) -> dict[str, str] | None:
    """Names in lower case -> values; None after a line about the one that has no name."""
    headers: dict[str, str] = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon or not name.strip():
            print(
                f"kvgate explain: --header {pair!r}: write it as NAME:VALUE, like content-type:application/json",
                file=sys.stderr,
            )
            return None
        headers[name.strip().lower()] = value.strip()
    return headers
