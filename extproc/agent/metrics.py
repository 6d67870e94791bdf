"""The agent's own Prometheus metrics: rendered from its state when somebody asks, nothing is kept beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from extproc.agent import names
from extproc.agent.alarms import KINDS
from extproc.agent.devices.base import DeviceState
from extproc.agent.loop import Agent
from extproc.agent.watch import ReplicaWatch
from extproc.ledger.base import ReplicaState
from extproc.telemetry.names import Metric


class _Put(Protocol):
    """Adds one series unless its value is unknown."""

    def __call__(self, metric: Metric, value: float | None, *labels: str) -> None: ...


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AgentCollector(Collector):
    """Everything ``names`` lists, as of now."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Family]:
        """One family per metric, series or not."""
        families = {metric.name: _family(metric) for metric in names.ALL}

        def put(metric: Metric, value: float | None, *labels: str) -> None:
            if value is not None and math.isfinite(value):
                families[metric.name].add_metric(list(labels), float(value))

        health = self._agent.health
        put(names.ROUNDS, health.rounds)
        put(names.ROUND_SECONDS, health.last_round_s)
        put(names.PUBLISH_FAILURES, health.publish_failures)
        for component, words in health.components.items():
            put(names.COMPONENT, words == "ok", component)
        raised = [alarm.kind for alarm in self._agent.alarms]
        for kind in KINDS:
            put(names.ALARM, raised.count(kind), kind)
        mono_s = time.monotonic()
        for watch in self._agent.watches:
            self._replica(watch, mono_s, put)
            put(names.WEIGHTS, self._agent.weights_bytes(watch), watch.origin.target, watch.origin.replica)
        for device in self._agent.devices.readings(mono_s):
            for state in DeviceState:
                put(names.DEVICE_STATE, device.state is state, device.uuid, state.value)
            for metric, value in (
                (names.DEVICE_TOTAL, device.total_bytes),
                (names.DEVICE_FREE, device.free_bytes),
                (names.DEVICE_USED, device.used_bytes),
                (names.DEVICE_ENGINE, device.engine_used_bytes()),
                (names.DEVICE_TEMPERATURE, device.temperature_c),
                (names.DEVICE_THROTTLED, bool(device.throttled)),
                (names.DEVICE_ECC, device.ecc_uncorrected),
            ):
                put(metric, value, device.uuid)
        yield from families.values()

    @staticmethod
    def _replica(watch: ReplicaWatch, mono_s: float, put: _Put) -> None:
        labels = (watch.origin.target, watch.origin.replica)
        now = watch.state(mono_s)
        for state in ReplicaState:
            put(names.STATE, now is state, *labels, state.value)
        put(names.SCRAPES, watch.scrapes, *labels)
        put(names.SCRAPE_FAILURES, watch.failures, *labels)
        put(names.RESTARTS, watch.restarts, *labels)
        put(names.AGE, watch.age_s(mono_s), *labels)
        rates = watch.rates()
        for metric, value in (
            (names.PREFILL_RATE, rates.prefill_tokens_per_s),
            (names.DECODE_RATE, rates.decode_tokens_per_s),
            (names.OUTPUT_RATE, rates.output_tokens_per_s),
            (names.TTFT, rates.ttft_s),
            (names.QUEUE, rates.queue_s),
            (names.HIT_SHARE, rates.prefix_hit_share),
            (names.PREEMPTIONS, rates.preemptions_per_finished),
        ):
            put(metric, value, *labels)
        reading = watch.reading
        if reading is None:
            return
        for metric, value in (
            (names.BAD_LINES, reading.bad_lines),
            (names.CAPACITY, reading.capacity_blocks),
            (names.USED, reading.used_blocks),
            (names.BLOCK_BYTES, reading.kv_bytes_per_block),
            (names.FORMULA_RATIO, reading.formula_ratio),
            (names.RUNNING, reading.running),
            (names.WAITING, reading.waiting),
        ):
            put(metric, value, *labels)
        for pool in reading.pools:
            put(names.POOL_USED, pool.used_blocks, *labels, pool.label)


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=list(metric.labels))


def render(agent: Agent) -> bytes:
    """The exposition of one agent."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent))
    return generate_latest(registry)
