"""Prometheus metrics of one process, in a registry of their own.

Owns what is counted and how labels stay bounded; knows neither the server that exposes them nor the ledger that
feeds them. Recording is a few dictionary look-ups and float additions (``tallies``): label children are bound once per
combination, and the fleet's gauges are built from the last snapshot only when somebody scrapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from extproc.config import Config
from extproc.ledger.base import LedgerSnapshot, ReplicaState, ReplicaView
from extproc.telemetry import names, series
from extproc.telemetry.names import NONE, OTHER, Metric
from extproc.telemetry.record import MAX_TEXT, clean
from extproc.telemetry.tallies import Number, Spread, Tallies, numbers, spreads
from extproc.types import Decision

#: What a device can be; see ``ledger.base.DeviceReport``.
DEVICE_STATES = ("ok", "lost", "unknown", "unified")


class CountingFigures(Protocol):
    """What the token counter says about itself; see ``counting.CountingStats``."""

    deadlines: int
    refused_for_memory: int
    pending_bytes: int


class LabelCap:
    """Bounds the distinct values of one label: configured ones always pass, ``limit`` others do, then ``other``.

    First come, first served; a value is never evicted, because a series that changes its meaning is worse than
    one that is missing.
    """

    __slots__ = ("_room", "_values")

    def __init__(self, limit: int, known: Iterable[str] = ()) -> None:
        self._values = {value: value for value in known}
        self._room = limit

    def __call__(self, value: str | None) -> str:
        """What to show for ``value``; ``none`` where there is none."""
        if not value:
            return NONE
        shown = self._values.get(value)
        if shown is not None:
            return shown
        if self._room <= 0 or len(value) > MAX_TEXT:
            return OTHER
        self._room -= 1
        shown = clean(value) or NONE
        self._values[value] = shown
        return shown


@dataclass(frozen=True, slots=True)
class _DecisionChildren:
    """Label children of one (mode, decision, lane, target, reason)."""

    count: Number
    seconds: Spread
    input_tokens: Spread
    wait: Spread
    blocks: Spread | None


@dataclass(frozen=True, slots=True)
class _CompletionChildren:
    """Label children of one (ended, lane, target)."""

    count: Number
    output_tokens: Spread
    over_tokens: Spread
    under_tokens: Spread
    first_byte: Spread
    duration: Spread


class Metrics:
    """All metrics of one process; every method is cheap, synchronous and safe to call on the event loop."""

    def __init__(
        self,
        *,
        max_label_values: int = 100,
        models: Iterable[str] = (),
        lanes: Iterable[str] = (),
        targets: Iterable[str] = (),
        version: str = "",
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = LabelCap(max_label_values, models)
        self._lane = LabelCap(max_label_values, lanes)
        self._target = LabelCap(max_label_values, targets)
        self._decided: dict[tuple[str, str, str | None, str | None, str | None], _DecisionChildren] = {}
        self._completed: dict[tuple[str, str | None, str | None], _CompletionChildren] = {}
        self._models: dict[tuple[str, str], Number] = {}
        self._fleet = _Fleet()
        self._counting = _Counting()
        self._counters = numbers(_own("counter"))
        self._gauges = numbers(_own("gauge"))
        self._histograms = spreads(_own("histogram"))
        self._streams, self._exchanges, self._ledger_up = (
            self._gauges[metric].labels() for metric in (names.STREAMS, names.EXCHANGES, names.LEDGER_UP)
        )
        self._count_seconds, self._ledger_seconds = (
            self._histograms[metric] for metric in (names.COUNT_SECONDS, names.LEDGER_SECONDS)
        )
        self._gauges[names.BUILD].labels(version).set(1)
        self.registry.register(
            Tallies((*self._counters.values(), *self._gauges.values()), tuple(self._histograms.values()))
        )
        self.registry.register(self._fleet)
        self.registry.register(self._counting)
        ProcessCollector(registry=self.registry)

    @classmethod
    def from_config(cls, config: Config, *, version: str = "") -> Metrics:
        """Metrics in which every configured lane, target and model name keeps its own label value and stands at 0."""
        metrics = cls(
            max_label_values=config.telemetry.max_label_values,
            models=(*config.aliases, *config.models),
            lanes=config.lanes,
            targets=config.targets,
            version=version,
        )
        for decision in series.decisions(config):
            metrics._counters[names.DECISIONS].labels(*decision)
        for model in series.models(config):
            metrics._counters[names.REQUESTED_MODELS].labels(*model)
        for lane in series.queues(config):
            metrics.queue_depth(lane, 0)
        metrics._fleet.lanes = tuple(config.lanes)
        metrics._fleet.watermarks = {name: target.watermark for name, target in config.targets.items()}
        return metrics

    # -- the request path

    def decision(self, decision: Decision, *, decision_s: float, count_s: float | None = None) -> None:
        """Record one decision; ``count_s`` None where nothing was counted."""
        key = (decision.mode, decision.decision, decision.lane, decision.target, decision.reason)
        children = self._decided.get(key)
        if children is None:
            children = self._bind_decision(decision)
        children.count.inc()
        children.seconds.observe(decision_s)
        if decision.input_tokens is not None:
            children.input_tokens.observe(decision.input_tokens)
        if decision.waited_ms:
            children.wait.observe(decision.waited_ms / 1000)
        if children.blocks is not None:
            blocks = _taken_blocks(decision)
            if blocks is not None:
                children.blocks.observe(blocks)
        if count_s is not None:
            self._count_seconds.labels(decision.count_source or NONE).observe(count_s)
        if decision.ledger != "ok":
            self._counters[names.DEGRADED_DECISIONS].labels(decision.ledger).inc()
        model = self._model(decision.model)
        asked = self._models.get((model, decision.decision))
        if asked is None:
            asked = self._counters[names.REQUESTED_MODELS].labels(model, decision.decision)
            self._models[(model, decision.decision)] = asked
        asked.inc()

    def completion(
        self,
        *,
        ended: str,
        lane: str | None,
        target: str | None,
        output_tokens: int | None = None,
        expected_output_tokens: int | None = None,
        first_byte_s: float | None = None,
        duration_s: float | None = None,
    ) -> None:
        """Record the end of one request; None where the access log did not show it.

        The prediction error is recorded for complete answers only: an aborted one says nothing about its length.
        """
        children = self._completed.get((ended, lane, target))
        if children is None:
            children = self._bind_completion(ended, lane, target)
        children.count.inc()
        if output_tokens is not None and ended == "complete":
            children.output_tokens.observe(output_tokens)
            if expected_output_tokens is not None:
                error = output_tokens - expected_output_tokens
                (children.over_tokens if error > 0 else children.under_tokens).observe(abs(error))
        if first_byte_s is not None:
            children.first_byte.observe(first_byte_s)
        if duration_s is not None:
            children.duration.observe(duration_s)

    def stream_opened(self) -> None:
        """An ext_proc stream began."""
        self._streams.inc()

    def stream_closed(self) -> None:
        """An ext_proc stream ended."""
        self._streams.dec()

    def exchange_began(self) -> None:
        """A request's headers arrived; its decision is due."""
        self._exchanges.inc()

    def exchange_decided(self) -> None:
        """A request that began was decided or went away."""
        self._exchanges.dec()

    def queue_depth(self, lane: str, depth: int) -> None:
        """Requests of ``lane`` that are held now."""
        self._gauges[names.QUEUE_DEPTH].labels(self._lane(lane)).set(depth)

    def misrouted(self, target: str | None) -> None:
        """A request was served by another endpoint than the reserved one."""
        self._counters[names.MISROUTED].labels(self._target(target)).inc()

    def internal_error(self, where: str) -> None:
        """Something of ours broke; ``where`` is a fixed word of the code, never input."""
        self._counters[names.INTERNAL_ERRORS].labels(where).inc()

    # -- the ledger and what feeds from it

    def ledger_call(self, call: str, elapsed_s: float, *, ok: bool) -> None:
        """One call to the ledger ended, with an answer or without."""
        self._ledger_seconds.labels(call).observe(elapsed_s)
        self._ledger_up.set(1 if ok else 0)
        if not ok:
            self._counters[names.LEDGER_ERRORS].labels(call).inc()

    def reaped(self, count: int) -> None:
        """Reservations that the reaper released."""
        self._counters[names.REAPED].labels().inc(count)

    def renewals_refused(self, count: int) -> None:
        """Periodic records that met a tombstone."""
        self._counters[names.RENEWALS_REFUSED].labels().inc(count)

    def undelivered_ends(self, count: int) -> None:
        """End records waiting for the ledger."""
        self._gauges[names.UNDELIVERED_ENDS].labels().set(count)

    def fleet(self, snapshot: LedgerSnapshot) -> None:
        """Show this snapshot from now on; replicas, lanes and devices that are gone from it leave the exposition."""
        self._fleet.snapshot = snapshot

    # -- kvgate itself

    def decision_log_dropped(self, count: int = 1) -> None:
        """Records the decision log had no room for."""
        self._counters[names.DECISION_LOG_DROPPED].labels().inc(count)

    def spans(self, result: str, count: int) -> None:
        """Spans ``recorded``, ``exported`` or ``failed``; what is recorded and neither of the others waits or was dropped."""
        self._counters[names.SPANS].labels(result).inc(count)

    def exposition(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body for a scrape whose Accept header is ``accept``."""
        encoder, content_type = choose_encoder(accept)
        return content_type, encoder(self.registry)

    def watch_counting(self, stats: CountingFigures, remembered_bytes: Callable[[], int]) -> None:
        """Show these figures from now on, as they are when somebody scrapes."""
        self._counting.stats, self._counting.remembered_bytes = stats, remembered_bytes

    # -- binding, once per combination

    def _bind_decision(self, decision: Decision) -> _DecisionChildren:
        lane, target = self._lane(decision.lane), self._target(decision.target)
        reserves = decision.decision in ("admit", "fallback") and decision.replica is not None
        children = _DecisionChildren(
            count=self._counters[names.DECISIONS].labels(
                decision.mode, decision.decision, lane, target, decision.reason or NONE
            ),
            seconds=self._histograms[names.DECISION_SECONDS].labels(decision.decision),
            input_tokens=self._histograms[names.INPUT_TOKENS].labels(lane),
            wait=self._histograms[names.QUEUE_WAIT_SECONDS].labels(lane),
            blocks=self._histograms[names.RESERVED_BLOCKS].labels(target) if reserves else None,
        )
        if OTHER not in (lane, target):
            self._decided[(decision.mode, decision.decision, decision.lane, decision.target, decision.reason)] = (
                children
            )
        return children

    def _bind_completion(self, ended: str, lane: str | None, target: str | None) -> _CompletionChildren:
        lane_label, target_label = self._lane(lane), self._target(target)
        children = _CompletionChildren(
            count=self._counters[names.COMPLETIONS].labels(ended, lane_label, target_label),
            output_tokens=self._histograms[names.OUTPUT_TOKENS].labels(target_label),
            over_tokens=self._histograms[names.OUTPUT_ERROR_TOKENS].labels(target_label, "over"),
            under_tokens=self._histograms[names.OUTPUT_ERROR_TOKENS].labels(target_label, "under"),
            first_byte=self._histograms[names.FIRST_BYTE_SECONDS].labels(target_label),
            duration=self._histograms[names.REQUEST_SECONDS].labels(target_label),
        )
        if OTHER not in (lane_label, target_label):
            self._completed[(ended, lane, target)] = children
        return children


def _taken_blocks(decision: Decision) -> int | None:
    for candidate in decision.candidates:
        if candidate.target == decision.target and candidate.replica == decision.replica:
            return candidate.need.kv_blocks or None if candidate.need else None
    return None


# The fleet's metrics come from the snapshot at scrape time, so that what is gone is gone from the exposition too.
_PER_REPLICA: Mapping[Metric, str] = {
    names.REPLICA_AGE: "age_s",
    names.REPLICA_RESERVED: "reserved_blocks",
    names.REPLICA_FOREIGN: "foreign_blocks",
    names.REPLICA_COMMITTED: "committed_blocks",
    names.REPLICA_SEQUENCES: "sequences",
    names.REPLICA_PREFILL: "prefill_level_tokens",
    names.REPLICA_RESERVATIONS: "reservations",
    names.REPLICA_ORPHANED: "orphaned",
}
_OVER_BY_CAUSE = (("adopted", "over_adopted"), ("grew", "over_grew"), ("foreign", "over_foreign"))
_FLEET: Sequence[Metric] = (
    names.SNAPSHOT_TIMESTAMP,
    names.REPLICA_STATE,
    names.REPLICA_CAPACITY,
    names.REPLICA_HEADROOM,
    names.REPLICA_DRIFT,
    *_PER_REPLICA,
    names.OVER_ADMISSIONS,
    names.LANE_IN_FLIGHT,
    names.DEVICE_TOTAL,
    names.DEVICE_FREE,
    names.DEVICE_RESERVED,
    names.DEVICE_STATE,
)


_COUNTING: Mapping[Metric, str] = {
    names.COUNT_DEADLINES: "deadlines",
    names.COUNT_REFUSED: "refused_for_memory",
    names.COUNT_PENDING_BYTES: "pending_bytes",
}


def _own(kind: str) -> Iterator[Metric]:
    collected = {*_FLEET, *_COUNTING, names.REMEMBERED_BYTES}
    return (metric for metric in names.METRICS if metric.kind == kind and metric not in collected)


class _Counting(Collector):
    """Turns the counter's own figures into metric families; none before it is there."""

    def __init__(self) -> None:
        self.stats: CountingFigures | None = None
        self.remembered_bytes: Callable[[], int] = int

    def describe(self) -> Iterable[Family]:
        return _families((*_COUNTING, names.REMEMBERED_BYTES)).values()

    def collect(self) -> Iterable[Family]:
        families = _families((*_COUNTING, names.REMEMBERED_BYTES))
        if self.stats is not None:
            families[names.REMEMBERED_BYTES].add_metric((), self.remembered_bytes())
            for metric, attribute in _COUNTING.items():
                families[metric].add_metric((), getattr(self.stats, attribute))
        return families.values()


class _Fleet(Collector):
    """Turns the last snapshot into metric families."""

    def __init__(self) -> None:
        self.snapshot: LedgerSnapshot | None = None
        self.lanes: tuple[str, ...] = ()
        #: Share of the pool that admissions leave free, by target; the ledger's views know none.
        self.watermarks: Mapping[str, float] = {}

    def describe(self) -> Iterable[Family]:
        return _families(_FLEET).values()

    def collect(self) -> Iterable[Family]:
        families = _families(_FLEET)
        snapshot = self.snapshot
        if snapshot is not None:
            families[names.SNAPSHOT_TIMESTAMP].add_metric((), snapshot.now_s)
            for view in snapshot.replicas.values():
                _replica(families, view, self.watermarks.get(view.target, 0.0))
            for lane, count in (dict.fromkeys(self.lanes, 0) | dict(snapshot.lanes)).items():
                families[names.LANE_IN_FLIGHT].add_metric((lane,), count)
            _devices(families, snapshot)
        return families.values()


_Families = Mapping[Metric, CounterMetricFamily | GaugeMetricFamily]


def _families(metrics: Iterable[Metric]) -> _Families:
    make = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return {metric: make[metric.kind](metric.name, metric.help, labels=metric.labels) for metric in metrics}


def _replica(families: _Families, view: ReplicaView, watermark: float) -> None:
    labels = (view.target, view.replica)
    for state in ReplicaState:
        families[names.REPLICA_STATE].add_metric((*labels, state.value), 1 if view.state == state else 0)
    for metric, attribute in _PER_REPLICA.items():
        value = getattr(view, attribute)
        if value is not None:
            families[metric].add_metric(labels, value)
    for cause, attribute in _OVER_BY_CAUSE:
        families[names.OVER_ADMISSIONS].add_metric((*labels, cause), getattr(view, attribute))
    report = view.report
    if report is None:
        return
    if report.capacity_blocks is not None:
        families[names.REPLICA_CAPACITY].add_metric(labels, report.capacity_blocks)
        if view.headroom_blocks is not None:
            usable = view.headroom_blocks - math.ceil(report.capacity_blocks * watermark)
            families[names.REPLICA_HEADROOM].add_metric(labels, usable)
    if report.used_blocks is not None and view.committed_blocks is not None:
        families[names.REPLICA_DRIFT].add_metric(labels, report.used_blocks - view.committed_blocks)


def _devices(families: _Families, snapshot: LedgerSnapshot) -> None:
    for uuid, device in snapshot.devices.items():
        for state in DEVICE_STATES:
            families[names.DEVICE_STATE].add_metric((uuid, state), 1 if device.state == state else 0)
        if device.total_bytes is not None:
            families[names.DEVICE_TOTAL].add_metric((uuid,), device.total_bytes)
        if device.free_bytes is not None:
            families[names.DEVICE_FREE].add_metric((uuid,), device.free_bytes)
    for uuid, reserved in snapshot.device_reserved_bytes.items():
        families[names.DEVICE_RESERVED].add_metric((uuid,), reserved)
