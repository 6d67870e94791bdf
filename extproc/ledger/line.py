"""The line of those who were refused and told when to come back: the reference of ``lua/line.lua``.

Retry times hold only if whoever comes back finds what was forecast; under steady overload newcomers took nearly every
place otherwise. Nothing here is stock: the line says which promises a decision should leave room for, and
``rules.starts_in_us`` whether it does. A request is known by a digest of its bytes. Room is kept only while refused
requests are seen to come back, so that nobody is turned away in favour of someone who never will. Pure: time is an
argument, in microseconds on the ledger's clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

#: A retry is on time from this much before it (clocks that tick differently) until this much after it: the
#: header of whole seconds says up to a second more.
EARLY_US, LATE_US = 20_000, 1_100_000
#: Share of kept promises from which on room is kept, and the weight of one promise in it. Of clients that give up after
#: two retries in an overload of 1.5 about half are kept: room left for them cost a tenth of the requests served.
WORTH_KEEPING, WEIGHT = 0.75, 1 / 16
#: Promises remembered; beyond it none is given.
MAX_PROMISES = 256


@dataclass(frozen=True, slots=True)
class Due:
    """``blocks`` of one replica that are promised from ``due_us`` on, for about ``run_us`` (-1: as long as the asker)."""

    due_us: int
    blocks: int
    run_us: int = -1


@dataclass(frozen=True, slots=True)
class Promised:
    """What is promised on one replica to requests refused ``before`` this one, and to those refused ``after`` it.

    A request leaves room for the former; the time that it is told is one at which it takes nothing from either.
    """

    before: tuple[Due, ...] = ()
    after: tuple[Due, ...] = ()


NOTHING = Promised()


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's place among those who were refused and told when to come back.

    ``since_at_s`` is when it was refused first (None: a newcomer, behind all others), ``replica`` where it was told to
    come to, ``others`` what is promised to others there and elsewhere.
    """

    since_at_s: float | None = None
    replica: str | None = None
    others: Mapping[str, Promised] = field(default_factory=dict)

    def promised(self, replica: str) -> Promised:
        """What is promised to others on ``replica``."""
        return self.others.get(replica, NOTHING)


@dataclass(frozen=True, slots=True)
class Promise:
    """One refused request: first refused at ``since_us``, told to come back to ``replica`` when ``due`` says."""

    token: str
    replica: str
    since_us: int
    due: Due


class Line:
    """The promises of one pool; ``kept`` is the share that is taken up, over about the last sixteen."""

    __slots__ = ("_promises", "kept")

    def __init__(self) -> None:
        self._promises: list[Promise] = []
        self.kept = 0.0

    def promise(
        self, token: str, replica: str, blocks: int, wait_us: int, since_us: int, run_us: int, now_us: int
    ) -> None:
        """See ``Ledger.promise``; ``since_us`` -1: refused for the first time.

        Of requests with the same bytes one has a place: nobody can tell the others' return from a newcomer.
        """
        self._expire(now_us)
        if len(self._promises) < MAX_PROMISES and not any(one.token == token for one in self._promises):
            since = now_us if since_us < 0 else since_us
            promise = Promise(token, replica, since, Due(now_us + wait_us, blocks, run_us))
            insort(self._promises, promise, key=lambda one: one.due.due_us)

    def turn(self, token: str, now_us: int) -> Turn:
        """See ``Ledger.turn``; who comes before its time has neither kept its promise nor broken it."""
        self._expire(now_us)
        mine = next((one for one in self._promises if one.token == token), None)
        if mine is not None:
            self._promises.remove(mine)
            if mine.due.due_us <= now_us + EARLY_US:
                self.kept += (1.0 - self.kept) * WEIGHT
        since_at_s, replica = (mine.since_us / 1e6, mine.replica) if mine is not None else (None, None)
        if self.kept < WORTH_KEEPING:
            return Turn(since_at_s, replica)
        others: dict[str, tuple[list[Due], list[Due]]] = {}
        for one in self._promises:
            before, after = others.setdefault(one.replica, ([], []))
            (before if mine is None or one.since_us < mine.since_us else after).append(one.due)
        return Turn(since_at_s, replica, {name: Promised(tuple(b), tuple(a)) for name, (b, a) in others.items()})

    def _expire(self, now_us: int) -> None:
        there = [one for one in self._promises if one.due.due_us + LATE_US >= now_us]
        for _ in range(len(self._promises) - len(there)):
            self.kept -= self.kept * WEIGHT
        self._promises = there
