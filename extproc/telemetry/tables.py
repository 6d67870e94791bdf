"""What ``kvgate status`` prints: headroom per replica, lane and device, and the recent decisions, as plain text.

Pure: the objects of ``status --json`` in, lines out. Sizes are shown in KiB, MiB or GiB where the bytes of a block
are known, in blocks where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extproc.telemetry.record import clean

#: Longest cell; an id is recognisable long before its end, and ``--json`` has all of it.
MAX_CELL = 36
UNKNOWN = "-"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Row = Mapping[str, Any]


def size(size_bytes: int | None) -> str:
    """Bytes in the largest of KiB, MiB, GiB that leaves a number of at least one; ``-`` for None."""
    if size_bytes is None:
        return UNKNOWN
    for unit, name in _UNITS:
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def status_text(status: Mapping[str, Any], block_bytes: Mapping[str, float] | None = None) -> str:
    """The whole page for one ``status --json`` object.

    ``block_bytes`` are the bytes of one KV block over all shards, by replica, as the models' geometries say; a replica
    that is missing there shows what its reservations and recent decisions tell.
    """
    ledger, state = status["ledger"], status["state"]
    per_block = bytes_per_block(state, status["recent"]) | dict(block_bytes or {})
    summary = (
        f"ledger {ledger['state']}, {ledger['latency_ms']} ms; {ledger['reservations']} reservations, "
        f"{ledger['orphaned']} orphaned, {ledger['over_admissions']} over-admissions"
    )
    parts = [
        summary,
        table(_REPLICA_HEAD, [_replica(row, per_block.get(row["replica"])) for row in state["replicas"]])
        or "no replicas",
        table(("LANE", "IN FLIGHT"), [(row["lane"], row["in_flight"]) for row in state["lanes"]]),
        table(("DEVICE", "STATE", "FREE", "RESERVED", "TOTAL"), [_device(row) for row in state["devices"]]),
        recent_text(status["recent"]),
    ]
    return "\n\n".join(part for part in parts if part)


def recent_text(rows: Sequence[Row]) -> str:
    """The decision table, newest first; empty where there are no decisions."""
    return table(_RECENT_HEAD, [_recent(row) for row in rows])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, numbers and sizes to the right; empty where there are no rows."""
    if not rows:
        return ""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    right = [all(_numeric(line[column]) for line in cells[1:]) for column in range(len(head))]
    return "\n".join(_line(line, widths, right) for line in cells)


def bytes_per_block(state: Mapping[str, Any], recent: Iterable[Row]) -> dict[str, float]:
    """Replica -> bytes of one KV block over all shards, as reservations and recent decisions show it."""
    found: dict[str, float] = {}
    for row in recent:
        if row.get("figures_of") and row.get("projected_kv_blocks") and row.get("projected_kv_bytes"):
            found[row["figures_of"]] = row["projected_kv_bytes"] / row["projected_kv_blocks"]
    for replica in state["replicas"]:
        for held in replica.get("reservations", ()):
            if held["reserved_blocks"] and held["kv_bytes"]:
                found[replica["replica"]] = held["kv_bytes"] / held["reserved_blocks"]
    return found


_REPLICA_HEAD = (
    *("REPLICA", "TARGET", "STATE", "AGE", "CAPACITY", "USED", "RESERVED", "FOREIGN", "HEADROOM", "FREE"),
    *("RESERVATIONS", "ORPHANED", "SEQUENCES", "WAITING"),
)


def _replica(row: Row, per_block: float | None) -> tuple[object, ...]:
    capacity, headroom = row.get("kv_capacity_blocks"), row["kv_headroom_blocks"]
    share = f"{100 * headroom / capacity:.0f} %" if capacity and headroom is not None else None
    state = f"{row['state']}, drained" if row["drained"] and row["state"] != "draining" else row["state"]
    return (
        row["replica"],
        row["target"],
        state,
        None if row["age_s"] is None else f"{row['age_s']:.1f} s",
        _blocks(capacity, per_block),
        _blocks(row.get("kv_used_blocks"), per_block),
        _blocks(row["kv_reserved_blocks"], per_block),
        _blocks(row["kv_foreign_blocks"], per_block),
        _blocks(headroom, per_block),
        share,
        len(row.get("reservations", ())),
        row["orphaned"],
        _of(row["sequences"], row.get("max_sequences")),
        row.get("waiting"),
    )


def _device(row: Row) -> tuple[object, ...]:
    return (row["uuid"], row["state"], size(row["free_bytes"]), size(row["reserved_bytes"]), size(row["total_bytes"]))


_RECENT_HEAD = (
    *("AT", "LANE", "REQ_ID", "PROMPT", "PROJECTED_KV", "FREE_BEFORE", "FREE_AFTER", "OUTCOME"),
    *("REASON", "FREE_AT_END", "ACTUAL_IN", "EXPECTED_OUT", "ACTUAL_OUT", "ENDED", "RID"),
)


def _recent(row: Row) -> tuple[object, ...]:
    return (
        str(row["at"])[11:23],
        row["lane"],
        row["request_id"] or row["rid"],
        row["input_tokens"],
        _room(row, "projected_kv"),
        _room(row, "free_before"),
        _room(row, "free_after"),
        f"{row['outcome']} (shadow)" if row["mode"] == "shadow" else row["outcome"],
        None if str(row["outcome"]).startswith("reject") else row["reason"],
        size(row["free_at_end_bytes"]),
        row["actual_input_tokens"],
        row["expected_output_tokens"],
        row["actual_output_tokens"],
        row["ended"],
        row["rid"],
    )


def _room(row: Row, name: str) -> str:
    return size(row[f"{name}_bytes"]) if row[f"{name}_bytes"] is not None else _blocks(row[f"{name}_blocks"], None)


def _blocks(blocks: int | None, per_block: float | None) -> str:
    if blocks is None:
        return UNKNOWN
    return f"{blocks} blocks" if per_block is None else size(round(blocks * per_block))


def _of(value: int, limit: int | None) -> str:
    return str(value) if limit is None else f"{value}/{limit}"


def _cell(value: object) -> str:
    text = UNKNOWN if value is None else clean(str(value), MAX_CELL + 1) or UNKNOWN
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"


def _numeric(text: str) -> bool:
    return text == UNKNOWN or text[0].isdigit() or (text[0] == "-" and text[1:2].isdigit())


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    )
    return "  ".join(padded).rstrip()
