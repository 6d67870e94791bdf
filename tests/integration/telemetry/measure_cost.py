"""Measures what telemetry costs one decision, in microseconds of CPU: `python tests/integration/telemetry/measure_cost.py`.

The figures in docs/metrics.md and docs/tracing.md come from here.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[3]))

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from extproc.telemetry.decisionlog import QUEUE_ENTRIES, RingLog, end_record
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.record import decision_record
from extproc.telemetry.spans import Spans
from tests.unit.telemetry.samples import FALLBACK, snapshot

CARRIER = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
ROUNDS, CALLS = 7, 2000


class Discard(SpanExporter):
    """A collector that takes everything at once."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def cost(what: str, call: Callable[[], object]) -> None:
    """Print the median over rounds of the CPU time of one call."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time_ns() - started) / CALLS / 1000)
    print(f"{what:52} {median(rounds):8.1f} us")


async def main() -> None:
    """All figures, one a line."""
    metrics, ring = Metrics(), RingLog(QUEUE_ENTRIES)
    record = decision_record(FALLBACK, at_s=1.0, decision_ms=1.0, count_ms=0.5)
    off, on = Spans(), Spans(Discard())
    decision = replace(FALLBACK, rid="r")
    cost("metrics.decision", lambda: metrics.decision(decision, decision_s=0.001, count_s=0.0005))
    cost(
        "metrics.completion",
        lambda: metrics.completion(
            ended="complete",
            lane="l",
            target="t",
            output_tokens=9,
            expected_output_tokens=8,
            first_byte_s=0.1,
            duration_s=1.0,
        ),
    )
    cost("decision_record, two candidates", lambda: decision_record(decision, at_s=1.0, decision_ms=1.0, count_ms=0.5))
    cost("decision log: append", lambda: ring.append(record))
    cost("decision log: end", lambda: ring.end(end_record("r", ended="complete")))
    cost("spans off: decided", lambda: off.decided(record, carrier=CARRIER, start_ns=1, end_ns=2, ledger_ms=0.2))
    cost(
        "spans on, unsampled: decided",
        lambda: on.decided(record, carrier=UNSAMPLED, start_ns=1, end_ns=2, ledger_ms=0.2),
    )
    cost(
        "spans on, sampled: decided, two candidates",
        lambda: on.decided(record, carrier=CARRIER, start_ns=1, end_ns=2, ledger_ms=0.2),
    )
    cost("spans on, sampled: completed", lambda: on.completed("r", ended="complete", end_ns=2, carrier=CARRIER))
    on.close()
    metrics.fleet(snapshot()[0])
    cost("scrape of /metrics, two replicas", metrics.exposition)


if __name__ == "__main__":
    asyncio.run(main())
