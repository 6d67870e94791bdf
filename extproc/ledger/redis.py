"""The shared ledger: the Lua scripts on Redis 7+ or Valkey, one round trip per call.

Owns how calls are made and what happens when the server does not answer; the rules live in the scripts. What a caller
sees of an outage is ``LedgerDown`` at once or at the deadline, never a late success: reserves are not queued, a reserve
of unknown outcome is followed by a compensating end of its rid (so that rid is burnt: a request that goes on under a
posture takes a new one), and ends are kept and sent when the server is back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from extproc.errors import LedgerDown
from extproc.ledger import keys, scripts, wire
from extproc.ledger.address import parse
from extproc.ledger.base import (
    AuditLine,
    DeviceReport,
    End,
    Ended,
    EndResult,
    Ledger,
    LedgerSnapshot,
    LiveReservation,
    PublishResult,
    ReplicaReport,
    ReserveRequest,
    ReserveResult,
    Upsert,
)
from extproc.ledger.lessons import Lesson
from extproc.ledger.line import Turn
from extproc.ledger.link import Link, UnderWay, log, pack
from extproc.ledger.rules import to_us
from extproc.ledger.shared import Part, Shared
from extproc.ledger.stream import NotRun, OutcomeUnknown

#: Calls that nobody waits for with a request in hand.
BACKGROUND_DEADLINE_S = 1.0
AUDIT_DEADLINE_S = 10.0
#: Entries of one renew or end call: more would hold up the server for over a millisecond.
BATCH = 100
#: Concurrent reserve calls, and end calls, that travel in one command: a fraction of a millisecond of the server.
SHARED = 32
#: Due entries of one reap call.
REAP_LIMIT = 500
#: Ends kept during an outage; beyond it the oldest are dropped (their reservations end as orphans).
MAX_KEPT_ENDS = 100_000
#: Weight of a new sample in the latency figure.
LATENCY_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """How the ledger's server is doing: ``state`` is ok or degraded; ``latency_ms`` a moving mean of a round trip."""

    state: str
    latency_ms: float
    last_error: str | None
    kept_ends: int
    dropped_ends: int
    unknown_outcomes: int


