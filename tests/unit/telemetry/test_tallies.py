"""Numbers and histograms against prometheus_client's own: the same observations give the same exposition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from extproc.telemetry.names import Metric
from extproc.telemetry.tallies import Children, Number, Tallies, numbers, spreads

COUNTER = Metric("kvgate_test", "counter", "Things.", ("kind",))
GAUGE = Metric("kvgate_test_level", "gauge", "A level.")
HISTOGRAM = Metric("kvgate_test_seconds", "histogram", "Seconds.", ("kind",), (0.0, 0.5, 1.0, 300.0))


def shown(collector: Tallies) -> list[str]:
    registry = CollectorRegistry()
    registry.register(collector)
    return sorted(generate_latest(registry).decode().splitlines())


def theirs(registry: CollectorRegistry) -> list[str]:
    """What prometheus_client's own metrics show, without the timestamps of when a series began."""
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


@given(st.lists(st.one_of(st.sampled_from(HISTOGRAM.buckets), st.floats(0.0, 1000.0))))
def test_histograms_show_what_prometheus_clients_own_show(values: list[float]) -> None:
    """Every observation, one on a bucket's very end too, falls where prometheus_client puts it."""
    registry = CollectorRegistry()
    own = Histogram(
        HISTOGRAM.name, HISTOGRAM.help, HISTOGRAM.labels, buckets=HISTOGRAM.buckets, registry=registry
    ).labels("a")
    ours = spreads([HISTOGRAM])
    child = ours[HISTOGRAM].labels("a")
    for value in values:
        own.observe(value)
        child.observe(value)
    assert shown(Tallies((), ours.values())) == theirs(registry)


def test_counters_and_gauges_show_what_prometheus_clients_own_show() -> None:
    """A counter with labels and a gauge without, moved in every way there is."""
    registry = CollectorRegistry()
    counter = Counter(COUNTER.name, COUNTER.help, COUNTER.labels, registry=registry)
    gauge = Gauge(GAUGE.name, GAUGE.help, registry=registry)
    ours = numbers([COUNTER, GAUGE])
    for count, level in ((counter.labels, gauge), (ours[COUNTER].labels, ours[GAUGE].labels())):
        count("a").inc()
        count("a").inc(2)
        count('b"\\\n').inc(0.5)
        level.set(7)
        level.inc()
        level.dec()
    assert shown(Tallies(ours.values(), ())) == theirs(registry)


def test_a_metric_without_labels_stands_at_zero_from_the_start() -> None:
    """One with labels has no child before its first mention, one without has its only one."""
    assert [labels for labels, _ in Children(GAUGE, Number).items()] == [()]
    assert Children(COUNTER, Number).items() == []


def test_a_child_is_made_once_and_wants_every_label() -> None:
    """The same label values name the same child; too few or too many are a fault of the caller."""
    children = Children(COUNTER, Number)
    assert children.labels("a") is children.labels("a")
    with pytest.raises(ValueError, match="kvgate_test has the labels"):
        children.labels()
