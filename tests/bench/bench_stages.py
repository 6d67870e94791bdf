"""Where a decision's CPU goes, stage by stage: ``python -m tests.bench.bench_stages [--json FILE]``.

One process, no socket: the messages that Envoy sends for one request go through the parts of ``kvgate serve`` in their
order, with the ledger in memory. Each figure is the best of several rounds on this thread's CPU clock: with warm caches,
and ``cold``, after other memory was read as other processes do between two requests of a live server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from extproc.accesslog import LogRecord, read
from extproc.config import load_text
from extproc.gateway import names
from extproc.ledger.inmemory import InMemoryLedger
from extproc.modelset import ModelSet
from extproc.mutation import CONTINUES
from extproc.observe import Observer
from extproc.runtime import Runtime
from extproc.server import attributes_of, head_of, render
from extproc.telemetry.decisionlog import RingLog
from extproc.telemetry.metrics import Metrics
from extproc.types import Decision
from extproc.wire import pb
from tests.bench.bench_gateway import BODIES, CLUSTER, config_text, requests_of

ROUNDS, CALLS = 7, 300
#: Read through before each request of a cold round: larger than this core's own caches, as what runs between two requests is.
OTHERS = bytes(8 * 1024 * 1024)
#: What Envoy shows of a request from the bench's client.
HEADERS = {
    ":authority": "bench", ":path": "/v1/chat/completions", ":method": "POST", ":scheme": "http",
    "content-type": "application/json", "authorization": "Bearer secret", "user-agent": "bench",
    "x-forwarded-proto": "http", "x-request-id": "8a3f6f8e-6a3c-4a39-a2b3-0f7d52d8f0c1",
}  # fmt: skip


class Stages:
    """CPU seconds per stage of one round."""

    def __init__(self) -> None:
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Charge what happens inside to ``name``."""
        began = time.thread_time()
        yield
        self.spent_s[name] += time.thread_time() - began


def asked(body: bytes) -> tuple[bytes, bytes]:
    """The two messages of one request, as bytes."""
    first = pb.ProcessingRequest()
    for name, value in {**HEADERS, "content-length": str(len(body))}.items():
        first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    attributes = first.attributes[names.ATTRIBUTES_KEY].fields
    attributes[names.ATTRIBUTE_PEER].string_value = "127.0.0.1:40000"
    attributes[names.ATTRIBUTE_NODE].string_value = "envoy-1"
    attributes[names.ATTRIBUTE_TIME].string_value = "2026-11-29T15:00:00.123456+00:00"
    second = pb.ProcessingRequest()
    second.request_body.body = body
    second.request_body.end_of_stream = True
    return first.SerializeToString(), second.SerializeToString()


def logged(decision: Decision, kind: pb.AccessLogType, now_s: float) -> bytes:
    """One access-log message about the exchange of ``decision``, as bytes."""
    entry = pb.HTTPAccessLogEntry()
    common = entry.common_properties
    common.access_log_type = kind
    common.metadata.filter_metadata[names.DECISION_NAMESPACE].update(dict(decision.metadata))
    common.metadata.filter_metadata[names.USAGE_NAMESPACE].update({"input_tokens": 300, "output_tokens": 2})
    common.start_time.FromMicroseconds(int(now_s * 1e6))
    for span in ("time_to_first_upstream_tx_byte", "time_to_first_upstream_rx_byte", "time_to_last_upstream_rx_byte",
                 "duration"):  # fmt: skip
        getattr(common, span).FromMicroseconds(1500)
    common.upstream_cluster = CLUSTER
    common.stream_id = HEADERS["x-request-id"]
    entry.request.request_headers[names.HEADER_RID] = decision.rid
    entry.response.response_code.value = 200
    entry.response.response_body_bytes = 300
    message = pb.StreamAccessLogsMessage()
    message.http_logs.log_entry.append(entry)
    return message.SerializeToString()


async def one(runtime: Runtime, observer: Observer, messages: tuple[bytes, bytes], stages: Stages) -> None:
    """One request from its first message to its end, each stage on the clock."""
    with stages.of("read Envoy's two messages"):
        first, second = (pb.ProcessingRequest.FromString(data) for data in messages)
        head = head_of(first, attributes_of(first))
        CONTINUES["request_headers"].SerializeToString()
    pending = runtime.admission.begin(head, "envoy-1")
    began = time.thread_time()
    decision = await runtime.admission.decide(pending, second.request_body.body)
    whole = time.thread_time() - began
    assert decision.decision == "admit", decision
    known = {"parse the body": "parse", "count (bound)": "count", "reserve (in memory)": "ledger"}
    for name, key in known.items():
        stages.spent_s[name] += pending.timings_ms[key] / 1000.0
    stages.spent_s["classify, places, settle"] += whole - sum(pending.timings_ms[k] for k in known.values()) / 1000.0
    with stages.of("write the answer"):
        render(decision, "request_body", head).SerializeToString()
    with stages.of("metrics and decision record"):
        observer.decided(decision, pending, time.time_ns(), 1_000_000, None)
    now_s = time.time()
    ends = [logged(decision, kind, now_s) for kind in (pb.UpstreamEnd, pb.DownstreamEnd)]
    records: list[LogRecord | None] = []
    with stages.of("read two access-log entries"):
        for data in ends:
            message = pb.StreamAccessLogsMessage.FromString(data)
            records += [read(entry, now_s) for entry in message.http_logs.log_entry]
    with stages.of("complete and learn"):
        for record in records:
            assert record is not None
            assert record.rid == decision.rid
            runtime.completion.record(record, "envoy-1")


async def measure() -> dict[str, dict[str, float]]:
    """Body size -> stage -> microseconds of CPU per request."""
    config = load_text(config_text(Path("/nowhere"), 1, "memory", "bench", None), where="bench")
    metrics = Metrics.from_config(config, version=version("kvgate"))
    log = RingLog(config.telemetry.decision_log)
    ledger = InMemoryLedger(time.time, periodic_s=config.envoy.periodic_s)
    runtime = Runtime(config, ModelSet.load(config, where="bench"), ledger, log, metrics)
    # Stage timings inside the decision on the same clock as the rest.
    runtime.admission._clock_s = runtime.admission._placing._clock_s = time.thread_time
    observer = Observer(metrics, runtime.spans, log, runtime.fleet)
    await runtime.fleet.refresh()
    figures = {}
    for (name, size), cold in itertools.product(BODIES.items(), (False, True)):
        make, rounds = requests_of(size), []
        for _ in range(ROUNDS):
            stages = Stages()
            for _ in range(CALLS):
                messages = asked(make().partition(b"\r\n\r\n")[2])
                if cold:
                    OTHERS.count(b"\xff")
                await one(runtime, observer, messages, stages)
            await runtime.completion.flush()
            rounds.append({stage: spent / CALLS * 1e6 for stage, spent in stages.spent_s.items()})
        shown = f"{name}, cold" if cold else name
        figures[shown] = {stage: min(each[stage] for each in rounds) for stage in rounds[0]}
        figures[shown]["sum"] = sum(figures[shown].values())
    runtime.counting.close()
    return figures


def main() -> None:
    """Print the figures; ``--json`` also writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = asyncio.run(measure())
    for body, stages in figures.items():
        for stage, cost in stages.items():
            print(f"{body:>11}  {stage:<30} {cost:7.1f} us")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
