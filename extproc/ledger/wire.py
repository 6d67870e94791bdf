"""The msgpack shapes that travel between Python and the scripts.

Owns the order of the arrays (the head of ``lua/_lib.lua`` and of each script states the same), the units (whole
microseconds) and -1 for "not known". Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from extproc.ledger.base import (
    CLEAN_ENDS,
    Candidate,
    DeviceReport,
    End,
    LedgerSnapshot,
    LiveReservation,
    ReplicaReport,
    ReplicaState,
    Reservation,
    ReserveRequest,
    ReserveResult,
    State,
    Upsert,
    Verdict,
)
from extproc.ledger.lessons import Lesson
from extproc.ledger.line import Due, Promised, Turn
from extproc.ledger.rules import SEPARATOR, Epoch, Scrape, Sums, expected_s, to_us, whole
from extproc.ledger.views import view
from extproc.types import Need

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def text(value: str) -> str:
    """A name as the indexes can hold it: without their separator."""
    return value.replace(SEPARATOR, "?") if SEPARATOR in value else value


def candidate(c: Candidate, request: ReserveRequest) -> list[Any]:
    """One candidate of ``reserve.lua``."""
    n = c.need
    return [
        text(c.target), text(c.replica), int(c.remote), n.kv_blocks, n.input_blocks, n.kv_bytes, n.prefill_tokens,
        n.sequences, n.vram_bytes, c.cap_blocks, to_us(c.cap_s), [text(d) for d in c.devices], c.device_guard_bytes,
        whole(c.static_capacity_blocks), whole(c.static_max_sequences), c.watermark, c.keep_free_blocks,
        _or_unset(c.prefill_rate), _or_unset(c.prefill_capacity_tokens), whole(c.max_waiting),
        _or_unset(c.lane_share), _or_unset(c.lane_yields_at), to_us(expected_s(c, request)),
        _dues(c.promised.before), _dues(c.promised.after),
    ]  # fmt: skip


def together(payloads: Sequence[bytes]) -> bytes:
    """One payload that carries several, for the scripts that take a list: ``reserve.lua`` and ``end.lua``."""
    return b"\xdc%b%b" % (len(payloads).to_bytes(2), b"".join(payloads))


def reserve(r: ReserveRequest) -> bytes:
    """One request of ``reserve.lua``."""
    return encode([
        text(r.rid), text(r.lane), text(r.owner), text(r.request_id), r.klass, r.input_tokens, r.expected_output_tokens,
        whole(r.max_output_tokens), whole(r.lane_concurrency), to_us(r.lease_s), to_us(r.fresh_s), to_us(r.unknown_s),
        int(r.force), [candidate(c, r) for c in r.candidates],
    ])  # fmt: skip


def lessons(told: Sequence[Lesson]) -> bytes:
    """What ``lessons.lua`` is told."""
    return encode([[one.name, one.weight, one.figures] for one in told])


def heard(raw: bytes) -> list[Lesson]:
    """What ``lessons.lua`` knows."""
    return [Lesson(name, int(weight), tuple(map(float, figures))) for name, weight, figures in decode(raw)]


def turn(raw: bytes) -> Turn:
    """What ``line.lua`` says to a request that comes."""
    since_us, replica, others = decode(raw)
    promised = {name: Promised(_due(before), _due(after)) for name, before, after in others}
    return Turn(None if since_us < 0 else since_us / 1e6, replica or None, promised)


def _dues(dues: Sequence[Due]) -> list[int]:
    return [figure for due in dues for figure in (due.due_us, due.blocks, due.run_us)]


def _due(flat: Sequence[int]) -> tuple[Due, ...]:
    return tuple(map(Due, flat[::3], flat[1::3], flat[2::3]))


def reserve_result(answer: Sequence[Any]) -> ReserveResult:
    """One answer of ``reserve.lua``."""
    chosen, now, ended, verdicts = answer
    return ReserveResult(
        None if chosen < 0 else chosen, tuple(_verdict(v) for v in verdicts), now / 1e6, ended=bool(ended)
    )


def _verdict(v: Sequence[Any]) -> Verdict:
    refused, state, pool, committed, headroom, retry = v
    return Verdict(
        refused or None,
        state,
        _known(pool),
        _known(committed),
        None if headroom is False else int(headroom),
        None if retry < 0 else retry / 1e6,
    )


def record(r: Reservation) -> list[Any]:
    """A whole record R; lease, first byte, seen and current blocks are the script's to fill in."""
    n = r.need
    vram: list[Any] = []
    for i, device in enumerate(r.devices):
        vram += [text(device), n.vram_bytes[i] if i < len(n.vram_bytes) else 0]
    return [
        "r", text(r.target), text(r.replica), text(r.lane), text(r.owner), text(r.request_id), r.klass,
        to_us(r.reserved_at_s), n.kv_blocks, n.input_blocks, n.kv_bytes, n.prefill_tokens, n.sequences, r.input_tokens,
        r.expected_output_tokens, whole(r.max_output_tokens), r.cap_blocks, to_us(r.cap_s), to_us(r.expected_s), vram,
        n.kv_blocks, 0, -1, 0, -1, 0, -1, -1, "",
    ]  # fmt: skip


