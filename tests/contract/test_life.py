"""The life of a reservation, rule by rule (01-product), over every ledger."""

from __future__ import annotations

import pytest

from extproc.ledger.base import Ended, Ledger, State
from tests.support.ledgers import Clock, ask, candidate, end, need, record, report, reservation


async def blocks(ledger: Ledger, replica: str = "a") -> int:
    """What the ledger holds on a replica."""
    return (await ledger.snapshot()).replicas[replica].reserved_blocks


async def states(ledger: Ledger, replica: str = "a") -> dict[str, State]:
    """State by rid."""
    return {live.reservation.rid: live.state for live in await ledger.reservations(replica)}


@pytest.fixture
async def held(ledger: Ledger, clock: Clock) -> Ledger:
    """One reservation "1" of 10 blocks on an engine that runs it."""
    await ledger.publish([report(clock())], [], 1000)
    await ledger.reserve(ask("1"))
    return ledger


async def test_rule_1_the_first_end_record_releases(held: Ledger, clock: Clock) -> None:
    """A second record of the same end changes nothing."""
    first, second = await held.end([end("1"), end("1")])
    assert (first.released, second.released) == (True, False)
    assert await blocks(held) == 0


async def test_rule_1_an_attempts_end_counts_only_on_its_replica(held: Ledger) -> None:
    """The attempt that ended elsewhere is not this reservation's."""
    (other,) = await held.end([end("1", replica="b")])
    assert (other.released, await blocks(held)) == (False, 10)
    (own,) = await held.end([end("1", replica="a")])
    assert (own.released, await blocks(held)) == (True, 0)


async def test_rule_1_an_end_without_rid_orphans_by_envoy_and_request_id(held: Ledger, clock: Clock) -> None:
    """The client left while the decision was being made; an idle engine or silence ends what it left."""
    clock.tick(0.1)
    (result,) = await held.end([end(None, Ended.CLIENT_ABORT, request_id="x-1")])
    assert (result.released, await states(held)) == (False, {"1": State.ORPHANED})
    clock.tick(5)
    await held.publish([report(clock())], [], 30)
    assert await blocks(held) == 0


async def test_rule_1_a_join_that_was_another_requests_does_no_harm(held: Ledger, clock: Clock) -> None:
    """Two requests with one x-request-id: the record of the one that lives brings its reservation back."""
    made = clock.now_s
    clock.tick(0.1)
    await held.end([end(None, Ended.CLIENT_ABORT, request_id="x-1")])
    clock.tick(0.9)
    assert await held.renew([record(reservation("1", made))]) == [True]
    assert await states(held) == {"1": State.RESERVED}


async def test_rule_1_a_join_never_takes_a_request_that_is_known_to_run(held: Ledger, clock: Clock) -> None:
    """A client that uses one x-request-id twice does not free the other request's blocks."""
    clock.tick(1)
    await held.renew([record(reservation("1", clock.now_s - 1))])
    await held.end([end(None, Ended.CLIENT_ABORT, request_id="x-1")])
    assert await states(held) == {"1": State.RESERVED}


async def test_rule_1_a_join_never_takes_what_was_made_after_that_end(ledger: Ledger, clock: Clock) -> None:
    """A late end of the first try does not free the retry with the same x-request-id."""
    await ledger.publish([report(clock())], [], 30)
    await ledger.reserve(ask("2", request_id="x-1"))
    clock.tick(0.5)
    await ledger.end([end(None, Ended.CLIENT_ABORT, request_id="x-1", ended_age_s=0.7)])
    assert await states(ledger) == {"2": State.RESERVED}


async def test_rule_1_a_join_never_takes_what_an_earlier_exchange_made(held: Ledger, clock: Clock) -> None:
    """The exchange that ended began after this reservation was made, so it is another request's."""
    clock.tick(3)
    await held.end([end(None, Ended.CLIENT_ABORT, request_id="x-1", began_age_s=0.5)])
    assert await states(held) == {"1": State.RESERVED}
    await held.end([end(None, Ended.CLIENT_ABORT, request_id="x-1", began_age_s=3.0)])
    assert await states(held) == {"1": State.ORPHANED}


async def test_rule_1_of_two_with_one_request_id_the_join_questions_the_latest(ledger: Ledger, clock: Clock) -> None:
    """Neither is known to be the one that left, so neither is released."""
    await ledger.publish([report(clock())], [], 30)
    await ledger.reserve(ask("1", request_id="same"))
    await ledger.reserve(ask("2", request_id="same"))
    clock.tick(0.1)
    await ledger.end([end(None, Ended.CLIENT_ABORT, request_id="same")])
    assert await states(ledger) == {"1": State.RESERVED, "2": State.ORPHANED}


