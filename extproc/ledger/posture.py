"""The posture ``share``: what one sidecar may admit by itself while the ledger does not answer.

Each live sidecar takes an equal part of every replica's last known headroom (not of its size), so that all of them
together cannot promise more than was free. Pure: no clock, no I/O. Only ends of what was admitted here give room back;
the first snapshot after the outage starts afresh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from extproc.ledger.base import KEEP_FREE_SHARE, Candidate, LedgerSnapshot, ReplicaState, Reservation

#: Admissions remembered for the ledger's return; about 1 KB each.
MAX_OWED = 20_000


@dataclass(slots=True)
class _Room:
    """A replica as the last snapshot showed it, and what was taken since."""

    capacity: int
    headroom: int
    slots: int | None
    noted_blocks: int = 0
    taken_blocks: int = 0
    taken_sequences: int = 0


class LocalShare:
    """The share of this process; ``live_sidecars`` is how many the ledger counted last (itself included)."""

    def __init__(self) -> None:
        self.live_sidecars = 1
        self._rooms: dict[str, _Room] = {}
        #: rid -> replica, blocks, sequences, and when it has ended at the latest; in order of admission.
        self._taken: dict[str, tuple[str, int, int, float]] = {}
        #: What was admitted here and the ledger has not heard of, by rid; to be told to it before it is asked again.
        self.owed: dict[str, Reservation] = {}

    def observe(self, snapshot: LedgerSnapshot) -> None:
        """The ledger answers: forget what was taken, and remember the room for the next outage."""
        self.live_sidecars = max(1, self.live_sidecars, snapshot.live_sidecars)
        self._taken.clear()
        self._rooms = {}
        for name, view in snapshot.replicas.items():
            report, headroom = view.report, view.headroom_blocks
            if view.state != ReplicaState.READY or headroom is None or report is None or report.capacity_blocks is None:
                continue
            slots = None if report.max_sequences is None else report.max_sequences - view.sequences
            self._rooms[name] = _Room(report.capacity_blocks, headroom, slots)

    def note(self, replica: str, blocks: int) -> None:
        """A reservation that the ledger made after the last snapshot; the other sidecars are taken to have made as many."""
        room = self._rooms.get(replica)
        if room is not None:
            room.noted_blocks += blocks

    def owe(self, reservation: Reservation) -> None:
        """The ledger has to hear of this one; beyond ``MAX_OWED`` its periodic records alone will tell it."""
        if len(self.owed) < MAX_OWED:
            self.owed[reservation.rid] = reservation

    def owed_first(self, count: int) -> list[Reservation]:
        """Up to ``count`` of what is owed."""
        return list(islice(self.owed.values(), count))

    def paid(self, reservations: Sequence[Reservation]) -> None:
        """The ledger has heard of these."""
        for reservation in reservations:
            self.owed.pop(reservation.rid, None)

    def admit(self, rid: str, candidate: Candidate, now_s: float) -> bool:
        """Take the candidate's blocks out of this sidecar's share; a remote candidate takes nothing and always fits.

        ``now_s`` is any steady clock. What must have ended by it is given back first: its end may have been heard by
        another instance.
        """
        if candidate.remote:
            return True
        for old, (*_, gone_s) in list(self._taken.items()):
            if gone_s > now_s:
                break
            self.ended(old)
        room = self._rooms.get(candidate.replica)
        if room is None:
            return False
        pool = room.capacity - math.ceil(room.capacity * candidate.watermark)
        keep = room.capacity - pool + min(candidate.keep_free_blocks, math.floor(pool * KEEP_FREE_SHARE))
        share = (room.headroom - keep) // self.live_sidecars - room.noted_blocks
        blocks, sequences = candidate.need.kv_blocks, candidate.need.sequences
        if room.taken_blocks + blocks > share:
            return False
        if room.slots is not None and room.taken_sequences + sequences > room.slots // self.live_sidecars:
            return False
        room.taken_blocks += blocks
        room.taken_sequences += sequences
        self._taken[rid] = (candidate.replica, blocks, sequences, now_s + candidate.cap_s)
        return True

    def ended(self, rid: str) -> None:
        """An end record of a request admitted by this share: its room is free again."""
        self.owed.pop(rid, None)
        taken = self._taken.pop(rid, None)
        if taken is not None:
            replica, blocks, sequences, _ = taken
            room = self._rooms.get(replica)
            if room is not None:
                room.taken_blocks -= blocks
                room.taken_sequences -= sequences
