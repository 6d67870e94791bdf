"""Every resource refuses alone, with its own reason, and what it says about the room left is right."""

from __future__ import annotations

import pytest

from extproc.ledger.base import Ended, Ledger
from extproc.ledger.line import Due, Promised
from extproc.ledger.rules import to_us
from tests.support.ledgers import Clock, ask, candidate, device, end, need, record, report, reservation


async def reasons(ledger: Ledger, *requests: object) -> list[str | None]:
    """The first candidate's refusal of each request."""
    return [(await ledger.reserve(r)).verdicts[0].refused_by for r in requests]  # type: ignore[arg-type]


def due(clock: Clock, in_s: float, blocks: int, run_s: float | None) -> Due:
    """Blocks promised from then on for so long."""
    return Due(to_us(clock() + in_s), blocks, -1 if run_s is None else to_us(run_s))


async def test_kv_pool_admits_what_fits_and_says_what_is_left(ledger: Ledger, clock: Clock) -> None:
    """Room is capacity less what is promised, before the request."""
    await ledger.publish([report(clock())], [], 30)
    first = await ledger.reserve(ask("1", candidate(n=need(60))))
    second = await ledger.reserve(ask("2", candidate(n=need(60))))
    assert (first.chosen, first.verdicts[0].headroom_blocks, first.verdicts[0].committed_blocks) == (0, 100, 0)
    assert (second.chosen, second.verdicts[0].refused_by) == (None, "insufficient_headroom")
    assert (second.verdicts[0].headroom_blocks, second.verdicts[0].retry_after_s) == (40, 10.0)


async def test_watermark_and_keep_free_are_never_promised(ledger: Ledger, clock: Clock) -> None:
    """A 2 % watermark of 100 blocks is 2; the lane's keep-free is cut at a quarter of the pool."""
    await ledger.publish([report(clock())], [], 30)
    answers = await reasons(
        ledger,
        ask("1", candidate(n=need(99), watermark=0.02)),
        ask("2", candidate(n=need(75), watermark=0.02, keep_free_blocks=90)),
        ask("3", candidate(n=need(74), watermark=0.02, keep_free_blocks=90)),
    )
    assert answers == ["exceeds_pool", "exceeds_pool", None]


async def test_what_others_were_promised_stays_free_unless_nothing_runs(ledger: Ledger, clock: Clock) -> None:
    """A newcomer waits until those told to come back have theirs too; an idle replica takes it; size is no matter of it."""
    await ledger.publish([report(clock())], [], 30)

    def told(blocks: int) -> Promised:
        return Promised((due(clock, 0.0, blocks, 30.0),))

    first = await ledger.reserve(ask("1", candidate(n=need(60), expected_s=10.0, promised=told(90))))
    second = await ledger.reserve(ask("2", candidate(n=need(30), expected_s=20.0)))
    behind = await ledger.reserve(ask("3", candidate(n=need(10), promised=told(61))))
    fits = await ledger.reserve(ask("4", candidate(n=need(5), promised=told(5))))
    assert (first.chosen, second.chosen, fits.chosen) == (0, 0, 0)
    assert (behind.verdicts[0].refused_by, behind.verdicts[0].retry_after_s) == ("insufficient_headroom", 20.0)


async def half_full(ledger: Ledger, clock: Clock) -> None:
    """Of 100 blocks 40 are free in 10 s and 20 in 20 s; 40 are free now."""
    await ledger.publish([report(clock())], [], 30)
    for rid, blocks, seconds in (("first", 40, 10.0), ("second", 20, 20.0)):
        assert (await ledger.reserve(ask(rid, candidate(n=need(blocks), expected_s=seconds)))).chosen == 0


@pytest.mark.parametrize(
    ("blocks", "run_s", "due_s", "due_blocks", "wait_s"),
    [
        (30, 5.0, 6.0, 40, None),
        (30, 6.0, 6.0, 40, None),
        (30, 6.000001, 6.0, 40, 10.0),
        (30, 60.0, 10.0, 50, None),
        (30, 60.0, 10.0, 51, 20.0),
        (30, 60.0, 9.9, 40, 10.0),
        (41, 60.0, 15.0, 39, 10.0),
        (41, 4.0, 14.0, 40, 10.0),
        (41, 4.000001, 14.0, 40, 20.0),
    ],
)
async def test_who_delays_nobody_goes_first(
    ledger: Ledger, clock: Clock, blocks: int, run_s: float, due_s: float, due_blocks: int, wait_s: float | None
) -> None:
    """A newcomer that is over before a promise is due, or leaves enough by then, is admitted; else it waits until it does."""
    await half_full(ledger, clock)
    promised = Promised((due(clock, due_s, due_blocks, 30.0),))
    result = await ledger.reserve(ask("new", candidate(n=need(blocks), expected_s=run_s, promised=promised)))
    verdict = result.verdicts[0]
    assert (verdict.refused_by, verdict.retry_after_s) == (wait_s and "insufficient_headroom", wait_s)