async def test_rule_1_unsent_is_released_at_once(held: Ledger) -> None:
    """No engine ever saw it, so nothing has to cool."""
    await held.end([end("1", Ended.UNSENT)])
    assert await blocks(held) == 0


async def test_rule_2_records_renew_the_lease_for_as_long_as_they_come(held: Ledger, clock: Clock) -> None:
    """A request silent for 20 minutes keeps its reservation while Envoy reports it."""
    made = clock.now_s
    for _ in range(400):
        clock.tick(3)
        assert await held.renew([record(reservation("1", made))]) == [True]
        await held.reap()
    assert await states(held) == {"1": State.RESERVED}


async def test_rule_2_a_record_rebuilds_what_the_ledger_never_knew(ledger: Ledger, clock: Clock) -> None:
    """An upsert carries the whole reservation; one that does not fit is counted as over-admission."""
    await ledger.publish([report(clock(), capacity_blocks=15)], [], 30)
    made = clock.now_s
    clock.tick(2)
    assert await ledger.renew([record(reservation("1", made)), record(reservation("2", made))]) == [True, True]
    view = (await ledger.snapshot()).replicas["a"]
    assert (view.reserved_blocks, view.over_admissions, view.over_adopted) == (20, 1, 1)
    assert [live.reservation for live in await ledger.reservations("a")] == [
        reservation("1", made),
        reservation("2", made),
    ]


async def test_rule_2_a_request_that_outgrew_its_prediction_is_extended(held: Ledger, clock: Clock) -> None:
    """Its current blocks count, and never shrink."""
    made = clock.now_s
    clock.tick(1)
    await held.renew([record(reservation("1", made), current_blocks=95)])
    await held.renew([record(reservation("1", made), current_blocks=90)])
    assert await blocks(held) == 95
    await held.renew([record(reservation("1", made), current_blocks=101)])
    assert (await held.snapshot()).replicas["a"].over_grew == 1
    await held.end([end("1")])
    assert await blocks(held) == 0


async def test_rule_3_a_late_record_cannot_resurrect(held: Ledger, clock: Clock) -> None:
    """For 60 s the rid is remembered as ended."""
    made = clock.now_s
    await held.end([end("1")])
    clock.tick(59)
    assert await held.renew([record(reservation("1", made), seen_age_s=58)]) == [False]
    assert await blocks(held) == 0


async def test_rule_3_a_record_older_than_a_tombstone_is_refused(ledger: Ledger, clock: Clock) -> None:
    """When the tombstone is gone, its record's age tells."""
    assert await ledger.renew([record(reservation("1", clock.now_s - 90), seen_age_s=61)]) == [False]


async def test_rule_3_an_unknown_rids_end_is_remembered_too(ledger: Ledger, clock: Clock) -> None:
    """A reserve that lands after its compensating release takes nothing."""
    await ledger.publish([report(clock())], [], 30)
    (result,) = await ledger.end([end("1", Ended.UNSENT)])
    late = await ledger.reserve(ask("1"))
    assert (result.released, late.chosen, late.ended) == (False, None, True)
    assert await ledger.renew([record(reservation("1", clock.now_s))]) == [False]
    assert await blocks(ledger) == 0


async def test_rule_3_the_tombstone_goes_after_a_minute(held: Ledger, clock: Clock) -> None:
    """Nothing of an ended reservation stays."""
    await held.end([end("1")])
    clock.tick(60)
    await held.reap()
    lines = {line.what: line.stored for line in await held.audit()}
    assert (lines["index due"], lines["index tombstones"]) == (0, 0)


async def test_rule_4_silence_is_an_end_where_somebody_listened(held: Ledger, clock: Clock) -> None:
    """Ten seconds of listening without a record of it release an orphan; another Envoy's stays."""
    await held.reserve(ask("2", owner="envoy-2"))
    listening = clock.now_s
    clock.tick(9.9)
    assert await held.reap(listened_s=clock.now_s - listening, owners=["envoy-1"]) == 0
    clock.tick(0.1)
    assert await held.reap(listened_s=clock.now_s - listening, owners=["envoy-1"]) == 1
    assert await states(held) == {"2": State.ORPHANED}


