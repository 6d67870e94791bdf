"""What a caller sees when the server does not answer, and what is true again when it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from extproc.errors import LedgerDown
from extproc.ledger import keys, link, redis, stream
from extproc.ledger.base import Ended, ReserveResult
from extproc.ledger.redis import SHARED, RedisLedger
from extproc.ledger.stream import NotRun, OutcomeUnknown
from tests.support.ledgers import ask, candidate, end, need, record, reservation
from tests.support.valkey import ValkeyServer

PLACE = candidate(static_capacity_blocks=1000)
#: How long calls fail at once after three without an answer in time, in tests of that: so long that a standstill of
#: seconds falls into it. A connection that says nothing is kept, so that nothing else makes them fail.
OPEN_S, STALL_S = 5.0, 3600.0


async def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition; what cannot be asked yet is not true yet. AssertionError where it does not come."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if true():
                return
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


async def raw(ledger: RedisLedger, *parts: str) -> Any:
    """A command of the test's own on the ledger's connection."""
    from extproc.ledger.link import pack

    return await ledger._link.call(pack(*parts), 60.0)


async def blocks(ledger: RedisLedger) -> int:
    """What is reserved on the one replica; 0 where the ledger knows none."""
    view = (await ledger.snapshot()).replicas.get("a")
    return view.reserved_blocks if view else 0


async def test_forgotten_scripts_are_loaded_within_the_call(ledger: RedisLedger) -> None:
    """NOSCRIPT after SCRIPT FLUSH: the same call, the same rid, one reservation."""
    await raw(ledger, "SCRIPT", "FLUSH")
    assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
    assert await blocks(ledger) == 10


async def test_concurrent_calls_get_their_own_answers(ledger: RedisLedger) -> None:
    """256 at once over one connection."""
    answers = await asyncio.gather(
        *(ledger.reserve(ask(str(i), candidate(n=need(i + 1), static_capacity_blocks=i))) for i in range(256))
    )
    assert {a.verdicts[0].capacity_blocks for a in answers} == set(range(256))
    assert [a.verdicts[0].capacity_blocks for a in answers] == list(range(256))


@pytest.fixture
def circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The circuit stays open long enough to be looked at, and nothing but it makes calls fail at once."""
    monkeypatch.setattr(link, "OPEN_S", OPEN_S)
    monkeypatch.setattr(stream, "STALL_S", STALL_S)


async def patient(url: str, pool: str) -> RedisLedger:
    """A ledger for what is not judged: it waits longer than any busy machine takes."""
    return await RedisLedger.connect(
        url, pool, deadline_s=60.0, background_deadline_s=60.0, wait_s=60.0, fresh=True
    )  # fmt: skip


async def until_open(ledger: RedisLedger, deadline_s: float) -> None:
    """Three reserves cost their deadline each and may have run; those after them cost nothing and did not."""
    for number in range(3):
        began = time.perf_counter()
        with pytest.raises(OutcomeUnknown, match="no answer within"):
            await ledger.reserve(ask(f"lost{number}", PLACE))
        assert time.perf_counter() - began >= 0.95 * deadline_s
    for number in range(3, 6):
        with pytest.raises(NotRun, match=r"3 .*in a row"):
            await ledger.reserve(ask(f"lost{number}", PLACE))
    assert ledger.status.state == "degraded"
    assert ledger.status.unknown_outcomes == 3


@pytest.mark.usefixtures("circuit")
async def test_a_stopped_server_costs_a_deadline_then_nothing_and_leaves_no_reservation(
    server: ValkeyServer, pool: str
) -> None:
    """Unknown outcomes are compensated; after three in a row calls fail at once; all is well again afterwards."""
    other = await patient(server.url, pool)
    assert (await other.reserve(ask("kept", PLACE))).chosen == 0
    ledger = await RedisLedger.connect(server.url, pool, deadline_s=0.4, wait_s=60.0)
    server.pause()
    await until_open(ledger, 0.4)
    server.resume()
    await until(lambda: ledger.status.kept_ends == 0 and ledger.status.state == "ok")
    assert await blocks(other) == 10
    late = await other.reserve(ask("lost0", PLACE))
    assert (late.chosen, late.ended) == (None, True)
    await ledger.close()
    await other.close()


