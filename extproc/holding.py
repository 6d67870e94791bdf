"""Holds refused requests at the gate for lanes that want it: bounded in number, bytes and time, first come first served.

Owns the waiting of one process; the ledger alone says what fits. A lane's first waiter is tried whenever room may have
come free (an end seen here, or a fresh snapshot that may show ends seen elsewhere); those behind it wait for their
turn, so that a large request is never overtaken for ever by small ones. Meant for background lanes: a person who
waits is better served by an honest refusal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from extproc.config.models import LaneQueue

Answer = TypeVar("Answer")


class NoPlace(Enum):
    """Why a request could not be held, or not until it fitted."""

    FULL = auto()
    TIMEOUT = auto()


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class _Line:
    """The waiters of one lane, in order of arrival."""

    __slots__ = ("limits", "size", "waiters")

    def __init__(self, limits: LaneQueue) -> None:
        self.limits = limits
        self.waiters: deque[_Waiter] = deque()
        self.size = 0

    def takes(self, size: int) -> bool:
        """Whether there is a place for one more of ``size`` bytes."""
        return len(self.waiters) < self.limits.max_depth and self.size + size <= self.limits.max_bytes

    def join(self, waiter: _Waiter) -> None:
        """To the end of the line."""
        self.waiters.append(waiter)
        self.size += waiter.size

    def leave(self, waiter: _Waiter) -> None:
        """Out of the line, from wherever it stands; whoever is first then has its turn."""
        self.waiters.remove(waiter)
        self.size -= waiter.size
        self.wake()

    def wake(self) -> None:
        """Room may have come free: the first may try."""
        if self.waiters:
            self.waiters[0].turn.set()


class Holding(Generic[Answer]):
    """Every lane's line; ``depth_changed(lane, depth)`` is told about each change."""

    def __init__(
        self, lanes: Mapping[str, LaneQueue], depth_changed: Callable[[str, int], None] = lambda _lane, _depth: None
    ) -> None:
        self._lines = {name: _Line(limits) for name, limits in lanes.items()}
        self._depth_changed = depth_changed

    def wants(self, lane: str) -> bool:
        """Whether requests of ``lane`` may be held at all."""
        return lane in self._lines

    def busy(self, lane: str) -> bool:
        """Whether somebody waits in ``lane``, so that a newcomer has to stand behind."""
        return lane in self._lines and bool(self._lines[lane].waiters)

    def wake(self) -> None:
        """Room may have come free somewhere: the first of every line may try."""
        for line in self._lines.values():
            line.wake()

    async def hold(
        self, lane: str, size: int, attempt: Callable[[], Awaitable[Answer | None]], wait_s: float
    ) -> Answer | NoPlace:
        """Wait for a place; ``attempt`` is called at each turn and returns None where there is still no room.

        Leaves the line however it ends: with an answer, in time-out, or cancelled because the client left.
        """
        line = self._lines[lane]
        if not line.takes(size):
            return NoPlace.FULL
        waiter = _Waiter(size)
        line.join(waiter)
        self._depth_changed(lane, len(line.waiters))
        until_s = asyncio.get_running_loop().time() + wait_s
        try:
            while True:
                # An attempt is never cut off by the time limit: what it reserves has to come back to the caller.
                async with asyncio.timeout_at(until_s):
                    await waiter.turn.wait()
                waiter.turn.clear()
                answer = await attempt()
                if answer is not None:
                    return answer
        except TimeoutError:
            return NoPlace.TIMEOUT
        finally:
            line.leave(waiter)
            self._depth_changed(lane, len(line.waiters))
