"""OpenTelemetry spans: one per decision, one per completion, in the trace that Envoy began.

Owns how a record becomes a span. Without an endpoint nothing of OpenTelemetry is imported and every method
returns at once. With one, a finished span goes into a bounded queue that a background thread empties: a collector
that is slow, away or wrong costs spans, never a request.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from extproc.config import TelemetryConfig
from extproc.telemetry import names
from extproc.telemetry.record import Record, clean, figures_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import SpanContext, Tracer

log = logging.getLogger("kvgate.spans")

#: The metadata of one gRPC call as grpc.aio shows it.
GrpcMetadata = Iterable[tuple[str, str | bytes]]

#: W3C Trace Context, the headers that Envoy puts into ext_proc's gRPC metadata.
TRACE_HEADERS = ("traceparent", "tracestate")
#: Longest traceparent plus tracestate that is looked at (the standard asks for 512 characters of tracestate).
MAX_HEADER = 1024
#: Traces remembered from decision to completion; the oldest goes first. About 300 bytes each.
MAX_LIVE = 20_000
#: The export thread encodes spans in Python (120 us each) and would keep the interpreter for 5 ms at a time. Measured on
#: two cores while it encodes: a socket round trip of the main thread has p99 11.2 ms at 5 ms and 1.2 ms at 0.5 ms.
SWITCH_S = 0.0005
#: Seconds one export may take; then its spans are lost and the next batch has its turn.
EXPORT_TIMEOUT_S = 5.0

#: Dialect (``openai.chat``) or its last part -> GenAI operation; anything else is a chat.
OPERATIONS: Mapping[str, str] = {
    "completions": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
    "embed": "embeddings",
}

#: Key of a decision record -> attribute of the decision span, where the value is copied as it stands.
_COPIED: tuple[tuple[str, str], ...] = (
    ("model", "gen_ai.request.model"),
    ("max_output_tokens", "gen_ai.request.max_tokens"),
    ("rid", "kvgate.rid"),
    ("request_id", "kvgate.request_id"),
    ("mode", "kvgate.mode"),
    ("lane", "kvgate.lane"),
    ("target", "kvgate.target"),
    ("replica", "kvgate.replica"),
    ("decision", "kvgate.decision"),
    ("outcome", "kvgate.outcome"),
    ("reason", "kvgate.reason"),
    ("status", "kvgate.status"),
    ("retry_after_ms", "kvgate.retry_after_ms"),
    ("input_tokens", "kvgate.input_tokens"),
    ("count_source", "kvgate.count_source"),
    ("expected_output_tokens", "kvgate.expected_output_tokens"),
    ("waited_ms", "kvgate.waited_ms"),
    ("count_ms", "kvgate.count_ms"),
    ("ledger", "kvgate.ledger"),
)


def trace_carrier(metadata: GrpcMetadata | None) -> dict[str, str]:
    """The trace headers in gRPC metadata; a repeated, oversized or binary one is left out, as the standard says."""
    found: dict[str, str] = {}
    repeated = False
    for key, value in metadata or ():
        if key in TRACE_HEADERS and isinstance(value, str) and len(value) <= MAX_HEADER:
            repeated |= key == "traceparent" and key in found
            found[key] = value
    return {} if repeated else found


class Spans:
    """Writes the spans of one process; every method is cheap and never raises for the collector's sake."""

    def __init__(
        self,
        exporter: SpanExporter | None = None,
        *,
        version: str = "",
        on_result: Callable[[str, int], None] | None = None,
    ) -> None:
        """``exporter`` None: off. ``on_result(result, count)`` hears of recorded, exported and failed spans, the last two on another thread."""
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        self._exporter = exporter
        self._on_result = on_result or (lambda _result, _count: None)
        self._live: dict[str, dict[str, str]] = {}
        if exporter is not None:
            self._start(exporter, version)

    @classmethod
    def from_config(
        cls, config: TelemetryConfig, *, version: str = "", on_result: Callable[[str, int], None] | None = None
    ) -> Spans:
        """Spans to ``otlpEndpoint`` over OTLP/gRPC; off without it. OTEL_EXPORTER_OTLP_CERTIFICATE turns TLS on,
        OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*, OTEL_TRACES_SAMPLER and OTEL_RESOURCE_ATTRIBUTES hold as documented by OpenTelemetry.
        """
        if config.otlp_endpoint is None:
            return cls()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        plain = "OTEL_EXPORTER_OTLP_CERTIFICATE" not in os.environ
        exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=plain, timeout=EXPORT_TIMEOUT_S)
        return cls(exporter, version=version, on_result=on_result)

    @property
    def enabled(self) -> bool:
        """Whether any span is ever written."""
        return self._tracer is not None

    def decided(
        self,
        record: Record,
        *,
        carrier: Mapping[str, str],
        start_ns: int,
        end_ns: int,
        ledger_ms: float | None = None,
        operation: str | None = None,
    ) -> None:
        """Write the span of one decision; call it after the answer is on its way.

        ``carrier`` is ``trace_carrier(metadata)``; a parent that is not sampled (flag 00) gives no span. Times are Unix nanoseconds.
        """
        if self._tracer is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            names.SPAN_DECIDE, context=_context(carrier), kind=SpanKind.SERVER, start_time=start_ns
        )
        if not span.is_recording():
            return
        span.set_attributes(_decision_attributes(record, ledger_ms, operation))
        for candidate in record["candidates"]:
            span.add_event(names.EVENT_CANDIDATE, _candidate_attributes(candidate), timestamp=end_ns)
        if (record["status"] or 0) >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=end_ns)
        self._on_result("recorded", 1)
        if record["rid"] and record["decision"] in ("admit", "fallback"):
            self._remember(record["rid"], _carrier_of(span.get_span_context()))

    def completed(
        self,
        rid: str,
        *,
        ended: str,
        end_ns: int,
        start_ns: int | None = None,
        carrier: Mapping[str, str] | None = None,
        request_id: str | None = None,
        lane: str | None = None,
        target: str | None = None,
        replica: str | None = None,
        operation: str | None = None,
        response_model: str | None = None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        expected_output_tokens: int | None = None,
        free_at_end_bytes: int | None = None,
    ) -> None:
        """Write the span of one completion, from ``start_ns`` (default: its end) to ``end_ns``.

        It is a child of this process' decision with the same rid; where another process decided, of the context in
        ``carrier``. A request whose trace is known by neither gets no span.
        """
        remembered = self._live.pop(rid, None)
        if self._tracer is None:
            return
        parent = remembered or carrier
        if not parent:
            return
        began_ns = end_ns if start_ns is None else start_ns
        span = self._tracer.start_span(names.SPAN_COMPLETE, context=_context(parent), start_time=began_ns)
        if not span.is_recording():
            return
        span.set_attributes(
            _present(
                {
                    "kvgate.rid": rid,
                    "kvgate.request_id": clean(request_id),
                    "kvgate.ended": ended,
                    "kvgate.lane": lane,
                    "kvgate.target": target,
                    "kvgate.replica": replica,
                    "kvgate.expected_output_tokens": expected_output_tokens,
                    "kvgate.free_at_end_bytes": free_at_end_bytes,
                    "gen_ai.operation.name": operation,
                    "gen_ai.response.model": clean(response_model),
                    "gen_ai.usage.input_tokens": input_tokens,
                    "gen_ai.usage.output_tokens": output_tokens,
                    "error.type": None if ended == "complete" else ended,
                }
            )
        )
        span.end(end_time=end_ns)
        self._on_result("recorded", 1)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout_s``; what is left then is lost."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is None:
            return
        # The SDK's own shutdown waits up to 30 s for a collector that does not answer.
        thread = threading.Thread(target=provider.shutdown, name="kvgate-spans-close", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            if self._exporter is not None:
                self._exporter.shutdown()  # ends its retries, and with them the background thread
            log.warning("the collector did not take the last spans in time")

    def _start(self, exporter: SpanExporter, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "kvgate"), "service.version": version}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_counting(exporter, self._on_result)))
        self._tracer = self._provider.get_tracer("kvgate", version)

    def _remember(self, rid: str, carrier: dict[str, str]) -> None:
        if len(self._live) >= MAX_LIVE:
            self._live.pop(next(iter(self._live)))
        self._live[rid] = carrier