def reservation(rid: str, r: Sequence[Any]) -> Reservation:
    """The reservation of a record R."""
    vram = r[19]
    sizes = tuple(int(b) for b in vram[1::2])
    need = Need(r[8], r[9], r[10], r[11], r[12], sizes if any(sizes) else ())
    return Reservation(
        rid, r[1], r[2], r[3], r[4], r[5], r[6], r[7] / 1e6, need, r[13], r[14], _known(r[15]), r[16], r[17] / 1e6,
        tuple(vram[0::2]), r[18] / 1e6,
    )  # fmt: skip


def renew(records: Sequence[Upsert]) -> bytes:
    """The payload of ``renew.lua``."""
    return encode([
        [text(u.reservation.rid), record(u.reservation), to_us(u.lease_s), to_us(u.seen_age_s), _age(u.first_byte_age_s),
         whole(u.current_blocks)] for u in records
    ])  # fmt: skip


def ends(items: Sequence[End], extra_age_s: Sequence[float]) -> bytes:
    """One batch of ``end.lua``; ``extra_age_s`` is how long each end has waited here."""
    return encode([
        [text(e.rid or ""), text(e.owner), text(e.request_id), e.how.value, to_us(e.ended_age_s + late),
         text(e.replica or ""), to_us(e.cool_s), _age(e.first_byte_age_s, late), int(e.how in CLEAN_ENDS), _age(e.began_age_s, late)]
        for e, late in zip(items, extra_age_s, strict=True)
    ])  # fmt: skip


def publish(
    replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float, periodic_s: float
) -> bytes:
    """The payload of ``publish.lua``."""
    return encode([
        to_us(ttl_s), to_us(periodic_s),
        [[text(r.replica), r.state.value, to_us(r.scrape_start_at_s), to_us(r.scrape_end_at_s), whole(r.capacity_blocks),
          whole(r.used_blocks), int(r.shows_used), whole(r.running), whole(r.waiting), whole(r.max_sequences),
          _age(r.engine_started_at_s), blob(r)] for r in replicas],
        [[text(d.uuid), d.state, to_us(d.scrape_start_at_s), whole(d.free_bytes), blob(d)] for d in devices],
    ])  # fmt: skip


def snapshot(raw: Sequence[Any]) -> LedgerSnapshot:
    """The answer of ``snapshot.lua``."""
    now, epoch, loss_us, alive = decode(raw[0])
    at = Epoch(epoch, loss_us)
    reps = {name.decode(): _scrape(decode(packed)) for name, packed in _pairs(raw[1])}
    sums = {name.decode(): _sums(decode(packed)) for name, packed in _pairs(raw[2])}
    return LedgerSnapshot(
        now / 1e6,
        {name: view(name, reps.get(name), sums.get(name, Sums()), at, now) for name in {*reps, *sums}},
        {lane.decode(): int(live) for lane, live in _pairs(raw[3]) if live != b"0"},
        {uuid.decode(): device_report(decode(packed)[4]) for uuid, packed in _pairs(raw[4])},
        {uuid.decode(): int(size) for uuid, size in _pairs(raw[5])},
        epoch,
        alive,
        loss_us / 1e6 if loss_us else None,
    )


def live_reservation(raw: bytes) -> LiveReservation:
    """One answer of ``reservations.lua``."""
    rid, r = decode(raw)
    state = {"r": State.RESERVED, "c": State.COOLING, "o": State.ORPHANED}[r[0]]
    return LiveReservation(reservation(rid, r), state, r[21] / 1e6, int(r[20]), None if r[22] < 0 else r[22] / 1e6)


def _pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _sums(s: Sequence[Any]) -> Sums:
    lanes = {name: int(blocks) for name, blocks in s[11].items()} if s[11] else {}
    return Sums(int(s[0]), int(s[1]), int(s[2]), int(s[3]), float(s[4]), int(s[5]), float(s[6]), s[7], s[8], s[9],
                bool(s[10]), lanes)  # fmt: skip


def _scrape(p: Sequence[Any]) -> Scrape:
    return Scrape(replica_report(p[11]), p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], bool(p[9]), p[10])


def blob(report: ReplicaReport | DeviceReport) -> str:
    """A report as it is stored for readers: JSON, because scripts carry it as text (msgspec writes NaN as null)."""
    return msgspec.json.encode(report).decode()


def replica_report(stored: str) -> ReplicaReport:
    """A stored report; fields that a newer release added are ignored."""
    fields = cast(dict[str, Any], msgspec.json.decode(stored))
    known = {k: v for k, v in fields.items() if k in ReplicaReport.__dataclass_fields__}
    known["state"] = ReplicaState(known["state"])
    return ReplicaReport(**known)


def device_report(stored: str) -> DeviceReport:
    """A stored device report; fields that a newer release added are ignored."""
    fields = cast(dict[str, Any], msgspec.json.decode(stored))
    return DeviceReport(**{k: v for k, v in fields.items() if k in DeviceReport.__dataclass_fields__})


def _or_unset(value: float | None) -> float:
    return -1 if value is None else value


def _age(value: float | None, late: float = 0.0) -> int:
    return -1 if value is None else to_us(value + late)


def _known(value: int) -> int | None:
    return None if value < 0 else int(value)
