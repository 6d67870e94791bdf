"""Counters, gauges and histograms as plain numbers, shown to prometheus_client when somebody scrapes.

Owns the numbers of one process and their shape in an exposition. A request moves twenty of them; without a lock each,
and with a bucket found by bisection, that costs a fifth of what prometheus_client's own take. What replaces the locks:
one thread writes a child, whoever reads it may see the last value or the one before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.telemetry.names import Metric


class Number:
    """One counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        """Add ``by``."""
        self.value += by

    def dec(self) -> None:
        """Take one off a gauge."""
        self.value -= 1.0

    def set(self, value: float) -> None:
        """Let a gauge show ``value``."""
        self.value = value


class Spread:
    """One histogram; ``bounds`` are its buckets' upper ends, rising, and what lies above them has a bucket of its own."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Take one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def shown(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets as an exposition has them, each with all below it, and the sum."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True)), self._sum


Child = TypeVar("Child")


class Children(Generic[Child]):
    """The children of one metric by their label values; one without labels stands there from the start."""

    __slots__ = ("_children", "_make", "metric")

    def __init__(self, metric: Metric, make: Callable[[], Child]) -> None:
        self.metric = metric
        self._make = make
        self._children: dict[tuple[str, ...], Child] = {}
        if not metric.labels:
            self.labels()

    def labels(self, *values: str) -> Child:
        """The child with these label values, in the metric's order; made at its first mention, and kept."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.metric.labels):
                raise ValueError(f"{self.metric.name} has the labels {self.metric.labels}, not {values}")
            child = self._children[values] = self._make()
        return child

    def items(self) -> list[tuple[tuple[str, ...], Child]]:
        """Every child with its label values, as they are now."""
        return list(self._children.items())


def numbers(metrics: Iterable[Metric]) -> dict[Metric, Children[Number]]:
    """Counters or gauges of ``metrics``, by metric."""
    return {metric: Children(metric, Number) for metric in metrics}


def spreads(metrics: Iterable[Metric]) -> dict[Metric, Children[Spread]]:
    """Histograms of ``metrics``, by metric."""
    return {metric: _histogram(metric) for metric in metrics}


def _histogram(metric: Metric) -> Children[Spread]:
    return Children(metric, lambda: Spread(metric.buckets))


class Tallies(Collector):
    """Turns numbers and histograms into metric families."""

    def __init__(self, numbers: Iterable[Children[Number]], spreads: Iterable[Children[Spread]]) -> None:
        self._numbers = tuple(numbers)
        self._spreads = tuple(spreads)

    def describe(self) -> Iterable[Family]:
        """See ``Collector``."""
        yield from (_number_family(numbers.metric) for numbers in self._numbers)
        yield from (_spread_family(spreads.metric) for spreads in self._spreads)

    def collect(self) -> Iterable[Family]:
        """See ``Collector``."""
        for numbers in self._numbers:
            family = _number_family(numbers.metric)
            for labels, number in numbers.items():
                family.add_metric(labels, number.value)
            yield family
        for spreads in self._spreads:
            histogram = _spread_family(spreads.metric)
            for labels, spread in spreads.items():
                histogram.add_metric(labels, *spread.shown())
            yield histogram


def _number_family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)


def _spread_family(metric: Metric) -> HistogramMetricFamily:
    return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
