"""Work that nobody waits for: its order, that none is lost, and that it never holds up the loop for long."""

from __future__ import annotations

import asyncio
from functools import partial

from extproc.backlog import AT_ONCE, Backlog


async def test_work_is_done_by_itself_in_the_order_it_was_added() -> None:
    """Nobody has to ask for it, and more than one turn's worth is done to the end."""
    backlog, done = Backlog(), list[int]()
    finished = asyncio.Event()
    for number in range(2 * AT_ONCE + 1):
        backlog.add(partial(done.append, number))
    backlog.add(finished.set)
    assert done == []
    await finished.wait()
    assert done == list(range(2 * AT_ONCE + 1))


async def test_what_work_adds_is_done_as_well() -> None:
    """A piece of work may leave another one."""
    backlog, finished = Backlog(), asyncio.Event()
    backlog.add(lambda: backlog.add(finished.set))
    await finished.wait()


async def test_others_have_their_turn_while_much_is_done() -> None:
    """Between two turns' worth of work the other tasks go on."""
    backlog, order = Backlog(), list[str]()
    for _ in range(AT_ONCE + 1):
        backlog.add(partial(order.append, "work"))

    async def other() -> None:
        order.append("other")

    task = asyncio.create_task(other())
    await backlog.clear()
    await task
    assert order == ["work"] * AT_ONCE + ["other", "work"]


async def test_clearing_does_what_was_there_and_leaves_what_comes_meanwhile() -> None:
    """Whoever clears it is done in the end, however fast more is added; the rest is done by itself."""
    backlog, done = Backlog(), list[int]()
    finished = asyncio.Event()

    def again(left: int) -> None:
        done.append(left)
        if left:
            backlog.add(partial(again, left - 1))
        else:
            finished.set()

    backlog.add(partial(again, 10 * AT_ONCE))
    await backlog.clear()
    assert 0 < len(done) <= AT_ONCE
    await finished.wait()
    assert len(done) == 10 * AT_ONCE + 1


async def test_it_can_be_cleared_without_a_pause() -> None:
    """A reader that must not wait finds everything done."""
    backlog, done = Backlog(), list[int]()
    for number in range(2 * AT_ONCE):
        backlog.add(partial(done.append, number))
    backlog.clear_now()
    assert len(done) == 2 * AT_ONCE
