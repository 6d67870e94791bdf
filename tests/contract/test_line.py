"""The line of refused requests: who comes back when told goes first, and nobody waits for those who never come."""

from __future__ import annotations

from extproc.ledger.base import Ledger
from extproc.ledger.line import EARLY_US, LATE_US, MAX_PROMISES, Turn
from tests.support.ledgers import Clock

#: Enough kept (or broken) promises to settle what is believed of clients.
MANY = 30
EARLY_S, LATE_S = EARLY_US / 1e6, LATE_US / 1e6


async def returning(ledger: Ledger, clock: Clock) -> None:
    """Let clients come back so often that room is kept for them."""
    for _ in range(MANY):
        await ledger.promise("seen", "a", 1, 1.0, None)
        clock.tick(1.0)
        assert (await ledger.turn("seen")).since_at_s is not None


async def test_room_is_kept_only_where_refused_clients_come_back(ledger: Ledger, clock: Clock) -> None:
    """Nothing is kept at first; after enough kept promises a newcomer stands behind; after enough broken ones not."""
    await ledger.promise("x", "a", 10, 1.0, None)
    assert await ledger.turn("new") == Turn()
    clock.tick(2.0)
    await returning(ledger, clock)
    await ledger.promise("x", "a", 10, 1.0, None)
    newcomer = await ledger.turn("new")
    assert (newcomer.since_at_s, newcomer.promised("a"), newcomer.promised("b")) == (None, 10, 0)
    for number in range(MANY):
        await ledger.promise(f"gone{number}", "a", 10, 1.0, None)
    clock.tick(1.0 + LATE_S + 0.01)
    await ledger.promise("x", "a", 10, 1.0, None)
    assert await ledger.turn("new") == Turn()


async def test_a_retry_is_known_by_its_bytes_and_its_time(ledger: Ledger, clock: Clock) -> None:
    """Other bytes, or the same ones before their time, are a newcomer; whoever comes gives up the place."""
    refused_at_s = clock()
    await ledger.promise("x", "a", 10, 2.0, None)
    clock.tick(2.0 - EARLY_S - 0.01)
    assert [(await ledger.turn(token)).replica for token in ("x", "y")] == [None, None]
    clock.tick(0.02)
    turn = await ledger.turn("x")
    assert (turn.replica, turn.since_at_s) == ("a", refused_at_s)
    assert await ledger.turn("x") == Turn()


async def test_who_comes_too_late_is_a_newcomer(ledger: Ledger, clock: Clock) -> None:
    """The place is kept for half a second."""
    await ledger.promise("x", "a", 10, 1.0, None)
    await ledger.promise("y", "a", 10, 1.1, None)
    clock.tick(1.0 + LATE_S + 0.01)
    assert [(await ledger.turn(token)).replica for token in ("x", "y")] == [None, "a"]


async def test_equal_bytes_of_several_clients(ledger: Ledger, clock: Clock) -> None:
    """One of them has a place: the others' return could not be told from a newcomer, and room would wait for nobody."""
    await ledger.promise("x", "b", 1, 2.0, None)
    await ledger.promise("x", "a", 1, 1.8, None)
    clock.tick(2.0)
    assert [(await ledger.turn("x")).replica for _ in range(2)] == ["b", None]


async def test_first_refused_goes_first(ledger: Ledger, clock: Clock) -> None:
    """Before a returning request are those refused earlier, however often it was refused; elsewhere it is a newcomer."""
    await returning(ledger, clock)
    await ledger.promise("old", "a", 10, 5.0, None)
    clock.tick(0.1)
    first_s = clock()
    await ledger.promise("mine", "a", 20, 1.0, None)
    clock.tick(0.1)
    await ledger.promise("young", "a", 40, 5.0, None)
    await ledger.promise("other", "b", 80, 5.0, None)
    clock.tick(0.9)
    mine = await ledger.turn("mine")
    assert (mine.since_at_s, mine.promised("a"), mine.promised("b")) == (first_s, 10, 80)
    await ledger.promise("mine", "a", 20, 1.0, mine.since_at_s)
    clock.tick(1.0)
    again = await ledger.turn("mine")
    assert (again.since_at_s, again.promised("a")) == (first_s, 10)
    assert (await ledger.turn("new")).promised("a") == 50


async def test_the_line_is_bounded(ledger: Ledger, clock: Clock) -> None:
    """A storm of refusals is remembered up to a limit."""
    await returning(ledger, clock)
    for number in range(MAX_PROMISES + 10):
        await ledger.promise(f"{number}", "a", 1, 1.0, None)
    assert (await ledger.turn("new")).promised("a") == MAX_PROMISES
