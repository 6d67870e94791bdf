"""One connection to the ledger's server, shared by all concurrent calls, that comes back by itself.

Owns sockets, replies and reconnecting; knows nothing of reservations. Calls made in the same turn of the event loop
leave in one write and their replies are read in one go, so concurrency makes batches by itself; those of one kind that
follow each other make one command (``shared``). Replies come in the order of the calls; a call that gave up leaves its
place, and its late reply is thrown away.

There is no offline queue: while the connection is away a call fails at once. A failure says whether the command can
have run: ``NotRun`` (it did not) or ``OutcomeUnknown``. Only a command that the server sent elsewhere is sent again, to
where it belongs by then, and within the deadline of its call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hiredis

from extproc.errors import LedgerDown
from extproc.ledger.address import Address
from extproc.ledger.shared import Carrier, Part

log = logging.getLogger("kvgate.ledger")

CONNECT_TIMEOUT_S = 1.0
#: Reconnecting starts this fast and slows down to RETRY_MAX_S.
RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
#: So many calls in a row without an answer in time open the circuit ...
FAILURES_TO_OPEN = 3
#: ... for this long: calls with a shorter deadline than PATIENT_S fail at once, the patient ones go on.
OPEN_S, PATIENT_S = 0.5, 0.5
#: A connection on which calls wait and nothing at all has come for this long is dropped and built anew. With Sentinels
#: or a cluster a failover has to take longer than this and one call, or a stopped master that goes on is believed.
STALL_S = 1.5
#: More unanswered calls than this are refused at once: they could not be served in time.
MAX_PENDING = 8192
#: Replies that say "not here": the connection is built anew. The command did not run.
ELSEWHERE = ("MOVED", "READONLY", "MASTERDOWN")
#: Replies of a cluster whose slot is between two nodes. Following ASK would not help: the node that takes the slot over
#: runs nothing on several keys before it has them all, and a stream must not grow in two places.
UNDER_WAY = ("ASK", "TRYAGAIN")
#: Pause before a command that met a slot under way is sent again.
UNDER_WAY_S = 0.005
#: Replies that say "not now"; the command did not run.
NOT_NOW = ("LOADING", "CLUSTERDOWN", "BUSY", "OOM", "NOAUTH", "WRONGPASS", "NOPERM", "MISCONF", "NOREPLICAS",
           "UNKILLABLE")  # fmt: skip

_INCOMPLETE = object()


class NotRun(LedgerDown):
    """The server did not run the command."""


class _Redirected(NotRun):
    """It belongs elsewhere, or will in a moment."""


class OutcomeUnknown(LedgerDown):
    """No answer: the command may have run, or may run yet."""


class _Batch:
    """Stands in the line of waiting calls once for each of its commands; ``whole`` has all replies, in order.

    A command that got none has the exception in its place.
    """

    __slots__ = ("_count", "_replies", "whole")

    def __init__(self, count: int, whole: asyncio.Future[list[Any]]) -> None:
        self._count = count
        self._replies: list[Any] = []
        self.whole = whole

    def done(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.whole.done()

    def set_result(self, reply: Any) -> None:
        """The reply to the next of its commands."""
        self._replies.append(reply)
        if len(self._replies) == self._count:
            self.whole.set_result(self._replies)

    set_exception = set_result


class _Stream(asyncio.Protocol):
    """Bytes in, replies out, in order."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._waiting: deque[asyncio.Future[Any] | _Batch | Carrier] = deque()
        self._out: list[bytes | Carrier] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        self._waiting_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._waiting_since_s = self._loop.time()
        while (reply := self._reader.gets()) is not _INCOMPLETE:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(OutcomeUnknown(f"connection lost: {exc or 'closed by the server'}"))
        self._transport = None
        self.closed.set()

    @property
    def peer(self) -> str:
        """The address of the other side; only while it is connected over TCP."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("peername")[0])

    @property
    def pending(self) -> int:
        return len(self._waiting)

    @property
    def stalled(self) -> bool:
        """Whether calls wait and the server has said nothing for STALL_S."""
        return bool(self._waiting) and self._loop.time() - self._waiting_since_s > STALL_S

    def send(self, command: bytes | Part) -> asyncio.Future[Any]:
        """The reply to a command, or the answer to a part, which travels with those sent just before it."""
        future = self._loop.create_future()
        if isinstance(command, bytes):
            self._put(command, (future,))
            return future
        last = self._out[-1] if self._out else None
        if not isinstance(last, Carrier) or not last.takes(command):
            last = Carrier(command.kind)
            self._put(last, (last,))
        last.add(command, future)
        return future

    def send_all(self, packed: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """Several commands with one future for all their replies (an exception for each that got none)."""
        batch = _Batch(len(packed), self._loop.create_future())
        self._put(b"".join(packed), (batch,) * len(packed))
        return batch.whole

    def _put(self, command: bytes | Carrier, waiting: Sequence[asyncio.Future[Any] | _Batch | Carrier]) -> None:
        if self._transport is None or self._transport.is_closing():
            raise NotRun("the ledger's connection is closed")
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)
        if not self._waiting:
            self._waiting_since_s = self._loop.time()
        self._waiting.extend(waiting)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(b"".join([each if isinstance(each, bytes) else each.packed() for each in out]))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def pack(*parts: bytes | str | int) -> bytes:
    """One command as the server reads it."""
    return bytes(hiredis.pack_command(parts))  # type: ignore[arg-type]  # the stub forgets that each part varies


class Link:
    """The way to the server: ``call`` sends, a background task connects and reconnects.

    ``on_up`` runs on every new connection before calls are let through (it loads the scripts) and raises
    ``LedgerDown`` where the server is not usable.
    """

    def __init__(self, address: Address, on_up: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]]) -> None:
        self._address = address
        self._on_up = on_up
        self._stream: _Stream | None = None
        self._failures = 0
        self._open_until_s = 0.0
        self._moved_to: tuple[str, int] | None = None
        #: The host of the URL to ask first: one that does not answer is asked last.
        self._first = 0
        self._task: asyncio.Task[None] | None = None
        self.up = asyncio.Event()
        self.last_error = "not connected yet"

    def start(self) -> None:
        """Begin to connect, and to reconnect whenever the connection goes."""
        self._task = asyncio.create_task(self._run(), name="kvgate-ledger-link")

    async def close(self) -> None:
        """Give the connection back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        stream = self._stream
        self.drop("closed")
        if stream is not None:
            await stream.closed.wait()
        await asyncio.sleep(0)  # a connection attempt that was just cancelled closes its socket in the next turn

    def drop(self, why: str) -> None:
        """Abandon the connection; the background task builds a new one."""
        self.up.clear()
        self.last_error = why
        self._failures, self._open_until_s = 0, 0.0
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    @property
    def usable(self) -> bool:
        """Whether a call would be tried: connected, and answering in time."""
        return self.up.is_set() and time.monotonic() >= self._open_until_s

    async def call(self, command: bytes | Part, timeout_s: float) -> Any:
        """One command's reply, or a part's answer; errors as ``NotRun`` or ``OutcomeUnknown``, except NOSCRIPT, which is returned."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            stream = self._stream
            if stream is None or not self.up.is_set() or (timeout_s < PATIENT_S and not self.usable):
                raise NotRun(f"ledger away: {self.last_error}")
            if stream.pending >= MAX_PENDING:
                raise NotRun(f"{MAX_PENDING} ledger calls unanswered")
            try:
                async with asyncio.timeout_at(until_s):
                    reply = await stream.send(command)
            except TimeoutError:
                self._timed_out(stream, timeout_s)
                raise OutcomeUnknown(f"no answer within {timeout_s * 1000:.0f} ms") from None
            if timeout_s < PATIENT_S:
                self._failures, self._open_until_s = 0, 0.0
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            try:
                return self._error(str(reply), reply, stream)
            except _Redirected as redirected:
                await self._until_there(until_s, redirected)

    async def _until_there(self, until_s: float, redirected: _Redirected) -> None:
        """Wait until a command that was sent elsewhere may be sent again; raises ``redirected`` at the deadline."""
        try:
            async with asyncio.timeout_at(until_s):
                await asyncio.sleep(UNDER_WAY_S)
                await self.up.wait()
        except TimeoutError:
            raise redirected from None

    async def calls(self, packed: Sequence[bytes], timeout_s: float) -> list[Any]:
        """Many commands in one write and one wait, for callers that are patient: a reply or a ``LedgerDown`` for each.

        Raises ``LedgerDown`` where none can have run or not all were answered in time.
        """
        stream = self._stream
        if stream is None or not self.up.is_set():
            raise NotRun(f"ledger away: {self.last_error}")
        try:
            async with asyncio.timeout(timeout_s):
                replies = await stream.send_all(packed)
        except TimeoutError:
            self._timed_out(stream, timeout_s)
            raise OutcomeUnknown(f"no answer within {timeout_s * 1000:.0f} ms") from None
        return [self._read(reply, stream) if isinstance(reply, hiredis.ReplyError) else reply for reply in replies]

    def _read(self, reply: hiredis.ReplyError, stream: _Stream) -> Any:
        try:
            return self._error(str(reply), reply, stream)
        except LedgerDown as refused:
            return refused

    def _timed_out(self, stream: _Stream, timeout_s: float) -> None:
        if stream is not self._stream:
            return
        if stream.stalled:
            self.drop(f"nothing received for {STALL_S:.0f} s")
        elif timeout_s < PATIENT_S:
            self._failures += 1
            if self._failures >= FAILURES_TO_OPEN:
                self.last_error = f"{self._failures} calls in a row without an answer in time"
                self._open_until_s = time.monotonic() + OPEN_S

    def _error(self, message: str, reply: Any, stream: _Stream) -> Any:
        code = message.split(" ", 1)[0]
        if code == "NOSCRIPT":
            return reply
        if code in ELSEWHERE:
            if code == "MOVED":
                host, _, port = message.split(" ")[2].rpartition(":")
                # A node that does not know the other's name means its own.
                self._moved_to = (stream.peer if host in ("", "?") else host, int(port))
            if stream is self._stream:
                self.drop(message)
        if code in ELSEWHERE or code in UNDER_WAY:
            raise _Redirected(f"ledger answered {message}")
        if code in NOT_NOW:
            raise NotRun(f"ledger answered {message}")
        raise LedgerDown(f"ledger answered {message}")

    async def _run(self) -> None:
        pause_s, told = RETRY_MIN_S, ""
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S * 3):
                    stream = await self._open()
            except (OSError, TimeoutError, LedgerDown) as e:
                self.last_error = str(e) or "timed out"
                self._first += 1
                if self._moved_to is None and self.last_error != told:  # being sent on is no news
                    told = self.last_error
                    log.warning("ledger %s away: %s", self._address.printable, told)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2)
                continue
            pause_s, told = RETRY_MIN_S, ""
            self._stream = stream
            self.up.set()
            log.info("ledger %s connected", self._address.printable)
            await stream.closed.wait()
            if stream is self._stream:
                self.drop("connection lost")

    async def _open(self) -> _Stream:
        moved, self._moved_to = self._moved_to, None
        host = moved or await self._master()
        stream = await self._connect(host)
        try:

            async def ask(*parts: bytes | str | int) -> Any:
                reply = await stream.send(pack(*parts))
                if isinstance(reply, hiredis.ReplyError):
                    return self._error(str(reply), reply, stream)
                return reply

            login = self._address.login.command()
            if login is not None:
                await ask(*login)
            if self._address.db:
                await ask("SELECT", self._address.db)
            await self._on_up(ask)
            if self._address.kind == "sentinel" and host != await self._master():
                # It was stopped while another was promoted, and has not heard of it yet.
                raise NotRun("the master changed while it was asked")
        except BaseException:
            stream.close()
            raise
        return stream

    async def _connect(self, host: tuple[str, int] | None) -> _Stream:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if self._address.path is not None:
                _, stream = await loop.create_unix_connection(_Stream, self._address.path)
            else:
                assert host is not None
                _, stream = await loop.create_connection(_Stream, host[0], host[1], ssl=self._address.tls)
        return stream

    async def _master(self) -> tuple[str, int] | None:
        """The host to connect to: the URL's, whichever of a cluster's is next, or what a Sentinel names."""
        a = self._address
        if a.kind == "single":
            return a.hosts[0] if a.hosts else None
        first = self._first % len(a.hosts)
        hosts = a.hosts[first:] + a.hosts[:first]
        if a.kind == "cluster":
            return hosts[0]
        problems: list[str] = []
        for host in hosts:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    found = await self._ask_sentinel(host)
            except (OSError, TimeoutError, LedgerDown) as e:
                problems.append(f"{host[0]}:{host[1]}: {str(e) or 'timed out'}")
                continue
            if found is not None:
                return found
            problems.append(f"{host[0]}:{host[1]}: knows no master {a.service!r}")
        raise NotRun("; ".join(problems))

    async def _ask_sentinel(self, host: tuple[str, int]) -> tuple[str, int] | None:
        """The master's address as this Sentinel knows it; None where it knows no such master."""
        stream = await self._connect(host)
        try:
            login = self._address.sentinel_login.command()
            if login is not None:
                await stream.send(pack(*login))
            reply: Sequence[bytes] | hiredis.ReplyError | None = await stream.send(
                pack("SENTINEL", "get-master-addr-by-name", self._address.service)
            )
        finally:
            stream.close()
        if reply is None or isinstance(reply, hiredis.ReplyError):
            return None
        return reply[0].decode(), int(reply[1])
