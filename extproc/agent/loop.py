"""The agent's round: discover, scrape all engines side by side, read the devices, publish once.

Owns the schedule and the tasks; what a replica is, is ``watch``'s business. Nothing that an engine, a device
library or the ledger does ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from extproc.agent import alarms
from extproc.agent.devices.base import DeviceReader
from extproc.agent.devices.declared import declared_bytes
from extproc.agent.discovery import Discovery, Endpoint
from extproc.agent.engines import ENGINES
from extproc.agent.http import Client
from extproc.agent.scraper import Scraper
from extproc.agent.watch import Origin, ReplicaWatch, Scrape
from extproc.errors import LedgerDown
from extproc.ledger.base import Ledger, PublishResult, ReplicaReport

log = logging.getLogger("kvgate.agent")

#: A failing replica is logged when its cause changes and then at most this often.
LOG_EVERY_S = 60.0
#: Somebody else's API is visited this seldom: often enough that its row does not turn unknown in between, and 8,640
#: requests a day.
OUTSIDE_EVERY_S = 10.0
#: Rounds between two looks at who else publishes for this node.
SIBLING_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Settings:
    """What the loop needs beyond its parts; ``ttl_s`` is how long the ledger keeps an unrefreshed report."""

    node: str
    instance: str
    interval_s: float = 1.0
    timeout_s: float = 0.8
    unknown_s: float = 15.0
    ttl_s: float = 60.0


@dataclass(slots=True)
class Health:
    """Named components, each "ok" or what is wrong with it; and the round's figures."""

    components: dict[str, str] = field(default_factory=dict)
    began_mono_s: float = field(default_factory=time.monotonic)
    rounds: int = 0
    publish_failures: int = 0
    last_round_s: float | None = None
    last_round_mono_s: float | None = None
    last_publish_mono_s: float | None = None
    clock_offset_s: float | None = None

    def ready(self) -> bool:
        """Whether every component is ok and something was published."""
        return self.last_publish_mono_s is not None and all(value == "ok" for value in self.components.values())


@dataclass(slots=True)
class _Watched:
    endpoint: Endpoint
    watch: ReplicaWatch
    scraper: Scraper
    task: asyncio.Task[Scrape] | None = None
    due_mono_s: float = 0.0
    logged: tuple[str, float] | None = None


