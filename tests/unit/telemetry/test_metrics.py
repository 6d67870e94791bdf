"""Metrics as a scraper reads them: the exposition's text is parsed back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from extproc.config import load_text
from extproc.counting import CountingStats
from extproc.telemetry import names
from extproc.telemetry.metrics import LabelCap, Metrics
from tests.unit.telemetry.samples import FALLBACK, REJECT, TO_REMOTE, snapshot

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: Metrics) -> Samples:
    content_type, body = metrics.exposition()
    assert content_type.startswith("text/plain")
    families = parse_text(body.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def test_no_series_tells_when_another_began() -> None:
    """Neither format carries the ``_created`` series that double what a scrape stores."""
    metrics = Metrics()
    metrics.decision(FALLBACK, decision_s=0.002, count_s=0.001)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        assert b"_created" not in metrics.exposition(accept)[1]


def test_counts_a_decision_under_its_labels() -> None:
    """Each decision adds one under mode, decision, lane, target and reason."""
    metrics = Metrics()
    metrics.decision(FALLBACK, decision_s=0.002, count_s=0.001)
    metrics.decision(FALLBACK, decision_s=0.002, count_s=0.001)
    metrics.decision(REJECT, decision_s=0.0005)
    found = scrape(metrics)
    same = {"mode": "enforce", "lane": "fast-edit", "reason": "insufficient_headroom"}
    assert value(found, "kvgate_decisions_total", decision="fallback", target="qwen-14b-q4", **same) == 2
    assert value(found, "kvgate_decisions_total", decision="reject", target="none", **same) == 1
    assert value(found, "kvgate_count_duration_seconds_count", source="exact") == 2
    assert value(found, "kvgate_decision_duration_seconds_bucket", decision="reject", le="0.0005") == 1


def test_reserved_blocks_are_those_of_the_place_taken() -> None:
    """Only a request that took blocks of a local pool counts as a reservation."""
    metrics = Metrics()
    for decision in (FALLBACK, TO_REMOTE, REJECT):
        metrics.decision(decision, decision_s=0.001)
    found = scrape(metrics)
    assert value(found, "kvgate_reserved_blocks_sum", target="qwen-14b-q4") == 278
    assert not value(found, "kvgate_reserved_blocks_count", target="remote")


def test_a_wait_at_the_gate_and_a_degraded_ledger_are_seen() -> None:
    """Held time and decisions without a healthy ledger have metrics of their own."""
    metrics = Metrics()
    metrics.decision(structs.replace(FALLBACK, waited_ms=1500, ledger="degraded"), decision_s=1.6)
    found = scrape(metrics)
    assert value(found, "kvgate_queue_wait_seconds_sum", lane="fast-edit") == 1.5
    assert value(found, "kvgate_degraded_decisions_total", ledger="degraded") == 1


def test_prediction_error_keeps_its_direction() -> None:
    """An answer shorter than expected counts as under, a longer one as over; an aborted answer teaches nothing."""
    metrics = Metrics()
    shared = {"lane": "fast-edit", "target": "primary-32b", "expected_output_tokens": 310}
    metrics.completion(ended="complete", output_tokens=200, first_byte_s=0.2, duration_s=2.0, **shared)  # type: ignore[arg-type]
    metrics.completion(ended="complete", output_tokens=1000, **shared)  # type: ignore[arg-type]
    metrics.completion(ended="client_abort", output_tokens=5, duration_s=0.5, **shared)  # type: ignore[arg-type]
    found = scrape(metrics)
    assert value(found, "kvgate_output_error_tokens_sum", target="primary-32b", direction="under") == 110
    assert value(found, "kvgate_output_error_tokens_count", target="primary-32b", direction="under") == 1
    assert value(found, "kvgate_output_error_tokens_sum", target="primary-32b", direction="over") == 690
    assert value(found, "kvgate_completions_total", ended="client_abort", lane="fast-edit", target="primary-32b") == 1
    assert value(found, "kvgate_request_duration_seconds_count", target="primary-32b") == 2


def test_fleet_shows_the_last_snapshot_only() -> None:
    """Headroom, drift, age and over-admissions come from the snapshot, and a replica that is gone is gone."""
    metrics = Metrics()
    taken, _ = snapshot()
    metrics.fleet(taken)
    found = scrape(metrics)
    busy = {"target": "primary-32b", "replica": "gpu-a-0"}
    assert value(found, "kvgate_replica_headroom_blocks", **busy) == 2896
    assert value(found, "kvgate_replica_drift_blocks", **busy) == 0
    assert value(found, "kvgate_replica_report_age_seconds", **busy) == 0.5
    assert value(found, "kvgate_over_admissions_total", cause="grew", **busy) == 2
    assert value(found, "kvgate_replica_state", state="ready", **busy) == 1
    assert value(found, "kvgate_replica_state", state="lost", **busy) == 0
    assert value(found, "kvgate_replica_orphaned_reservations", **busy) == 1
    assert value(found, "kvgate_lane_in_flight", lane="fast-edit") == 1
    assert value(found, "kvgate_device_free_bytes", device="GPU-1") == 6442450944
    metrics.fleet(replace(taken, replicas={}))
    assert value(scrape(metrics), "kvgate_replica_headroom_blocks", **busy) is None


def test_headroom_is_what_admissions_can_use() -> None:
    """The target's watermark is taken off, as the decisions do."""
    config = load_text(
        "targets: {primary-32b: {engine: vllm, watermark: 0.1, replicas: [{name: gpu-a-0, url: 'http://127.0.0.1:1'}]}}\n"
        "lanes: {a: {}}",
        where="k",
    )
    metrics = Metrics.from_config(config)
    metrics.fleet(snapshot()[0])
    found = scrape(metrics)
    assert value(found, "kvgate_replica_headroom_blocks", target="primary-32b", replica="gpu-a-0") == 2896 - 410
    assert value(found, "kvgate_lane_in_flight", lane="a") == 0


