"""One ``serve`` process without sockets: the real runtime over a ledger in memory, asked as Envoy asks.

Several of them on one ledger stand for several sidecars. What agents would report is published by the test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from extproc.accesslog import EntryKind, LogRecord
from extproc.config import load_text
from extproc.ledger.base import DeviceReport, Ended, ReplicaReport, ReplicaState
from extproc.ledger.inmemory import InMemoryLedger
from extproc.modelset import ModelSet
from extproc.runtime import Runtime
from extproc.telemetry.decisionlog import RingLog
from extproc.telemetry.metrics import Metrics
from extproc.types import Decision, RequestHead
from extproc.wire import pb

CHAT = "/v1/chat/completions"
BUFFERED = pb.ProtocolConfiguration.BUFFERED
MIB = 1024 * 1024


def tokens(count: int, *, max_tokens: int | None = 100, **more: Any) -> tuple[str, bytes]:
    """Path and body of a completion whose prompt has exactly ``count`` tokens, being given as ids."""
    body = {"model": "coder", "prompt": [1] * count, "max_tokens": max_tokens, **more}
    return "/v1/completions", json.dumps(body).encode()


def chat(text: str = "hello", **more: Any) -> tuple[str, bytes]:
    """Path and body of a chat."""
    return CHAT, json.dumps({"model": "coder", "messages": [{"role": "user", "content": text}], **more}).encode()


def fleet(engine: str = "vllm", *, lane: str = "{}", target: str = "{}", more: str = "") -> str:
    """A configuration: replica ``gpu-0`` of ``primary`` behind the alias ``coder``, and a remote for fallbacks."""
    replica = "{name: gpu-0, url: 'http://127.0.0.1:1', devices: [GPU-0]}"
    return (
        "targets:\n"
        f"  primary: {{<<: [{target}, {{engine: {engine}, replicas: [{replica}]}}]}}\n"
        "  far: {engine: openai, url: 'https://api.example.test'}\n"
        f"lanes: {{edit: {lane}}}\n"
        "aliases: {coder: {lane: edit, targets: [primary]}}\n"
        f"ledger: {{url: memory}}\n{more}"
    )


def report(
    replica: str = "gpu-0", *, tokens: int = 100_000, block: int = 16, age_s: float = 0.1, **more: Any
) -> ReplicaReport:
    """A scrape of an idle engine with a pool of that many tokens."""
    now_s = time.time() - age_s
    fields: dict[str, Any] = {
        "target": "primary", "engine": "vllm", "node": "n", "instance": "agent", "state": ReplicaState.READY,
        "scrape_start_at_s": now_s, "scrape_end_at_s": now_s + 0.05, "capacity_blocks": tokens // block,
        "block_tokens": block, "used_blocks": 0, "shows_used": True, "running": 0, "waiting": 0, **more,
    }  # fmt: skip
    return ReplicaReport(replica=replica, **fields)


def llamacpp(replica: str = "gpu-0", *, tokens: int, **more: Any) -> ReplicaReport:
    """The same of an engine that shows no use of its cells."""
    fields = {"block": 1, "engine": "llamacpp", "used_blocks": None, "shows_used": False, **more}
    return report(replica, tokens=tokens, **fields)


def device(free_mb: int | None, *, state: str = "ok", uuid: str = "GPU-0") -> DeviceReport:
    """A card of 80 GiB with so much free."""
    free = None if free_mb is None else free_mb * MIB
    return DeviceReport(uuid, "n", "agent", time.time() - 0.1, state, 80 * 1024 * MIB, free)


def ended(
    decision: Decision,
    how: Ended,
    *,
    status: int | None = None,
    usage: dict[str, int] | None = None,
    cluster: str = "gpu-0",
    took_s: float = 2.0,
) -> LogRecord:
    """The entry that Envoy writes at the end of the exchange that ``decision`` let go on; it began ``took_s`` ago."""
    fields: dict[str, Any] = dict(decision.metadata)
    return LogRecord(
        kind=EntryKind.END, rid=decision.rid, request_id="x", cluster=cluster, fields=fields, usage=usage or {}, how=how,
        status=status, began_us=0, began_age_s=took_s, ended_age_s=0.0, first_byte_age_s=took_s / 2, duration_s=took_s,
        response_bytes=400, attempts=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What Envoy was told: ``status`` is 0 where the request goes on, then ``plan`` says where."""

    status: int
    reason: str | None
    plan: tuple[str, ...]
    headers: Mapping[str, str]
    body: Any
    metadata: Mapping[str, Any]


