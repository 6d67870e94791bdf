"""Public bug reports of kinds e and j: how a request ends, and what of it stays reserved, counted and learned."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import pytest

from extproc.ledger.base import Ended
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.link import pack
from extproc.ledger.redis import RedisLedger
from tests.cases.sidecar import Sidecar, ended, fleet, report, tokens
from tests.support.ledgers import ask, candidate, end, need
from tests.support.valkey import ValkeyServer

COOL_S = 1.5


class Passing:
    """The host's clock, and as much more as the test lets pass."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock() -> Passing:
    """A clock that can be put forward."""
    return Passing()


@pytest.fixture
def sidecar(clock: Passing) -> Iterator[Sidecar]:
    """A lane of ten."""
    made = Sidecar(fleet(lane="{concurrency: 10}"), InMemoryLedger(clock, periodic_s=1.0))
    yield made
    made.close()


async def test_e01_time_outs_of_the_engine_give_their_places_back(sidecar: Sidecar, clock: Passing) -> None:
    """Ten places, ten 504s: the eleventh is admitted as soon as what they held has cooled."""
    await sidecar.see(report())
    decisions = [await sidecar.decide(tokens(100)) for _ in range(10)]
    assert (await sidecar.decide(tokens(100))).outcome == "reject:lane_full"
    for decision in decisions:
        sidecar.runtime.completion.record(ended(decision, Ended.TIMEOUT, status=504), "envoy-1")
    await sidecar.runtime.completion.flush()
    clock.ahead_s += COOL_S + 0.1
    await sidecar.ledger.reap()
    assert await sidecar.reserved() == []
    assert (await sidecar.decide(tokens(100))).outcome == "admit"


@pytest.mark.parametrize(
    ("how", "status"), [(Ended.CLIENT_ABORT, 200), (Ended.UPSTREAM_ERROR, 500), (Ended.UPSTREAM_RESET, 503)]
)
async def test_j12_j14_an_end_without_usage_releases_and_teaches_nothing(
    sidecar: Sidecar, clock: Passing, how: Ended, status: int
) -> None:
    """Absent usage is absent, not 0: the room comes back, the row has no tokens, and no length is learned from it."""
    await sidecar.see(report())
    for _ in range(60):
        decision = await sidecar.decide(tokens(100))
        await sidecar.runtime.service.settle()
        sidecar.runtime.completion.record(ended(decision, how, status=status), "envoy-1")
        await sidecar.runtime.completion.flush()
        clock.ahead_s += COOL_S + 0.1
        await sidecar.see(report(age_s=-clock.ahead_s))
    await sidecar.ledger.reap()
    assert await sidecar.reserved() == []
    assert sidecar.runtime.learning.expected_output(("edit", "primary", "text_completion:-:-:le256")) is None
    found = sidecar.samples()
    assert found[f'kvgate_completions_total{{ended="{how}",lane="edit",target="primary"}}'] == 60
    assert found['kvgate_output_tokens_count{target="primary"}'] == 0


async def test_j12_a_complete_answer_with_usage_teaches(sidecar: Sidecar) -> None:
    """The same end with usage is what lengths are learned from."""
    await sidecar.see(report())
    for _ in range(60):
        decision = await sidecar.decide(tokens(100))
        record = ended(decision, Ended.COMPLETE, status=200, usage={"output_tokens": 13})
        sidecar.runtime.completion.record(record, "envoy-1")
        await sidecar.runtime.completion.flush()
    expected = sidecar.runtime.learning.expected_output(("edit", "primary", "text_completion:-:-:le256"))
    assert expected is not None
    assert 13 <= expected <= 16


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    """A server for this module."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def two(valkey: ValkeyServer) -> AsyncIterator[tuple[RedisLedger, RedisLedger]]:
    """Two sidecars' connections to one pool."""
    pool = f"cases-{time.time_ns()}"
    made = [
        await RedisLedger.connect(valkey.url, pool, deadline_s=30.0, background_deadline_s=30.0, fresh=True)
        for _ in range(2)
    ]
    yield made[0], made[1]
    for ledger in made:
        await ledger.close()


@pytest.mark.parametrize("skew_s", [0.04, 1.0, 3600.0])
async def test_e09_e10_no_hosts_clock_decides(
    two: tuple[RedisLedger, RedisLedger], monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """A cap of one holds between a host whose clock is right and one whose clock is ahead, in both directions."""
    true_time = time.time
    right, ahead = two
    place = candidate(static_capacity_blocks=1000)

    async def reserve(ledger: RedisLedger, rid: str) -> str | None:
        skew = skew_s if ledger is ahead else 0.0
        monkeypatch.setattr(time, "time", lambda: true_time() + skew)
        return (await ledger.reserve(ask(rid, place, lane_concurrency=1))).verdicts[0].refused_by

    for first, second in ((ahead, right), (right, ahead)):
        name = f"{skew_s}-{first is ahead}"
        assert await reserve(first, f"{name}-1") is None
        assert await reserve(second, f"{name}-2") == "lane_full"
        await first.end([end(f"{name}-1")])
        assert await reserve(second, f"{name}-3") is None
        await second.end([end(f"{name}-3")])


async def test_e06_giving_back_takes_away_ones_own_only(two: tuple[RedisLedger, RedisLedger]) -> None:
    """A's undo leaves what B reserved in between."""
    a, b = two
    place = candidate(static_capacity_blocks=1000, n=need(10))
    await a.reserve(ask("a-1", place))
    await b.reserve(ask("b-1", place))
    await a.end([end("a-1", Ended.UNSENT)])
    left = await a.reservations("a")
    assert [live.reservation.rid for live in left] == ["b-1"]


async def _changes(ledger: RedisLedger) -> int:
    info = (await ledger._link.call(pack("INFO", "persistence"), 5.0)).decode()
    return int(info.partition("rdb_changes_since_last_save:")[2].split()[0])


async def test_j06_a_refusal_writes_nothing(two: tuple[RedisLedger, RedisLedger]) -> None:
    """Clients that come back too early cost the reserve script reads only."""
    ledger, _ = two
    place = candidate(static_capacity_blocks=10, n=need(10))
    assert (await ledger.reserve(ask("holder", place))).chosen == 0
    before = await _changes(ledger)
    for n in range(50):
        assert (await ledger.reserve(ask(f"early-{n}", place))).chosen is None
    assert await _changes(ledger) == before


async def test_e18_a_pool_with_everything_taken_stays_full(two: tuple[RedisLedger, RedisLedger]) -> None:
    """Capacity has a place of its own: all taken is not a new pool, and none taken again is not an unknown one."""
    ledger, other = two
    place = candidate(static_capacity_blocks=20, n=need(10))
    assert [(await ledger.reserve(ask(rid, place))).chosen for rid in ("1", "2", "3")] == [0, 0, None]
    assert (await other.reserve(ask("4", place))).verdicts[0].headroom_blocks == 0
    await ledger.end([end("1"), end("2")])
    view = await other.snapshot()
    assert view.replicas["a"].reserved_blocks == 0
    assert (await other.reserve(ask("5", place))).verdicts[0].headroom_blocks == 20