async def test_a_promise_ends_when_its_run_does(ledger: Ledger, clock: Clock) -> None:
    """Its blocks are free again then, for a run as long as the asker's where nobody said how long it takes."""
    await half_full(ledger, clock)
    waits = []
    for run_s in (3.0, None):
        promised = Promised((due(clock, 10.0, 80, run_s),))
        result = await ledger.reserve(ask(f"{run_s}", candidate(n=need(41), expected_s=7.0, promised=promised)))
        waits.append(result.verdicts[0].retry_after_s)
    assert waits == [13.0, 17.0]


async def test_who_was_refused_earlier_need_not_wait_for_later_ones(ledger: Ledger, clock: Clock) -> None:
    """It leaves room to those before it; where it does not fit, it is told a time at which it takes from nobody."""
    await half_full(ledger, clock)
    later = (due(clock, 0.0, 40, 30.0),)
    mine = await ledger.reserve(ask("mine", candidate(n=need(30), promised=Promised((), later))))
    more = await ledger.reserve(ask("more", candidate(n=need(20), expected_s=60.0, promised=Promised((), later))))
    assert (mine.chosen, more.chosen, more.verdicts[0].retry_after_s) == (0, None, 10.0)
    newcomer = await ledger.reserve(ask("new", candidate(n=need(10), promised=Promised(later))))
    assert newcomer.chosen is None


async def test_a_request_larger_than_the_pool_is_told_so_even_when_it_is_empty(ledger: Ledger, clock: Clock) -> None:
    """Never fits is not "not now"."""
    await ledger.publish([report(clock())], [], 30)
    assert await reasons(ledger, ask("1", candidate(n=need(101)))) == ["exceeds_pool"]


async def test_the_first_candidate_with_room_wins_and_a_remote_takes_nothing(ledger: Ledger, clock: Clock) -> None:
    """Order is preference; every candidate gets a verdict."""
    await ledger.publish([report(clock()), report(clock(), "b", capacity_blocks=5)], [], 30)
    places = (candidate("b"), candidate("a"), candidate("far", remote=True))
    result = await ledger.reserve(ask("1", *places))
    assert result.chosen == 1
    assert [v.refused_by for v in result.verdicts] == ["exceeds_pool", None, "not_tried"]
    await ledger.reserve(ask("2", candidate("a", n=need(85))))
    result = await ledger.reserve(ask("3", *places))
    assert (result.chosen, (await ledger.snapshot()).replicas["a"].reservations) == (2, 2)


async def test_the_same_rid_takes_once_and_gets_its_first_answer(ledger: Ledger, clock: Clock) -> None:
    """Idempotent by rid."""
    await ledger.publish([report(clock()), report(clock(), "b")], [], 30)
    first = await ledger.reserve(ask("1", candidate("a"), candidate("b")))
    again = await ledger.reserve(ask("1", candidate("b"), candidate("a")))
    assert (first.chosen, again.chosen, again.verdicts[1].headroom_blocks) == (0, 1, 100)
    assert (await ledger.snapshot()).replicas["a"].reserved_blocks == 10


async def test_prefill_bucket_drains_at_the_rate(ledger: Ledger, clock: Clock) -> None:
    """2,000 tokens at 1,000/s leave after 2 s; a refusal says when."""
    await ledger.publish([report(clock())], [], 30)
    place = candidate(n=need(1, prefill=1500), prefill_rate=1000.0, prefill_capacity_tokens=2000.0)
    await ledger.reserve(ask("1", place))
    refused = (await ledger.reserve(ask("2", place))).verdicts[0]
    assert (refused.refused_by, refused.retry_after_s) == ("prefill_busy", 1.0)
    clock.tick(1.0)
    assert await reasons(ledger, ask("2", place)) == [None]


async def test_an_idle_replica_takes_a_prompt_larger_than_the_bucket(ledger: Ledger, clock: Clock) -> None:
    """A replica with no live reservation always takes one; the next waits for it."""
    await ledger.publish([report(clock())], [], 30)
    place = candidate(n=need(1, prefill=9000), prefill_rate=1000.0, prefill_capacity_tokens=2000.0)
    assert await reasons(ledger, ask("1", place), ask("2", place)) == [None, "prefill_busy"]