@dataclass
class Stream:
    """A context that keeps what is written."""

    sent: Iterator[pb.ProcessingRequest]
    written: list[pb.ProcessingResponse] = field(default_factory=list)
    aborted: str = ""

    async def read(self) -> Any:
        """The next message of Envoy's."""
        return next(self.sent, grpc.aio.EOF)

    async def write(self, message: bytes) -> None:
        """Keep it."""
        self.written.append(pb.ProcessingResponse.FromString(message))

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """No trace headers."""
        return ()

    async def abort(self, _code: Any, details: str) -> None:
        """The stream ends with an error."""
        self.aborted = details


class Sidecar:
    """One process of ``serve``; ``ledger`` is shared where several stand side by side.

    ``more`` goes to the ``Runtime``: another clock, another spread of retry times.
    """

    def __init__(self, text: str, ledger: InMemoryLedger | None = None, **more: Any) -> None:
        self.config = load_text(text, where="test")
        self.ledger = ledger or InMemoryLedger(time.time, periodic_s=1.0)
        self.log = RingLog(1000)
        self.metrics = Metrics.from_config(self.config)
        models = ModelSet.load(self.config, where="test")
        self.runtime = Runtime(self.config, models, self.ledger, self.log, self.metrics, **more)
        self.runtime.gate.set(open_=True, wanted=True)

    async def see(self, *reports: ReplicaReport, devices: Sequence[DeviceReport] = ()) -> None:
        """What the agents published, as this process knows it."""
        await self.ledger.publish(reports, devices, 60)
        await self.runtime.fleet.refresh()

    async def decide(self, request: tuple[str, bytes], headers: Mapping[str, str] | None = None) -> Decision:
        """The decision for one body."""
        path, body = request
        admission = self.runtime.admission
        return await admission.decide(admission.begin(RequestHead("POST", path, dict(headers or {})), "envoy-1"), body)

    async def answer(self, *messages: pb.ProcessingRequest) -> list[Answer]:
        """What one ext_proc stream of these messages is answered, one by one."""
        stream = Stream(iter(messages))
        last = await self.runtime.service.process(stream, stream)
        await self.runtime.backlog.clear()  # the decision is told when its answer has left
        await self.runtime.service.settle()
        return [understood(message) for message in (*stream.written, last) if message.WhichOneof("response")]

    async def reserved(self) -> list[str]:
        """Rids of everything live."""
        views = (await self.ledger.snapshot()).replicas
        return [live.reservation.rid for name in views for live in await self.ledger.reservations(name)]

    def samples(self) -> dict[str, float]:
        """The exposition as name{labels} -> value."""
        lines = self.metrics.exposition()[1].decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}

    def close(self) -> None:
        """End its threads."""
        self.runtime.counting.close()


def head(
    path: str = CHAT, *, method: str = "POST", last: bool = False, mode: int | None = BUFFERED, **headers: str
) -> pb.ProcessingRequest:
    """Envoy's first message; ``mode`` None: an Envoy that announces no body mode."""
    message = pb.ProcessingRequest()
    fields = {":method": method, ":path": path, "content-type": "application/json", **headers}
    for name, value in fields.items():
        message.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=value.encode())
    message.request_headers.end_of_stream = last
    if mode is not None:
        message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
    return message


def body(data: bytes, *, last: bool = True) -> pb.ProcessingRequest:
    """A body message."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=last))


def trailers() -> pb.ProcessingRequest:
    """The request's trailers."""
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


def understood(message: pb.ProcessingResponse) -> Answer:
    """One answer in the terms of a decision."""
    metadata = dict(message.dynamic_metadata["kvgate"]) if "kvgate" in message.dynamic_metadata else {}
    plan: tuple[str, ...] = ()
    if "kvgate.plan" in message.dynamic_metadata:
        plan = tuple(group["name"] for group in message.dynamic_metadata["kvgate.plan"]["priority_groups"])
    immediate = message.immediate_response
    headers = {option.header.key: option.header.raw_value.decode() for option in immediate.headers.set_headers}
    parsed = json.loads(immediate.body) if immediate.body else None
    return Answer(immediate.status.code, metadata.get("reason"), plan, headers, parsed, metadata)
