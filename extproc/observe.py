"""Tells metrics, spans and the decision log what happened; the only place that knows all three.

Called after an answer left, never before. Holds no state but the sinks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from extproc.accesslog import LogRecord
from extproc.fleet import Fleet
from extproc.ledger.base import Ended
from extproc.placing import Pending
from extproc.telemetry.decisionlog import DecisionLog, end_record
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.record import decision_record
from extproc.telemetry.spans import GrpcMetadata, Spans, trace_carrier
from extproc.types import Decision


class Observer:
    """The sinks of one process."""

    def __init__(self, metrics: Metrics, spans: Spans, decisions: DecisionLog, fleet: Fleet) -> None:
        self._metrics = metrics
        self._spans = spans
        self._decisions = decisions
        self._fleet = fleet

    def internal_error(self, where: str) -> None:
        """A fault of ours was caught at the outer border of a request."""
        self._metrics.internal_error(where)

    def stream_opened(self) -> None:
        """An ext_proc stream began."""
        self._metrics.stream_opened()

    def stream_closed(self) -> None:
        """An ext_proc stream ended."""
        self._metrics.stream_closed()

    def exchange_began(self) -> None:
        """A request waits for its decision."""
        self._metrics.exchange_began()

    def exchange_decided(self) -> None:
        """It has one, or its stream ended without."""
        self._metrics.exchange_decided()

    @property
    def traces(self) -> bool:
        """Whether spans are written, which continue the trace in a stream's gRPC metadata."""
        return self._spans.enabled

    def decided(
        self, decision: Decision, pending: Pending, answered_ns: int, elapsed_ns: int, metadata: GrpcMetadata | None
    ) -> None:
        """One decision was answered at ``answered_ns`` (Unix time), after ``elapsed_ns``."""
        timings = pending.timings_ms
        count_ms = timings.get("count")
        self._metrics.decision(
            decision, decision_s=elapsed_ns / 1e9, count_s=None if count_ms is None else count_ms / 1000.0
        )
        if decision.decision == "pass":
            return
        record = decision_record(
            decision,
            at_s=answered_ns / 1e9,
            decision_ms=elapsed_ns / 1e6,
            count_ms=count_ms or 0.0,
            request_id=pending.who.request_id,
        )
        self._decisions.append(record)
        if self._spans.enabled:
            self._spans.decided(
                record,
                carrier=trace_carrier(metadata),
                start_ns=answered_ns - elapsed_ns,
                end_ns=answered_ns,
                ledger_ms=timings.get("ledger"),
            )

    def completed(self, record: LogRecord, output_tokens: int | None) -> None:
        """One exchange ended, as the access log proves."""
        fields = record.fields
        lane, target = str(fields.get("lane", "")) or None, str(fields.get("target", "")) or None
        expected = fields.get("expected_output_tokens")
        self._metrics.completion(
            ended=str(record.how),
            lane=lane,
            target=target,
            output_tokens=output_tokens,
            expected_output_tokens=int(expected) if isinstance(expected, float) else None,
            first_byte_s=None if record.first_byte_age_s is None else record.began_age_s - record.first_byte_age_s,
            duration_s=record.duration_s,
        )
        rid = record.rid or ""
        now_s = time.time()
        free_at_end = self._free_bytes(str(fields.get("replica", "")), fields)
        self._decisions.end(
            end_record(
                rid,
                ended=str(record.how),
                at_s=now_s,
                free_at_end_bytes=free_at_end,
                actual_input_tokens=record.usage.get("input_tokens"),
                actual_output_tokens=output_tokens,
            )
        )
        if not self._spans.enabled:
            return
        end_ns = record.began_us * 1000 + int(record.duration_s * 1e9)
        self._spans.completed(
            rid,
            ended=str(record.how),
            end_ns=end_ns,
            start_ns=end_ns - int(record.duration_s * 1e9),
            request_id=record.request_id,
            lane=lane,
            target=target,
            replica=record.cluster or None,
            input_tokens=record.usage.get("input_tokens"),
            output_tokens=output_tokens,
            expected_output_tokens=int(expected) if isinstance(expected, float) else None,
            free_at_end_bytes=free_at_end,
        )

    def unsent(self, rid: str) -> None:
        """One decision was in vain: its client left, or Envoy waited too long, before the answer came."""
        self._decisions.end(end_record(rid, ended=str(Ended.UNSENT), at_s=time.time()))

    def misrouted(self, record: LogRecord) -> None:
        """An exchange was served by a replica that was not in its plan."""
        if record.how is not Ended.CLIENT_ABORT:
            self._metrics.misrouted(str(record.fields.get("target", "")))

    def _free_bytes(self, replica: str, fields: Mapping[str, object]) -> int | None:
        view = self._fleet.view(replica)
        blocks, size = fields.get("blocks"), fields.get("kv_bytes")
        if view is None or view.headroom_blocks is None or not isinstance(blocks, float) or not blocks:
            return None
        return int(view.headroom_blocks * (size / blocks)) if isinstance(size, float) and size else None
