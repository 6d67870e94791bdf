"""One place that is told what happened and passes it on to metrics, spans and the decision log.

Owns the fan-out and nothing else. It is the ``Observer`` of the server and of completions; what it needs from their
objects is stated here as protocols, so that telemetry imports neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from extproc.ledger.base import Ended, ReplicaView
from extproc.telemetry.decisionlog import DecisionLog, end_record
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.record import decision_record
from extproc.telemetry.spans import Spans, trace_carrier
from extproc.types import Decision


class Asked(Protocol):
    """Who asked, as ``decisions.Identity``."""

    @property
    def request_id(self) -> str:
        """The request id that Envoy knows the exchange by."""
        ...


class Decided(Protocol):
    """A request with its timings, as ``admission.Pending``."""

    @property
    def who(self) -> Asked:
        """Who asked."""
        ...

    @property
    def timings_ms(self) -> Mapping[str, float]:
        """Milliseconds by stage; ``count`` and ``ledger`` are read here."""
        ...


class Exchanged(Protocol):
    """One ended exchange, as ``accesslog.LogRecord``; ages are seconds before now, ``fields`` our own metadata."""

    @property
    def rid(self) -> str | None: ...  # noqa: D102 - the fields of LogRecord, described there
    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def fields(self) -> Mapping[str, str | float]: ...  # noqa: D102
    @property
    def usage(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def how(self) -> Ended: ...  # noqa: D102
    @property
    def began_age_s(self) -> float: ...  # noqa: D102
    @property
    def ended_age_s(self) -> float: ...  # noqa: D102
    @property
    def first_byte_age_s(self) -> float | None: ...  # noqa: D102
    @property
    def duration_s(self) -> float: ...  # noqa: D102


class Recorder:
    """Tells metrics, spans and the decision log of every decision and every end; no call waits for anything."""

    def __init__(
        self,
        metrics: Metrics,
        spans: Spans,
        log: DecisionLog,
        *,
        view: Callable[[str], ReplicaView | None] = lambda _replica: None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """``view`` is the fleet's last sight of a replica, for the room at a request's end; ``clock_s`` Unix time."""
        self._metrics = metrics
        self._spans = spans
        self._log = log
        self._view = view
        self._clock_s = clock_s

    def decided(
        self,
        decision: Decision,
        pending: Decided,
        decision_ms: float,
        context: Mapping[str, str],
        operation: str | None = None,
    ) -> None:
        """Record one decision; ``context`` is the gRPC metadata with Envoy's trace context.

        ``operation`` is the GenAI operation where the dialect's own is not meant.
        """
        at_s = self._clock_s()
        timings = pending.timings_ms
        count_ms = timings.get("count")
        self._metrics.decision(
            decision, decision_s=decision_ms / 1000, count_s=None if count_ms is None else count_ms / 1000
        )
        record = decision_record(
            decision,
            at_s=at_s,
            decision_ms=decision_ms,
            count_ms=count_ms or 0.0,
            request_id=pending.who.request_id,
        )
        self._log.append(record)
        if self._spans.enabled:
            end_ns = int(at_s * 1e9)
            self._spans.decided(
                record,
                carrier=trace_carrier(context.items()),
                start_ns=end_ns - int(decision_ms * 1e6),
                end_ns=end_ns,
                ledger_ms=timings.get("ledger"),
                operation=operation,
            )

    def completed(self, record: Exchanged, output_tokens: int | None) -> None:
        """Record the end of one exchange that held a place; ``output_tokens`` as reported or guessed from its bytes."""
        fields = record.fields
        lane, target, replica = _text(fields, "lane"), _text(fields, "target"), _text(fields, "replica")
        expected = fields.get("expected_output_tokens")
        expected_tokens = int(expected) if isinstance(expected, float) else None
        first_byte_s = (
            None if record.first_byte_age_s is None else max(0.0, record.began_age_s - record.first_byte_age_s)
        )
        self._metrics.completion(
            ended=record.how.value,
            lane=lane,
            target=target,
            output_tokens=output_tokens,
            expected_output_tokens=expected_tokens,
            first_byte_s=first_byte_s,
            duration_s=record.duration_s,
        )
        if record.rid is None:
            return
        free_bytes = self._free_bytes(replica, fields)
        input_tokens = record.usage.get("input_tokens")
        self._log.end(
            end_record(
                record.rid,
                ended=record.how.value,
                free_at_end_bytes=free_bytes,
                actual_input_tokens=input_tokens,
                actual_output_tokens=output_tokens,
            )
        )
        if not self._spans.enabled:
            return
        end_ns = int((self._clock_s() - record.ended_age_s) * 1e9)
        traceparent = _text(fields, "traceparent")
        self._spans.completed(
            record.rid,
            ended=record.how.value,
            start_ns=end_ns - int(record.duration_s * 1e9),
            end_ns=end_ns,
            carrier={"traceparent": traceparent} if traceparent else None,
            request_id=record.request_id,
            lane=lane,
            target=target,
            replica=replica,
            input_tokens=input_tokens,
            output_tokens=record.usage.get("output_tokens"),
            expected_output_tokens=expected_tokens,
            free_at_end_bytes=free_bytes,
        )

    def misrouted(self, record: Exchanged) -> None:
        """Record that an exchange was served by another endpoint than the reserved one."""
        self._metrics.misrouted(_text(record.fields, "target"))

    def _free_bytes(self, replica: str | None, fields: Mapping[str, str | float]) -> int | None:
        """Free KV bytes of the replica in the last snapshot: as the engine reports, else as the ledger sums."""
        view = self._view(replica) if replica else None
        blocks, size_bytes = fields.get("blocks"), fields.get("kv_bytes")
        if view is None or not isinstance(blocks, float) or not isinstance(size_bytes, float) or not blocks:
            return None
        free = view.headroom_blocks
        report = view.report
        if report is not None and report.capacity_blocks is not None and report.used_blocks is not None:
            free = report.capacity_blocks - report.used_blocks
        return int(free * size_bytes / blocks) if free is not None and size_bytes else None


def _text(fields: Mapping[str, str | float], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) and value else None
