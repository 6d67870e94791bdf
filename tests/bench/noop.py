"""An ext_proc server that decides nothing: ``python -m tests.bench.noop unix:PATH CLUSTER [--lean]``.

The floor of what any ext_proc server in this Python costs: grpc.aio with the wire messages, event loop and options of
``kvgate serve``, each body answered with one constant plan of the size of a real one, each access-log entry read and
dropped. ``--lean``: with the calls of gRPC that kvgate makes; messages are read from the call itself, and the answer
leaves in one batch with the end of its stream. Prints one line of JSON when it listens.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from extproc import wire
from extproc.gateway import names
from extproc.mutation import CONTINUES
from extproc.wire import pb

OPTIONS = [
    ("grpc.max_receive_message_length", 34_603_008),
    ("grpc.max_concurrent_streams", 100_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def constant_plan(cluster: str) -> pb.ProcessingResponse:
    """An admission to ``cluster`` with the headers and metadata that kvgate writes."""
    answer = pb.ProcessingResponse()
    common = answer.request_body.response
    common.clear_route_cache = True
    for key, value in ((names.HEADER_RID, "0123456789abcdef01234567"), (names.HEADER_MAX_RETRIES, "0")):
        option = common.header_mutation.set_headers.add(append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = key, value.encode()
    texts = dict.fromkeys(("decision", "target", "replica", "endpoint", "lane", "class", "pool", "owner"), "some-name")
    texts |= {"rid": "0123456789abcdef01234567", "request_id": "12345678-1234-1234-1234-123456789012@1764400000000000"}
    counts = ("input_tokens", "expected_output_tokens", "cap_blocks", "blocks", "input_blocks", "kv_bytes",
              "prefill_charge", "sequences", "reserved_at", "cap_s", "expected_s", "max_output_tokens")  # fmt: skip
    answer.dynamic_metadata.update({
        names.DECISION_NAMESPACE: {**texts, **dict.fromkeys(counts, 12345.0)},
        names.PLAN_NAMESPACE: names.plan([cluster]),
    })  # fmt: skip
    return answer


class NoOp:
    """The handlers."""

    def __init__(self, cluster: str, *, lean: bool) -> None:
        self._plan = constant_plan(cluster)
        self._lean = lean

    async def process(self, requests: AsyncIterator[pb.ProcessingRequest], context: Any) -> None:
        """ExternalProcessor.Process."""
        async for message in requests:
            stage = message.WhichOneof("request")
            await context.write(self._plan if stage == "request_body" else CONTINUES[str(stage)])

    async def process_lean(self, _requests: AsyncIterator[pb.ProcessingRequest], context: Any) -> pb.ProcessingResponse:
        """The same, as ``extproc.server`` does it."""
        while (message := await context.read()) is not grpc.aio.EOF:
            stage = message.WhichOneof("request")
            if stage == "request_body":
                return self._plan
            await context.write(CONTINUES[str(stage)].SerializeToString())
        return pb.ProcessingResponse()

    async def log(self, messages: AsyncIterator[pb.StreamAccessLogsMessage], _context: Any) -> Any:
        """AccessLogService.StreamAccessLogs."""
        async for _ in messages:
            pass
        return pb.StreamAccessLogsResponse()

    async def check(self, _request: pb.HealthCheckRequest, _context: Any) -> pb.HealthCheckResponse:
        """Health.Check."""
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The three services under Envoy's names."""
        encode: Any = lambda message: message.SerializeToString()  # noqa: E731
        read = pb.ProcessingRequest.FromString
        process = grpc.stream_stream_rpc_method_handler(self.process, read, encode)
        if self._lean:
            process = grpc.stream_unary_rpc_method_handler(self.process_lean, read, encode)
        log = grpc.stream_unary_rpc_method_handler(self.log, pb.StreamAccessLogsMessage.FromString, encode)
        check = grpc.unary_unary_rpc_method_handler(self.check, pb.HealthCheckRequest.FromString, encode)
        return [
            grpc.method_handlers_generic_handler(wire.EXT_PROC_SERVICE, {wire.EXT_PROC_PROCESS: process}),
            grpc.method_handlers_generic_handler(wire.ACCESS_LOG_SERVICE, {wire.ACCESS_LOG_STREAM: log}),
            grpc.method_handlers_generic_handler(wire.HEALTH_SERVICE, {wire.HEALTH_CHECK: check}),
        ]


async def serve(address: str, cluster: str, *, lean: bool) -> None:
    """Serve on ``address`` until SIGTERM."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(NoOp(cluster, lean=lean).handlers())
    server.add_insecure_port(address)
    await server.start()
    print(json.dumps({"ready": address}), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    run = asyncio.run if "--asyncio" in sys.argv else uvloop.run
    run(serve(sys.argv[1], sys.argv[2], lean="--lean" in sys.argv))
