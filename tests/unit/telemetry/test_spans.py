"""Spans as an exporter gets them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from extproc.config import TelemetryConfig
from extproc.telemetry import names
from extproc.telemetry import spans as module
from extproc.telemetry.record import decision_record
from extproc.telemetry.spans import Spans, operation_of, trace_carrier
from extproc.types import Decision, Reason, Refusal
from tests.unit.telemetry.samples import FALLBACK, REJECT, TO_REMOTE

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CARRIER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


class Fixture:
    """Spans into memory, and the results they report."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.results: list[tuple[str, int]] = []
        self.spans = Spans(self.exporter, version="1.2.3", on_result=lambda *result: self.results.append(result))

    def decide(self, decision: Decision, carrier: dict[str, str] | None = None) -> None:
        record = decision_record(decision, at_s=2.0, decision_ms=1.0, count_ms=0.5, request_id="x-1")
        self.spans.decided(record, carrier=carrier or {}, start_ns=10**9, end_ns=2 * 10**9, ledger_ms=0.25)

    def finished(self) -> Sequence[ReadableSpan]:
        self.spans.close()
        return self.exporter.get_finished_spans()


@pytest.fixture
def fixture() -> Iterator[Fixture]:
    found = Fixture()
    yield found
    found.spans.close()


def test_the_decision_span_is_a_child_of_envoys(fixture: Fixture) -> None:
    """It continues Envoy's trace under its ext_proc span, with the decision's own times."""
    fixture.decide(FALLBACK, CARRIER)
    (span,) = fixture.finished()
    assert (span.name, span.kind) == ("kvgate.decide", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT  # type: ignore[union-attr]
    assert span.context.trace_state.to_header() == "vendor=1"
    assert (span.start_time, span.end_time) == (10**9, 2 * 10**9)
    assert span.resource.attributes["service.name"] == "kvgate"


def test_the_decision_span_says_what_was_decided_and_why(fixture: Fixture) -> None:
    """Outcome, reason, GenAI attributes and the three figures stand on the span."""
    fixture.decide(FALLBACK, CARRIER)
    (span,) = fixture.finished()
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "qwen-coder",
        "gen_ai.request.max_tokens": 1200,
        "kvgate.rid": "rid-1",
        "kvgate.request_id": "x-1",
        "kvgate.outcome": "fallback:qwen-14b-q4",
        "kvgate.reason": "insufficient_headroom",
        "kvgate.input_tokens": 4123,
        "kvgate.count_ms": 0.5,
        "kvgate.ledger_ms": 0.25,
        "kvgate.free_before_blocks": 900,
        "kvgate.projected_blocks": 278,
        "kvgate.free_after_blocks": 622,
        "kvgate.projected_bytes": 72876032,
    }
    attributes = dict(span.attributes or {})
    assert expected == {key: attributes.get(key) for key in expected}
    assert "error.type" not in attributes


def test_every_candidate_is_an_event_with_its_figures(fixture: Fixture) -> None:
    """Each candidate shows what it needed, free before, projected, free after, its score and what refused it."""
    fixture.decide(FALLBACK, CARRIER)
    (span,) = fixture.finished()
    first, second = span.events
    assert (first.name, first.timestamp) == ("kvgate.candidate", 2 * 10**9)
    assert dict(first.attributes or {}) == {
        "kvgate.target": "primary-32b",
        "kvgate.replica": "gpu-a-0",
        "kvgate.score": 0.81,
        "kvgate.refused_by": "insufficient_headroom",
        "kvgate.prefill_tokens": 4123,
        "kvgate.sequences": 1,
        "kvgate.vram_bytes": 0,
        "kvgate.free_before_blocks": 120,
        "kvgate.projected_blocks": 278,
        "kvgate.free_after_blocks": -158,
        "kvgate.free_before_bytes": 31457280,
        "kvgate.projected_bytes": 72876032,
        "kvgate.free_after_bytes": -41418752,
    }
    assert "kvgate.refused_by" not in (second.attributes or {})


