"""A watched ledger answers as the ledger behind it, and says how it is doing."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.errors import LedgerDown
from extproc.ledger.base import Candidate, End, Ended, Ledger, ReserveRequest, Upsert
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.redis import RedisLedger
from extproc.telemetry.ledgerwatch import watched
from extproc.telemetry.metrics import Metrics
from tests.support.valkey import ValkeyServer
from tests.unit.telemetry.samples import NEED

CANDIDATE = Candidate("t", "r", remote=False, need=NEED, cap_blocks=278, static_capacity_blocks=1000)
REQUEST = ReserveRequest("rid-1", "fast-edit", "envoy-1", "x-1", "none:s", 4123, 310, 1200, [CANDIDATE])


def figures(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition()[1].decode())
    return {s.name + "".join(f"[{v}]" for v in s.labels.values()): s.value for f in families for s in f.samples}


async def test_it_is_the_ledger_behind_it() -> None:
    """Every call of the protocol reaches the ledger and brings its answer back, timed under its name."""
    metrics = Metrics()
    plain = InMemoryLedger(lambda: 1000.0)
    ledger: Ledger = watched(plain, metrics)
    assert await ledger.time_s() == 1000.0
    assert (await ledger.reserve(REQUEST)).chosen == 0
    (held,) = await ledger.reservations("r")
    assert held.reservation.rid == "rid-1"
    assert (await ledger.snapshot()).replicas["r"].reserved_blocks == 278
    assert await ledger.renew([Upsert(held.reservation, 10.0)]) == [True]
    await ledger.publish([], [], ttl_s=10.0)
    await ledger.drain("r", True)
    assert await ledger.heartbeat("i", 10.0) == 1
    await ledger.promise("token", "r", 1, 1.0, None, None)
    assert (await ledger.turn("token")).replica == "r"
    assert await ledger.lessons([]) == []
    assert await ledger.reap() == 0
    assert all(line.stored == line.recomputed for line in await ledger.audit())
    (ended,) = await ledger.end([End("rid-1", "envoy-1", "x-1", Ended.COMPLETE)])
    assert ended.released
    assert await ledger.renew([Upsert(held.reservation, 10.0)]) == [False]
    await ledger.close()
    found = figures(metrics)
    calls = (
        "time", "reserve", "reservations", "snapshot", "publish", "drain", "heartbeat", "promise", "turn", "lessons", "reap",
        "audit", "end",
    )  # fmt: skip
    assert {call: found[f"kvgate_ledger_call_duration_seconds_count[{call}]"] for call in calls} == dict.fromkeys(
        calls, 1
    )
    assert found["kvgate_ledger_call_duration_seconds_count[renew]"] == 2
    assert found["kvgate_renewals_refused_total"] == 1
    assert found["kvgate_ledger_up"] == 1


async def test_an_outage_shows_and_passes_through(pool: str) -> None:
    """Calls without an answer raise as before, count as errors, and kept ends are seen waiting."""
    metrics = Metrics()
    with ValkeyServer() as server:
        plain = await RedisLedger.connect(
            server.url, pool, deadline_s=60.0, background_deadline_s=60.0, wait_s=60.0, fresh=True
        )
        ledger = watched(plain, metrics)
        await ledger.snapshot()
        assert figures(metrics)["kvgate_ledger_up"] == 1
        server.kill()
        with pytest.raises(LedgerDown):
            await ledger.reserve(REQUEST)
        (result,) = await ledger.end([End("rid-9", "envoy-1", "x-1", Ended.COMPLETE)])
        assert result.kept
        found = figures(metrics)
        assert found["kvgate_ledger_up"] == 0
        assert found["kvgate_ledger_errors_total[reserve]"] == 1
        assert found["kvgate_ledger_errors_total[end]"] == 1
        assert found["kvgate_undelivered_ends"] >= 1
        await ledger.close()