def operation_of(dialect: str | None) -> str | None:
    """The GenAI operation of a dialect name such as ``openai.chat``; None for None."""
    return OPERATIONS.get(dialect.rpartition(".")[2], "chat") if dialect else None


def _decision_attributes(record: Record, ledger_ms: float | None, operation: str | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {attribute: record[key] for key, attribute in _COPIED}
    attributes["gen_ai.operation.name"] = operation or operation_of(record["dialect"])
    attributes["kvgate.ledger_ms"] = ledger_ms
    if record["decision"] == "reject":
        attributes["error.type"] = record["reason"]
    shown = figures_of(record)
    if shown is not None:
        attributes.update(_figures(shown))
    return _present(attributes)


def _candidate_attributes(candidate: Mapping[str, Any]) -> dict[str, Any]:
    need = candidate["need"] or {}
    return _present(
        {
            "kvgate.target": candidate["target"],
            "kvgate.replica": candidate["replica"],
            "kvgate.score": candidate["score"],
            "kvgate.refused_by": candidate["refused_by"],
            "kvgate.prefill_tokens": need.get("prefill_tokens"),
            "kvgate.sequences": need.get("sequences"),
            "kvgate.vram_bytes": need.get("vram_bytes"),
            **_figures(candidate),
        }
    )


def _figures(candidate: Mapping[str, Any]) -> dict[str, Any]:
    need = candidate["need"] or {}
    return {
        "kvgate.free_before_blocks": candidate["free_before"]["kv_blocks"],
        "kvgate.projected_blocks": need.get("kv_blocks"),
        "kvgate.free_after_blocks": candidate["free_after"]["kv_blocks"],
        "kvgate.free_before_bytes": candidate["free_before"]["kv_bytes"],
        "kvgate.projected_bytes": need.get("kv_bytes"),
        "kvgate.free_after_bytes": candidate["free_after"]["kv_bytes"],
    }


def _present(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _context(carrier: Mapping[str, str]) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier)


def _carrier_of(context: SpanContext) -> dict[str, str]:
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"}
    if context.trace_state:
        carrier["tracestate"] = context.trace_state.to_header()
    return carrier


def _counting(exporter: SpanExporter, on_result: Callable[[str, int], None]) -> SpanExporter:
    """``exporter`` with its results reported; defined here so that the SDK is imported only when spans are on."""
    from opentelemetry.sdk.trace.export import SpanExporter as Base
    from opentelemetry.sdk.trace.export import SpanExportResult as Result

    class Counting(Base):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            on_result("exported" if result is Result.SUCCESS else "failed", len(spans))
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Counting()
