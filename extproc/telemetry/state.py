"""STATE.json: the fleet as ``status --json`` prints it and as ``explain`` and ``plan`` read it back.

Owns the conversion in both directions and the judgement of a hand-written file: every mistake is one line with
file, path and mend. Only ``target``, ``replica`` and ``engine`` are required; what is absent is unknown, never
zero, except sums that follow from the reservations given. Pure but for ``load_state``, which reads a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.errors import ConfigError
from extproc.ledger.base import (
    DeviceReport,
    LedgerSnapshot,
    LiveReservation,
    ReplicaReport,
    ReplicaState,
    ReplicaView,
    Reservation,
    State,
)
from extproc.telemetry.statefields import DEVICE, DEVICE_STATES, LANE, REPLICA, RESERVATION, TOP, Fields
from extproc.types import Need

Reservations = Mapping[str, Sequence[LiveReservation]]

# -- out


def state_json(snapshot: LedgerSnapshot, reservations: Reservations) -> dict[str, Any]:
    """The snapshot and the live reservations of each replica as STATE.json; ages are seconds before the snapshot.

    A replica without an entry in ``reservations`` keeps its sums and has no list.
    """
    return {
        "now_s": snapshot.now_s,
        "epoch": snapshot.epoch,
        "live_sidecars": snapshot.live_sidecars,
        "loss_age_s": None if snapshot.loss_at_s is None else _ms(snapshot.now_s - snapshot.loss_at_s),
        "replicas": [
            _replica_out(view, reservations.get(name), snapshot.now_s) for name, view in snapshot.replicas.items()
        ],
        "devices": [_device_out(device, snapshot) for device in snapshot.devices.values()],
        "lanes": [{"lane": lane, "in_flight": count} for lane, count in snapshot.lanes.items()],
    }


def _replica_out(view: ReplicaView, live: Sequence[LiveReservation] | None, now_s: float) -> dict[str, Any]:
    report = view.report
    found: dict[str, Any] = {
        "target": view.target,
        "replica": view.replica,
        "engine": None,
        "state": str(view.state),
        "age_s": _ms(view.age_s),
    }
    if report is not None:
        found |= {
            "engine": report.engine,
            "node": report.node,
            "instance": report.instance,
            "scrape_s": _ms(report.scrape_end_at_s - report.scrape_start_at_s),
            "kv_capacity_blocks": report.capacity_blocks,
            "block_tokens": report.block_tokens,
            "kv_used_blocks": report.used_blocks,
            "shows_used": report.shows_used,
            "running": report.running,
            "waiting": report.waiting,
            "max_sequences": report.max_sequences,
            "max_model_tokens": report.max_model_tokens,
            "prefill_tokens_per_s": report.prefill_tokens_per_s,
            "decode_tokens_per_s": report.decode_tokens_per_s,
            "prefix_hit_share": report.prefix_hit_share,
            "preemptions_total": report.preemptions_total,
            "engine_age_s": None if report.engine_started_at_s is None else _ms(now_s - report.engine_started_at_s),
        }
    return found | {
        "kv_reserved_blocks": view.reserved_blocks,
        "kv_foreign_blocks": view.foreign_blocks,
        "kv_committed_blocks": view.committed_blocks,
        "kv_headroom_blocks": view.headroom_blocks,
        "sequences": view.sequences,
        "prefill_level_tokens": round(view.prefill_level_tokens, 1),
        "orphaned": view.orphaned,
        "bypass": view.bypass,
        "over_admissions": view.over_admissions,
        "over_adopted": view.over_adopted,
        "over_grew": view.over_grew,
        "over_foreign": view.over_foreign,
        "lane_blocks": dict(view.lane_blocks),
        "drained": view.drained_by_operator,
        **({"reservations": [_reservation_out(each, now_s) for each in live]} if live is not None else {}),
    }


def _reservation_out(live: LiveReservation, now_s: float) -> dict[str, Any]:
    held = live.reservation
    return {
        "rid": held.rid,
        "state": str(live.state),
        "blocks": max(live.current_blocks, held.need.kv_blocks),
        "reserved_blocks": held.need.kv_blocks,
        "input_blocks": held.need.input_blocks,
        "kv_bytes": held.need.kv_bytes,
        "prefill_tokens": held.need.prefill_tokens,
        "sequences": held.need.sequences,
        "vram_bytes": list(held.need.vram_bytes),
        "devices": list(held.devices),
        "input_tokens": held.input_tokens,
        "expected_output_tokens": held.expected_output_tokens,
        "max_output_tokens": held.max_output_tokens,
        "cap_blocks": held.cap_blocks,
        "cap_s": held.cap_s,
        "expected_s": held.expected_s,
        "lane": held.lane,
        "owner": held.owner,
        "request_id": held.request_id,
        "class": held.klass,
        "age_s": _ms(now_s - held.reserved_at_s),
        "lease_s": round(live.lease_at_s - now_s, 3),
        "first_byte_age_s": None if live.first_byte_at_s is None else _ms(now_s - live.first_byte_at_s),
    }


def _device_out(device: DeviceReport, snapshot: LedgerSnapshot) -> dict[str, Any]:
    return {
        "uuid": device.uuid,
        "name": device.name,
        "node": device.node,
        "instance": device.instance,
        "state": device.state,
        "age_s": _ms(snapshot.now_s - device.scrape_start_at_s),
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "used_bytes": device.used_bytes,
        "driver_reserved_bytes": device.reserved_bytes,
        "reserved_bytes": snapshot.device_reserved_bytes.get(device.uuid, 0),
    }


def _ms(seconds: float | None) -> float | None:
    """An age to the millisecond; a clock that is a little ahead gives none below zero."""
    return None if seconds is None else max(0.0, round(seconds, 3))


# -- in


def load_state(path: str | Path) -> tuple[LedgerSnapshot, dict[str, list[LiveReservation]]]:
    """The state in a file; ``ConfigError`` with one line per mistake. What ``status --json`` printed is accepted whole."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); name a readable file"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 at byte {error.start}; save it as UTF-8"]) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            [f"{path}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}); correct it there"]
        ) from error
    except RecursionError as error:
        raise ConfigError([f"{path}: nested too deeply; flatten it"]) from error
    return snapshot_from_state(data, where=str(path))


