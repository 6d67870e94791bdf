"""The posture ``share``: what one sidecar may admit by itself while the ledger does not answer.

Each live sidecar takes an equal part of every replica's last known headroom, so that all of them together cannot
promise more than was there. Pure: no clock, no I/O. Only ends of what was admitted here give room back; the first
snapshot after the outage starts afresh.
"""

from __future__ import annotations

import math

from extproc.ledger.base import Candidate, LedgerSnapshot, ReplicaState


class LocalShare:
    """The share of this process; ``live_sidecars`` is how many the ledger counted last (itself included)."""

    def __init__(self) -> None:
        self.live_sidecars = 1
        self._left: dict[str, int] = {}
        self._taken: dict[str, tuple[str, int]] = {}
        self._shares: dict[str, int] = {}

    def observe(self, snapshot: LedgerSnapshot) -> None:
        """The ledger answers: forget what was taken, and remember the room for the next outage."""
        live = max(1, self.live_sidecars, snapshot.live_sidecars)
        self._taken.clear()
        self._shares = {
            name: view.headroom_blocks // live
            for name, view in snapshot.replicas.items()
            if view.headroom_blocks is not None and view.state == ReplicaState.READY and not view.drained_by_operator
        }
        self._left = dict(self._shares)

    def admit(self, rid: str, candidate: Candidate) -> bool:
        """Take the candidate's blocks out of this sidecar's share; a remote candidate takes nothing and always fits."""
        if candidate.remote:
            return True
        left = self._left.get(candidate.replica)
        if left is None:
            return False
        keep = math.ceil(self._shares[candidate.replica] * candidate.watermark) + candidate.keep_free_blocks
        if candidate.need.kv_blocks > left - keep:
            return False
        self._left[candidate.replica] = left - candidate.need.kv_blocks
        self._taken[rid] = (candidate.replica, candidate.need.kv_blocks)
        return True

    def ended(self, rid: str) -> None:
        """An end record of a request admitted by this share: its blocks are free again."""
        taken = self._taken.pop(rid, None)
        if taken is not None:
            replica, blocks = taken
            self._left[replica] = min(self._shares.get(replica, 0), self._left.get(replica, 0) + blocks)
