"""A ledger that reports how long each call took and whether it was answered.

Owns the measuring; every call goes to the ledger behind it unchanged, and so does every exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from extproc.errors import LedgerDown
from extproc.ledger.base import (
    AuditLine,
    DeviceReport,
    End,
    EndResult,
    Ledger,
    LedgerSnapshot,
    LiveReservation,
    PublishResult,
    ReplicaReport,
    ReserveRequest,
    ReserveResult,
    Upsert,
)
from extproc.ledger.lessons import Lesson
from extproc.ledger.line import Turn
from extproc.ledger.redis import RedisLedger
from extproc.telemetry.metrics import Metrics

Answer = TypeVar("Answer")


def watched(ledger: Ledger, metrics: Metrics) -> WatchedLedger:
    """``ledger`` with its calls, and the ends it keeps where it keeps any, in ``metrics``."""
    if isinstance(ledger, RedisLedger):
        return WatchedLedger(ledger, metrics, undelivered=partial(_kept_ends, ledger))
    return WatchedLedger(ledger, metrics)


def _kept_ends(ledger: RedisLedger) -> int:
    return ledger.status.kept_ends


class WatchedLedger:
    """``ledger`` with its calls in ``metrics``; ``undelivered`` says how many ends it keeps for its server's return."""

    def __init__(self, ledger: Ledger, metrics: Metrics, *, undelivered: Callable[[], int] | None = None) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._undelivered = undelivered

    async def time_s(self) -> float:
        """See ``Ledger.time_s``."""
        return await self._watched("time", self._ledger.time_s())

    async def reserve(self, request: ReserveRequest) -> ReserveResult:
        """See ``Ledger.reserve``."""
        return await self._watched("reserve", self._ledger.reserve(request))

    async def renew(self, records: Sequence[Upsert]) -> list[bool]:
        """See ``Ledger.renew``."""
        answers = await self._watched("renew", self._ledger.renew(records))
        refused = answers.count(False)
        if refused:
            self._metrics.renewals_refused(refused)
        return answers

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """See ``Ledger.end``; an end that had to be kept counts as a call without an answer."""
        started = time.perf_counter()
        results = await self._ledger.end(ends)
        kept = any(result.kept for result in results)
        self._metrics.ledger_call("end", time.perf_counter() - started, ok=not kept)
        self._report_undelivered()
        return results

    async def reap(self, *, listened_s: float | None = None, owners: Sequence[str] = ()) -> int:
        """See ``Ledger.reap``."""
        released = await self._watched("reap", self._ledger.reap(listened_s=listened_s, owners=owners))
        if released:
            self._metrics.reaped(released)
        return released

    async def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float
    ) -> PublishResult:
        """See ``Ledger.publish``."""
        return await self._watched("publish", self._ledger.publish(replicas, devices, ttl_s))

    async def snapshot(self) -> LedgerSnapshot:
        """See ``Ledger.snapshot``."""
        self._report_undelivered()
        return await self._watched("snapshot", self._ledger.snapshot())

    async def reservations(self, replica: str) -> list[LiveReservation]:
        """See ``Ledger.reservations``."""
        return await self._watched("reservations", self._ledger.reservations(replica))

    async def drain(self, replica: str, on: bool) -> None:
        """See ``Ledger.drain``."""
        await self._watched("drain", self._ledger.drain(replica, on))

    async def audit(self) -> list[AuditLine]:
        """See ``Ledger.audit``."""
        return await self._watched("audit", self._ledger.audit())

    async def heartbeat(self, instance: str, ttl_s: float) -> int:
        """See ``Ledger.heartbeat``."""
        return await self._watched("heartbeat", self._ledger.heartbeat(instance, ttl_s))

    async def lessons(self, told: Sequence[Lesson]) -> list[Lesson]:
        """See ``Ledger.lessons``."""
        return await self._watched("lessons", self._ledger.lessons(told))

    async def turn(self, token: str) -> Turn:
        """See ``Ledger.turn``."""
        return await self._watched("turn", self._ledger.turn(token))

    async def promise(
        self, token: str, replica: str, blocks: int, wait_s: float, since_at_s: float | None, run_s: float | None = None
    ) -> None:
        """See ``Ledger.promise``."""
        await self._watched("promise", self._ledger.promise(token, replica, blocks, wait_s, since_at_s, run_s))

    async def close(self) -> None:
        """See ``Ledger.close``."""
        await self._ledger.close()

    async def _watched(self, name: str, call: Coroutine[Any, Any, Answer]) -> Answer:
        started = time.perf_counter()
        try:
            answer = await call
        except LedgerDown:
            self._metrics.ledger_call(name, time.perf_counter() - started, ok=False)
            raise
        self._metrics.ledger_call(name, time.perf_counter() - started, ok=True)
        return answer

    def _report_undelivered(self) -> None:
        if self._undelivered is not None:
            self._metrics.undelivered_ends(self._undelivered())