def test_unknown_is_absent_never_zero() -> None:
    """A replica without a report has a state, and no headroom that could be read as empty or full."""
    metrics = Metrics()
    metrics.fleet(snapshot()[0])
    found = scrape(metrics)
    silent = {"target": "qwen-14b-q4", "replica": "gpu-b-0"}
    assert value(found, "kvgate_replica_state", state="unknown", **silent) == 1
    assert value(found, "kvgate_replica_headroom_blocks", **silent) is None
    assert value(found, "kvgate_replica_foreign_blocks", **silent) is None


def test_ledger_state_follows_the_last_call() -> None:
    """A failed call turns the ledger down and counts; the next answered one turns it up."""
    metrics = Metrics()
    metrics.ledger_call("reserve", 0.05, ok=False)
    assert value(scrape(metrics), "kvgate_ledger_up") == 0
    metrics.ledger_call("reserve", 0.001, ok=True)
    found = scrape(metrics)
    assert value(found, "kvgate_ledger_up") == 1
    assert value(found, "kvgate_ledger_errors_total", call="reserve") == 1
    assert value(found, "kvgate_ledger_call_duration_seconds_count", call="reserve") == 2


def test_what_can_be_asked_for_stands_at_zero_from_the_start() -> None:
    """No demand is 0, never an empty result; no value is NaN (cases i09, i10)."""
    config = load_text(
        "targets: {r: {engine: openai, url: 'https://h.test'}, s: {engine: openai, url: 'https://i.test'}}\n"
        "lanes: {l: {fallback: s, queue: {}}, k: {targets: [s]}}\naliases: {coder: {lane: l, targets: [r]}}\n",
        where="t",
    )
    metrics = Metrics.from_config(config)
    metrics.fleet(replace(snapshot()[0], lanes={"k": 2}))
    found = scrape(metrics)
    refused = {"mode": "enforce", "decision": "reject", "target": "none"}
    assert value(found, "kvgate_decisions_total", lane="l", reason="unknown_state", **refused) == 0
    assert value(found, "kvgate_decisions_total", lane="none", reason="unknown_model", **refused) == 0
    decided = [dict(labels) for name, labels in found if name == "kvgate_decisions_total"]
    admitted = {(labels["lane"], labels["target"]) for labels in decided if labels["decision"] == "admit"}
    assert admitted == {("l", "r"), ("l", "s"), ("k", "s")}
    assert value(found, "kvgate_requested_models_total", model="coder", decision="reject") == 0
    assert value(found, "kvgate_queue_depth", lane="l") == 0
    assert value(found, "kvgate_lane_in_flight", lane="l") == 0
    assert value(found, "kvgate_lane_in_flight", lane="k") == 2
    assert value(found, "kvgate_ledger_up") == 0
    assert not any(math.isnan(figure) for figure in found.values())


def test_counting_is_read_when_somebody_scrapes() -> None:
    """The counter's own figures are absent without a counter and current with one."""
    metrics, stats = Metrics(), CountingStats()
    assert value(scrape(metrics), "kvgate_count_deadlines_total") is None
    metrics.watch_counting(stats, lambda: 5)
    stats.deadlines, stats.refused_for_memory, stats.pending_bytes = 2, 1, 4096
    found = scrape(metrics)
    assert value(found, "kvgate_count_deadlines_total") == 2
    assert value(found, "kvgate_count_refused_total") == 1
    assert value(found, "kvgate_count_pending_bytes") == 4096
    assert value(found, "kvgate_tokenizer_memory_bytes") == 5