async def test_rule_4_who_has_not_listened_long_enough_ends_nothing(held: Ledger, clock: Clock) -> None:
    """A restarted instance may have missed the records."""
    clock.tick(30)
    assert await held.reap(listened_s=9.9, owners=["envoy-1"]) == 0
    assert await states(held) == {"1": State.ORPHANED}


async def test_rule_4_a_record_within_the_silence_keeps_it(held: Ledger, clock: Clock) -> None:
    """Its lease may be over, but it was heard of 4 s ago."""
    made = clock.now_s
    clock.tick(14)
    await held.renew([record(reservation("1", made), seen_age_s=4, lease_s=2)])
    assert await held.reap(listened_s=14.0, owners=["envoy-1"]) == 0
    assert await states(held) == {"1": State.ORPHANED}


@pytest.mark.parametrize("how", [Ended.CLIENT_ABORT, Ended.UPSTREAM_RESET, Ended.UPSTREAM_ERROR, Ended.TIMEOUT])
async def test_rule_5_anything_but_a_complete_answer_cools_in_full(held: Ledger, clock: Clock, how: Ended) -> None:
    """The engine frees later than the client leaves: 1.5 s after the end, not after the record came."""
    clock.tick(1)
    (result,) = await held.end([end("1", how, ended_age_s=0.5)])
    assert (result.released, await blocks(held), await states(held)) == (True, 10, {"1": State.COOLING})
    clock.tick(0.99)
    await held.reap()
    assert await blocks(held) == 10
    clock.tick(0.01)
    await held.reap()
    assert await blocks(held) == 0


async def test_rule_5_an_end_that_is_old_news_does_not_cool_again(held: Ledger, clock: Clock) -> None:
    """Sent after an outage: its cooling is over."""
    clock.tick(5)
    await held.end([end("1", Ended.CLIENT_ABORT, ended_age_s=2)])
    assert await blocks(held) == 0


async def test_rule_5_a_cooling_reservation_is_not_renewed(held: Ledger, clock: Clock) -> None:
    """Its end has been seen."""
    made = clock.now_s
    await held.end([end("1", Ended.CLIENT_ABORT)])
    assert await held.renew([record(reservation("1", made))]) == [False]


async def test_rule_5_room_returns_by_itself_when_cooling_is_over(held: Ledger, clock: Clock) -> None:
    """The next reserve sees it, whether or not somebody reaps."""
    await held.reserve(ask("2", candidate(n=need(90))))
    await held.end([end("1", Ended.CLIENT_ABORT)])
    assert (await held.reserve(ask("3"))).chosen is None
    clock.tick(1.5)
    assert (await held.reserve(ask("3"))).chosen == 0


async def test_rule_6_an_expired_lease_is_counted_in_full(held: Ledger, clock: Clock) -> None:
    """Orphaned is a state, not an end."""
    clock.tick(10)
    assert await held.reap() == 0
    view = (await held.snapshot()).replicas["a"]
    assert (view.reserved_blocks, view.orphaned, await states(held)) == (10, 1, {"1": State.ORPHANED})


async def test_rule_6_a_record_brings_an_orphan_back(held: Ledger, clock: Clock) -> None:
    """Its Envoy lives."""
    made = clock.now_s
    clock.tick(20)
    await held.reap()
    assert await held.renew([record(reservation("1", made))]) == [True]
    assert (await states(held), (await held.snapshot()).replicas["a"].orphaned) == ({"1": State.RESERVED}, 0)


async def test_rule_6_an_idle_engine_ends_an_orphan(held: Ledger, clock: Clock) -> None:
    """running + waiting = 0 in a scrape 5 s after it was made and 2.5 s after its last record."""
    clock.tick(11)
    await held.reap()
    await held.publish([report(clock() - 0.2, running=1)], [], 30)
    assert await blocks(held) == 10
    await held.publish([report(clock())], [], 30)
    assert await blocks(held) == 0


@pytest.mark.parametrize(("made_age_s", "seen_age_s", "left"), [(4.9, 4.9, 10), (20.0, 2.4, 10), (20.0, 2.6, 0)])
async def test_rule_6_an_idle_engine_does_not_end_the_young_or_the_lately_heard(
    ledger: Ledger, clock: Clock, made_age_s: float, seen_age_s: float, left: int
) -> None:
    """They may be on their way to the engine."""
    await ledger.renew([record(reservation("1", clock() - made_age_s), seen_age_s=seen_age_s, lease_s=0.0)])
    await ledger.reap()
    assert await states(ledger) == {"1": State.ORPHANED}
    await ledger.publish([report(clock())], [], 30)
    assert await blocks(ledger) == left


