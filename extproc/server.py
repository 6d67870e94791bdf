"""The gRPC side of ``kvgate serve``: ext_proc, the access-log service, health; one event loop, no blocking call.

Owns the translation of messages into exchange events and the guard around each stream: a fault of ours before
the body answer becomes an immediate JSON error with the reservation released; after it, it is logged and the
reservation lives on, because only an end record ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from extproc import wire
from extproc.accesslog import read
from extproc.admission import Admission
from extproc.backlog import Backlog
from extproc.completion import Completion
from extproc.dialects import error_body
from extproc.exchange import Action, Exchange
from extproc.gate import Gate
from extproc.gateway.names import ATTRIBUTE_NODE, ATTRIBUTE_PEER, ATTRIBUTE_TIME, ATTRIBUTES_KEY, LOG_REQUEST
from extproc.mutation import CONTINUES, go_on, hold, refuse
from extproc.placing import Pending
from extproc.policy.refusals import retry_after_seconds
from extproc.telemetry.spans import GrpcMetadata
from extproc.types import Decision, RequestHead
from extproc.wire import pb

log = logging.getLogger("kvgate.server")

#: Room above the largest body for headers and framing.
MESSAGE_SLACK_BYTES = 1024 * 1024
#: Every response in flight holds one stream.
MAX_CONCURRENT_STREAMS = 100_000
#: HTTP/2 keepalive of Envoy's own connections is 5 s; ours only has to notice a host that vanished.
KEEPALIVE_MS = 20_000

#: gRPC shows a reset as the end of what can be read, and a moment later by cancelling the call's task.
RESET_S = 0.1

#: ``CONTINUES`` as gRPC sends them: all answers but a call's last one are written as bytes.
_CONTINUES = {stage: answer.SerializeToString() for stage, answer in CONTINUES.items()}
#: The last message of a stream that outlives its answer; Envoy has ended it by then and reads nothing more.
_NOTHING_MORE = pb.ProcessingResponse()


class Observer(Protocol):
    """Who is told about decisions (metrics, spans, the decision log)."""

    @property
    def traces(self) -> bool:
        """Whether it wants to know a stream's gRPC metadata, which hold Envoy's trace context."""
        ...

    def decided(
        self, decision: Decision, pending: Pending, answered_ns: int, elapsed_ns: int, metadata: GrpcMetadata | None
    ) -> None:
        """A decision was answered at ``answered_ns`` (Unix time)."""
        ...

    def internal_error(self, where: str) -> None:
        """A fault of ours was caught at the outer border of a request."""
        ...

    def stream_opened(self) -> None:
        """An ext_proc stream began."""
        ...

    def stream_closed(self) -> None:
        """An ext_proc stream ended."""
        ...

    def exchange_began(self) -> None:
        """A request waits for its decision."""
        ...

    def exchange_decided(self) -> None:
        """It has one, or its stream ended without."""
        ...


@dataclass(slots=True)
class _Call:
    """One ext_proc stream: ``pending`` is set while a reservation may exist whose answer has not left.

    ``one_body``: Envoy announced that the whole body comes in one message.
    """

    exchange: Exchange
    one_body: bool = False
    owner: str = ""
    pending: Pending | None = None
    written: bool = False


class Service:
    """Handlers of one process."""

    def __init__(
        self,
        admission: Admission,
        completion: Completion,
        observer: Observer,
        gate: Gate,
        backlog: Backlog,
        max_body_bytes: int,
    ) -> None:
        self._admission = admission
        self._completion = completion
        self._observer = observer
        self._gate = gate
        self._backlog = backlog
        self._max_body_bytes = max_body_bytes
        self._background: set[asyncio.Task[None]] = set()
        #: Tasks of streams whose answer is written; shutdown ends them without waiting for their responses.
        self._answered: set[asyncio.Task[Any]] = set()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Generic handlers under the full method names that Envoy and health checkers call.

        To gRPC ``process`` is a call with one response, because only that leaves in one batch with the end of the stream.
        On the wire it is the stream that Envoy calls, with the answers written before it.
        """
        return [
            grpc.method_handlers_generic_handler(
                wire.EXT_PROC_SERVICE,
                {
                    wire.EXT_PROC_PROCESS: grpc.stream_unary_rpc_method_handler(
                        self.process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
                    )
                },
            ),
            grpc.method_handlers_generic_handler(
                wire.ACCESS_LOG_SERVICE,
                {
                    wire.ACCESS_LOG_STREAM: grpc.stream_unary_rpc_method_handler(
                        self.access_log,
                        None,  # messages are read later, many in a row
                        pb.StreamAccessLogsResponse.SerializeToString,
                    )
                },
            ),
            grpc.method_handlers_generic_handler(
                wire.HEALTH_SERVICE,
                {
                    wire.HEALTH_CHECK: grpc.unary_unary_rpc_method_handler(
                        self.health_check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
                    ),
                    wire.HEALTH_WATCH: grpc.unary_stream_rpc_method_handler(
                        self.health_watch, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
                    ),
                },
            ),
        ]

    async def process(self, _requests: AsyncIterator[pb.ProcessingRequest], context: Any) -> pb.ProcessingResponse:
        """One exchange; returns its last message, which ends the stream. That end means nothing to the reservation.

        Messages are read from the call itself, which costs less than iterating over it.
        """
        call = _Call(Exchange(self._max_body_bytes))
        task = asyncio.current_task()
        self._observer.stream_opened()
        self._observer.exchange_began()
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                answer = await self._step(call, message, context)
                if answer is not None:
                    if answer.HasField("immediate_response") or (call.one_body and _ends(message)):
                        # Nothing more can come, and Envoy resets a stream as soon as it reads a refusal. gRPC loses 80 bytes
                        # and more for ever with all that is sent on a stream that was reset (grpc/grpc#43360): so the
                        # answer and the end leave as one.
                        return answer
                    await context.write(answer.SerializeToString())
                    if task is not None:
                        self._answered.add(task)
                # Where the stream lives as long as its response, the request's body must not.
                del message, answer
            # Where that was a reset, nothing is sent after it.
            await asyncio.sleep(RESET_S)
        except asyncio.CancelledError:
            # Shutdown ends answered streams as if they were complete; Envoy's own cancellations go their way.
            if self._gate.open or not call.written or task is None:
                raise
            task.uncancel()
        finally:
            self._observer.stream_closed()
            if not call.written:
                self._observer.exchange_decided()
            if task is not None:
                self._answered.discard(task)
            if call.pending is not None:
                self._later(self._admission.abandon(call.pending))
        return _NOTHING_MORE

    async def _step(self, call: _Call, message: pb.ProcessingRequest, context: Any) -> pb.ProcessingResponse | None:
        """The decision, where it is due with this message of Envoy's; any other message is answered here."""
        stage = message.WhichOneof("request")
        if stage is None:
            return None
        exchange = call.exchange
        if stage == "request_headers":
            attributes = attributes_of(message)
            call.owner = attributes.get(ATTRIBUTE_NODE, "")
            whole = _whole_body(message)
            call.one_body = message.HasField("protocol_config") and whole
            last = message.request_headers.end_of_stream
            action = exchange.headers(head_of(message, attributes), last=last, whole_body=whole)
        else:
            action = self._feed(exchange, message, stage)
        if action is Action.CONTINUE:
            await context.write(_CONTINUES[stage])
            return None
        if action is Action.PROTOCOL_ERROR or exchange.head is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"unexpected {stage}")
            return None
        call.pending = pending = self._admission.begin(exchange.head, call.owner)
        started_ns = time.perf_counter_ns()
        decision, answer = await self._answer(pending, exchange, action, stage, context)
        elapsed_ns = time.perf_counter_ns() - started_ns
        # From here on Envoy may have the answer, whatever becomes of this call (it can end long after, where this
        # process was stopped in between): only the access log knows.
        call.written, call.pending = True, None
        self._observer.exchange_decided()
        # Whatever becomes of the call cannot keep the decision from being told.
        metadata = context.invocation_metadata() if self._observer.traces else None
        self._backlog.add(partial(self._observe, decision, pending, time.time_ns(), elapsed_ns, metadata))
        if pending.touched_ledger:
            self._completion.answered(pending.who)
        exchange.forget_body()
        return answer

    async def access_log(self, _messages: AsyncIterator[bytes], context: Any) -> pb.StreamAccessLogsResponse:
        """Entries of one Envoy worker and logger; the first message alone names the Envoy and the log."""
        owner: str | None = None
        heard = False
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                if owner is None:
                    identifier = pb.StreamAccessLogsMessage.FromString(data).identifier
                    owner = identifier.node.id
                    # Silence on any other log proves nothing: only this one tells what is alive.
                    heard = identifier.log_name == LOG_REQUEST
                    if heard:
                        self._completion.attach(owner)
                self._backlog.add(partial(self._take, data, time.time(), owner))
        finally:
            if owner is not None and heard:
                self._completion.detach(owner)
        return pb.StreamAccessLogsResponse()

    def _take(self, data: bytes, now_s: float, owner: str) -> None:
        """Entries that came at ``now_s``."""
        try:
            entries = pb.StreamAccessLogsMessage.FromString(data).http_logs.log_entry
        except DecodeError:
            log.exception("an access-log message cannot be read")
            self._observer.internal_error("access_log")
            return
        for entry in entries:
            try:
                record = read(entry, now_s)
                if record is not None:
                    self._completion.record(record, owner)
            except Exception:
                # The outer border of one record: the others still have to be heard.
                log.exception("an access-log record failed")
                self._observer.internal_error("access_log")

    async def health_check(self, _request: pb.HealthCheckRequest, _context: Any) -> pb.HealthCheckResponse:
        """Whether this process takes new work; independent of Redis, whose absence is a posture, not an illness."""
        return self._health()

    async def health_watch(self, _request: pb.HealthCheckRequest, context: Any) -> None:
        """The same, as a stream of changes."""
        while True:
            changed = self._gate.changed()
            await context.write(self._health())
            await changed.wait()

    async def settle(self) -> None:
        """End the streams that are answered, then wait for releases that are still on their way."""
        for task in tuple(self._answered):
            task.cancel()
        while self._background:
            await asyncio.gather(*tuple(self._background), return_exceptions=True)

    def _health(self) -> pb.HealthCheckResponse:
        status = pb.HealthCheckResponse.SERVING if self._gate.wanted else pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=status)

    def _feed(self, exchange: Exchange, message: pb.ProcessingRequest, stage: str) -> Action:
        if stage == "request_body":
            return exchange.body_piece(message.request_body.body, last=message.request_body.end_of_stream)
        if stage == "request_trailers":
            return exchange.request_trailers()
        return exchange.response_message()

    async def _answer(
        self, pending: Pending, exchange: Exchange, action: Action, stage: str, context: Any
    ) -> tuple[Decision, pb.ProcessingResponse]:
        try:
            if not self._gate.open:
                decision = self._admission.not_ready(pending)
            elif action is Action.UNUSABLE_MODE:
                log.error("Envoy's request_body_mode must be BUFFERED; configure it as `kvgate envoy` prints it")
                decision = self._admission.failed(pending)
            elif action is Action.TOO_LARGE:
                decision = self._admission.too_large(pending)
            else:
                decision = await self._admission.decide(
                    pending, exchange.body, lambda wait_ms: context.write(hold(wait_ms).SerializeToString())
                )
            return decision, render(decision, stage, pending.head)
        except Exception:
            # The outer border of one request: whatever it was, the client gets an answer and nothing stays reserved.
            log.exception("decision failed", extra={"rid": pending.who.rid})
            self._observer.internal_error("decision")
            self._later(self._admission.abandon(pending))
            decision = self._admission.failed(pending)
            return decision, render(decision, stage, pending.head)

    def _observe(
        self, decision: Decision, pending: Pending, answered_ns: int, elapsed_ns: int, metadata: GrpcMetadata | None
    ) -> None:
        try:
            self._observer.decided(decision, pending, answered_ns, elapsed_ns, metadata)
        except Exception:
            # Telemetry never costs a request its answer.
            log.exception("telemetry failed", extra={"rid": pending.who.rid})
            self._observer.internal_error("telemetry")

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def render(decision: Decision, stage: str, head: RequestHead) -> pb.ProcessingResponse:
    """The message for ``decision``; refusals in the client's dialect."""
    refusal = decision.refusal
    if refusal is None:
        return go_on(decision, stage=stage)
    retry_ms = refusal.retry_after_ms
    body, headers = error_body(
        decision.dialect,
        head=head,
        status=refusal.status,
        reason=str(refusal.reason),
        code=refusal.code,
        message=refusal.message,
        param=refusal.param,
        retry_after_ms=retry_ms,
        retry_after_s=retry_after_seconds(retry_ms) if retry_ms is not None else None,
        request_id=head.request_id,
        # An upper bound is no figure to tell a client as a fact; the message says what it is.
        input_tokens=None if decision.count_source == "bound" else decision.input_tokens,
        limit_tokens=refusal.limit_tokens,
    )
    return refuse(decision, status=refusal.status, headers=headers, body=body)


