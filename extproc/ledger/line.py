"""The line of those who were refused and told when to come back: the reference of ``lua/line.lua``.

Retry times hold only if whoever comes back goes before those who come later; under steady overload newcomers took
nearly every place otherwise. Nothing here is stock: the line says how many blocks a decision should leave to others. A
retry is known by a digest of its bytes and by coming when it was told to. Room is kept only while refused requests are
seen to come back, so that nobody is turned away in favour of someone who never will. Pure: time is an argument, in
microseconds on the ledger's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: A retry may come this much before its time (clocks that tick differently) and this much after it.
EARLY_US, LATE_US = 20_000, 500_000
#: Share of kept promises from which on room is kept, and the weight of one promise in it. Of clients that give up after
#: two retries in an overload of 1.5 about half are kept: room left for them cost a tenth of the requests served.
WORTH_KEEPING, WEIGHT = 0.75, 1 / 16
#: Promises remembered; beyond it none is given.
MAX_PROMISES = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's place among those who were refused and told when to come back.

    ``since_at_s`` is when it was refused first (None: a newcomer), ``replica`` where it was told to come to,
    ``before_blocks`` what is promised there to requests refused before it, ``ahead_blocks`` all that is promised.
    """

    since_at_s: float | None = None
    replica: str | None = None
    before_blocks: int = 0
    ahead_blocks: Mapping[str, int] = field(default_factory=dict)

    def promised(self, replica: str) -> int:
        """Blocks of ``replica`` that this request leaves to others."""
        return self.before_blocks if replica == self.replica else self.ahead_blocks.get(replica, 0)


@dataclass(frozen=True, slots=True)
class Promise:
    """One refused request: first refused at ``since_us``, told to come back to ``replica`` at ``due_us``."""

    token: str
    replica: str
    blocks: int
    since_us: int
    due_us: int


class Line:
    """The promises of one pool; ``kept`` is the share that is taken up, over about the last sixteen."""

    __slots__ = ("_promises", "kept")

    def __init__(self) -> None:
        self._promises: list[Promise] = []
        self.kept = 0.0

    def promise(self, token: str, replica: str, blocks: int, wait_us: int, since_us: int, now_us: int) -> None:
        """See ``Ledger.promise``; ``since_us`` -1: refused for the first time.

        Of requests with the same bytes one has a place: nobody can tell the others' return from a newcomer.
        """
        self._expire(now_us)
        if len(self._promises) < MAX_PROMISES and not any(one.token == token for one in self._promises):
            since = now_us if since_us < 0 else since_us
            self._promises.append(Promise(token, replica, blocks, since, now_us + wait_us))

    def turn(self, token: str, now_us: int) -> Turn:
        """See ``Ledger.turn``."""
        self._expire(now_us)
        due = (one for one in self._promises if one.token == token and one.due_us <= now_us + EARLY_US)
        mine = next(due, None)
        if mine is not None:
            self._promises.remove(mine)
            self.kept += (1.0 - self.kept) * WEIGHT
        since_at_s, replica = (mine.since_us / 1e6, mine.replica) if mine is not None else (None, None)
        if self.kept < WORTH_KEEPING:
            return Turn(since_at_s, replica)
        ahead: dict[str, int] = {}
        before = 0
        for one in self._promises:
            ahead[one.replica] = ahead.get(one.replica, 0) + one.blocks
            if mine is not None and one.replica == mine.replica and one.since_us < mine.since_us:
                before += one.blocks
        return Turn(since_at_s, replica, before, ahead)

    def _expire(self, now_us: int) -> None:
        there = [one for one in self._promises if one.due_us + LATE_US >= now_us]
        for _ in range(len(self._promises) - len(there)):
            self.kept -= self.kept * WEIGHT
        self._promises = there
