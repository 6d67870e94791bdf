"""Recomputes every sum of the in-memory ledger from its records, as ``lua/audit.lua`` does for Redis."""

from __future__ import annotations

from collections import Counter

from extproc.ledger.base import AuditLine
from extproc.ledger.book import ORPHANED, Book, Record


def audit(book: Book) -> list[AuditLine]:
    """Every stored sum beside the same sum recomputed from the records."""
    found: Counter[str] = Counter()
    live = [r for r in book.records.values() if isinstance(r, Record)]
    for r in live:
        res = r.reservation
        found[f"{res.replica} kv_blocks"] += r.current
        found[f"{res.replica} sequences"] += res.need.sequences
        found[f"{res.replica} reservations"] += 1
        found[f"{res.replica} orphaned"] += r.state == ORPHANED
        found[f"{res.replica} lane {res.lane} kv_blocks"] += r.current
        found[f"lane {res.lane} reservations"] += 1
    for device, _rid, size in book.pending:
        found[f"device {device} pending_bytes"] += size
    found["index reservations"] = len(live)
    found["index due"] = len(book.records)
    found["index tombstones"] = len(book.records) - len(live)
    stored = _stored(book)
    return [AuditLine(what, stored.get(what, 0), found.get(what, 0)) for what in sorted({*stored, *found})]


def _stored(book: Book) -> dict[str, float]:
    stored: dict[str, float] = {}
    for name, s in book.sums.items():
        stored[f"{name} kv_blocks"] = s.kv
        stored[f"{name} sequences"] = s.sequences
        stored[f"{name} reservations"] = s.reservations
        stored[f"{name} orphaned"] = s.orphans
        for lane, blocks in s.lanes.items():
            stored[f"{name} lane {lane} kv_blocks"] = blocks
    for lane, live in book.lanes.items():
        stored[f"lane {lane} reservations"] = live
    for device, size in book.pending_bytes.items():
        stored[f"device {device} pending_bytes"] = size
    stored["index reservations"] = sum(len(entries) for entries in book.index.values())
    stored["index due"] = len(book.due)
    if not stored["index reservations"]:
        stored["index joins"] = len(book.joins)
    stored["index tombstones"] = sum(len(entries) for entries in book.ended.values())
    return stored