def test_a_refusal_is_typed_and_only_our_own_failure_is_an_error(fixture: Fixture) -> None:
    """429 is a designed answer with an error.type; 503 is a failed span."""
    down = Refusal(Reason.LEDGER_DOWN, 503, "down", 5000)
    fixture.decide(REJECT, CARRIER)
    fixture.decide(replace(REJECT, rid="rid-4", reason="ledger_down", refusal=down), CARRIER)
    busy, failed = fixture.finished()
    assert (busy.attributes["error.type"], busy.status.status_code) == ("insufficient_headroom", StatusCode.UNSET)  # type: ignore[index]
    assert (failed.attributes["error.type"], failed.status.status_code) == ("ledger_down", StatusCode.ERROR)  # type: ignore[index]


def test_only_documented_attributes_are_written(fixture: Fixture) -> None:
    """Whatever is written on a span or an event stands in the names table."""
    for decision in (FALLBACK, TO_REMOTE, replace(REJECT, rid="rid-5")):
        fixture.decide(decision, CARRIER)
    fixture.spans.completed(
        "rid-1", ended="timeout", end_ns=3 * 10**9, response_model="m", input_tokens=1, output_tokens=2
    )
    found = fixture.finished()
    written = {key for span in found for key in span.attributes or {}}
    written |= {key for span in found for event in span.events for key in event.attributes or {}}
    assert written <= set(names.ATTRIBUTES)


def test_an_unsampled_parent_gives_no_span(fixture: Fixture) -> None:
    """Flag 00 is respected for the decision and for its completion."""
    fixture.decide(FALLBACK, UNSAMPLED)
    fixture.spans.completed("rid-1", ended="complete", end_ns=3 * 10**9, carrier=UNSAMPLED)
    assert fixture.finished() == ()


@pytest.mark.parametrize(
    "header", ["", "garbage", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "00-" + "x" * 900]
)
def test_a_broken_traceparent_starts_a_trace_of_its_own(fixture: Fixture, header: str) -> None:
    """What is no W3C trace context is ignored, never an error."""
    fixture.decide(FALLBACK, {"traceparent": header})
    (span,) = fixture.finished()
    assert span.parent is None


def test_the_completion_joins_the_decisions_trace(fixture: Fixture) -> None:
    """The end is a child of the decision with the same rid, with the engine's own counts."""
    fixture.decide(FALLBACK, CARRIER)
    fixture.spans.completed(
        "rid-1",
        ended="client_abort",
        start_ns=10**9,
        end_ns=5 * 10**9,
        input_tokens=4125,
        output_tokens=77,
        free_at_end_bytes=9,
    )
    decide, complete = fixture.finished()
    assert complete.name == "kvgate.complete"
    assert complete.context.trace_id == decide.context.trace_id
    assert complete.parent.span_id == decide.context.span_id  # type: ignore[union-attr]
    assert dict(complete.attributes or {}) == {
        "kvgate.rid": "rid-1",
        "kvgate.ended": "client_abort",
        "error.type": "client_abort",
        "gen_ai.usage.input_tokens": 4125,
        "gen_ai.usage.output_tokens": 77,
        "kvgate.free_at_end_bytes": 9,
    }


def test_a_completion_elsewhere_uses_the_context_it_is_given(fixture: Fixture) -> None:
    """Another process joins by the trace context that travelled with the request; without one there is no span."""
    fixture.spans.completed("other", ended="complete", end_ns=1, carrier=CARRIER)
    fixture.spans.completed("unheard-of", ended="complete", end_ns=1)
    (span,) = fixture.finished()
    assert f"{span.context.trace_id:032x}" == TRACE


