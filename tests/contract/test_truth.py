"""Freshness, and what a scrape says about load that is not ours."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.ledger.base import Ended, Ledger, ReplicaState
from tests.support.ledgers import Clock, ask, candidate, device, end, need, record, report, reservation


async def answer(ledger: Ledger, rid: str = "probe", **more: Any) -> tuple[str | None, str]:
    """Refusal and state of a one-block request."""
    verdict = (await ledger.reserve(ask(rid, candidate(n=need(1), **more)))).verdicts[0]
    return verdict.refused_by, verdict.state


async def foreign(ledger: Ledger) -> int | None:
    """What is foreign on replica a."""
    return (await ledger.snapshot()).replicas["a"].foreign_blocks


async def test_no_report_is_unknown_never_empty(ledger: Ledger) -> None:
    """And with the operator's static size it is the ledger's alone."""
    assert await answer(ledger) == ("unknown_state", "unknown")
    assert await answer(ledger, static_capacity_blocks=5) == (None, "ready")


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(5.0, (None, "ready")), (5.1, (None, "stale")), (15.0, (None, "stale")), (15.1, ("unknown_state", "unknown"))],
)
async def test_freshness_by_the_scrapes_start(
    ledger: Ledger, clock: Clock, age_s: float, expected: tuple[str | None, str]
) -> None:
    """Fresh to 5 s, the ledger alone to 15 s, then unknown."""
    await ledger.publish([report(clock() - age_s)], [], 60)
    assert await answer(ledger) == expected


async def test_a_stale_queue_is_not_asked(ledger: Ledger, clock: Clock) -> None:
    """Between 5 and 15 s the ledger decides alone."""
    await ledger.reserve(ask("1", candidate(n=need(1, sequences=50), static_capacity_blocks=100)))
    clock.tick(1)
    await ledger.publish([report(clock(), waiting=50)], [], 60)
    assert await answer(ledger, max_waiting=16) == ("engine_queue", "ready")
    clock.tick(6)
    assert await answer(ledger, max_waiting=16) == (None, "stale")


async def test_a_report_lives_no_longer_than_its_agent_says(ledger: Ledger, clock: Clock) -> None:
    """ttl_s is the agent's lease."""
    await ledger.publish([report(clock())], [], 2)
    clock.tick(2)
    assert await answer(ledger) == ("unknown_state", "unknown")


@pytest.mark.parametrize(
    ("state", "refused"),
    [("draining", "not_ready"), ("wedged", "unknown_state"), ("lost", "unknown_state"), ("unknown", "unknown_state")],
)
async def test_what_the_agent_says_of_the_engine_decides(
    ledger: Ledger, clock: Clock, state: str, refused: str
) -> None:
    """An engine that is not ready admits nothing, whatever its figures."""
    await ledger.publish([report(clock(), state=ReplicaState(state))], [], 60)
    assert await answer(ledger) == (refused, state)


@pytest.mark.parametrize("missing", [{"capacity_blocks": None}, {"used_blocks": None}, {"used_blocks": float("nan")}])
async def test_a_missing_required_signal_is_unknown(ledger: Ledger, clock: Clock, missing: dict[str, Any]) -> None:
    """NaN and absence are not zero."""
    await ledger.publish([report(clock(), **missing)], [], 60)
    assert await answer(ledger) == ("unknown_state", "unknown")


async def test_an_engine_that_shows_no_use_needs_only_its_size(ledger: Ledger, clock: Clock) -> None:
    """llama.cpp: capacity from /props suffices."""
    await ledger.publish([report(clock(), used_blocks=None, shows_used=False, running=None, waiting=None)], [], 60)
    assert await answer(ledger) == (None, "ready")


async def test_a_scrape_from_the_future_or_the_past_is_not_taken(ledger: Ledger, clock: Clock) -> None:
    """The last one stands."""
    await ledger.publish([report(clock(), capacity_blocks=50)], [], 60)
    await ledger.publish([report(clock() + 2, capacity_blocks=60)], [], 60)
    await ledger.publish([report(clock() - 1, capacity_blocks=70)], [], 60)
    view = (await ledger.snapshot()).replicas["a"]
    assert view.report is not None
    assert view.report.capacity_blocks == 50


async def test_ours_explains_what_the_engine_uses(ledger: Ledger, clock: Clock) -> None:
    """Used blocks within our reservations are not counted twice."""
    await ledger.publish([report(clock())], [], 60)
    await ledger.reserve(ask("1", candidate(n=need(40))))
    clock.tick(1)
    await ledger.publish([report(clock(), used_blocks=30, running=1)], [], 60)
    view = (await ledger.snapshot()).replicas["a"]
    assert (view.foreign_blocks, view.committed_blocks, view.bypass) == (0, 40, False)


async def test_use_beyond_our_reservations_is_foreign_without_any_stranger(ledger: Ledger, clock: Clock) -> None:
    """A prefix cache that is pinned, or blocks not yet freed."""
    await ledger.publish([report(clock())], [], 60)
    await ledger.reserve(ask("1", candidate(n=need(40))))
    clock.tick(1)
    await ledger.publish([report(clock(), used_blocks=55, running=1)], [], 60)
    assert (await foreign(ledger), (await ledger.snapshot()).replicas["a"].headroom_blocks) == (15, 45)