async def test_an_unknown_prefill_rate_turns_the_bucket_off(ledger: Ledger, clock: Clock) -> None:
    """No rate, no limit."""
    await ledger.publish([report(clock())], [], 30)
    place = candidate(n=need(1, prefill=9000), prefill_capacity_tokens=2000.0)
    assert await reasons(ledger, ask("1", place), ask("2", place)) == [None, None]


async def test_an_abort_before_the_first_byte_gives_the_unserved_prefill_back(ledger: Ledger, clock: Clock) -> None:
    """Of 1,500 tokens 500 are served after half a second; 1,000 leave the bucket."""
    await ledger.publish([report(clock())], [], 30)
    place = candidate(n=need(1, prefill=1500), prefill_rate=1000.0, prefill_capacity_tokens=2000.0)
    await ledger.reserve(ask("1", place))
    clock.tick(0.5)
    await ledger.end([end("1", Ended.CLIENT_ABORT)])
    assert (await ledger.snapshot()).replicas["a"].prefill_level_tokens == 0.0


@pytest.mark.parametrize("how", [Ended.COMPLETE, Ended.CLIENT_ABORT])
async def test_after_the_first_byte_nothing_is_given_back(ledger: Ledger, clock: Clock, how: Ended) -> None:
    """The prompt was served."""
    await ledger.publish([report(clock())], [], 30)
    place = candidate(n=need(1, prefill=1500), prefill_rate=1000.0, prefill_capacity_tokens=2000.0)
    await ledger.reserve(ask("1", place))
    clock.tick(0.5)
    await ledger.end([end("1", how, first_byte_age_s=0.1)])
    assert (await ledger.snapshot()).replicas["a"].prefill_level_tokens == 1000.0


async def test_sequences_fill_up_and_one_request_wider_than_all_slots_takes_an_empty_engine(
    ledger: Ledger, clock: Clock
) -> None:
    """Slots are a stock; 64 prompts on 4 slots run one after another, alone."""
    await ledger.publish([report(clock(), max_sequences=4)], [], 30)
    answers = await reasons(
        ledger, ask("1", candidate(n=need(1, sequences=64))), ask("2", candidate(n=need(1))),
    )  # fmt: skip
    assert answers == [None, "sequences_full"]
    await ledger.end([end("1")])
    assert await reasons(ledger, *(ask(f"s{i}", candidate(n=need(1))) for i in range(5))) == [None] * 4 + [
        "sequences_full"
    ]


async def test_lane_concurrency_counts_local_work_everywhere(ledger: Ledger, clock: Clock) -> None:
    """Two replicas share the lane's two places; a remote is not in the count."""
    await ledger.publish([report(clock()), report(clock(), "b")], [], 30)
    answers = await reasons(
        ledger,
        ask("1", candidate("a"), lane_concurrency=2),
        ask("2", candidate("b"), lane_concurrency=2),
        ask("3", candidate("a"), lane_concurrency=2),
        ask("4", candidate("far", remote=True), lane_concurrency=2),
        ask("5", candidate("a"), lane="other", lane_concurrency=2),
    )
    assert answers == [None, None, "lane_full", None, None]
    assert (await ledger.snapshot()).lanes == {"fast": 2, "other": 1}


async def test_a_lanes_share_of_the_pool_is_its_limit(ledger: Ledger, clock: Clock) -> None:
    """Batch takes at most 40 of 100 blocks; a request beyond that alone never fits."""
    await ledger.publish([report(clock())], [], 30)
    answers = await reasons(
        ledger,
        ask("1", candidate(n=need(30), lane_share=0.4), lane="batch"),
        ask("2", candidate(n=need(11), lane_share=0.4), lane="batch"),
        ask("3", candidate(n=need(41), lane_share=0.4), lane="batch"),
        ask("4", candidate(n=need(60)), lane="fast"),
    )
    assert answers == [None, "lane_share", "exceeds_pool", None]


async def test_a_yielding_lane_waits_while_the_others_use_most_of_the_pool(ledger: Ledger, clock: Clock) -> None:
    """No batch while realtime holds 80 of 100."""
    await ledger.publish([report(clock())], [], 30)
    answers = await reasons(
        ledger,
        ask("1", candidate(n=need(79)), lane="fast"),
        ask("2", candidate(n=need(1), lane_yields_at=0.8), lane="batch"),
        ask("3", candidate(n=need(1)), lane="fast"),
        ask("4", candidate(n=need(1), lane_yields_at=0.8), lane="batch"),
    )
    assert answers == [None, None, None, "lane_share"]