def snapshot_from_state(
    data: object, *, where: str = "STATE.json"
) -> tuple[LedgerSnapshot, dict[str, list[LiveReservation]]]:
    """A snapshot and its reservations from STATE.json; ``ConfigError`` with one line per mistake.

    ``now_s`` absent is 1000, so that every age lies after the clock's zero. Reserved blocks and sequences are the
    sums of ``reservations`` where that list is given, committed and headroom follow; foreign blocks that are not
    given are computed as the decision model says (null: unknown).
    """
    if isinstance(data, dict) and "replicas" not in data and isinstance(data.get("state"), dict):
        data = data["state"]
    problems: list[str] = []
    top = Fields(data, "", TOP, problems)
    if not problems and not top.has("replicas"):
        top.problem("replicas", "missing; add it, [] for an empty fleet")
    now_s = float(top.get("now_s", 1000.0))
    replicas: dict[str, ReplicaView] = {}
    reservations: dict[str, list[LiveReservation]] = {}
    rids: set[str] = set()
    for fields in top.objects("replicas", REPLICA):
        view, live = _replica_in(fields, now_s, rids)
        if view.replica in replicas:
            fields.problem("replica", f"{view.replica!r} stands twice; give every replica its own name")
        replicas[view.replica], reservations[view.replica] = view, live
    devices: dict[str, DeviceReport] = {}
    device_reserved: dict[str, int] = {}
    for fields in top.objects("devices", DEVICE):
        device = _device_in(fields, now_s)
        devices[device.uuid], device_reserved[device.uuid] = device, fields.get("reserved_bytes", 0)
    lanes = {fields.required("lane"): int(fields.get("in_flight", 0)) for fields in top.objects("lanes", LANE)}
    if problems:
        raise ConfigError([f"{where}: {line}" for line in problems])
    loss_age_s = top.get("loss_age_s")
    found = LedgerSnapshot(
        now_s=now_s,
        replicas=replicas,
        lanes=lanes,
        devices=devices,
        device_reserved_bytes=device_reserved,
        epoch=top.get("epoch", ""),
        live_sidecars=top.get("live_sidecars", 0),
        loss_at_s=None if loss_age_s is None else now_s - loss_age_s,
    )
    return found, reservations