async def test_a_request_reserved_after_the_scrape_does_not_explain_its_use(ledger: Ledger, clock: Clock) -> None:
    """Scrape, then reserve, then publish: the 30 used blocks are not its."""
    start = clock()
    clock.tick(0.2)
    await ledger.reserve(ask("1", candidate(n=need(40), static_capacity_blocks=100)))
    await ledger.publish([report(start, used_blocks=30, running=0)], [], 60)
    assert await foreign(ledger) == 30


async def test_a_request_that_ended_just_before_the_scrape_still_explains_its_use(ledger: Ledger, clock: Clock) -> None:
    """The engine frees up to 1.5 s later; after that the use is foreign."""
    await ledger.publish([report(clock())], [], 60)
    await ledger.reserve(ask("1", candidate(n=need(40))))
    clock.tick(1)
    await ledger.end([end("1")])
    clock.tick(1.5)
    await ledger.publish([report(clock(), used_blocks=40, running=1)], [], 60)
    assert (await foreign(ledger), (await ledger.snapshot()).replicas["a"].bypass) == (0, False)
    clock.tick(0.1)
    await ledger.publish([report(clock(), used_blocks=40)], [], 60)
    assert await foreign(ledger) == 40


async def bypassed(ledger: Ledger, clock: Clock) -> float:
    """One of ours (40 blocks, 20 of them input, first byte seen) beside a stranger; returns when ours was made."""
    await ledger.publish([report(clock())], [], 600)
    await ledger.reserve(ask("1", candidate(n=need(40))))
    made = clock.now_s
    clock.tick(1)
    await ledger.renew([record(reservation("1", made, n=need(40)), first_byte_age_s=0.5)])
    clock.tick(0.5)
    await ledger.publish([report(clock(), used_blocks=60, running=2)], [], 600)
    return made


async def test_more_running_than_ours_means_bypass_and_the_cautious_figure(ledger: Ledger, clock: Clock) -> None:
    """Only our input blocks after the first byte are surely in use: 60 - 20 are foreign."""
    await bypassed(ledger, clock)
    view = (await ledger.snapshot()).replicas["a"]
    assert (view.bypass, view.foreign_blocks, view.committed_blocks) == (True, 40, 80)


async def test_bypass_is_remembered_for_thirty_seconds(ledger: Ledger, clock: Clock) -> None:
    """The stranger may come back."""
    made = await bypassed(ledger, clock)
    figures = []
    for _ in range(2):
        clock.tick(15)
        await ledger.renew([record(reservation("1", made, n=need(40)), first_byte_age_s=20)])
        await ledger.publish([report(clock(), used_blocks=30, running=1)], [], 600)
        figures.append(await foreign(ledger))
        clock.tick(0.2)
    assert figures == [10, 0]


async def test_with_bypass_a_report_is_unknown_after_five_seconds(ledger: Ledger, clock: Clock) -> None:
    """Foreign growth since then cannot be seen."""
    await bypassed(ledger, clock)
    clock.tick(5.1)
    assert await answer(ledger) == ("unknown_state", "unknown")


async def test_bypass_on_an_engine_that_shows_no_use_is_unknown(ledger: Ledger, clock: Clock) -> None:
    """llama.cpp with a stranger: nobody knows what he holds."""
    await ledger.publish([report(clock(), used_blocks=None, shows_used=False, running=1)], [], 60)
    assert await answer(ledger) == ("unknown_state", "unknown")


async def test_what_leaves_without_an_end_record_is_added_back(ledger: Ledger, clock: Clock) -> None:
    """Its 20 input blocks were subtracted from the scrape and may still be there."""
    await bypassed(ledger, clock)
    clock.tick(4)
    await ledger.end([end("1", Ended.OPERATOR)])
    assert await foreign(ledger) == 60


async def test_what_leaves_by_its_end_record_is_not_added_back(ledger: Ledger, clock: Clock) -> None:
    """The engine freed it."""
    await bypassed(ledger, clock)
    await ledger.end([end("1")])
    assert await foreign(ledger) == 40


async def test_foreign_growth_that_does_not_fit_is_counted(ledger: Ledger, clock: Clock) -> None:
    """Over-admission by strangers is shown, not hidden."""
    await ledger.publish([report(clock())], [], 60)
    await ledger.reserve(ask("1", candidate(n=need(60))))
    clock.tick(1)
    await ledger.publish([report(clock(), used_blocks=100, running=2)], [], 60)
    view = (await ledger.snapshot()).replicas["a"]
    assert (view.over_foreign, view.over_admissions, view.headroom_blocks) == (1, 1, -60)


async def test_a_replica_that_left_is_forgotten_after_an_hour(ledger: Ledger, clock: Clock) -> None:
    """Names come and go; one that still holds something, or that an operator drained, stays."""
    names = ("gone", "holds", "drained", "here")
    await ledger.publish([report(clock(), name) for name in names], [device(clock())], 60)
    await ledger.drain("drained", True)
    clock.tick(3660)
    await ledger.renew([record(reservation("1", clock.now_s, "holds"))])
    await ledger.publish([report(clock(), "here")], [], 60)
    snapshot = await ledger.snapshot()
    assert (set(snapshot.replicas), snapshot.devices) == ({"holds", "drained", "here"}, {})