async def test_rule_6_an_idle_engine_does_not_end_what_is_not_orphaned(held: Ledger, clock: Clock) -> None:
    """A running lease is not questioned by counts."""
    made = clock.now_s
    clock.tick(6)
    await held.renew([record(reservation("1", made), seen_age_s=3)])
    await held.publish([report(clock())], [], 30)
    assert await blocks(held) == 10


async def test_rule_6_an_orphan_goes_when_its_cap_must_be_over(ledger: Ledger, clock: Clock) -> None:
    """cap_s after it was made, at the slowest rate ever measured."""
    await ledger.publish([report(clock())], [], 1000)
    await ledger.reserve(ask("1", candidate(cap_s=40.0)))
    clock.tick(39.9)
    await ledger.reap()
    assert await blocks(ledger) == 10
    clock.tick(0.1)
    assert (await ledger.reap(), await blocks(ledger)) == (1, 0)


async def test_rule_7_an_engine_restart_voids_what_was_made_before_it_in_any_state(
    ledger: Ledger, clock: Clock
) -> None:
    """Reserved, cooling and orphaned go; what was made later stays."""
    await ledger.publish([report(clock())], [], 1000)
    await ledger.reserve(ask("orphan", lease_s=0.1))
    await ledger.reserve(ask("cooling"))
    await ledger.reserve(ask("reserved"))
    clock.tick(1)
    await ledger.reap()
    await ledger.end([end("cooling", Ended.CLIENT_ABORT)])
    assert len(await states(ledger)) == 3
    started = clock.tick(0.5)
    clock.tick(0.5)
    await ledger.reserve(ask("later"))
    result = await ledger.publish([report(clock(), engine_started_at_s=started)], [], 30)
    assert (result.voided, await states(ledger)) == ({"a": 3}, {"later": State.RESERVED})


async def test_rule_7_a_voided_reservation_is_not_brought_back(held: Ledger, clock: Clock) -> None:
    """Its late records are of a stream that died with the engine."""
    made = clock.now_s
    clock.tick(1)
    await held.publish([report(clock(), engine_started_at_s=clock() - 0.5)], [], 30)
    assert await held.renew([record(reservation("1", made))]) == [False]


@pytest.mark.parametrize("fresh", [False], indirect=True)
class TestRule8:
    """Lost data: nothing is assumed empty."""

    async def test_a_replica_is_unknown_until_a_later_scrape_proves_it(self, ledger: Ledger, clock: Clock) -> None:
        """Three periodic intervals give every live stream the time to be reported again."""
        await ledger.reap()
        answers = []
        for _ in range(4):
            await ledger.publish([report(clock())], [], 30)
            answers.append((await ledger.reserve(ask("1"))).verdicts[0].refused_by)
            clock.tick(1)
        assert answers == ["unknown_state"] * 3 + [None]

    async def test_more_running_than_ours_proves_nothing(self, ledger: Ledger, clock: Clock) -> None:
        """Somebody's requests run that the ledger does not know."""
        await ledger.reap()
        clock.tick(4)
        await ledger.publish([report(clock(), running=1, used_blocks=10)], [], 30)
        assert (await ledger.reserve(ask("1"))).verdicts[0].refused_by == "unknown_state"

    async def test_ours_are_proof_once_later_records_show_that_they_were_inside(
        self, ledger: Ledger, clock: Clock
    ) -> None:
        """One runs and one is known: that it is the same one, only a record from after the scrape says."""
        await ledger.reap()
        made = clock()
        clock.tick(4)
        await ledger.renew([record(reservation("known", made))])
        clock.tick(0.1)
        await ledger.publish([report(clock(), running=1, used_blocks=10)], [], 30)
        assert (await ledger.reserve(ask("1"))).verdicts[0].refused_by == "unknown_state"
        clock.tick(1)
        await ledger.renew([record(reservation("known", made))])
        clock.tick(0.1)
        await ledger.publish([report(clock(), running=1, used_blocks=10)], [], 30)
        assert (await ledger.reserve(ask("2"))).chosen == 0

    async def test_one_that_had_ended_does_not_stand_in_for_one_that_was_lost(
        self, ledger: Ledger, clock: Clock
    ) -> None:
        """Its end record comes after the scrape, and says that it was over before."""
        await ledger.reap()
        made = clock()
        clock.tick(4)
        await ledger.renew([record(reservation("known", made))])
        clock.tick(1)
        await ledger.publish([report(clock(), running=1, used_blocks=8)], [], 30)
        clock.tick(1)
        await ledger.end([end("known", ended_age_s=1.5)])
        await ledger.publish([report(clock(), running=1, used_blocks=8)], [], 30)
        assert (await ledger.reserve(ask("1"))).verdicts[0].refused_by == "unknown_state"

    async def test_an_end_after_the_scrape_is_a_witness_too(self, ledger: Ledger, clock: Clock) -> None:
        """It was inside when the engine counted."""
        await ledger.reap()
        made = clock()
        clock.tick(4)
        await ledger.renew([record(reservation("known", made))])
        clock.tick(0.1)
        await ledger.publish([report(clock(), running=1, used_blocks=10)], [], 30)
        clock.tick(1)
        await ledger.end([end("known", ended_age_s=0.5)])
        await ledger.publish([report(clock(), running=1, used_blocks=10)], [], 30)
        assert (await ledger.reserve(ask("1"))).chosen == 0

    async def test_a_scrape_that_nothing_confirms_gives_way_to_a_later_one(self, ledger: Ledger, clock: Clock) -> None:
        """An aborted request that the engine still ran holds the replica up for seconds, not for a minute."""
        await ledger.reap()
        made = clock()
        clock.tick(4)
        await ledger.publish([report(clock(), running=2, used_blocks=20)], [], 30)
        answers = []
        for _ in range(5):
            clock.tick(1)
            await ledger.renew([record(reservation("known", made))])
            clock.tick(0.1)
            await ledger.publish([report(clock(), running=1, used_blocks=10)], [], 30)
            answers.append((await ledger.reserve(ask(str(clock())))).chosen)
        assert answers == [None, None, None, 0, 0]

    async def test_after_a_minute_it_is_no_longer_asked(self, ledger: Ledger, clock: Clock) -> None:
        """At most 60 s."""
        await ledger.reap()
        clock.tick(59.9)
        static = candidate(static_capacity_blocks=50)
        assert (await ledger.reserve(ask("1", static))).verdicts[0].refused_by == "unknown_state"
        clock.tick(0.1)
        assert (await ledger.reserve(ask("1", static))).chosen == 0


