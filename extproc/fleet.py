"""The fleet as this process last saw it: a snapshot refreshed in the background, read without waiting.

Owns the snapshot and its age; the ledger alone decides what fits. Requests read it to know block sizes, contexts
and which replicas are worth asking first. Reservations made here since the last refresh are added to it, so
that a burst does not queue up at one replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from extproc.errors import DependencyDown
from extproc.ledger.base import Ledger, LedgerSnapshot, ReplicaState, ReplicaView

#: How often the snapshot is read; half the agents' scrape interval.
REFRESH_S = 0.5
#: How long one reading may take before the old snapshot is kept.
TIMEOUT_S = 2.0


class Fleet:
    """Latest snapshot of the ledger's pool."""

    __slots__ = ("_clock_s", "_ledger", "_members", "_observe", "_read_at_s", "_since", "failures", "snapshot")

    def __init__(
        self,
        ledger: Ledger,
        observe: Callable[[LedgerSnapshot], None] = lambda _: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._observe = observe
        self._clock_s = clock_s
        self._read_at_s = 0.0
        self.snapshot: LedgerSnapshot | None = None
        self.failures = 0
        self._since: dict[str, int] = defaultdict(int)
        self._members: dict[str, tuple[str, ...]] = {}

    def members(self, replica: str) -> tuple[str, ...]:
        """The replicas that agents found under ``replica`` (`discover`) and report now."""
        return self._members.get(replica, ())

    def view(self, replica: str) -> ReplicaView | None:
        """One replica as last seen, or None where no agent ever reported it."""
        return None if self.snapshot is None else self.snapshot.replicas.get(replica)

    def rank(self, replica: str) -> tuple[int, int, float]:
        """Sort key: usable replicas first, most free blocks first, emptiest prefill bucket first."""
        view = self.view(replica)
        if view is None:
            return (2, 0, 0.0)
        usable = 0 if view.state == ReplicaState.READY and not view.drained_by_operator else 1
        headroom = view.headroom_blocks if view.headroom_blocks is not None else 0
        return (usable, -(headroom - self._since[replica]), view.prefill_level_tokens)

    def note(self, replica: str, blocks: int) -> None:
        """Remember a reservation that the snapshot does not show yet."""
        self._since[replica] += blocks

    def ledger_now_s(self) -> float | None:
        """The ledger's clock as the last snapshot and our own clock tell it; None before the first snapshot."""
        if self.snapshot is None:
            return None
        return self.snapshot.now_s + self._clock_s() - self._read_at_s

    async def refresh(self) -> bool:
        """Read the snapshot once; False where the ledger did not answer and the old one stays."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                snapshot = await self._ledger.snapshot()
        except (DependencyDown, TimeoutError):
            self.failures += 1
            return False
        self.failures = 0
        self.snapshot = snapshot
        self._members = _found(snapshot)
        self._read_at_s = self._clock_s()
        self._since.clear()
        self._observe(snapshot)
        return True

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)


def _found(snapshot: LedgerSnapshot) -> dict[str, tuple[str, ...]]:
    """Names with an address, by what stands before it; those of static replicas are among them and never asked for."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, view in snapshot.replicas.items():
        base, at, _ = name.rpartition("@")
        if at and view.report is not None:
            found[base].append(name)
    return {base: tuple(sorted(names)) for base, names in found.items()}