def _replica_in(fields: Fields, now_s: float, rids: set[str]) -> tuple[ReplicaView, list[LiveReservation]]:
    target, replica = fields.required("target"), fields.required("replica")
    state = fields.choice("state", tuple(ReplicaState), ReplicaState.READY)
    age_s = fields.get("age_s", None if fields.has("age_s") or state == ReplicaState.UNKNOWN else 0.0)
    if age_s is None and state == ReplicaState.READY:
        state = ReplicaState.UNKNOWN
    if state in (ReplicaState.READY, ReplicaState.STALE):
        fields.required("engine")
    block_tokens = fields.get("block_tokens", 16)
    if block_tokens < 1:
        fields.problem("block_tokens", "must be at least 1; write the engine's block size in tokens")
        block_tokens = 16
    report = None
    if age_s is not None and fields.get("engine"):
        report = _report_in(fields, target, replica, state, block_tokens, age_s, now_s)
    items = fields.objects("reservations", RESERVATION)
    live = [_reservation_in(each, target, replica, block_tokens, now_s) for each in items]
    for item, each in zip(items, live, strict=True):
        if each.reservation.rid in rids:
            item.problem("rid", f"{each.reservation.rid!r} stands twice; give every reservation its own")
        rids.add(each.reservation.rid)
    reserved = sum(each.current_blocks for each in live)
    sequences = sum(each.reservation.need.sequences for each in live)
    if not fields.has("reservations"):
        reserved, sequences = fields.get("kv_reserved_blocks", 0), fields.get("sequences", 0)
    foreign = _foreign(report, live, reserved, sequences)
    if fields.has("kv_foreign_blocks"):
        foreign = fields.get("kv_foreign_blocks")
    committed = None if report is not None and foreign is None else reserved + (foreign or 0)
    capacity = report.capacity_blocks if report else None
    view = ReplicaView(
        report=report,
        replica=replica,
        target=target,
        state=state,
        age_s=age_s,
        reserved_blocks=reserved,
        foreign_blocks=foreign,
        committed_blocks=committed,
        headroom_blocks=None if capacity is None or committed is None else capacity - committed,
        sequences=sequences,
        prefill_level_tokens=float(fields.get("prefill_level_tokens", 0.0)),
        reservations=len(live),
        orphaned=sum(each.state == State.ORPHANED for each in live),
        over_admissions=fields.get("over_admissions", 0),
        drained_by_operator=fields.get("drained", False),
        bypass=fields.get("bypass", _bypass(report, sequences)),
        over_adopted=fields.get("over_adopted", 0),
        over_grew=fields.get("over_grew", 0),
        over_foreign=fields.get("over_foreign", 0),
        lane_blocks=fields.get("lane_blocks", _by_lane(live)),
    )
    return view, live


def _report_in(
    fields: Fields, target: str, replica: str, state: str, block_tokens: int, age_s: float, now_s: float
) -> ReplicaReport:
    start_at_s = now_s - age_s
    used = fields.get("kv_used_blocks")
    engine_age_s = fields.get("engine_age_s")
    return ReplicaReport(
        replica=replica,
        target=target,
        engine=fields.get("engine"),
        node=fields.get("node", ""),
        instance=fields.get("instance", ""),
        state=ReplicaState(state),
        scrape_start_at_s=start_at_s,
        scrape_end_at_s=start_at_s + fields.get("scrape_s", 0.0),
        capacity_blocks=fields.get("kv_capacity_blocks"),
        block_tokens=block_tokens,
        used_blocks=used,
        shows_used=fields.get("shows_used", used is not None),
        running=fields.get("running"),
        waiting=fields.get("waiting"),
        max_sequences=fields.get("max_sequences"),
        max_model_tokens=fields.get("max_model_tokens"),
        prefill_tokens_per_s=fields.get("prefill_tokens_per_s"),
        decode_tokens_per_s=fields.get("decode_tokens_per_s"),
        engine_started_at_s=None if engine_age_s is None else now_s - engine_age_s,
        preemptions_total=fields.get("preemptions_total"),
        prefix_hit_share=fields.get("prefix_hit_share"),
    )