async def test_moved_leaves_its_blocks_cooling_on_the_old_replica(held: Ledger, clock: Clock) -> None:
    """The attempt there may still run; the request counts on the new one."""
    made = clock.now_s
    clock.tick(1)
    assert await held.renew([record(reservation("1", made, "b"))]) == [True]
    assert (await blocks(held, "a"), await blocks(held, "b")) == (10, 10)
    clock.tick(1.5)
    await held.reap()
    assert (await blocks(held, "a"), await blocks(held, "b")) == (0, 10)
    (result,) = await held.end([end("1")])
    assert (result.released, await blocks(held, "b")) == (True, 0)


async def test_an_older_record_of_the_old_replica_does_not_move_it_back(held: Ledger, clock: Clock) -> None:
    """Records may be reordered."""
    made = clock.now_s
    clock.tick(2)
    await held.renew([record(reservation("1", made, "b"))])
    await held.renew([record(reservation("1", made, "a"), seen_age_s=1)])
    assert await states(held, "b") == {"1": State.RESERVED}


async def test_an_operators_release_is_at_once_from_any_state(held: Ledger, clock: Clock) -> None:
    """Also from cooling."""
    await held.end([end("1", Ended.CLIENT_ABORT)])
    await held.end([end("1", Ended.OPERATOR)])
    assert await blocks(held) == 0


async def test_a_lease_that_is_renewed_by_an_old_record_is_not_shortened(held: Ledger, clock: Clock) -> None:
    """Duplicates and reordering do no harm."""
    made = clock.now_s
    clock.tick(5)
    await held.renew([record(reservation("1", made)), record(reservation("1", made), seen_age_s=4)])
    clock.tick(9.9)
    await held.reap()
    assert await states(held) == {"1": State.RESERVED}


async def test_rule_9_without_records_a_lease_of_the_predicted_duration_is_the_whole_life(
    ledger: Ledger, clock: Clock
) -> None:
    """A mesh without an access log: lease and cap are both the prediction."""
    await ledger.publish([report(clock())], [], 1000)
    await ledger.reserve(ask("1", candidate(cap_s=20.0), lease_s=20.0))
    clock.tick(19.9)
    await ledger.reap()
    assert await states(ledger) == {"1": State.RESERVED}
    clock.tick(0.1)
    await ledger.reap()
    await ledger.reap()
    assert await blocks(ledger) == 0
