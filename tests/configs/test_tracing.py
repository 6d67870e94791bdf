"""Through a real Envoy: spans that lead from the client's trace to kvgate's decision and to the engine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support import gateway as support

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def collector(spans: list[Any]) -> grpc.GenericRpcHandler:
    """The OTLP trace service; keeps every span."""

    def export(request: ExportTraceServiceRequest, _: grpc.ServicerContext) -> ExportTraceServiceResponse:
        spans.extend(span for r in request.resource_spans for s in r.scope_spans for span in s.spans)
        return ExportTraceServiceResponse()

    method = grpc.unary_unary_rpc_method_handler(
        export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    return grpc.method_handlers_generic_handler(service, {"Export": method})


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Until it holds or the time is over."""
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


def test_spans_continue_the_clients_trace_and_carry_the_rid() -> None:
    """With telemetry.otlpEndpoint every request is a span of the client's trace, tagged with rid, decision, target, lane."""
    spans: list[Any] = []
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([collector(spans)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with support.running(sections=f'telemetry: {{otlpEndpoint: "127.0.0.1:{port}"}}\n') as gateway:
            gateway.admit("gpu-a-0", rid="rid-traced")
            gateway.ask(headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
            wait_for(lambda: any(span.parent_span_id.hex() == SPAN for span in spans))
            sent = gateway.seen("a")[0].headers["traceparent"]
    finally:
        server.stop(0).wait(5)
    ingress = next(span for span in spans if span.parent_span_id.hex() == SPAN)
    tags = {a.key: a.value.string_value for a in ingress.attributes if a.key.startswith("kvgate.")}
    assert tags == {
        "kvgate.rid": "rid-traced",
        "kvgate.decision": "admit",
        "kvgate.target": "primary",
        "kvgate.lane": "fast",
    }
    assert (ingress.trace_id.hex(), sent.split("-")[1]) == (TRACE, TRACE)
