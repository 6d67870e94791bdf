"""Access-log entries: what they prove, how an exchange ended, and that junk proves nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.accesslog import EntryKind, read
from extproc.ledger.base import Ended
from extproc.wire import pb

NOW_S = 1_800_000_100.0


def entry(
    kind: int = pb.DownstreamEnd, *, status: int | None = 200, flag: str | None = None, details: str = "via_upstream"
) -> pb.HTTPAccessLogEntry:
    """An entry of a request that began 10 s ago, lasted 8 s and had its first byte after 3 s."""
    made = pb.HTTPAccessLogEntry()
    common = made.common_properties
    common.access_log_type = kind
    common.start_time.seconds = int(NOW_S) - 10
    common.duration.seconds = 8
    common.time_to_first_upstream_tx_byte.seconds = 1
    common.time_to_first_upstream_rx_byte.seconds = 3
    common.stream_id = "client-id"
    common.upstream_cluster = "big-0"
    common.metadata.filter_metadata["kvgate"].update({"rid": "r1", "lane": "fast", "blocks": 7})
    common.metadata.filter_metadata["kvgate.usage"].update({"input_tokens": 11, "output_tokens": 30})
    if flag:
        setattr(common.response_flags, flag, True)
    if status is not None:
        made.response.response_code.value = status
    made.response.response_code_details = details
    made.response.response_body_bytes = 900
    return made


def test_an_end_entry_is_read_whole() -> None:
    """Times become ages on the reader's clock, usage whole numbers, metadata our fields."""
    record = read(entry(), NOW_S)
    assert record is not None
    assert (record.kind, record.rid, record.request_id, record.cluster) == (EntryKind.END, "r1", "client-id", "big-0")
    assert (record.began_age_s, record.ended_age_s, record.first_byte_age_s) == (10.0, 2.0, 7.0)
    assert record.usage == {"input_tokens": 11, "output_tokens": 30}
    assert record.fields["blocks"] == 7.0
    assert record.how is Ended.COMPLETE


@pytest.mark.parametrize(
    ("status", "flag", "details", "how"),
    [
        (200, None, "via_upstream", Ended.COMPLETE),
        (200, "downstream_connection_termination", "downstream_remote_disconnect", Ended.CLIENT_ABORT),
        (200, "downstream_remote_reset", "", Ended.CLIENT_ABORT),
        (None, "downstream_connection_termination", "", Ended.CLIENT_ABORT),
        (None, None, "", Ended.CLIENT_ABORT),
        (200, "upstream_protocol_error", "upstream_reset_after_response_started{protocol_error}", Ended.UPSTREAM_RESET),
        (503, "upstream_connection_termination", "upstream_reset_before_response_started", Ended.UPSTREAM_RESET),
        (503, "upstream_connection_failure", "", Ended.UPSTREAM_RESET),
        (200, None, "upstream_reset_after_response_started", Ended.UPSTREAM_RESET),
        (504, "upstream_request_timeout", "", Ended.TIMEOUT),
        (200, "stream_idle_timeout", "", Ended.TIMEOUT),
        (503, None, "via_upstream", Ended.UPSTREAM_ERROR),
        (400, None, "via_upstream", Ended.UPSTREAM_ERROR),
    ],
)
def test_how_it_ended(status: int | None, flag: str | None, details: str, how: Ended) -> None:
    """Every ending that was measured on real Envoy."""
    record = read(entry(status=status, flag=flag, details=details), NOW_S)
    assert record is not None
    assert record.how is how


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pb.DownstreamEnd, EntryKind.END),
        (pb.DownstreamPeriodic, EntryKind.ALIVE),
        (pb.UpstreamEnd, EntryKind.ATTEMPT_END),
    ],
)
def test_kinds(kind: int, expected: EntryKind) -> None:
    """Three kinds of entries prove something."""
    record = read(entry(kind), NOW_S)
    assert record is not None
    assert record.kind is expected


def test_an_attempt_without_the_end_of_its_answer_was_aborted() -> None:
    """Envoy flags nothing on an attempt whose client left in mid-stream: only the answer's last byte tells it apart."""
    made = entry(pb.UpstreamEnd, details="")
    record = read(made, NOW_S)
    assert record is not None
    assert record.how is Ended.CLIENT_ABORT
    made.common_properties.time_to_last_upstream_rx_byte.seconds = 8
    record = read(made, NOW_S)
    assert record is not None
    assert record.how is Ended.COMPLETE


def test_an_attempt_that_never_reached_its_engine_leaves_nothing_behind() -> None:
    """Connection refused: no byte was sent, so nothing has to cool."""
    made = entry(pb.UpstreamEnd, status=None, flag="upstream_connection_failure", details="")
    made.common_properties.ClearField("time_to_first_upstream_tx_byte")
    record = read(made, NOW_S)
    assert record is not None
    assert record.how is Ended.UNSENT


@pytest.mark.parametrize("kind", [pb.NotSet, pb.DownstreamStart, pb.UpstreamPoolReady, pb.TcpConnectionEnd])
def test_other_kinds_prove_nothing(kind: int) -> None:
    """A start, a pool that became ready or a TCP entry is no record."""
    assert read(entry(kind), NOW_S) is None


def test_an_attempt_tells_what_the_api_says_of_its_limits() -> None:
    """A 429 with its time, a limit at zero on a good answer; nothing for the rest and for whole exchanges."""
    spent = entry(pb.UpstreamEnd, status=429)
    spent.response.response_headers["retry-after"] = "7"
    last = entry(pb.UpstreamEnd)
    last.response.response_headers.update({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "2s"})
    whole = entry(pb.DownstreamEnd, status=429)
    records = [read(each, NOW_S) for each in (spent, last, entry(pb.UpstreamEnd), whole)]
    assert [record.closed_for_s for record in records if record is not None] == [7.0, 2.0, None, None]


def test_an_attempt_is_known_by_its_header() -> None:
    """Per-attempt entries carry no metadata; the rid comes from the logged request header."""
    made = entry(pb.UpstreamEnd)
    made.common_properties.metadata.Clear()
    made.request.request_headers["x-kvgate-rid"] = "r2"
    record = read(made, NOW_S)
    assert record is not None
    assert (record.rid, record.fields) == ("r2", {})


def test_an_entry_from_the_future_has_age_zero() -> None:
    """A host clock that was set back makes no negative age."""
    record = read(entry(), NOW_S - 3600)
    assert record is not None
    assert (record.began_age_s, record.ended_age_s) == (0.0, 0.0)


@given(st.binary(max_size=200))
def test_junk_never_raises(junk: bytes) -> None:
    """Any bytes that parse as an entry give a record or nothing."""
    made = pb.HTTPAccessLogEntry()
    try:
        made.ParseFromString(junk)
    except Exception:  # noqa: BLE001 - protobuf's own refusal of the bytes; what parses must be readable
        return
    read(made, NOW_S)
