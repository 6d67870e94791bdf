"""The decision log on real Valkey: written behind the request, joined when read, bounded in every direction."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from extproc.errors import LedgerDown
from extproc.ledger.keys import decisions_key
from extproc.telemetry import decisionlog
from extproc.telemetry.decisionlog import DecisionLog, RingLog, StreamLog, end_record
from extproc.telemetry.record import decision_record
from extproc.types import Decision
from tests.support.valkey import ValkeyServer
from tests.unit.telemetry.samples import FALLBACK, REJECT


def record(rid: str, decision: Decision = FALLBACK) -> dict[str, Any]:
    return decision_record(replace(decision, rid=rid), at_s=1764421200.0, decision_ms=1.3, count_ms=0.4)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits that no busy machine meets; the test of a stopped server sets its own."""
    monkeypatch.setattr(decisionlog, "CLOSE_S", 60.0)
    monkeypatch.setattr(decisionlog, "CALL_S", 60.0)


@pytest.fixture(params=["stream", "ring"])
async def log(request: pytest.FixtureRequest, valkey: ValkeyServer, pool: str) -> AsyncIterator[DecisionLog]:
    """Both homes of the log, under the same tests."""
    found: DecisionLog = StreamLog(valkey.url, pool, maxlen=100) if request.param == "stream" else RingLog(100)
    yield found
    await found.close()


async def rows(log: DecisionLog, count: int = 100, *, until: int = 1) -> list[dict[str, Any]]:
    """What can be read once at least ``until`` decisions are there."""
    for _ in range(3000):
        if len(await log.recent(count)) >= until:
            break
        await asyncio.sleep(0.02)
    return await log.recent(count)


async def test_a_decision_is_a_row_of_status(log: DecisionLog) -> None:
    """Every field of the schema's `recent` is there before the request has ended."""
    log.append(record("a"))
    (row,) = await rows(log)
    expected = {
        "at": "2025-11-29T13:00:00.000Z",
        "rid": "a",
        "lane": "fast-edit",
        "model": "qwen-coder",
        "input_tokens": 4123,
        "projected_kv_bytes": 72876032,
        "free_before_bytes": 900 * 262144,
        "free_after_bytes": 622 * 262144,
        "free_at_end_bytes": None,
        "actual_input_tokens": None,
        "actual_output_tokens": None,
        "outcome": "fallback:qwen-14b-q4",
        "target": "qwen-14b-q4",
        "replica": "gpu-b-0",
        "reason": "insufficient_headroom",
        "waited_ms": 0,
        "decision_ms": 1.3,
        "ended": None,
    }
    assert expected == {key: row[key] for key in expected}
    await log.close()


async def test_an_end_completes_its_row(log: DecisionLog) -> None:
    """Decision and end are joined by rid; others stay running."""
    log.append(record("a"))
    log.append(record("b"))
    log.end(end_record("a", ended="complete", free_at_end_bytes=7, actual_input_tokens=4125, actual_output_tokens=298))
    await log.close()
    newest, oldest = await rows(log, until=2)
    assert (newest["rid"], newest["ended"]) == ("b", None)
    assert (oldest["ended"], oldest["free_at_end_bytes"], oldest["actual_output_tokens"]) == ("complete", 7, 298)
    assert oldest["actual_input_tokens"] == 4125


async def test_the_first_end_counts(log: DecisionLog) -> None:
    """A second end of the same rid changes nothing, as in the ledger."""
    log.append(record("a"))
    log.end(end_record("a", ended="moved"))
    log.end(end_record("a", ended="complete"))
    await log.close()
    (row,) = await rows(log)
    assert row["ended"] == "moved"


async def test_an_end_that_overtook_its_decision_still_joins(valkey: ValkeyServer, pool: str) -> None:
    """Two processes flush on their own, so an end may stand before its decision in the stream."""
    ending, deciding = StreamLog(valkey.url, pool, 100), StreamLog(valkey.url, pool, 100)
    ending.end(end_record("a", ended="complete"))
    await ending.close()
    deciding.append(record("a"))
    await deciding.close()
    (row,) = await deciding.recent(1)
    await deciding.close()
    assert row["ended"] == "complete"


