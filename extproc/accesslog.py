"""Reads Envoy's access-log entries: which exchange, how far, how it ended, what it used.

Pure translation of one entry into one record; ``completion`` acts on it. The proof of an end is an end entry with
our rid, never the end of a gRPC stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from extproc.gateway.names import DECISION_NAMESPACE, HEADER_RID, USAGE_NAMESPACE
from extproc.gateway.quota import SPENT, closed_for_s
from extproc.ledger.base import Ended
from extproc.wire import pb

_ABORTS = ("downstream_connection_termination", "downstream_remote_reset")
_TIMEOUTS = (
    "upstream_request_timeout",
    "stream_idle_timeout",
    "duration_timeout",
    "upstream_max_stream_duration_reached",
)
_RESETS = (
    "upstream_connection_termination",
    "upstream_remote_reset",
    "upstream_connection_failure",
    "upstream_protocol_error",
    "upstream_overflow",
    "local_reset",
    "no_healthy_upstream",
)


class EntryKind(StrEnum):
    """What an entry proves."""

    #: The exchange goes on.
    ALIVE = "alive"
    #: One attempt at one upstream is over.
    ATTEMPT_END = "attempt_end"
    #: The whole exchange is over.
    END = "end"


_KINDS = {
    pb.DownstreamPeriodic: EntryKind.ALIVE,
    pb.UpstreamEnd: EntryKind.ATTEMPT_END,
    pb.DownstreamEnd: EntryKind.END,
}


#: All that is read of our metadata, field by field at a price, in entries that end something: an attempt's is followed by
#: the exchange's own, and only a periodic one may have to rebuild a reservation.
_FIELDS: Mapping[EntryKind, tuple[str, ...] | None] = {
    EntryKind.ALIVE: None,
    EntryKind.ATTEMPT_END: ("rid", "target"),
    EntryKind.END: (
        "rid",
        "pool",
        "class",
        "lane",
        "target",
        "replica",
        "plan",
        "sequences",
        "expected_output_tokens",
        "blocks",
        "kv_bytes",
    ),
}


class LogRecord(Struct, frozen=True):
    """One entry, read. Ages are seconds before "now" of the host that reads; None where it did not happen.

    ``fields`` are our own metadata as written at the decision (of an end: what ``_FIELDS`` names); ``usage`` what
    the engine reported of the exchange (input_tokens, output_tokens, cached_tokens), absent keys were not reported. ``began_us`` is
    the exchange's begin on Envoy's wall clock. ``closed_for_s`` (of an attempt): the API wants no more for so long.
    """

    kind: EntryKind
    rid: str | None
    request_id: str
    cluster: str
    fields: Mapping[str, str | float]
    usage: Mapping[str, int]
    how: Ended
    status: int | None
    began_us: int
    began_age_s: float
    ended_age_s: float
    first_byte_age_s: float | None
    duration_s: float
    response_bytes: int
    attempts: int
    closed_for_s: float | None = None


def read(entry: pb.HTTPAccessLogEntry, now_s: float) -> LogRecord | None:
    """The record in ``entry``; ``now_s`` is the host's wall clock. None for entries that prove nothing here."""
    common, response = entry.common_properties, entry.response
    kind = _KINDS.get(common.access_log_type)
    if kind is None:
        return None
    of_attempt = kind is EntryKind.ATTEMPT_END
    metadata = common.metadata.filter_metadata
    fields = _values(metadata[DECISION_NAMESPACE], _FIELDS[kind]) if DECISION_NAMESPACE in metadata else {}
    usage = _usage(metadata[USAGE_NAMESPACE]) if not of_attempt and USAGE_NAMESPACE in metadata else {}
    rid = fields.get("rid") or entry.request.request_headers.get(HEADER_RID) or None
    status = response.response_code.value if response.HasField("response_code") else None
    start = common.start_time
    began_age_s = max(0.0, now_s - _seconds(start))
    duration_s = _seconds(common.duration) if common.HasField("duration") else began_age_s
    first = (
        _seconds(common.time_to_first_upstream_rx_byte) if common.HasField("time_to_first_upstream_rx_byte") else None
    )
    return LogRecord(
        kind=kind,
        rid=rid if isinstance(rid, str) else None,
        request_id=common.stream_id or entry.request.request_id,
        cluster=common.upstream_cluster,
        fields=fields,
        usage=usage,
        how=_ended(common, response.response_code_details, kind, status),
        status=status,
        began_us=start.seconds * 1_000_000 + start.nanos // 1000,
        began_age_s=began_age_s,
        ended_age_s=max(0.0, began_age_s - duration_s),
        first_byte_age_s=None if first is None else max(0.0, began_age_s - first),
        duration_s=duration_s,
        response_bytes=response.response_body_bytes,
        attempts=common.upstream_request_attempt_count,
        closed_for_s=closed_for_s(status, response.response_headers)
        if of_attempt and (status in SPENT or response.response_headers)
        else None,
    )


def _ended(common: pb.AccessLogCommon, details: str, kind: EntryKind, status: int | None) -> Ended:
    # Envoy always sends the message, and nearly always without a flag in it.
    flags = common.response_flags if common.response_flags.ListFields() else None
    if kind is EntryKind.ATTEMPT_END and not common.HasField("time_to_first_upstream_tx_byte"):
        return Ended.UNSENT  # connection refused, or overflow: nothing of it reached the engine
    if _any(flags, _ABORTS) or details.startswith("downstream_remote_disconnect"):
        return Ended.CLIENT_ABORT
    if _any(flags, _TIMEOUTS):
        return Ended.TIMEOUT
    if _any(flags, _RESETS) or details.startswith("upstream_reset"):
        return Ended.UPSTREAM_RESET
    if status is None:
        return Ended.CLIENT_ABORT
    if status >= 400:
        return Ended.UPSTREAM_ERROR
    # An attempt cut short because the client left shows 200, no flag and no details, as a complete one does; only
    # the end of the engine's answer is missing (observed on Envoy 1.40).
    if kind is EntryKind.ATTEMPT_END and not common.HasField("time_to_last_upstream_rx_byte"):
        return Ended.CLIENT_ABORT
    return Ended.COMPLETE


def _any(flags: Any, names: tuple[str, ...]) -> bool:
    return flags is not None and any(getattr(flags, name) for name in names)


def _values(struct: Any, wanted: tuple[str, ...] | None = None) -> dict[str, str | float]:
    """The texts and numbers of a google.protobuf.Struct; with ``wanted`` only of these names."""
    fields = struct.fields
    found: dict[str, str | float] = {}
    for name in fields if wanted is None else wanted:
        value = fields.get(name)
        if value is None:
            continue
        # A field that is set shows what it holds; only an empty one has to be asked what it is.
        known = value.string_value or value.number_value
        if known:
            found[name] = known
        elif (kind := value.WhichOneof("kind")) in ("string_value", "number_value"):
            found[name] = getattr(value, kind)
    return found


def _usage(struct: Any) -> dict[str, int]:
    """The counts in what the engine reported."""
    reported = _values(struct)
    return {name: int(value) for name, value in reported.items() if isinstance(value, float) and 0 <= value < 2**53}


def _seconds(span: Any) -> float:
    """A google.protobuf Timestamp or Duration in seconds."""
    return float(span.seconds) + float(span.nanos) / 1e9