def head_of(message: pb.ProcessingRequest, attributes: Mapping[str, str]) -> RequestHead:
    """The HTTP head in a request-headers message; repeated headers are joined, the query string is cut off.

    ``attributes`` are Envoy's own words about the exchange, see ``attributes_of``.
    """
    headers: dict[str, str] = {}
    pseudo: dict[str, str] = {}
    for header in message.request_headers.headers.headers:
        name, raw = header.key, header.raw_value
        value = raw.decode("utf-8", "replace") if raw else header.value
        if name.startswith(":"):
            pseudo[name] = value
        elif name in headers:
            headers[name] = f"{headers[name]}, {value}"
        else:
            headers[name] = value
    return RequestHead(
        method=pseudo.get(":method", ""),
        path=pseudo.get(":path", "/").partition("?")[0],
        headers=headers,
        request_id=headers.get("x-request-id", ""),
        peer_address=attributes.get(ATTRIBUTE_PEER, "").rpartition(":")[0].strip("[]"),
        began_us=_microseconds(attributes.get(ATTRIBUTE_TIME, "")),
    )


def _ends(message: pb.ProcessingRequest) -> bool:
    """Whether the request is over with this message."""
    return bool(message.request_headers.end_of_stream or message.request_body.end_of_stream)


def _whole_body(message: pb.ProcessingRequest) -> bool:
    """Whether the body will come in one message, as Envoy announces; an Envoy that announces nothing is believed."""
    mode = message.protocol_config.request_body_mode
    return not message.HasField("protocol_config") or bool(mode == pb.ProtocolConfiguration.BUFFERED)


def attributes_of(message: pb.ProcessingRequest) -> dict[str, str]:
    """The texts among the attributes that Envoy sends with the first message of a stream, by name."""
    if ATTRIBUTES_KEY not in message.attributes:
        return {}
    return {name: value.string_value for name, value in message.attributes[ATTRIBUTES_KEY].fields.items()}


def _microseconds(timestamp: str) -> int:
    """Whole microseconds since the epoch of an RFC 3339 time; 0 where it is none."""
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1e6)
    except ValueError:
        return 0


async def start(
    service: Service, listen: str, max_body_bytes: int, on_bound: Callable[[str], None] = lambda _: None
) -> grpc.aio.Server:
    """Bind ``listen`` (``unix:PATH`` or host:port, port 0 for any) and serve."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_body_bytes + MESSAGE_SLACK_BYTES),
            ("grpc.max_send_message_length", max_body_bytes + MESSAGE_SLACK_BYTES),
            ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
        ],
    )
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_insecure_port(listen)
    await server.start()
    on_bound(listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}")
    return server
