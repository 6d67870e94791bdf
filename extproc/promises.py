"""Retry times that hold: who was refused and told when to come back stands in line before those who come later.

Owns one process's line of refused requests; the ledger alone says what fits, and nothing is taken from its stock. A
retry is known by a digest of the request's own bytes and by coming when it was told to. Room is kept only for those
who show that they come back: where refused requests are not tried again, nobody is turned away in favour of someone
who will never come. Pure: time is an argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

#: A retry may come this much before its time (clocks that tick differently) and this much after it.
EARLY_S, LATE_S = 0.02, 0.5
#: Share of kept promises from which on room is kept, and the weight of one promise in it.
WORTH_KEEPING, WEIGHT = 0.5, 1 / 16
#: Promises remembered; beyond it none is given.
MAX_PROMISES = 2048


@dataclass(frozen=True, slots=True)
class Promise:
    """One refused request: first refused at ``since_s``, told to come back to ``replica`` at ``due_s``."""

    token: bytes
    replica: str
    blocks: int
    since_s: float
    due_s: float


class Promises:
    """The line of one process; ``kept`` is the share of late promises that were taken up."""

    __slots__ = ("_ahead", "_first_due_s", "_line", "kept")

    def __init__(self) -> None:
        self._line: dict[bytes, list[Promise]] = {}
        self._ahead: dict[str, int] = defaultdict(int)
        self._first_due_s = float("inf")
        self.kept = 0.0

    def __len__(self) -> int:
        """How many are awaited."""
        return sum(map(len, self._line.values()))

    def give(self, token: bytes, replica: str, blocks: int, now_s: float, wait_s: float, since_s: float | None) -> None:
        """A request was refused and told to come back in ``wait_s``; ``since_s`` is when it was refused first."""
        if len(self) >= MAX_PROMISES:
            return
        promise = Promise(token, replica, blocks, now_s if since_s is None else since_s, now_s + wait_s)
        self._line.setdefault(token, []).append(promise)
        self._ahead[replica] += blocks
        self._first_due_s = min(self._first_due_s, promise.due_s)

    def came(self, token: bytes, now_s: float) -> Promise | None:
        """The promise that this request comes back for, which leaves the line; None for a newcomer.

        Several clients may send the same bytes: the one that comes takes the promise that fell due first.
        """
        self._expire(now_s)
        due = [promise for promise in self._line.get(token, ()) if promise.due_s <= now_s + EARLY_S]
        if not due:
            return None
        promise = min(due, key=lambda one: one.due_s)
        self._drop(promise)
        self.kept += (1.0 - self.kept) * WEIGHT
        return promise

    def ahead(self, now_s: float, mine: Promise | None) -> Callable[[str], int]:
        """Blocks of a replica that are promised to others who go first.

        Where this one was told to come to, those are the requests refused before it; elsewhere everybody in line.
        """
        self._expire(now_s)
        if self.kept < WORTH_KEEPING:
            return lambda _replica: 0
        if mine is None:
            return lambda replica: self._ahead.get(replica, 0)
        every = (promise for same in self._line.values() for promise in same)
        before = sum(one.blocks for one in every if one.replica == mine.replica and one.since_s < mine.since_s)
        return lambda replica: before if replica == mine.replica else self._ahead.get(replica, 0)

    def _drop(self, promise: Promise) -> None:
        same = self._line[promise.token]
        same.remove(promise)
        if not same:
            del self._line[promise.token]
        self._ahead[promise.replica] -= promise.blocks

    def _expire(self, now_s: float) -> None:
        if self._first_due_s + LATE_S >= now_s:
            return
        every = [promise for same in self._line.values() for promise in same]
        for promise in every:
            if promise.due_s + LATE_S < now_s:
                self._drop(promise)
                self.kept -= self.kept * WEIGHT
        self._first_due_s = min(
            (promise.due_s for same in self._line.values() for promise in same), default=float("inf")
        )