async def test_newest_first_and_no_more_than_asked(log: DecisionLog) -> None:
    """`recent(n)` is the last n decisions, newest first, refusals among them."""
    for index in range(30):
        log.append(record(f"r{index}", REJECT if index % 2 else FALLBACK))
    await log.close()
    assert [row["rid"] for row in await log.recent(3)] == ["r29", "r28", "r27"]


async def test_more_than_one_page_is_read(valkey: ValkeyServer, pool: str) -> None:
    """A count above the page size reads on, and each decision stands once."""
    log = StreamLog(valkey.url, pool, maxlen=1000)
    for index in range(500):
        log.append(record(f"r{index}"))
        log.end(end_record(f"r{index}", ended="complete"))
    await log.close()
    found = await log.recent(450)
    await log.close()
    assert [row["rid"] for row in found] == [f"r{index}" for index in range(499, 49, -1)]
    assert {row["ended"] for row in found} == {"complete"}


async def test_the_stream_is_capped(redis: Redis, valkey: ValkeyServer, pool: str) -> None:
    """However many decisions are made, the stream keeps about two entries for each of the configured number."""
    log = StreamLog(valkey.url, pool, maxlen=100)
    for index in range(2000):
        log.append(record(f"r{index}"))
    await log.close()
    assert 200 <= await redis.xlen(decisions_key(pool)) <= 320


async def test_strangers_in_the_stream_are_passed_over(redis: Redis, valkey: ValkeyServer, pool: str) -> None:
    """Entries of another release, broken JSON and foreign fields cost no row and no error."""
    log = StreamLog(valkey.url, pool, maxlen=100)
    for fields in (
        {"decision": "{"},
        {"decision": "[1]"},
        {"decision": '{"rid":["x"]}'},
        {"end": "7"},
        {b"\xff": b"\xff"},
    ):
        await redis.xadd(decisions_key(pool), fields)  # type: ignore[arg-type]
    await redis.xadd(decisions_key(pool), {"decision": json.dumps({"rid": "v9", "candidates": [{"shape": "new"}]})})
    log.append(record("a"))
    await log.close()
    assert [row["rid"] for row in await log.recent(10)] == ["a"]
    await log.close()


async def test_appending_never_waits_and_drops_are_counted(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Redis stopped for good a burst beyond the queue waits for nothing, costs bounded memory, and is counted."""
    monkeypatch.setattr(decisionlog, "CLOSE_S", 1.0)
    with ValkeyServer() as server:
        dropped: list[int] = []
        log = StreamLog(server.url, pool, maxlen=100, on_drop=dropped.append)
        server.pause()
        entry = record("a")
        for _ in range(decisionlog.QUEUE_ENTRIES + 50):
            log.append(entry)
        assert (len(log._queue), log.dropped, sum(dropped)) == (decisionlog.QUEUE_ENTRIES, 50, 50)
        started = time.monotonic()
        await log.close()
        assert time.monotonic() - started < 30 * decisionlog.CLOSE_S  # the server does not answer at all
        server.resume()


async def test_what_was_queued_arrives_when_redis_is_back(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage shorter than the queue loses nothing."""
    with ValkeyServer(appendonly=True) as server:
        log = StreamLog(server.url, pool, maxlen=100)
        log.append(record("before"))
        assert [row["rid"] for row in await rows(log)] == ["before"]
        server.kill()
        log.append(record("during"))
        await asyncio.sleep(0.4)
        with monkeypatch.context() as hasty:
            hasty.setattr(decisionlog, "CALL_S", 1.0)
            with pytest.raises(LedgerDown, match="ledger away"):
                await log.recent(1)
        server.start()
        assert [row["rid"] for row in await rows(log, until=2)] == ["during", "before"]
        await log.close()


async def test_the_key_carries_the_pools_hash_tag(redis: Redis, valkey: ValkeyServer, pool: str) -> None:
    """In a Redis Cluster the log lies in the slot of its pool."""
    log = StreamLog(valkey.url, pool, maxlen=100)
    log.append(record("a"))
    await log.close()
    assert await redis.exists(f"kvgate:{{{pool}}}:decisions") == 1
