"""Every decision is observed, however soon its stream is over: the service as it is, the ledger in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import grpc
import pytest

from extproc.config import load_text
from extproc.ledger.inmemory import InMemoryLedger
from extproc.modelset import ModelSet
from extproc.runtime import Runtime
from extproc.telemetry.decisionlog import RingLog
from extproc.telemetry.metrics import Metrics
from extproc.wire import pb

CONFIG = """
targets: {engine: {engine: vllm, replicas: [{name: engine-0, url: "http://127.0.0.1:1", kvTokens: 1000000}]}}
lanes: {edit: {maxOutputTokens: 20}}
aliases: {coder: {lane: edit, targets: [engine]}}
ledger: {url: memory}
noAgent: ledgerOnly
"""
BODY = b'{"model":"coder","messages":[{"role":"user","content":"hello"}],"max_tokens":5}'


class ClosedStream:
    """What grpc.aio shows of a stream that Envoy closes while the answer is being written, after ``messages`` of Envoy's."""

    def __init__(self, messages: Iterator[pb.ProcessingRequest]) -> None:
        self.sent = messages
        self.written = 0

    async def read(self) -> Any:
        """The next message of Envoy's."""
        return next(self.sent, grpc.aio.EOF)

    async def write(self, _message: bytes) -> None:
        """The first message goes through, the second is overtaken by the end of the stream."""
        self.written += 1
        if self.written == 2:
            raise asyncio.CancelledError

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """No trace headers."""
        return ()


def envoy(*, announced: bool) -> Iterator[pb.ProcessingRequest]:
    """What Envoy sends for one request; ``announced``: with its body mode, so that the answer ends the stream."""
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json")):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if announced:
        head.protocol_config.request_body_mode = pb.ProtocolConfiguration.BUFFERED
    body.request_body.body, body.request_body.end_of_stream = BODY, True
    yield head
    yield body


@pytest.mark.parametrize("announced", [True, False])
async def test_a_stream_that_ends_with_its_answer_is_observed(announced: bool) -> None:
    """A fast engine's answer ends the stream before the server's task has its turn again: the decision is logged."""
    config = load_text(CONFIG, where="test")
    log, ledger = RingLog(10), InMemoryLedger(time.time, periodic_s=1.0)
    runtime = Runtime(config, ModelSet.load(config, where="test"), ledger, log, Metrics.from_config(config))
    try:
        await runtime.fleet.refresh()
        runtime.gate.open = True
        stream = ClosedStream(envoy(announced=announced))
        with nullcontext() if announced else pytest.raises(asyncio.CancelledError):
            answer = await runtime.service.process(stream, stream)
            assert answer.WhichOneof("response") == "request_body"
        await runtime.backlog.clear()
        assert [row["outcome"] for row in await log.recent(10)] == ["admit"]
        assert b"kvgate_exchanges_undecided 0.0" in runtime.metrics.exposition()[1]
    finally:
        runtime.counting.close()