async def test_device_bytes_are_looked_at_card_by_card(ledger: Ledger, clock: Clock) -> None:
    """The fuller of two cards decides, and its guard stays free."""
    cards = ("GPU-1", "GPU-2")
    await ledger.publish([report(clock())], [device(clock()), device(clock(), "GPU-2", free_bytes=400)], 30)

    def place(*sizes: int) -> object:
        return candidate(n=need(1, vram_bytes=sizes), devices=cards, device_guard_bytes=100)

    answers = await reasons(
        ledger,
        ask("1", place(100, 301)),  # type: ignore[arg-type]
        ask("2", place(900, 200)),  # type: ignore[arg-type]
        ask("3", place(1, 1)),  # type: ignore[arg-type]
    )
    assert answers == ["insufficient_headroom", None, "insufficient_headroom"]


async def test_a_cards_own_figure_replaces_what_was_pending_once_the_engine_answered(
    ledger: Ledger, clock: Clock
) -> None:
    """After the first byte the memory is allocated, so a later scrape has it already."""
    await ledger.publish([report(clock())], [device(clock())], 30)
    place = candidate(n=need(1, vram_bytes=(600,)), devices=("GPU-1",))
    result = await ledger.reserve(ask("1", place))
    assert (await ledger.snapshot()).device_reserved_bytes == {"GPU-1": 600}
    kept = reservation("1", result.now_s, n=place.need, devices=("GPU-1",))
    clock.tick(1)
    await ledger.renew([record(kept, first_byte_age_s=0.2)])
    await ledger.publish([], [device(clock(), free_bytes=1000)], 30)
    assert (await ledger.snapshot()).device_reserved_bytes == {}
    assert await reasons(ledger, ask("2", place)) == [None]


async def test_an_ended_requests_card_bytes_count_until_a_later_scrape(ledger: Ledger, clock: Clock) -> None:
    """The last scrape did not see the allocation, so its free figure is too high until the next one."""
    await ledger.publish([report(clock())], [device(clock())], 30)
    place = candidate(n=need(1, vram_bytes=(600,)), devices=("GPU-1",))
    await ledger.reserve(ask("1", place))
    clock.tick(1)
    await ledger.end([end("1")])
    assert await reasons(ledger, ask("2", place)) == ["insufficient_headroom"]
    clock.tick(1)
    await ledger.publish([], [device(clock(), free_bytes=1000)], 30)
    assert await reasons(ledger, ask("2", place)) == [None]


@pytest.mark.parametrize(
    ("state", "answer"), [("lost", "unknown_state"), ("ok", "insufficient_headroom"), ("unknown", None)]
)
async def test_a_lost_card_is_unknown_and_a_full_one_is_guarded(
    ledger: Ledger, clock: Clock, state: str, answer: str
) -> None:
    """On engines that preallocate, the guard alone is checked, and only where the driver tells what is free."""
    await ledger.publish([report(clock())], [device(clock(), state=state, free_bytes=50)], 30)
    place = candidate(n=need(1), devices=("GPU-1",), device_guard_bytes=256)
    assert await reasons(ledger, ask("1", place)) == [answer]


async def test_an_unreported_card_is_unknown_only_to_who_needs_its_memory(ledger: Ledger, clock: Clock) -> None:
    """A CPU-only node has no device agent."""
    await ledger.publish([report(clock())], [], 30)
    answers = await reasons(
        ledger,
        ask("1", candidate(n=need(1), devices=("GPU-9",), device_guard_bytes=256)),
        ask("2", candidate(n=need(1, vram_bytes=(1,)), devices=("GPU-9",))),
    )
    assert answers == [None, "unknown_state"]
    await ledger.publish([], [device(clock(), "GPU-9", state="unknown", free_bytes=None)], 30)
    needs_it = candidate(n=need(1, vram_bytes=(1,)), devices=("GPU-9",))
    assert await reasons(ledger, ask("3", needs_it)) == ["unknown_state"]


