"""The line of refused requests: who comes back when told goes first, and nobody waits for those who never come."""

from __future__ import annotations

from extproc.promises import EARLY_S, LATE_S, MAX_PROMISES, WEIGHT, WORTH_KEEPING, Promises

MANY = 100


def returning(promises: Promises, until_s: float = 0.0) -> Promises:
    """A line whose clients have come back so often that room is kept for them."""
    for number in range(MANY):
        promises.give(b"seen", "a", 1, until_s - MANY + number, 1.0, None)
        assert promises.came(b"seen", until_s - MANY + number + 1.0) is not None
    return promises


def test_room_is_kept_only_where_refused_clients_come_back() -> None:
    """Nothing is kept at first; after enough kept promises a newcomer stands behind; after enough broken ones not."""
    promises = Promises()
    promises.give(b"x", "a", 10, 0.0, 1.0, None)
    assert promises.ahead(0.5, None)("a") == 0
    returning(promises, until_s=0.0)
    assert promises.kept > WORTH_KEEPING
    assert promises.ahead(0.5, None)("a") == 10
    for number in range(MANY):
        promises.give(b"%d" % number, "a", 10, 1.0, 1.0, None)
    assert promises.ahead(2.0 + LATE_S + 0.01, None)("a") == 0
    assert len(promises) == 0
    assert promises.kept < WORTH_KEEPING


def test_a_retry_is_known_by_its_bytes_and_its_time() -> None:
    """Other bytes, or the same ones before their time, are a newcomer; in time the place in line is given up."""
    promises = Promises()
    promises.give(b"x", "a", 10, 0.0, 2.0, None)
    assert promises.came(b"y", 2.0) is None
    assert promises.came(b"x", 2.0 - EARLY_S - 0.01) is None
    promise = promises.came(b"x", 2.0)
    assert promise is not None
    assert (promise.replica, promise.blocks, promise.since_s, promise.due_s) == ("a", 10, 0.0, 2.0)
    assert promises.came(b"x", 2.1) is None
    assert promises.kept == WEIGHT


def test_equal_bytes_of_several_clients() -> None:
    """Each takes one place, the one that fell due first."""
    promises = Promises()
    promises.give(b"x", "b", 1, 0.0, 2.0, None)
    promises.give(b"x", "a", 1, 0.0, 1.8, None)
    assert [p.replica if (p := promises.came(b"x", at_s)) else None for at_s in (2.0, 2.1, 2.2)] == ["a", "b", None]


def test_first_refused_goes_first() -> None:
    """Ahead of a returning request are those refused before it, however often it was refused, and nobody else."""
    promises = returning(Promises(), until_s=0.0)
    promises.give(b"old", "a", 10, 1.0, 5.0, None)
    promises.give(b"mine", "a", 20, 2.0, 1.0, None)
    promises.give(b"young", "a", 40, 2.5, 5.0, None)
    promises.give(b"other", "b", 80, 2.5, 5.0, None)
    mine = promises.came(b"mine", 3.0)
    assert mine is not None
    ahead = promises.ahead(3.0, mine)
    assert (ahead("a"), ahead("b")) == (10, 80)
    promises.give(b"mine", "a", 20, 3.0, 1.0, mine.since_s)
    again = promises.came(b"mine", 4.0)
    assert promises.ahead(4.0, again)("a") == 10
    assert promises.ahead(4.0, None)("a") == 50


def test_the_line_is_bounded() -> None:
    """A storm of refusals is remembered up to a limit, and forgotten when its time is over."""
    promises = Promises()
    for number in range(MAX_PROMISES + 10):
        promises.give(b"%d" % number, "a", 1, 0.0, 1.0, None)
    assert len(promises) == MAX_PROMISES
    assert promises.came(b"late", 1.0 + LATE_S + 0.01) is None
    assert len(promises) == 0