def _bypass(report: ReplicaReport | None, sequences: int) -> bool:
    """Whether the engine runs more sequences than we hold."""
    return report is not None and report.running is not None and report.running + (report.waiting or 0) > sequences


def _by_lane(live: Sequence[LiveReservation]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in live:
        found[each.reservation.lane] = found.get(each.reservation.lane, 0) + each.current_blocks
    return found


def _foreign(
    report: ReplicaReport | None, live: Sequence[LiveReservation], reserved: int, sequences: int
) -> int | None:
    """Foreign blocks by the decision model: all traffic is ours where the engine runs no more than we hold."""
    if report is None:
        return None
    bypass = _bypass(report, sequences)
    if report.used_blocks is None:
        return None if bypass else 0
    if not bypass:
        return max(0, report.used_blocks - reserved)
    seen = sum(
        each.reservation.need.input_blocks
        for each in live
        if each.first_byte_at_s is not None and each.first_byte_at_s < report.scrape_start_at_s
    )
    return max(0, report.used_blocks - seen)


def _reservation_in(fields: Fields, target: str, replica: str, block_tokens: int, now_s: float) -> LiveReservation:
    rid = fields.required("rid")
    state = fields.choice("state", tuple(State), State.RESERVED)
    blocks = fields.get("blocks", 0)
    reserved_blocks = fields.get("reserved_blocks", blocks)
    input_tokens = fields.get("input_tokens", 0)
    reserved_at_s = now_s - fields.get("age_s", 0.0)
    first_byte_age_s = fields.get("first_byte_age_s")
    lease_s = fields.get("lease_s", 0.0 if state == State.ORPHANED else 10.0)
    held = Reservation(
        rid=rid,
        target=target,
        replica=replica,
        lane=fields.get("lane", ""),
        owner=fields.get("owner", ""),
        request_id=fields.get("request_id", ""),
        klass=fields.get("class", ""),
        reserved_at_s=reserved_at_s,
        need=Need(
            kv_blocks=reserved_blocks,
            input_blocks=fields.get("input_blocks", min(reserved_blocks, -(-input_tokens // block_tokens))),
            kv_bytes=fields.get("kv_bytes", 0),
            prefill_tokens=fields.get("prefill_tokens", 0),
            sequences=fields.get("sequences", 1),
            vram_bytes=tuple(fields.get("vram_bytes", ())),
        ),
        input_tokens=input_tokens,
        expected_output_tokens=fields.get("expected_output_tokens", 0),
        max_output_tokens=fields.get("max_output_tokens"),
        cap_blocks=fields.get("cap_blocks", blocks),
        cap_s=float(fields.get("cap_s", 600.0)),
        devices=tuple(fields.get("devices", ())),
        expected_s=float(fields.get("expected_s", 0.0)),
    )
    return LiveReservation(
        reservation=held,
        state=State(state),
        lease_at_s=now_s + lease_s,
        current_blocks=blocks,
        first_byte_at_s=None if first_byte_age_s is None else now_s - first_byte_age_s,
    )


def _device_in(fields: Fields, now_s: float) -> DeviceReport:
    return DeviceReport(
        uuid=fields.required("uuid"),
        node=fields.get("node", ""),
        instance=fields.get("instance", ""),
        scrape_start_at_s=now_s - fields.get("age_s", 0.0),
        state=fields.choice("state", DEVICE_STATES, "ok"),
        total_bytes=fields.get("total_bytes"),
        free_bytes=fields.get("free_bytes"),
        used_bytes=fields.get("used_bytes"),
        reserved_bytes=fields.get("driver_reserved_bytes"),
        name=fields.get("name", ""),
    )
