"""The posture ``share``: what one sidecar may admit by itself while the ledger does not answer.

Each live sidecar takes an equal part of every replica's last known headroom (not of its size), so that all of them
together cannot promise more than was free when the ledger went away for all of them. For that

* whoever takes a part is known to all others that do: a sidecar that joins others, or that has not tried to beat for a
  heartbeat's life, takes none until it has lived so long again. By then each of them has beaten once more, and counted
  it, or does not count any more itself;
* what each reserved of late it leaves out of its part in full, though its own snapshot shows it already: the others'
  may be older, and take it for free.

Pure: no clock, no I/O. Only ends of what was admitted here give room back; the first snapshot after the outage starts
afresh, but for what the ledger has not been told yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from extproc.ledger.base import KEEP_FREE_SHARE, Candidate, LedgerSnapshot, ReplicaState, Reservation

#: How often a sidecar says that it lives, and how long it counts as living after that.
BEAT_S, BEAT_TTL_S = 1.0, 5.0
#: What a snapshot of this long ago did not show yet is left out still, on the server's clock: twice the longest time
#: between a sidecar's snapshots while the ledger answers.
SNAPSHOT_AGE_S = 2.0
#: Admissions remembered for the ledger's return; about 1 KB each.
MAX_OWED = 20_000


@dataclass(slots=True)
class _Room:
    """A replica as the last snapshot showed it, and what was taken since."""

    capacity: int
    headroom: int
    slots: int | None
    taken_blocks: int = 0
    taken_sequences: int = 0


class LocalShare:
    """The share of this process; ``live_sidecars`` is how many the ledger counted last (itself included).

    ``known``: all others that live know of this one from the beginning.
    """

    def __init__(self, *, known: bool = True) -> None:
        self.live_sidecars = 1
        self._known = known
        #: On the caller's steady clock: when the ledger first counted this one, counted it last, and was last asked to.
        self._joined_s = self._beat_s = self._tried_s = -math.inf
        self._rooms: dict[str, _Room] = {}
        #: The last snapshot's time on the server's clock -> replica and kind -> what the ledger reserved for this
        #: sidecar while it was the last.
        self._noted: dict[float, Counter[tuple[str, str]]] = {}
        self._seen_s = -math.inf
        #: rid -> replica, blocks, sequences, and when it has ended at the latest; in order of admission.
        self._taken: dict[str, tuple[str, int, int, float]] = {}
        #: What was admitted here and the ledger has not heard of, by rid; to be told to it before it is asked again.
        self.owed: dict[str, Reservation] = {}
        #: What it heard since the last snapshot, which may not show it.
        self._told: set[str] = set()

    def beat(self, live: int | None, sent_s: float, now_s: float) -> None:
        """A heartbeat was tried from ``sent_s`` to ``now_s``, any steady clock: so many live, or None without an answer."""
        if now_s - self._tried_s >= BEAT_TTL_S:
            self._known = False  # this process stood still, and the others may have gone on without it
        self._tried_s = now_s
        if live is None:
            return
        if now_s - self._beat_s >= BEAT_TTL_S:
            self._joined_s, self._known = now_s, False
        self._beat_s, self.live_sidecars = sent_s, live
        self._known = self._known or live == 1 or sent_s - self._joined_s >= BEAT_TTL_S

    def observe(self, snapshot: LedgerSnapshot) -> None:
        """The ledger answers: forget what was taken, and remember the room for the next outage."""
        self.live_sidecars = max(1, self.live_sidecars, snapshot.live_sidecars)
        self._seen_s = snapshot.now_s
        self._noted = {at_s: noted for at_s, noted in self._noted.items() if at_s >= self._seen_s - SNAPSHOT_AGE_S}
        self._taken = {rid: taken for rid, taken in self._taken.items() if rid in self.owed or rid in self._told}
        self._told.clear()
        self._rooms = {}
        for name, view in snapshot.replicas.items():
            report, headroom = view.report, view.headroom_blocks
            if view.state != ReplicaState.READY or headroom is None or report is None or report.capacity_blocks is None:
                continue
            slots = None if report.max_sequences is None else report.max_sequences - view.sequences
            self._rooms[name] = _Room(report.capacity_blocks, headroom, slots)
        for replica, blocks, sequences, _ in self._taken.values():
            self._take(replica, blocks, sequences)

    def note(self, replica: str, blocks: int, sequences: int = 1) -> None:
        """A reservation that the ledger made after the last snapshot; the other sidecars are taken to have made as many."""
        noted = self._noted.setdefault(self._seen_s, Counter())
        noted[replica, "blocks"] += blocks
        noted[replica, "sequences"] += sequences

    def _left_out(self, replica: str, kind: str) -> int:
        """Blocks or sequences reserved here that a snapshot, this sidecar's or another's, need not show."""
        alone = self.live_sidecars == 1
        return sum(noted[replica, kind] for at_s, noted in self._noted.items() if not alone or at_s == self._seen_s)

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
            if self.owed.pop(reservation.rid, None) is not None:
                self._told.add(reservation.rid)

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
        if room is None or not self._known:
            return False
        pool = room.capacity - math.ceil(room.capacity * candidate.watermark)
        keep = room.capacity - pool + min(candidate.keep_free_blocks, math.floor(pool * KEEP_FREE_SHARE))
        share = (room.headroom - keep) // self.live_sidecars - self._left_out(candidate.replica, "blocks")
        blocks, sequences = candidate.need.kv_blocks, candidate.need.sequences
        if room.taken_blocks + blocks > share:
            return False
        if room.slots is not None:
            slots = room.slots // self.live_sidecars - self._left_out(candidate.replica, "sequences")
            if room.taken_sequences + sequences > slots:
                return False
        self._take(candidate.replica, blocks, sequences)
        self._taken[rid] = (candidate.replica, blocks, sequences, now_s + candidate.cap_s)
        return True

    def ended(self, rid: str) -> None:
        """An end record of a request admitted by this share: its room is free again."""
        self.owed.pop(rid, None)
        taken = self._taken.pop(rid, None)
        if taken is not None:
            replica, blocks, sequences, _ = taken
            self._take(replica, -blocks, -sequences)

    def _take(self, replica: str, blocks: int, sequences: int) -> None:
        room = self._rooms.get(replica)
        if room is not None:
            room.taken_blocks += blocks
            room.taken_sequences += sequences