class Agent:
    """One node agent; ``run`` until cancelled, or ``round`` by hand in tests."""

    def __init__(self, ledger: Ledger, discovery: Discovery, devices: DeviceReader, settings: Settings) -> None:
        self._ledger = ledger
        self._discovery = discovery
        self.devices = devices
        self.settings = settings
        self.health = Health()
        self.published: list[ReplicaReport] = []
        self.result: PublishResult | None = None
        self.alarms: list[alarms.Alarm] = []
        self._watched: dict[str, _Watched] = {}
        self._siblings: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def watches(self) -> Sequence[ReplicaWatch]:
        """Every replica watched now, leaving ones included."""
        return [watched.watch for watched in self._watched.values()]

    def weights_bytes(self, watch: ReplicaWatch) -> int | None:
        """Weights and overhead as measured: process memory on the replica's devices less its KV pool.

        None where a device is shared, a process' size is not told, or the engine does not tell its block's bytes.
        """
        reading, devices = watch.reading, self._watched[watch.origin.replica].endpoint.devices
        if reading is None or reading.kv_bytes_per_block is None or reading.capacity_blocks is None or not devices:
            return None
        if any(len(self._tenants().get(uuid, ())) > 1 for uuid in devices):
            return None
        known = {device.uuid: device.engine_used_bytes() for device in self.devices.readings(time.monotonic())}
        used = [known.get(uuid) for uuid in devices]
        if any(size is None for size in used):
            return None
        pool = reading.kv_bytes_per_block * reading.capacity_blocks * len(devices)
        rest = sum(size or 0 for size in used) - pool
        return rest if rest > 0 else None

    def _tenants(self) -> dict[str, list[str]]:
        """Replicas by the devices they are configured on."""
        tenants: dict[str, list[str]] = {}
        for name, watched in self._watched.items():
            for uuid in watched.endpoint.devices:
                tenants.setdefault(uuid, []).append(name)
        return tenants

    async def run(self) -> None:
        """Round after round at a fixed beat; a round that ran late is followed by the next beat, not a burst."""
        beat = time.monotonic()
        try:
            while True:
                try:
                    await self.round()
                    self.health.components["loop"] = "ok"
                except Exception as error:  # outer border: one bad round must not blind the node
                    self.health.components["loop"] = f"failed: {type(error).__name__}"
                    log.exception("round failed")
                beat += self.settings.interval_s
                now = time.monotonic()
                if beat <= now:
                    beat = now - (now - beat) % self.settings.interval_s + self.settings.interval_s
                await asyncio.sleep(beat - now)
        finally:
            await self.close()

    async def round(self) -> None:
        """One look at everything, and one publish."""
        began = time.monotonic()
        await self._read_clock()
        self._follow(await self._discovery.endpoints())
        await asyncio.gather(self._scrape_all(), self.devices.read(self.settings.timeout_s))
        await self._publish()
        self.health.rounds += 1
        self.health.last_round_mono_s = time.monotonic()
        self.health.last_round_s = self.health.last_round_mono_s - began
        self._raise_alarms()

    async def close(self) -> None:
        """Stop every visit and give the connections back."""
        for watched in self._watched.values():
            await _stop(watched)
        self._watched.clear()
        if self._closing:
            await asyncio.wait(self._closing)
        await self._discovery.close()

    async def _read_clock(self) -> None:
        """The ledger's clock against ours; the answer's arrival is used, so our idea of its now is never ahead."""
        try:
            now_s = await self._ledger.time_s()
        except LedgerDown as error:
            self.health.components["ledger"] = f"down: {error}"
            return
        self.health.clock_offset_s = now_s - time.monotonic()
        self.health.components["ledger"] = "ok"

    def _follow(self, endpoints: Sequence[Endpoint]) -> None:
        """Take up new replicas, mark vanished ones as leaving, forget those that left and went idle."""
        self.health.components["discovery"] = self._discovery.health()
        present = {endpoint.replica: endpoint for endpoint in endpoints}
        for name, endpoint in present.items():
            known = self._watched.get(name)
            if known is not None and _same_engine(known.endpoint, endpoint):
                known.endpoint, known.watch.hints = endpoint, endpoint.hints
            else:
                if known is not None:
                    self._forget(name)
                self._watched[name] = self._take_up(endpoint)
            self._watched[name].watch.leaving = False
        for name in [name for name in self._watched if name not in present]:
            watched = self._watched[name]
            if watched.watch.leaving and watched.watch.idle():
                self._forget(name)
            else:
                watched.watch.leaving = True

    def _take_up(self, endpoint: Endpoint) -> _Watched:
        origin = Origin(endpoint.replica, endpoint.target, self.settings.node, self.settings.instance)
        watch = ReplicaWatch(origin, ENGINES[endpoint.engine], endpoint.hints, unknown_s=self.settings.unknown_s)
        client = Client(endpoint.url, connect_host=endpoint.address, trust=endpoint.trust)
        elsewhere: dict[str, Client] = {}
        if endpoint.metrics_url is not None:
            metrics = Client(endpoint.metrics_url, connect_host=endpoint.address, trust=endpoint.trust)
            elsewhere = {each.path: metrics for each in watch.engine.endpoints if each.metrics}
        return _Watched(endpoint, watch, Scraper(client, elsewhere))

    def _forget(self, name: str) -> None:
        watched = self._watched.pop(name)
        if watched.task is not None:
            watched.task.cancel()
        closing = asyncio.create_task(_stop(watched))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _scrape_all(self) -> None:
        """Visit every engine; those that are late go on by themselves and are taken up in a later round."""
        tasks, now_s = [], time.monotonic()
        for watched in self._watched.values():
            if watched.task is None and now_s >= watched.due_mono_s:
                watched.task = asyncio.create_task(watched.scraper.visit(watched.watch.due()))
                watched.due_mono_s = now_s + (OUTSIDE_EVERY_S if watched.watch.engine.outside else 0.0)
            if watched.task is not None:
                tasks.append(watched.task)
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.timeout_s)
        lost, offset_s, wall_s = self.devices.lost(), self.health.clock_offset_s or 0.0, time.time()
        for watched in self._watched.values():
            watched.watch.devices(
                lost=not lost.isdisjoint(watched.endpoint.devices), mono_s=time.monotonic(), offset_s=offset_s
            )
            if watched.task is not None and watched.task.done():
                task, watched.task = watched.task, None
                try:
                    watched.watch.observe(task.result(), offset_s=offset_s, wall_s=wall_s)
                except Exception as error:  # outer border of one replica: the others are published all the same
                    watched.watch.unreadable(error)
                    log.exception("replica %s: its answers cannot be read", watched.watch.origin.replica)
                reading = watched.watch.reading
                if reading is not None and reading.closed_for_s is not None:  # it asked not to be asked before then
                    watched.due_mono_s = max(watched.due_mono_s, now_s + reading.closed_for_s)
                self._log(watched)

    async def _publish(self) -> None:
        offset_s = self.health.clock_offset_s
        self.health.components["devices"] = self.devices.health()
        if offset_s is None:
            return
        if self.health.rounds % SIBLING_ROUNDS == 0:
            # Before our own publish, which would hide whose report was there.
            await self._look_for_siblings()
        mono_s, settings = time.monotonic(), self.settings
        replicas = [watched.watch.report(mono_s=mono_s, offset_s=offset_s) for watched in self._watched.values()]
        devices = self.devices.reports(settings.node, settings.instance, offset_s)
        try:
            self.result = await self._ledger.publish(replicas, devices, settings.ttl_s)
        except LedgerDown as error:
            self.health.publish_failures += 1
            self.health.components["ledger"] = f"down: {error}"
            return
        self.published = replicas
        self.health.last_publish_mono_s = time.monotonic()

    def _raise_alarms(self) -> None:
        """Find who shares a device; each finding is logged when it appears and when it is gone."""
        readings = self.devices.readings(time.monotonic())
        limits = declared_bytes({process.pid for reading in readings for process in reading.processes or ()})
        before, self.alarms = self.alarms, alarms.find(readings, self._tenants(), limits)
        known = {(alarm.kind, alarm.device) for alarm in before}
        for alarm in self.alarms:
            if (alarm.kind, alarm.device) not in known:
                log.warning("device %s: %s: %s", alarm.device, alarm.kind, alarm.message)

    async def _look_for_siblings(self) -> None:
        """Two agents for one node tell the same truth twice; harmless, but a mistake worth a word."""
        try:
            snapshot = await self._ledger.snapshot()
        except LedgerDown:
            return
        others = {
            view.report.instance
            for view in snapshot.replicas.values()
            if view.report is not None
            and view.report.node == self.settings.node
            and view.report.instance != self.settings.instance
            and view.age_s is not None
            and view.age_s < SIBLING_ROUNDS * self.settings.interval_s
        }
        # An agent that was just replaced is still fresh for a moment; it counts only when seen twice.
        self._siblings, before = others, self._siblings
        twice = others & before
        self.health.components["node"] = f"another agent publishes for {self.settings.node}" if twice else "ok"

    def _log(self, watched: _Watched) -> None:
        """One line when a replica's trouble changes, then at most once a minute (a 50 ms loop once flooded a log)."""
        watch, now = watched.watch, time.monotonic()
        trouble = watch.cause or ",".join(watch.reading.missing if watch.reading else ())
        before = watched.logged
        if before is None and not trouble:
            reading = watch.reading
            log.info("replica %s: %s at %s, signals %s", watch.origin.replica, watch.engine.name, watched.endpoint.url,
                     dict(reading.aliases) if reading else {})  # fmt: skip
        elif before is not None and before[0] == trouble and (not trouble or now - before[1] < LOG_EVERY_S):
            return
        elif trouble:
            log.warning("replica %s: %s (%s failures)", watch.origin.replica, trouble, watch.failures)
        else:
            log.info("replica %s: back", watch.origin.replica)
        watched.logged = (trouble, now)


def _same_engine(known: Endpoint, now: Endpoint) -> bool:
    """Whether both are one engine reached in one way: what else the file says of it may change while it is watched."""
    return replace(known, hints=now.hints, devices=now.devices) == now


async def _stop(watched: _Watched) -> None:
    if watched.task is not None:
        watched.task.cancel()
        await asyncio.wait([watched.task])
    await watched.scraper.close()