def test_traces_remembered_are_bounded(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose end never comes cannot fill the memory; the oldest is forgotten."""
    monkeypatch.setattr(module, "MAX_LIVE", 3)
    for index in range(10):
        fixture.decide(replace(FALLBACK, rid=f"r{index}"), CARRIER)
    assert list(fixture.spans._live) == ["r7", "r8", "r9"]


def test_refused_requests_are_not_remembered(fixture: Fixture) -> None:
    """Only what holds a place will have an end."""
    fixture.decide(REJECT, CARRIER)
    assert fixture.spans._live == {}


@pytest.mark.parametrize(
    ("metadata", "carrier"),
    [
        (None, {}),
        (
            [("traceparent", "a"), ("x-forwarded-for", "b"), ("tracestate", "c")],
            {"traceparent": "a", "tracestate": "c"},
        ),
        ([("traceparent", "a"), ("traceparent", "b")], {}),
        ([("traceparent", b"a")], {}),
        ([("tracestate", "x" * 5000), ("traceparent", "a")], {"traceparent": "a"}),
    ],
)
def test_carrier_from_metadata(metadata: list[tuple[str, str | bytes]] | None, carrier: dict[str, str]) -> None:
    """Only the two trace headers are taken; a repeated traceparent invalidates the context."""
    assert trace_carrier(metadata) == carrier


@pytest.mark.parametrize(
    ("dialect", "operation"),
    [
        ("openai.chat", "chat"),
        ("openai.completions", "text_completion"),
        ("openai.embeddings", "embeddings"),
        ("anthropic.messages", "chat"),
        ("ollama.generate", "text_completion"),
        ("ollama.embed", "embeddings"),
        (None, None),
    ],
)
def test_operation_of_a_dialect(dialect: str | None, operation: str | None) -> None:
    """Each dialect has its GenAI operation."""
    assert operation_of(dialect) == operation


#: How long a collector hangs that nobody lets go.
STUCK_S = 120.0


class Stuck(SpanExporter):
    """A collector that does not answer until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.let_go.wait(STUCK_S)
        return SpanExportResult.FAILURE


def test_a_stuck_collector_holds_up_neither_requests_nor_shutdown() -> None:
    """Thousands of spans behind a collector that hangs are written at once, and closing waits only so long."""
    stuck = Stuck()
    spans = Spans(stuck)
    record = decision_record(FALLBACK, at_s=2.0, decision_ms=1.0, count_ms=0.5)
    started = time.monotonic()
    for _ in range(5000):
        spans.decided(record, carrier=CARRIER, start_ns=1, end_ns=2)
    assert time.monotonic() - started < STUCK_S / 2
    started = time.monotonic()
    spans.close(timeout_s=0.2)
    assert time.monotonic() - started < STUCK_S / 2
    spans.decided(record, carrier=CARRIER, start_ns=1, end_ns=2)
    stuck.let_go.set()


def test_results_are_reported(fixture: Fixture) -> None:
    """Recorded and exported spans are counted, so that a loss shows."""
    fixture.decide(FALLBACK, CARRIER)
    fixture.finished()
    assert fixture.results == [("recorded", 1), ("exported", 1)]


def test_without_an_endpoint_the_sdk_is_never_imported() -> None:
    """No endpoint, no OpenTelemetry in the process, and every call returns."""
    code = (
        "import sys, json\n"
        "from extproc.config import TelemetryConfig\n"
        "from extproc.telemetry.spans import Spans\n"
        "spans = Spans.from_config(TelemetryConfig())\n"
        "spans.decided({}, carrier={}, start_ns=1, end_ns=2)\n"
        "spans.completed('r', ended='complete', end_ns=1)\n"
        "spans.close()\n"
        "print(json.dumps([spans.enabled, [m for m in sys.modules if m.startswith('opentelemetry')]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, []]


def test_from_config_without_endpoint_is_off() -> None:
    """The default configuration writes no spans."""
    assert not Spans.from_config(TelemetryConfig()).enabled
