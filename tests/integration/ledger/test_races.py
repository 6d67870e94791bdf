"""Each script under a hundred-way race on a real server: exactly the right number win, and the sums stay true."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from extproc.ledger.base import Ended
from extproc.ledger.redis import RedisLedger
from tests.support.ledgers import ask, candidate, end, need, record, report, reservation
from tests.support.valkey import ValkeyServer

PROCESSES, PER_PROCESS, PLACES = 8, 25, 10


async def true_sums(ledger: RedisLedger) -> None:
    """Every stored sum equals its parts."""
    assert [line for line in await ledger.audit() if line.stored != line.recomputed] == []


@pytest.fixture
async def hundred(valkey: ValkeyServer, pool: str) -> AsyncIterator[list[RedisLedger]]:
    """Ten connections; the races use each ten times at once."""
    ledgers = [
        await RedisLedger.connect(
            valkey.url, pool, deadline_s=30.0, background_deadline_s=30.0, wait_s=60.0, fresh=True
        )
        for _ in range(10)
    ]
    yield ledgers
    for each in ledgers:
        await each.close()


def test_eight_processes_racing_two_hundred_requests_for_ten_places_get_exactly_ten(
    valkey: ValkeyServer, pool: str
) -> None:
    """Check and reserve are one step, whoever asks."""

    async def prepare() -> None:
        ledger = await RedisLedger.connect(
            valkey.url, pool, fresh=True, deadline_s=30.0, background_deadline_s=30.0, wait_s=60.0
        )
        now = await ledger.time_s()
        await ledger.publish([report(now - 0.2, capacity_blocks=PLACES * 10)], [], 3600)
        await ledger.close()

    async def check() -> tuple[int, int]:
        ledger = await RedisLedger.connect(valkey.url, pool, deadline_s=30.0, background_deadline_s=30.0, wait_s=60.0)
        await true_sums(ledger)
        view = (await ledger.snapshot()).replicas["a"]
        await ledger.close()
        return view.reserved_blocks, view.reservations

    asyncio.run(prepare())
    go_at_s = time.time() + 2.5
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ledger.racer", valkey.url, pool, str(n), str(PER_PROCESS), str(go_at_s)],
            stdout=subprocess.PIPE, text=True,
        )
        for n in range(PROCESSES)
    ]  # fmt: skip
    won = [int(racer.communicate(timeout=300)[0]) for racer in racers]
    assert (sum(won), asyncio.run(check())) == (PLACES, (PLACES * 10, PLACES))


async def test_a_lane_is_one_lane_for_all_sidecars(hundred: list[RedisLedger]) -> None:
    """72 simultaneous calls, a lane of 16, several sidecars: 16 in all."""
    place = candidate(n=need(1), static_capacity_blocks=1000)
    answers = await asyncio.gather(
        *(hundred[i % 10].reserve(ask(str(i), place, lane_concurrency=16)) for i in range(72))
    )
    assert sum(a.chosen is not None for a in answers) == 16


async def test_a_hundred_reserves_of_one_rid_take_once(hundred: list[RedisLedger]) -> None:
    """Idempotent by rid."""
    place = candidate(static_capacity_blocks=1000)
    answers = await asyncio.gather(*(hundred[i % 10].reserve(ask("one", place)) for i in range(100)))
    assert {a.chosen for a in answers} == {0}
    assert (await hundred[0].snapshot()).replicas["a"].reserved_blocks == 10


async def test_a_hundred_records_of_one_unknown_rid_rebuild_it_once(hundred: list[RedisLedger]) -> None:
    """Any instance may re-assert."""
    up = record(reservation("one", await hundred[0].time_s()))
    answers = await asyncio.gather(*(hundred[i % 10].renew([up]) for i in range(100)))
    assert answers == [[True]] * 100
    assert (await hundred[0].snapshot()).replicas["a"].reserved_blocks == 10
    await true_sums(hundred[0])


async def test_a_hundred_ends_of_one_rid_release_once(hundred: list[RedisLedger]) -> None:
    """Both log entries, from several instances, at once."""
    await hundred[0].reserve(ask("one", candidate(static_capacity_blocks=1000)))
    answers = await asyncio.gather(*(hundred[i % 10].end([end("one")]) for i in range(100)))
    assert sum(a[0].released for a in answers) == 1
    assert (await hundred[0].snapshot()).replicas["a"].reserved_blocks == 0


async def test_ends_and_records_of_a_hundred_rids_in_any_order_leave_nothing(hundred: list[RedisLedger]) -> None:
    """Whatever comes last, an ended rid stays ended."""
    place = candidate(static_capacity_blocks=10_000)
    made = [await hundred[i % 10].reserve(ask(str(i), place)) for i in range(100)]
    calls = []
    for i, answer in enumerate(made):
        up = record(reservation(str(i), answer.now_s))
        calls += [
            hundred[i % 10].renew([up]),
            hundred[(i + 3) % 10].end([end(str(i))]),
            hundred[(i + 7) % 10].renew([up]),
        ]
    await asyncio.gather(*calls)
    assert (await hundred[0].snapshot()).replicas["a"].reserved_blocks == 0
    await true_sums(hundred[0])


async def test_a_hundred_reapers_release_fifty_cooled_once_each(hundred: list[RedisLedger]) -> None:
    """Whoever reaps first."""
    place = candidate(static_capacity_blocks=10_000)
    for i in range(50):
        await hundred[0].reserve(ask(str(i), place))
    await hundred[0].end([end(str(i), Ended.CLIENT_ABORT, cool_s=0.2) for i in range(50)])
    await asyncio.sleep(0.25)
    released = await asyncio.gather(*(hundred[i % 10].reap() for i in range(100)))
    assert sum(released) == 50
    await true_sums(hundred[0])


async def test_of_a_hundred_reports_the_latest_scrape_stands(hundred: list[RedisLedger]) -> None:
    """Whatever the order in which they arrive."""
    now = await hundred[0].time_s()
    await asyncio.gather(
        *(hundred[i % 10].publish([report(now - 1 + i / 1000, capacity_blocks=i + 1)], [], 60) for i in range(100))
    )
    view = (await hundred[0].snapshot()).replicas["a"]
    assert view.report is not None
    assert view.report.capacity_blocks == 100


async def test_a_hundred_heartbeats_are_a_hundred_sidecars(hundred: list[RedisLedger]) -> None:
    """None is lost."""
    await asyncio.gather(*(hundred[i % 10].heartbeat(f"i{i}", 30) for i in range(100)))
    assert (await hundred[0].snapshot()).live_sidecars == 100


async def test_drain_against_reserves_never_lets_one_through_after_it(hundred: list[RedisLedger]) -> None:
    """Every reserve after the drain's answer is refused."""
    place = candidate(n=need(1), static_capacity_blocks=10_000)

    async def late(i: int) -> str | None:
        await asyncio.sleep(0)
        return (await hundred[i % 10].reserve(ask(f"late{i}", place))).verdicts[0].refused_by

    await asyncio.gather(*(hundred[i % 10].reserve(ask(str(i), place)) for i in range(50)), hundred[3].drain("a", True))
    assert set(await asyncio.gather(*(late(i) for i in range(50)))) == {"not_ready"}