def test_client_model_names_are_capped() -> None:
    """Ten thousand invented model names make at most the cap's series, and configured names keep theirs."""
    metrics = Metrics(max_label_values=5, models=("qwen-coder",))
    for index in range(10_000):
        metrics.decision(structs.replace(REJECT, model=f"invented-{index}"), decision_s=0.001)
    metrics.decision(FALLBACK, decision_s=0.001)
    found = scrape(metrics)
    models = {dict(labels)["model"] for name, labels in found if name == "kvgate_requested_models_total"}
    assert models == {"other", "qwen-coder", *(f"invented-{index}" for index in range(5))}
    assert value(found, "kvgate_requested_models_total", model="other", decision="reject") == 9_995


@pytest.mark.parametrize("model", ["a\ud800", 'quote"back\\slash\nline', "x" * 10**6])
def test_no_model_name_breaks_the_exposition(model: str) -> None:
    """A hostile model name cannot make /metrics fail or forge a line."""
    metrics = Metrics()
    metrics.decision(structs.replace(REJECT, model=model), decision_s=0.001)
    found = scrape(metrics)
    assert sum(v for (name, _), v in found.items() if name == "kvgate_requested_models_total") == 1


def test_no_label_value_is_ever_evicted() -> None:
    """Once shown, a value keeps its series; later ones share `other`."""
    cap = LabelCap(1, ("known",))
    assert [cap(each) for each in ("a", "b", "a", "known", None, "")] == ["a", "other", "a", "known", "none", "none"]


def test_configured_names_are_known_from_the_start() -> None:
    """A flood of junk before the first real request does not push a configured alias into `other`."""
    config = load_text(
        "targets: {r: {engine: openai, url: 'https://h.test', servedModel: m}}\n"
        "lanes: {l: {}}\naliases: {coder: {lane: l, targets: [r]}}\ntelemetry: {maxLabelValues: 1}\n",
        where="t",
    )
    metrics = Metrics.from_config(config, version="1.2.3")
    for model in ("junk-1", "junk-2", "coder"):
        metrics.decision(structs.replace(REJECT, model=model), decision_s=0.001)
    found = scrape(metrics)
    assert value(found, "kvgate_requested_models_total", model="coder", decision="reject") == 1
    assert value(found, "kvgate_build_info", version="1.2.3") == 1


def test_two_instances_share_nothing() -> None:
    """Each process part has its own registry; nothing is global."""
    first, second = Metrics(), Metrics()
    first.decision(FALLBACK, decision_s=0.001)
    assert isinstance(first.registry, CollectorRegistry)
    assert not any(name == "kvgate_decisions_total" for name, _ in scrape(second))


def test_openmetrics_is_served_to_who_asks() -> None:
    """A scraper that accepts OpenMetrics gets it, valid to a strict parser."""
    metrics = Metrics()
    metrics.decision(FALLBACK, decision_s=0.001)
    metrics.completion(ended="complete", lane="l", target="t", output_tokens=1, expected_output_tokens=9)
    metrics.fleet(snapshot()[0])
    content_type, body = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "kvgate_decisions" in {family.name for family in parse_openmetrics(body.decode())}


def test_every_named_metric_is_exposed() -> None:
    """Each metric of the names table is registered under its name, kind and help."""
    metrics = Metrics()
    metrics.fleet(snapshot()[0])
    families = {family.name: family for family in metrics.registry.collect()}
    for metric in names.METRICS:
        assert families[metric.name].type == metric.kind, metric.name
        assert families[metric.name].documentation == metric.help


def test_gauges_that_others_set() -> None:
    """The small setters reach their metric."""
    metrics = Metrics()
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    metrics.exchange_began()
    metrics.exchange_decided()
    metrics.queue_depth("fast-edit", 3)
    metrics.undelivered_ends(4)
    metrics.reaped(6)
    metrics.renewals_refused(7)
    metrics.misrouted("primary-32b")
    metrics.internal_error("decide")
    metrics.decision_log_dropped(2)
    metrics.spans("failed", 8)
    found = scrape(metrics)
    assert value(found, "kvgate_extproc_streams") == 1
    assert value(found, "kvgate_exchanges_undecided") == 0
    assert value(found, "kvgate_queue_depth", lane="fast-edit") == 3
    assert value(found, "kvgate_undelivered_ends") == 4
    assert value(found, "kvgate_reaped_reservations_total") == 6
    assert value(found, "kvgate_renewals_refused_total") == 7
    assert value(found, "kvgate_misrouted_total", target="primary-32b") == 1
    assert value(found, "kvgate_internal_errors_total", where="decide") == 1
    assert value(found, "kvgate_decision_log_dropped_total") == 2
    assert value(found, "kvgate_spans_total", result="failed") == 8
