"""Holding at the gate: bounded, in order, woken, never left behind."""

from __future__ import annotations

import asyncio

import pytest

from extproc.config import LaneQueue
from extproc.holding import Holding, NoPlace

LIMITS = LaneQueue(max_depth=2, max_bytes=100, max_wait_ms=1000)


class Room:
    """Something that fits after ``needed`` attempts, and remembers who tried in which order."""

    def __init__(self) -> None:
        self.free = 0
        self.tried: list[str] = []

    def attempt(self, name: str, need: int = 1):  # type: ignore[no-untyped-def]
        """An attempt for ``name``."""

        async def once() -> str | None:
            self.tried.append(name)
            if self.free < need:
                return None
            self.free -= need
            return name

        return once


@pytest.fixture
def room() -> Room:
    """Nothing free."""
    return Room()


async def settled() -> None:
    """Let every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_first_come_first_served(room: Room) -> None:
    """The first waiter goes first, even if the second would fit earlier."""
    holding: Holding[str] = Holding({"batch": LIMITS})
    large = asyncio.create_task(holding.hold("batch", 10, room.attempt("large", 2), 300))
    await settled()
    small = asyncio.create_task(holding.hold("batch", 10, room.attempt("small"), 300))
    await settled()
    room.free = 1
    holding.wake()
    await settled()
    assert room.tried == ["large"]
    room.free = 3
    holding.wake()
    assert await large == "large"
    assert await small == "small"


async def test_nobody_tries_without_being_woken(room: Room) -> None:
    """Waiting costs no attempt: there is no polling."""
    holding: Holding[str] = Holding({"batch": LIMITS})
    task = asyncio.create_task(holding.hold("batch", 10, room.attempt("a"), 0.1))
    assert await task is NoPlace.TIMEOUT
    assert room.tried == []


async def test_depth_and_bytes_are_bounded(room: Room) -> None:
    """One more than the depth, or more bytes than allowed, is refused at once."""
    holding: Holding[str] = Holding({"batch": LIMITS})
    assert await holding.hold("batch", 101, room.attempt("big"), 300) is NoPlace.FULL
    tasks = [asyncio.create_task(holding.hold("batch", 10, room.attempt(name), 300)) for name in "ab"]
    await settled()
    assert await holding.hold("batch", 10, room.attempt("c"), 300) is NoPlace.FULL
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_leaves_makes_way(room: Room) -> None:
    """A client that goes away takes its place with it, and the next one has its turn."""
    depths: list[int] = []
    holding: Holding[str] = Holding({"batch": LIMITS}, lambda _lane, depth: depths.append(depth))
    first = asyncio.create_task(holding.hold("batch", 10, room.attempt("first", 5), 300))
    await settled()
    second = asyncio.create_task(holding.hold("batch", 10, room.attempt("second"), 300))
    await settled()
    room.free = 1
    first.cancel()
    assert await second == "second"
    assert not holding.busy("batch")
    assert depths == [1, 2, 1, 0]


async def test_an_attempt_is_not_cut_off(room: Room) -> None:
    """The time limit falls into an attempt that succeeds: its answer counts."""
    # Woken as it joins the line, it tries before any time has passed.
    holding: Holding[str] = Holding({"batch": LIMITS}, lambda _lane, _depth: holding.wake())

    async def slow() -> str:
        await asyncio.sleep(0.2)
        return "done"

    assert await holding.hold("batch", 10, slow, 0.1) == "done"


async def test_an_error_in_an_attempt_leaves_the_line(room: Room) -> None:
    """A fault of one request does not block the lane."""
    holding: Holding[str] = Holding({"batch": LIMITS})

    async def broken() -> str:
        raise RuntimeError("ours")

    task = asyncio.create_task(holding.hold("batch", 10, broken, 300))
    await settled()
    holding.wake()
    with pytest.raises(RuntimeError):
        await task
    assert not holding.busy("batch")


async def test_lanes_do_not_wait_for_each_other(room: Room) -> None:
    """Each lane has its own line."""
    holding: Holding[str] = Holding({"batch": LIMITS, "other": LIMITS})
    stuck = asyncio.create_task(holding.hold("batch", 10, room.attempt("stuck", 99), 300))
    await settled()
    room.free = 1
    other = asyncio.create_task(holding.hold("other", 10, room.attempt("other"), 300))
    await settled()
    holding.wake()
    assert await other == "other"
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
