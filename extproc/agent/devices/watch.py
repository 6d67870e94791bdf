"""All devices of a node, round after round: sources in, reports out, with isolation and slow recovery.

Owns which device is believed. A source that blocks (NVML can hang on a dying card) keeps its thread and its
devices turn unknown; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from extproc.agent.devices.base import DeviceReading, DeviceSource, DeviceState, SourceDown
from extproc.ledger.base import DeviceReport

log = logging.getLogger("kvgate.agent")

#: Good readings in a row before a device that was lost or unknown is believed again.
RECOVERY_READINGS = 3
#: A reading older than this says nothing any more.
STALE_S = 15.0
BELIEVED = frozenset({DeviceState.OK, DeviceState.UNIFIED})


@dataclass(slots=True)
class _Known:
    reading: DeviceReading
    at_mono_s: float
    good: int
    trusted: bool
    lost: bool = False  # was lost and is not yet trusted again


@dataclass(slots=True)
class _Running:
    source: DeviceSource
    pool: ThreadPoolExecutor
    task: asyncio.Future[Sequence[DeviceReading]] | None = None
    trouble: str | None = None
    ever: bool = False


class DeviceWatch:
    """Reads every source in its own thread; ``quiet`` sources may be absent without a word (no such hardware)."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self._running = [
            _Running(source, ThreadPoolExecutor(1, thread_name_prefix=f"kvgate-{source.name}")) for source in sources
        ]
        self._known: dict[str, _Known] = {}

    async def read(self, timeout_s: float) -> None:
        """One look at every source; late ones are taken up when they come."""
        loop = asyncio.get_running_loop()
        for running in self._running:
            if running.task is None:
                running.task = loop.run_in_executor(running.pool, running.source.read)
        tasks = [running.task for running in self._running if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for running in self._running:
            if running.task is None or not running.task.done():
                running.trouble = f"{running.source.name}: no answer yet"
                continue
            task, running.task = running.task, None
            try:
                readings = task.result()
            except SourceDown as error:
                # A source that never worked is hardware that is not there.
                running.trouble = f"{running.source.name}: {error}" if running.ever else None
                continue
            except Exception as error:  # outer border of a vendor's library: engines and other devices go on
                running.trouble = f"{running.source.name}: failed: {type(error).__name__}"
                log.exception("device source %s failed", running.source.name)
                continue
            running.trouble, running.ever = None, running.ever or bool(readings)
            self.take(readings, time.monotonic())

    def take(self, readings: Sequence[DeviceReading], at_mono_s: float) -> None:
        """Take readings made at ``at_mono_s``; those without a UUID cannot be told apart and are dropped."""
        for reading in readings:
            if not reading.uuid:
                continue
            known = self._known.get(reading.uuid)
            lost = reading.state is DeviceState.LOST or (known is not None and known.lost)
            if reading.state not in BELIEVED:
                self._known[reading.uuid] = _Known(reading, at_mono_s, 0, False, lost)
                continue
            good = 1 if known is None else known.good + 1
            trusted = known is None or known.trusted or good >= RECOVERY_READINGS
            self._known[reading.uuid] = _Known(reading, at_mono_s, good, trusted, lost and not trusted)

    def readings(self, mono_s: float) -> list[DeviceReading]:
        """Every known device as it is believed at ``mono_s``."""
        return [self._believed(known, mono_s) for known in self._known.values()]

    def reports(self, node: str, instance: str, offset_s: float) -> list[DeviceReport]:
        """One report per known device; figures of a device that is not believed are None."""
        mono_s = time.monotonic()
        return [
            DeviceReport(
                uuid=uuid,
                node=node,
                instance=instance,
                scrape_start_at_s=known.at_mono_s + offset_s,
                state=believed.state.value,
                total_bytes=believed.total_bytes,
                free_bytes=believed.free_bytes,
                used_bytes=believed.used_bytes,
                reserved_bytes=believed.reserved_bytes,
                name=believed.name,
            )
            for uuid, known in self._known.items()
            for believed in (self._believed(known, mono_s),)
        ]

    def lost(self) -> frozenset[str]:
        """Devices that are gone or not yet believed again after that."""
        return frozenset(
            uuid
            for uuid, known in self._known.items()
            if known.reading.state is DeviceState.LOST or (known.lost and not known.trusted)
        )

    def health(self) -> str:
        """ok, or the troubles of all sources."""
        troubles = [running.trouble for running in self._running if running.trouble]
        troubles += [f"{uuid} lost" for uuid, known in self._known.items() if known.reading.state is DeviceState.LOST]
        return "; ".join(troubles) or "ok"

    def close(self) -> None:
        """Give the libraries back; a thread that hangs in a driver is left behind."""
        for running in self._running:
            running.pool.shutdown(wait=False, cancel_futures=True)
            if running.task is None:
                running.source.close()

    def _believed(self, known: _Known, mono_s: float) -> DeviceReading:
        reading = known.reading
        if reading.state in BELIEVED and (not known.trusted or mono_s - known.at_mono_s > STALE_S):
            reading = replace(reading, state=DeviceState.UNKNOWN, notes=(*reading.notes, "not_fresh_or_recovering"))
        if reading.state not in BELIEVED:
            reading = replace(reading, total_bytes=None, free_bytes=None, used_bytes=None, reserved_bytes=None)
        return reading