async def test_a_cancelled_reserve_is_compensated(ledger: RedisLedger) -> None:
    """The stream went while the call was under way."""
    call = asyncio.create_task(ledger.reserve(ask("1", PLACE)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: ledger.status.kept_ends == 0)
    assert await blocks(ledger) == 0


async def test_a_cancelled_call_takes_none_of_those_with_it(ledger: RedisLedger) -> None:
    """Three reserves in one command; the second's client goes before and after it left."""
    for turn, leaves in enumerate(["before", "after"]):
        calls = [asyncio.create_task(ledger.reserve(ask(f"{turn}-{i}", PLACE))) for i in range(3)]
        await asyncio.sleep(0)
        if leaves == "after":
            await asyncio.sleep(0)
        calls[1].cancel()
        first, gone, last = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(gone, asyncio.CancelledError)
        assert [answer.chosen for answer in (first, last) if isinstance(answer, ReserveResult)] == [0, 0]
    await until(lambda: ledger.status.kept_ends == 0)
    live = {r.reservation.rid for r in await ledger.reservations("a")}
    assert (live, ledger.status.unknown_outcomes) == ({"0-0", "0-2", "1-0", "1-2"}, 2)


async def test_every_reserve_of_a_command_without_answer_is_compensated(server: ValkeyServer, pool: str) -> None:
    """More than one command's worth, all at once: each fails as unknown, each rid is burnt."""
    other = await patient(server.url, pool)
    assert (await other.reserve(ask("kept", PLACE))).chosen == 0
    ledger = await RedisLedger.connect(server.url, pool, deadline_s=0.3, wait_s=60.0)
    server.pause()
    some = [asyncio.create_task(ledger.reserve(ask(f"lost{i}", PLACE))) for i in range(SHARED + 8)]
    failed = await asyncio.gather(*some, return_exceptions=True)
    assert all(isinstance(each, OutcomeUnknown) for each in failed)
    assert (ledger.status.unknown_outcomes, ledger.status.kept_ends) == (len(some), len(some))
    server.resume()
    await until(lambda: ledger.status.kept_ends == 0 and ledger.status.state == "ok")
    assert await blocks(other) == 10
    for i in range(SHARED + 8):
        late = await other.reserve(ask(f"lost{i}", PLACE))
        assert (late.chosen, late.ended) == (None, True)
    await ledger.close()
    await other.close()


@pytest.mark.usefixtures("circuit")
async def test_calls_that_hang_at_the_same_time_count_once(server: ValkeyServer, pool: str) -> None:
    """Forty in two commands fail of one standstill: only the third such round opens the circuit."""
    ledger = await RedisLedger.connect(server.url, pool, deadline_s=0.3, wait_s=60.0, fresh=True)
    await until(lambda: ledger.status.state == "ok")
    server.pause()
    for turn in range(3):
        assert ledger.status.state == "ok"
        calls = [ledger.reserve(ask(f"{turn}-{number}", PLACE)) for number in range(SHARED + 8)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, OutcomeUnknown) for each in failed)
    with pytest.raises(NotRun, match="3 times in a row"):
        await ledger.reserve(ask("next", PLACE))
    assert ledger.status.unknown_outcomes == 3 * (SHARED + 8)
    server.resume()
    await until(lambda: ledger.status.kept_ends == 0 and ledger.status.state == "ok")
    assert await blocks(ledger) == 0
    await ledger.close()


async def test_a_killed_server_fails_calls_at_once_and_gets_the_ends_when_it_is_back(pool: str) -> None:
    """Reserves are not queued; ends are kept with their age."""
    with ValkeyServer(appendonly=True) as server:
        ledger = await patient(server.url, pool)
        for rid in ("1", "2"):
            await ledger.reserve(ask(rid, PLACE))
        server.kill()
        await until(lambda: ledger.status.state == "degraded")
        began = time.perf_counter()
        with pytest.raises(LedgerDown):
            await ledger.reserve(ask("3", PLACE))
        (result,) = await ledger.end([end("1", Ended.CLIENT_ABORT, cool_s=0.1)])
        assert time.perf_counter() - began < 30  # half of one deadline
        assert (result.kept, result.released) == (True, False)
        await asyncio.sleep(0.2)
        server.start()
        await until(lambda: ledger.status.state == "ok" and ledger.status.kept_ends == 0)
        assert [r.reservation.rid for r in await ledger.reservations("a")] == ["2"]
        await ledger.close()


async def test_lost_data_makes_replicas_unknown_and_records_rebuild_them(server: ValkeyServer, pool: str) -> None:
    """A server that comes back empty is not an empty fleet."""
    ledger = await patient(server.url, pool)
    before = (await ledger.snapshot()).epoch
    made = (await ledger.reserve(ask("1", PLACE))).now_s
    server.kill()
    await until(lambda: ledger.status.state == "degraded")
    server.start()
    await until(lambda: ledger.status.state == "ok")
    assert (await ledger.reserve(ask("2", PLACE))).verdicts[0].refused_by == "unknown_state"
    assert await ledger.renew([record(reservation("1", made))]) == [True]
    after = await ledger.snapshot()
    assert (await blocks(ledger), after.epoch > before, after.loss_at_s is not None) == (10, True, True)
    await ledger.close()


