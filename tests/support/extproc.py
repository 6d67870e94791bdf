"""A tiny real ext_proc + access-log + health server that decides by a function of the test."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from extproc import wire
from extproc.gateway import names
from extproc.wire import pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: Envoy pings every 5 s on streams that carry no data for long; gRPC's default policy answers "too many pings".
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.max_ping_strikes", 0),
]


@dataclass(frozen=True)
class Asked:
    """What Envoy showed of one request: its header map, its body (None: no body), its attributes."""

    headers: dict[str, str]
    body: bytes | None
    attributes: dict[str, Any]


@dataclass
class Verdict:
    """What to answer: a plan, or with ``status`` an immediate refusal."""

    plan: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    status: int = 0


class Decider:
    """The server's memory: every question, every access-log entry (log name, entry)."""

    def __init__(self, decide: Callable[[Asked], Verdict]) -> None:
        self.decide = decide
        self.asked: list[Asked] = []
        self.entries: list[tuple[str, Any]] = []
        self.nodes: set[str] = set()
        self.address = ""

    def entries_where(self, wanted: Callable[[str, Any], bool], *, count: int = 1, within_s: float = 60.0) -> list[Any]:
        """Wait for ``count`` access-log entries that ``wanted(log name, entry)`` likes; all there are."""
        until = time.monotonic() + within_s
        while True:
            found = [entry for name, entry in list(self.entries) if wanted(name, entry)]
            if len(found) >= count or time.monotonic() > until:
                return found
            time.sleep(0.01)

    def process(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """ExternalProcessor.Process."""
        headers: dict[str, str] = {}
        attributes: dict[str, Any] = {}
        for message in requests:
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                headers = {
                    h.key: (h.raw_value or h.value.encode()).decode() for h in message.request_headers.headers.headers
                }
                attributes = dict(message.attributes[names.ATTRIBUTES_KEY])
                if message.request_headers.end_of_stream:
                    yield self._answer(Asked(headers, None, attributes), "request_headers")
                else:
                    yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
            elif kind == "request_body":
                yield self._answer(Asked(headers, message.request_body.body, attributes), "request_body")

    def _answer(self, asked: Asked, stage: str) -> Any:
        self.asked.append(asked)
        verdict = self.decide(asked)
        answer = pb.ProcessingResponse()
        spaces = {names.DECISION_NAMESPACE: verdict.metadata}
        if verdict.plan:
            spaces[names.PLAN_NAMESPACE] = names.plan(verdict.plan)
        answer.dynamic_metadata.update(spaces)
        mutation = pb.HeaderMutation()
        for key, value in verdict.headers.items():
            item = mutation.set_headers.add(append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
            item.header.key, item.header.raw_value = key, value.encode()
        if verdict.status:
            answer.immediate_response.status.code = verdict.status
            answer.immediate_response.headers.CopyFrom(mutation)
            answer.immediate_response.body = verdict.body or b""
            return answer
        common = getattr(answer, stage).response
        common.header_mutation.CopyFrom(mutation)
        common.clear_route_cache = True
        if verdict.body is not None:
            common.body_mutation.body = verdict.body
        return answer

    def log(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """AccessLogService.StreamAccessLogs."""
        name = ""
        for message in messages:
            if message.HasField("identifier"):
                name = message.identifier.log_name
                self.nodes.add(message.identifier.node.id)
            self.entries += [(name, entry) for entry in message.http_logs.log_entry]
        return pb.StreamAccessLogsResponse()

    def check(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Health.Check."""
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING)


def handlers(decider: Decider) -> list[grpc.GenericRpcHandler]:
    """The three services under Envoy's names."""
    encode: Any = lambda message: message.SerializeToString()  # noqa: E731
    process = grpc.stream_stream_rpc_method_handler(decider.process, pb.ProcessingRequest.FromString, encode)
    log = grpc.stream_unary_rpc_method_handler(decider.log, pb.StreamAccessLogsMessage.FromString, encode)
    check = grpc.unary_unary_rpc_method_handler(decider.check, pb.HealthCheckRequest.FromString, encode)
    return [
        grpc.method_handlers_generic_handler(wire.EXT_PROC_SERVICE, {wire.EXT_PROC_PROCESS: process}),
        grpc.method_handlers_generic_handler(wire.ACCESS_LOG_SERVICE, {wire.ACCESS_LOG_STREAM: log}),
        grpc.method_handlers_generic_handler(wire.HEALTH_SERVICE, {wire.HEALTH_CHECK: check}),
    ]


@contextmanager
def deciding(decide: Callable[[Asked], Verdict], address: str) -> Iterator[Decider]:
    """Serve on ``address`` (``unix:PATH``)."""
    decider = Decider(decide)
    server = grpc.server(ThreadPoolExecutor(32), options=OPTIONS)
    server.add_generic_rpc_handlers(handlers(decider))
    server.add_insecure_port(address)
    server.start()
    try:
        yield decider
    finally:
        server.stop(0).wait(5)
