"""The ledger of a single sidecar without Redis: the reference behind the protocol; its data dies with the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from extproc.ledger.lessons import Lesson, Lessons
from extproc.ledger.line import Line, Turn
from extproc.ledger.reference import ReferenceLedger
from extproc.ledger.rules import to_us


class InMemoryLedger(Ledger):
    """The reference behind the ``Ledger`` protocol; ``clock`` returns seconds and is the ledger's clock."""

    def __init__(self, clock: Callable[[], float], *, fresh: bool = True, periodic_s: float = 1.0) -> None:
        self.reference = ReferenceLedger(fresh=fresh, periodic_s=periodic_s)
        self._clock = clock
        self._line = Line()
        self._lessons = Lessons()

    async def time_s(self) -> float:
        """The ledger's clock."""
        return self._clock()

    async def reserve(self, request: ReserveRequest) -> ReserveResult:
        """See ``Ledger.reserve``."""
        return self.reference.reserve(request, self._clock())

    async def renew(self, records: Sequence[Upsert]) -> list[bool]:
        """See ``Ledger.renew``."""
        return self.reference.renew(records, self._clock())

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """See ``Ledger.end``."""
        return self.reference.end(ends, self._clock())

    async def reap(self, *, listened_s: float | None = None, owners: Sequence[str] = ()) -> int:
        """See ``Ledger.reap``."""
        total, more = 0, True
        while more:
            released, more = self.reference.reap(self._clock(), listened_s=listened_s, owners=owners)
            total += released
        return total

    async def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float
    ) -> PublishResult:
        """See ``Ledger.publish``."""
        return self.reference.publish(replicas, devices, ttl_s, self._clock())

    async def snapshot(self) -> LedgerSnapshot:
        """See ``Ledger.snapshot``."""
        return self.reference.snapshot(self._clock())

    async def reservations(self, replica: str) -> list[LiveReservation]:
        """See ``Ledger.reservations``."""
        return self.reference.reservations(replica)

    async def drain(self, replica: str, on: bool) -> None:
        """See ``Ledger.drain``."""
        self.reference.drain(replica, on)

    async def audit(self) -> list[AuditLine]:
        """See ``Ledger.audit``."""
        return self.reference.audit()

    async def heartbeat(self, instance: str, ttl_s: float) -> int:
        """See ``Ledger.heartbeat``."""
        return self.reference.heartbeat(instance, ttl_s, self._clock())

    async def lessons(self, told: Sequence[Lesson]) -> list[Lesson]:
        """See ``Ledger.lessons``."""
        return self._lessons.tell(told, to_us(self._clock()))

    async def turn(self, token: str) -> Turn:
        """See ``Ledger.turn``."""
        return self._line.turn(token, to_us(self._clock()))

    async def promise(
        self, token: str, replica: str, blocks: int, wait_s: float, since_at_s: float | None, run_s: float | None = None
    ) -> None:
        """See ``Ledger.promise``."""
        since_us = -1 if since_at_s is None else to_us(since_at_s)
        run_us = -1 if run_s is None else to_us(run_s)
        self._line.promise(token, replica, blocks, to_us(wait_s), since_us, run_us, to_us(self._clock()))

    async def close(self) -> None:
        """Nothing to give back."""