async def test_a_ledger_may_be_asked_for_before_its_server_is_there(pool: str) -> None:
    """serve starts without Redis; the connection comes by itself."""
    server = ValkeyServer().start()
    server.stop()
    ledger = await RedisLedger.connect(server.url, pool, wait_s=0.05, fresh=True, background_deadline_s=60.0)
    with pytest.raises(LedgerDown):
        await ledger.time_s()
    server.start()
    await until(lambda: ledger.status.state == "ok")
    before_s = time.time()
    now_s = await ledger.time_s()
    assert before_s - 1.0 < now_s < time.time() + 1.0
    await ledger.close()
    server.close()


async def test_out_of_memory_refuses_reserves_and_still_takes_ends(server: ValkeyServer, pool: str) -> None:
    """A full server must not lock the room it holds."""
    ledger = await patient(server.url, pool)
    await ledger.reserve(ask("1", PLACE))
    await raw(ledger, "CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(LedgerDown, match="OOM"):
        await ledger.reserve(ask("2", PLACE))
    (result,) = await ledger.end([end("1")])
    assert (result.released, await blocks(ledger)) == (True, 0)
    await ledger.close()


async def test_a_newer_layout_is_refused_not_misread(ledger: RedisLedger, pool: str) -> None:
    """A release that does not understand the stored schema stays away from it."""
    await raw(ledger, "HSET", keys.key(pool, "meta"), "schema", "2")
    with pytest.raises(LedgerDown, match="KVGATE_SCHEMA"):
        await ledger.reserve(ask("1", PLACE))


async def test_close_sends_what_was_kept(
    ledger: RedisLedger, valkey: ValkeyServer, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that was kept a moment ago is not lost by a shutdown, and no reservation is released by one."""
    monkeypatch.setattr(redis, "BACKGROUND_DEADLINE_S", 60.0)
    for rid in ("1", "2"):
        await ledger.reserve(ask(rid, PLACE))
    leaving = await patient(valkey.url, pool)
    leaving._keep([end("1")])
    await leaving.close()
    assert [r.reservation.rid for r in await ledger.reservations("a")] == ["2"]


async def test_fields_of_a_later_release_survive_an_earlier_one(ledger: RedisLedger, pool: str) -> None:
    """A rolling update: arrays grow at their end, and who does not know a field carries it along."""
    made = (await ledger.reserve(ask("1", PLACE))).now_s
    key = keys.key(pool, "res")
    stored = msgspec.msgpack.decode(await raw(ledger, "HGET", key, "1"))
    await raw(ledger, "HSET", key, "1", msgspec.msgpack.encode([*stored, "of tomorrow"]))  # type: ignore[arg-type]
    assert await ledger.renew([record(reservation("1", made), first_byte_age_s=0.0)]) == [True]
    assert msgspec.msgpack.decode(await raw(ledger, "HGET", key, "1"))[-1] == "of tomorrow"
    (result,) = await ledger.end([end("1")])
    assert (result.released, await blocks(ledger)) == (True, 0)


@asynccontextmanager
async def slow_line_to(port: int, delay_s: float) -> AsyncIterator[tuple[int, dict[str, float]]]:
    """A TCP proxy that holds every chunk back; the delay can be set while it runs."""
    line = {"delay_s": delay_s}
    writers: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(65536):
            loop.call_later(line["delay_s"], sink.write, data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, inner_writer))
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer), return_exceptions=True)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1], line
    finally:
        for writer in writers:
            writer.close()
        proxy.close()
        await asyncio.sleep(0.05)


@pytest.mark.usefixtures("circuit")
async def test_a_slow_server_opens_the_circuit_for_requests_and_keeps_the_ledger_true(
    valkey: ValkeyServer, pool: str
) -> None:
    """Half a second each way: requests fail fast, renewals and ends get through, nothing is left behind."""
    other = await patient(valkey.url, pool)
    made = (await other.reserve(ask("kept", PLACE))).now_s
    async with slow_line_to(valkey.port, 0.0) as (port, line):
        ledger = await RedisLedger.connect(
            f"redis://127.0.0.1:{port}", pool, deadline_s=0.25, wait_s=60.0, background_deadline_s=60.0
        )
        line["delay_s"] = 0.25
        await until_open(ledger, 0.25)
        assert await ledger.renew([record(reservation("kept", made))]) == [True]
        line["delay_s"] = 0.0
        await until(lambda: ledger.status.state == "ok" and ledger.status.kept_ends == 0)
        assert (await other.reserve(ask("after", PLACE))).chosen == 0
        assert sorted(r.reservation.rid for r in await ledger.reservations("a")) == ["after", "kept"]
        await ledger.close()
    await other.close()
