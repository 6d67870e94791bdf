"""Spans over OTLP/gRPC: to a collector that is there, one that is away, one that comes back."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from extproc.config import TelemetryConfig
from extproc.telemetry.record import decision_record
from extproc.telemetry.spans import Spans
from tests.support.valkey import free_port
from tests.unit.telemetry.samples import FALLBACK

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
#: An export that gets no answer is given up after this long.
EXPORT_S = 10
CARRIER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector(TraceServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

    def Export(self, request: ExportTraceServiceRequest, _context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.requests.put(request)
        return ExportTraceServiceResponse()


def serve(collector: Collector, port: int) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(collector, server)
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    server.start()
    return server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches leave after 50 ms instead of 5 s; the interpreter's switch interval is put back."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def _export_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")}


def decide(spans: Spans, rid: str) -> None:
    record = decision_record(replace(FALLBACK, rid=rid), at_s=2.0, decision_ms=1.0, count_ms=0.5)
    spans.decided(record, carrier=CARRIER, start_ns=10**9, end_ns=2 * 10**9)


@pytest.mark.usefixtures("quick")
def test_a_collector_gets_the_spans() -> None:
    """Decision and completion arrive in Envoy's trace, with kvgate's resource."""
    collector, port = Collector(), free_port()
    server = serve(collector, port)
    results: list[tuple[str, int]] = []
    spans = Spans.from_config(
        TelemetryConfig(otlp_endpoint=f"127.0.0.1:{port}"), version="1.2.3", on_result=lambda *r: results.append(r)
    )
    decide(spans, "rid-1")
    spans.completed("rid-1", ended="complete", end_ns=3 * 10**9)
    spans.close()
    server.stop(None)
    found = []
    while not collector.requests.empty():
        for resource in collector.requests.get().resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert (attributes["service.name"], attributes["service.version"]) == ("kvgate", "1.2.3")
            found += [span for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in found] == ["kvgate.decide", "kvgate.complete"]
    assert {span.trace_id.hex() for span in found} == {TRACE}
    assert found[0].parent_span_id.hex() == PARENT
    assert len(found[0].events) == 2
    assert sum(count for result, count in results if result == "exported") == 2


@pytest.mark.usefixtures("quick")
def test_exporting_does_not_keep_the_interpreter_for_long() -> None:
    """With an endpoint, the export thread yields to the event loop within half a millisecond."""
    spans = Spans.from_config(TelemetryConfig(otlp_endpoint=f"127.0.0.1:{free_port()}"))
    assert sys.getswitchinterval() <= 0.0005
    spans.close()


@pytest.mark.usefixtures("quick")
def test_a_collector_that_is_away_costs_no_request_anything() -> None:
    """Nobody listens: no span waits for the ten seconds that one export may take, and closing waits as long as told."""
    before = _export_threads()
    spans = Spans.from_config(TelemetryConfig(otlp_endpoint=f"127.0.0.1:{free_port()}"))
    started = time.monotonic()
    for index in range(3000):
        decide(spans, f"r{index}")
    assert time.monotonic() - started < 60  # an export is tried for EXPORT_S, and there are thousands
    started = time.monotonic()
    spans.close(timeout_s=0.3)
    assert time.monotonic() - started < EXPORT_S
    for thread in _export_threads() - before:
        thread.join(60)
    assert _export_threads() <= before


@pytest.mark.usefixtures("quick")
def test_a_collector_that_comes_later_gets_what_is_decided_then() -> None:
    """After an outage spans flow again without a restart."""
    collector, port = Collector(), free_port()
    spans = Spans.from_config(TelemetryConfig(otlp_endpoint=f"127.0.0.1:{port}"))
    decide(spans, "early")
    time.sleep(0.3)
    server = serve(collector, port)
    try:
        arrived = False
        for _ in range(600):
            decide(spans, "late")
            try:
                collector.requests.get(timeout=0.2)
                arrived = True
                break
            except queue.Empty:
                continue
        assert arrived
    finally:
        spans.close()
        server.stop(None)