@pytest.mark.parametrize(
    ("waiting", "limit", "answer"), [(15, 16, None), (16, 16, "engine_queue"), (1, 0, "engine_queue"), (0, 0, None)]
)
async def test_the_engines_own_queue_refuses_at_its_limit(
    ledger: Ledger, clock: Clock, waiting: int, limit: int, answer: str | None
) -> None:
    """max_waiting 0 means: nobody may wait there."""
    await ledger.publish([report(clock(), waiting=waiting)], [], 30)
    assert await reasons(ledger, ask("1", candidate(max_waiting=limit))) == [answer]


async def test_force_reserves_anyway_and_still_says_what_would_have_been(ledger: Ledger, clock: Clock) -> None:
    """Shadow mode: the true load is counted, headroom goes negative."""
    await ledger.publish([report(clock())], [], 30)
    await ledger.reserve(ask("1", candidate(n=need(90))))
    result = await ledger.reserve(ask("2", candidate(n=need(20)), candidate("far", remote=True), force=True))
    assert (result.chosen, [v.refused_by for v in result.verdicts]) == (0, ["insufficient_headroom", None])
    assert (await ledger.snapshot()).replicas["a"].headroom_blocks == -10


async def test_retry_time_follows_the_earliest_ends_that_make_room(ledger: Ledger, clock: Clock) -> None:
    """30 + 30 + 40 promised, ends after 5, 9 and 20 s: 50 more fit after 9 s, 70 after 20 s."""
    await ledger.publish([report(clock())], [], 30)
    for rid, blocks, duration in (("1", 30, 5.0), ("2", 30, 9.0), ("3", 40, 20.0)):
        await ledger.reserve(ask(rid, candidate(n=need(blocks), expected_s=duration)))
    times = [(await ledger.reserve(ask(f"n{b}", candidate(n=need(b))))).verdicts[0].retry_after_s for b in (10, 50, 70)]
    assert times == [5.0, 9.0, 20.0]


async def test_an_overdue_reservation_is_given_more_the_longer_it_lasts(ledger: Ledger, clock: Clock) -> None:
    """Half of its overrun, or a fifth of what the asker expects for itself, and a tenth of a second at least."""
    await ledger.publish([report(clock())], [], 600)
    await ledger.reserve(ask("1", candidate(n=need(100), expected_s=10.0)))
    waits = []
    for number, (passed_s, own_s) in enumerate([(10.0, 0.0), (2.0, 0.0), (0.0, 4.0), (0.0, 20.0)]):
        clock.tick(passed_s + (0.001 if number == 0 else 0.0))
        refused = await ledger.reserve(ask(f"n{number}", candidate(n=need(50), expected_s=own_s)))
        waits.append(refused.verdicts[0].retry_after_s)
    assert waits == [0.1, 1.0005, 1.0005, 4.0]


async def test_foreign_load_has_no_known_end(ledger: Ledger, clock: Clock) -> None:
    """Where our own ends do not free enough, the retry time is unknown."""
    await ledger.publish([report(clock(), used_blocks=80, running=3)], [], 30)
    verdict = (await ledger.reserve(ask("1", candidate(n=need(30))))).verdicts[0]
    assert (verdict.refused_by, verdict.retry_after_s) == ("insufficient_headroom", None)


async def test_drain_stops_new_work_and_can_be_taken_back(ledger: Ledger, clock: Clock) -> None:
    """An operator's drain is not_ready; what runs stays counted."""
    await ledger.publish([report(clock())], [], 30)
    await ledger.reserve(ask("1"))
    await ledger.drain("a", True)
    assert await reasons(ledger, ask("2")) == ["not_ready"]
    view = (await ledger.snapshot()).replicas["a"]
    assert (view.state, view.drained_by_operator, view.reserved_blocks) == ("draining", True, 10)
    await ledger.drain("a", False)
    assert await reasons(ledger, ask("2")) == [None]


async def test_heartbeats_count_the_living(ledger: Ledger, clock: Clock) -> None:
    """A sidecar lives until its heartbeat lapses or it leaves."""
    assert await ledger.heartbeat("one", 5) == 1
    clock.tick(3)
    assert await ledger.heartbeat("two", 5) == 2
    clock.tick(3)
    assert (await ledger.snapshot()).live_sidecars == 1
    assert await ledger.heartbeat("two", 0) == 0


async def test_a_pool_without_blocks_takes_what_keeps_none(ledger: Ledger, clock: Clock) -> None:
    """An encoder has no KV; an engine that is still loading is unknown, not too small for ever."""
    await ledger.publish([report(clock(), capacity_blocks=0)], [], 30)
    answers = await reasons(ledger, ask("1", candidate(n=need(0))), ask("2", candidate(n=need(1))))
    assert answers == [None, "unknown_state"]