class RedisLedger(Ledger):
    """One pool on Redis or Valkey; see ``connect``."""

    def __init__(
        self, url: str, pool: str, *, deadline_s: float, fresh: bool, periodic_s: float,
        background_deadline_s: float, test_clock: Callable[[], float] | None,
    ) -> None:  # fmt: skip
        address = parse(url)
        names = keys.script_keys(pool, cluster=address.kind == "cluster")
        self._scripts = scripts.load_all()
        self._heads = {
            name: _head(len(names) + 5, "EVALSHA", script.sha, len(names), *names)
            for name, script in self._scripts.items()
        }
        self._reserve = Shared(lambda parts: self._command("reserve", wire.together(parts)), wire.decode, SHARED)
        self._ends = Shared(lambda parts: self._command("end", wire.together(parts)), wire.decode, SHARED)
        self._deadline_s = deadline_s
        self._background_s = background_deadline_s
        self._fresh = fresh
        self._periodic_s = periodic_s
        self._test_clock = test_clock
        self._link = Link(address, self._on_up, keys.key(pool, "meta"))
        self._kept: deque[tuple[float, End]] = deque(maxlen=MAX_KEPT_ENDS)
        self._kept_some = asyncio.Event()
        self._kept_none = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._latency_s = 0.0
        self._dropped = 0
        self._unknown = 0
        self._names = names

    @classmethod
    async def connect(
        cls, url: str, pool: str, *, deadline_s: float = 0.05, fresh: bool = False, periodic_s: float = 1.0,
        wait_s: float = 2.0, background_deadline_s: float = BACKGROUND_DEADLINE_S, test_clock: Callable[[], float] | None = None,
    ) -> RedisLedger:  # fmt: skip
        """A ledger on ``url`` (see ``address``); returns after the first connection, or after ``wait_s`` without one.

        ``deadline_s`` bounds reserve and end, ``background_deadline_s`` the calls that no request waits for. ``fresh``: the caller started this server itself and nothing ran before,
        so an empty server is no loss of data. ``periodic_s`` is the access log's flush interval. ``test_clock``
        (seconds) replaces the server's clock, in tests only. ValueError for a URL or pool name that cannot be used.
        """
        ledger = cls(
            url, pool, deadline_s=deadline_s, fresh=fresh, periodic_s=periodic_s,
            background_deadline_s=background_deadline_s, test_clock=test_clock,
        )  # fmt: skip
        ledger._link.start()
        ledger._sender = asyncio.create_task(ledger._send_kept(), name="kvgate-ledger-ends")
        try:
            async with asyncio.timeout(wait_s):
                await ledger._link.up.wait()
        except TimeoutError:
            pass  # the link goes on trying; until then every call says LedgerDown
        return ledger

    @property
    def status(self) -> LedgerStatus:
        """For ``status``, metrics and readiness."""
        up = self._link.usable
        return LedgerStatus(
            "ok" if up else "degraded", self._latency_s * 1000, None if up else self._link.last_error, len(self._kept),
            self._dropped, self._unknown,
        )  # fmt: skip

    # -- the protocol -----------------------------------------------------------------------------------------

    async def time_s(self) -> float:
        """See ``Ledger.time_s``."""
        return float(wire.decode(await self._run("init", wire.encode([int(self._fresh)]), self._background_s))[0]) / 1e6

    async def reserve(self, request: ReserveRequest) -> ReserveResult:
        """See ``Ledger.reserve``; after ``LedgerDown`` the rid must not be used again."""
        try:
            part = Part(self._reserve, wire.reserve(request))
            answer = await self._call(part, self._deadline_s)
        except NotRun:
            raise
        except (LedgerDown, asyncio.CancelledError):
            self._unknown += 1
            self._keep([End(request.rid, request.owner, request.request_id, Ended.UNSENT)])
            raise
        return wire.reserve_result(answer)

    async def renew(self, records: Sequence[Upsert]) -> list[bool]:
        """See ``Ledger.renew``."""
        answers: list[bool] = []
        for i in range(0, len(records), BATCH):
            raw = await self._run("renew", wire.renew(records[i : i + BATCH]), self._background_s)
            answers += [bool(a) for a in wire.decode(raw)]
        return answers

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """See ``Ledger.end``; never raises for an outage: what could not be sent is kept (``EndResult.kept``)."""
        results: list[EndResult] = []
        for i in range(0, len(ends), BATCH):
            batch = ends[i : i + BATCH]
            try:
                results += await self._end(batch, [0.0] * len(batch), self._deadline_s)
            except LedgerDown:
                self._keep(batch)
                results += [EndResult(False, kept=True)] * len(batch)
        return results

    async def reap(self, *, listened_s: float | None = None, owners: Sequence[str] = ()) -> int:
        """See ``Ledger.reap``; send every record heard (``renew``) before calling with ``listened_s``."""
        listened = -1 if listened_s is None else to_us(listened_s)
        ask = [listened, [wire.text(o) for o in owners], REAP_LIMIT]
        if listened_s is not None:
            # A server that hangs reads this call late: its own time now says up to when there was silence.
            ask.append(to_us(await self.time_s()))
        payload = wire.encode(ask)
        total, more = 0, True
        while more:
            released, more = wire.decode(await self._run("reap", payload, self._background_s))
            total += released
        return total

    async def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float
    ) -> PublishResult:
        """See ``Ledger.publish``."""
        payload = wire.publish(replicas, devices, ttl_s, self._periodic_s)
        result = PublishResult({}, {}, {})
        for name, foreign, bypass, voided, _taken in wire.decode(
            await self._run("publish", payload, self._background_s)
        ):
            result.foreign_blocks[name] = None if foreign < 0 else int(foreign)
            result.bypass[name], result.voided[name] = bool(bypass), voided
        return result

    async def snapshot(self) -> LedgerSnapshot:
        """See ``Ledger.snapshot``."""
        return wire.snapshot(await self._run("snapshot", b"", self._background_s))

    async def reservations(self, replica: str) -> list[LiveReservation]:
        """See ``Ledger.reservations``."""
        raw = await self._run("reservations", wire.encode([wire.text(replica)]), self._background_s)
        return [wire.live_reservation(item) for item in raw]

    async def drain(self, replica: str, on: bool) -> None:
        """See ``Ledger.drain``."""
        await self._run("drain", wire.encode([wire.text(replica), int(on)]), self._background_s)

    async def audit(self) -> list[AuditLine]:
        """See ``Ledger.audit``; holds up the server while it reads every record."""
        raw = wire.decode(await self._run("audit", b"", AUDIT_DEADLINE_S))
        return sorted((AuditLine(*line) for line in raw), key=lambda line: line.what)

    async def heartbeat(self, instance: str, ttl_s: float) -> int:
        """See ``Ledger.heartbeat``."""
        payload = wire.encode([wire.text(instance), to_us(ttl_s)])
        return int(await self._run("heartbeat", payload, self._background_s))

    async def lessons(self, told: Sequence[Lesson]) -> list[Lesson]:
        """See ``Ledger.lessons``."""
        return wire.heard(await self._run("lessons", wire.lessons(told), self._background_s))

    async def turn(self, token: str) -> Turn:
        """See ``Ledger.turn``."""
        return wire.turn(await self._run("line", wire.encode([wire.text(token), "", 0, 0, -1, -1]), self._deadline_s))

    async def promise(
        self, token: str, replica: str, blocks: int, wait_s: float, since_at_s: float | None, run_s: float | None = None
    ) -> None:
        """See ``Ledger.promise``."""
        since_us = -1 if since_at_s is None else to_us(since_at_s)
        run_us = -1 if run_s is None else to_us(run_s)
        payload = wire.encode([wire.text(token), wire.text(replica), blocks, to_us(wait_s), since_us, run_us])
        await self._run("line", payload, self._deadline_s)

    async def close(self) -> None:
        """Send what was kept if the server is there, then give the connection back; releases no reservation."""
        if self._kept and self._link.up.is_set():
            try:
                async with asyncio.timeout(BACKGROUND_DEADLINE_S):
                    await self._kept_none.wait()
            except TimeoutError:
                pass  # the rest ends as orphans
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        await self._link.close()

    # -- calls ------------------------------------------------------------------------------------------------

    def _command(self, name: str, payload: bytes) -> bytes:
        clock = b"" if self._test_clock is None else b"%d" % to_us(self._test_clock())
        return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n" % (self._heads[name], len(clock), clock, len(payload), payload)

    async def _run(self, name: str, payload: bytes, timeout_s: float) -> Any:
        return await self._call(self._command(name, payload), timeout_s)

    async def _call(self, command: bytes | Part, timeout_s: float) -> Any:
        began = time.perf_counter()
        reply = await self._link.call(command, timeout_s)
        took = time.perf_counter() - began
        self._latency_s += (took - self._latency_s) * (LATENCY_WEIGHT if self._latency_s else 1.0)
        return reply

    async def _on_up(self, ask: Callable[..., Awaitable[Any]]) -> None:
        """Load the scripts and run one, so that "up" means that the ledger works, or will when its slot has moved."""
        clock = b"" if self._test_clock is None else b"%d" % to_us(self._test_clock())
        with suppress(UnderWay):
            await asyncio.gather(  # one round trip: a slow server is not made slower
                *(ask("SCRIPT", "LOAD", script.text) for script in self._scripts.values()),
                ask("EVALSHA", self._scripts["init"].sha, len(self._names), *self._names, clock,
                    wire.encode([int(self._fresh)])),
            )  # fmt: skip
            self._fresh = False  # whatever is found empty from now on was lost

    async def _end(self, ends: Sequence[End], late_s: Sequence[float], timeout_s: float) -> list[EndResult]:
        ended = await self._call(Part(self._ends, wire.ends(ends, late_s)), timeout_s)
        return [EndResult(bool(released)) for released in ended]

    def _keep(self, ends: Sequence[End]) -> None:
        now = time.monotonic()
        for end in ends:
            if len(self._kept) == MAX_KEPT_ENDS:
                self._dropped += 1
            self._kept.append((now, end))
        self._kept_some.set()
        self._kept_none.clear()

    async def _send_kept(self) -> None:
        while True:
            await self._kept_some.wait()
            await self._link.up.wait()
            batch = [self._kept[i] for i in range(min(BATCH, len(self._kept)))]
            now = time.monotonic()
            try:
                await self._end([end for _, end in batch], [now - at for at, _ in batch], self._background_s)
            except (NotRun, OutcomeUnknown):
                await asyncio.sleep(0.05)
                continue
            except LedgerDown as e:  # the server ran into an error of its own: it may mend, but not at once
                log.warning("ledger does not take ends: %s", e)
                await asyncio.sleep(1.0)
                continue
            for item in batch:
                if self._kept and self._kept[0] is item:
                    self._kept.popleft()
            if not self._kept:
                self._kept_some.clear()
                self._kept_none.set()


def _head(parts: int, *known: bytes | str | int) -> bytes:
    """The constant beginning of a command of ``parts`` parts, ready to be followed by the rest."""
    packed = pack(*known)
    return b"*%d\r\n" % parts + packed[packed.index(b"\r\n") + 2 :]
