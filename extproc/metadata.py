"""What travels through Envoy with a request, so that any instance can renew, rebuild or complete it.

Owns the field names inside the metadata namespace ``kvgate`` and their reading and writing. Values are text or
numbers (a protobuf Struct knows no integers): block counts and epoch seconds stay exact in a double.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from operator import attrgetter

from extproc.ledger.base import Reservation
from extproc.types import Need

Value = str | float

#: Request ids up to this length stand as they are; a UUID has 36.
MAX_REQUEST_ID = 64

#: Field name -> attribute of Reservation, for plain text.
_TEXT = {
    "rid": "rid",
    "target": "target",
    "replica": "replica",
    "lane": "lane",
    "owner": "owner",
    "request_id": "request_id",
    "class": "klass",
}
#: Field name -> attribute of Reservation, for whole numbers.
_COUNTS = {
    "input_tokens": "input_tokens",
    "expected_output_tokens": "expected_output_tokens",
    "cap_blocks": "cap_blocks",
}
#: Field name -> attribute of Need.
_NEED = {
    "blocks": "kv_blocks",
    "input_blocks": "input_blocks",
    "kv_bytes": "kv_bytes",
    "prefill_charge": "prefill_tokens",
    "sequences": "sequences",
}


_text_of, _counts_of, _need_of = (attrgetter(*names.values()) for names in (_TEXT, _COUNTS, _NEED))


def exchange_id(request_id: str, began_us: int) -> str:
    """What joins an access-log entry without our metadata to its reservation: the request id and when it began.

    The request id is the client's, so a long one counts by its digest.
    """
    if len(request_id) > MAX_REQUEST_ID:
        request_id = hashlib.blake2b(request_id.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return f"{request_id}@{began_us}" if began_us else request_id


def reservation_fields(reservation: Reservation, pool: str) -> dict[str, Value]:
    """The reservation as flat fields of the namespace ``kvgate``."""
    fields: dict[str, Value] = dict(zip(_TEXT, _text_of(reservation), strict=True))
    fields.update(zip(_COUNTS, map(float, _counts_of(reservation)), strict=True))
    fields.update(zip(_NEED, map(float, _need_of(reservation.need)), strict=True))
    fields["pool"] = pool
    fields["reserved_at"] = reservation.reserved_at_s
    fields["cap_s"] = reservation.cap_s
    fields["expected_s"] = reservation.expected_s
    if reservation.max_output_tokens is not None:
        fields["max_output_tokens"] = float(reservation.max_output_tokens)
    if reservation.need.vram_bytes:
        fields["vram"] = json.dumps([reservation.devices, reservation.need.vram_bytes])
    return fields


def reservation_from(fields: Mapping[str, object], pool: str) -> Reservation | None:
    """The reservation in these fields; None where they hold none of this pool (remote, pass, or foreign)."""
    if fields.get("pool") != pool or not fields.get("reserved_at"):
        return None
    text = {attribute: fields.get(name) for name, attribute in _TEXT.items()}
    counts = {attribute: _count(fields.get(name)) for name, attribute in _COUNTS.items()}
    need = {attribute: _count(fields.get(name)) for name, attribute in _NEED.items()}
    cap, reserved_at, cap_s = fields.get("max_output_tokens"), fields.get("reserved_at"), fields.get("cap_s")
    expected_s = fields.get("expected_s")
    if not all(isinstance(value, str) for value in text.values()):
        return None
    if any(value is None for value in (*counts.values(), *need.values())):
        return None
    if not isinstance(reserved_at, float) or not isinstance(cap_s, float) or not math.isfinite(reserved_at + cap_s):
        return None
    devices, vram = _vram(fields.get("vram"))
    return Reservation(
        **text,  # type: ignore[arg-type]  # every value was seen to be text
        **counts,  # type: ignore[arg-type]  # and these whole numbers
        reserved_at_s=reserved_at,
        need=Need(**need, vram_bytes=vram),  # type: ignore[arg-type]
        max_output_tokens=_count(cap),
        cap_s=cap_s,
        devices=devices,
        expected_s=expected_s if isinstance(expected_s, float) and math.isfinite(expected_s) else 0.0,
    )


def _count(value: object) -> int | None:
    if not isinstance(value, float) or not 0 <= value < 2**53:
        return None
    return int(value)


def _vram(value: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(value, str):
        return (), ()
    devices, amounts = json.loads(value)
    return tuple(devices), tuple(int(amount) for amount in amounts)
