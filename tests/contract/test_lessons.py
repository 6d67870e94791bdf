"""What one sidecar learned is known to the pool: the best-founded lesson of a name stays while it is told."""

from __future__ import annotations

from extproc.ledger.base import Ledger
from extproc.ledger.lessons import FADES_US, FORGOTTEN_US, MAX_LESSONS, Lesson
from tests.support.ledgers import Clock

FADES_S, FORGOTTEN_S = FADES_US / 1e6, FORGOTTEN_US / 1e6


def lesson(weight: int, *figures: float, name: str = "output\x1ffast\x1fbig\x1fchat") -> Lesson:
    """One lesson."""
    return Lesson(name, weight, figures)


async def test_who_learned_nothing_hears_what_others_did(ledger: Ledger) -> None:
    """Names, weights and figures come back as they were told."""
    assert await ledger.lessons([]) == []
    told = [lesson(30, 120.0, 75.5), lesson(1, 0.041, name="pace\x1fbig")]
    await ledger.lessons(told)
    assert sorted(await ledger.lessons([]), key=lambda one: one.name) == told


async def test_of_one_name_the_lesson_of_most_answers_stays(ledger: Ledger) -> None:
    """Two sidecars hear different answers; neither overwrites the other for having spoken last."""
    await ledger.lessons([lesson(200, 100.0)])
    assert await ledger.lessons([lesson(199, 50.0)]) == [lesson(200, 100.0)]
    assert await ledger.lessons([lesson(200, 90.0)]) == [lesson(200, 90.0)]


async def test_a_lesson_that_nobody_tells_any_more_gives_way(ledger: Ledger, clock: Clock) -> None:
    """Its sidecar is gone, or hears no more such answers."""
    await ledger.lessons([lesson(500, 100.0)])
    clock.tick(FADES_S)
    assert await ledger.lessons([lesson(20, 50.0)]) == [lesson(500, 100.0)]
    clock.tick(1.0)
    assert await ledger.lessons([lesson(20, 50.0)]) == [lesson(20, 50.0)]


async def test_lessons_are_kept_for_a_month(ledger: Ledger, clock: Clock) -> None:
    """A pool that is restarted after a weekend still knows; names of old configurations go."""
    await ledger.lessons([lesson(30, 100.0)])
    clock.tick(FORGOTTEN_S)
    assert await ledger.lessons([]) == [lesson(30, 100.0)]
    clock.tick(1.0)
    assert await ledger.lessons([]) == []


async def test_names_are_bounded(ledger: Ledger) -> None:
    """Beyond the bound nothing new is taken, and what is known is still told anew."""
    known = await ledger.lessons([lesson(30, 1.0, name=str(number)) for number in range(MAX_LESSONS + 10)])
    assert len(known) == MAX_LESSONS
    again = await ledger.lessons([lesson(31, 2.0, name="0")])
    assert lesson(31, 2.0, name="0") in again
