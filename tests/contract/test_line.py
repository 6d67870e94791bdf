"""The line of refused requests: who comes back when told goes first, and nobody waits for those who never come."""

from __future__ import annotations

from extproc.ledger.base import Ledger
from extproc.ledger.line import EARLY_US, LATE_US, MAX_PROMISES, Due, Promised, Turn
from extproc.ledger.rules import to_us
from tests.support.ledgers import Clock

#: Enough kept (or broken) promises to settle what is believed of clients.
MANY = 30
EARLY_S, LATE_S = EARLY_US / 1e6, LATE_US / 1e6


async def returning(ledger: Ledger, clock: Clock) -> None:
    """Let clients come back so often that room is kept for them."""
    for _ in range(MANY):
        await ledger.promise("seen", "a", 1, 1.0, None, None)
        clock.tick(1.0 - EARLY_S)
        assert (await ledger.turn("seen")).since_at_s is not None


async def test_room_is_kept_only_where_refused_clients_come_back(ledger: Ledger, clock: Clock) -> None:
    """Nothing is kept at first; after enough kept promises a newcomer stands behind; after enough broken ones not."""
    await ledger.promise("x", "a", 10, 1.0, None, None)
    assert await ledger.turn("new") == Turn()
    clock.tick(2.0)
    await returning(ledger, clock)
    await ledger.promise("x", "a", 10, 1.0, None, 7.5)
    newcomer = await ledger.turn("new")
    assert newcomer == Turn(None, None, {"a": Promised((Due(to_us(clock() + 1.0), 10, 7_500_000),))})
    assert newcomer.promised("b") == Promised()
    for number in range(MANY):
        await ledger.promise(f"gone{number}", "a", 10, 1.0, None, None)
    clock.tick(1.0 + LATE_S + 0.01)
    await ledger.promise("x", "a", 10, 1.0, None, None)
    assert await ledger.turn("new") == Turn()


async def test_a_retry_is_known_by_its_bytes(ledger: Ledger, clock: Clock) -> None:
    """Whoever comes with them, before the time too, takes up the promise; other bytes are a newcomer's."""
    refused_at_s = clock()
    await ledger.promise("x", "a", 10, 2.0, None, None)
    await ledger.promise("z", "b", 10, 9.0, None, None)
    clock.tick(2.0)
    assert [(await ledger.turn(token)).replica for token in ("y", "z")] == [None, "b"]
    turn = await ledger.turn("x")
    assert (turn.replica, turn.since_at_s) == ("a", refused_at_s)
    assert await ledger.turn("x") == Turn()


async def test_who_comes_early_keeps_its_place_and_proves_nothing(ledger: Ledger, clock: Clock) -> None:
    """Its own promise does not stand in its way, its first refusal counts on; that it waits when told it has not shown."""
    await returning(ledger, clock)
    first_s = clock()
    await ledger.promise("x", "a", 10, 60.0, None, None)
    for _ in range(MANY):
        clock.tick(0.1)
        early = await ledger.turn("x")
        assert early == Turn(first_s, "a", {})
        await ledger.promise("x", "a", 10, 60.0, early.since_at_s, None)
    for number in range(MANY // 3):
        await ledger.promise(f"gone{number}", "a", 10, 1.0, None, None)
    clock.tick(1.0 + LATE_S + 0.01)
    assert (await ledger.turn("new")).promised("a") == Promised()


async def test_who_comes_too_late_is_a_newcomer(ledger: Ledger, clock: Clock) -> None:
    """The place is kept for a second and a tenth: the header of whole seconds is up to a second later."""
    await ledger.promise("x", "a", 10, 1.0, None, None)
    await ledger.promise("y", "a", 10, 1.1, None, None)
    clock.tick(1.0 + LATE_S + 0.01)
    assert [(await ledger.turn(token)).replica for token in ("x", "y")] == [None, "a"]


async def test_equal_bytes_of_several_clients(ledger: Ledger, clock: Clock) -> None:
    """One of them has a place: the others' return could not be told from a newcomer, and room would wait for nobody."""
    await ledger.promise("x", "b", 1, 2.0, None, None)
    await ledger.promise("x", "a", 1, 1.8, None, None)
    clock.tick(2.0)
    assert [(await ledger.turn("x")).replica for _ in range(2)] == ["b", None]


async def test_first_refused_goes_first(ledger: Ledger, clock: Clock) -> None:
    """Before a returning request are those refused earlier, however often it was refused; a newcomer is behind all."""
    await returning(ledger, clock)
    old = Due(to_us(clock() + 5.0), 10, 1_000_000)
    await ledger.promise("old", "a", 10, 5.0, None, 1.0)
    clock.tick(0.1)
    first_s = clock()
    await ledger.promise("mine", "a", 20, 1.0, None, 2.0)
    clock.tick(0.1)
    young, other = Due(to_us(clock() + 5.0), 40), Due(to_us(clock() + 5.0), 80)
    await ledger.promise("young", "a", 40, 5.0, None, None)
    await ledger.promise("other", "b", 80, 5.0, None, None)
    clock.tick(0.9)
    mine = await ledger.turn("mine")
    assert mine == Turn(first_s, "a", {"a": Promised((old,), (young,)), "b": Promised((), (other,))})
    again = Due(to_us(clock() + 1.0), 20, 2_000_000)
    await ledger.promise("mine", "a", 20, 1.0, mine.since_at_s, 2.0)
    newcomer = await ledger.turn("new")
    assert newcomer.promised("a") == Promised((again, old, young))
    clock.tick(1.0)
    assert await ledger.turn("mine") == mine


async def test_the_line_is_bounded(ledger: Ledger, clock: Clock) -> None:
    """A storm of refusals is remembered up to a limit."""
    await returning(ledger, clock)
    for number in range(MAX_PROMISES + 10):
        await ledger.promise(f"{number}", "a", 1, 1.0, None, None)
    assert len((await ledger.turn("new")).promised("a").before) == MAX_PROMISES
