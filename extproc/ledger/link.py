"""One connection to the ledger's server, shared by all concurrent calls, that comes back by itself.

Owns sockets, replies and reconnecting; knows nothing of reservations. Calls made in the same turn of the event loop
leave in one write and their replies are read in one go, so concurrency makes batches by itself; those of one kind that
follow each other make one command (``shared``). Replies come in the order of the calls; a call that gave up leaves its
place, and its late reply is thrown away.

There is no offline queue: while the connection is away a call fails at once. A failure says whether the command can
have run: ``NotRun`` (it did not) or ``OutcomeUnknown``. Only a command that the server sent elsewhere is sent again, to
where it belongs by then, and early enough for its answer to come before the call's deadline. A connection that is given
up because of that answers first what is under way on it.
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
#: Logging in and loading the scripts, on a new connection.
PREPARE_TIMEOUT_S = 2.0
#: Reconnecting starts this fast, so that a call that was sent elsewhere finds the way there within its deadline, and
#: slows down to RETRY_MAX_S.
RETRY_MIN_S, RETRY_MAX_S = 0.005, 1.0
#: So many calls in a row without an answer in time open the circuit ...
FAILURES_TO_OPEN = 3
#: ... for this long: calls with a shorter deadline than PATIENT_S fail at once, the patient ones go on.
OPEN_S, PATIENT_S = 0.5, 0.5
#: A connection on which calls wait and nothing at all has come for this long is dropped and built anew. With Sentinels
#: or a cluster a failover has to take longer than this, or a stopped master that goes on is believed.
STALL_S = 1.5
#: How often that is looked at.
WATCH_S = 0.25
#: More unanswered calls than this are refused at once: they could not be served in time.
MAX_PENDING = 8192
#: Replies that say "not here", or "not on a connection like this" (a server that forgot the scripts is prepared again):
#: the connection is built anew. The command did not run.
ELSEWHERE = ("MOVED", "READONLY", "MASTERDOWN", "NOSCRIPT")
#: Replies of a cluster whose slot is between two nodes. Following ASK would not help: the node that takes the slot over
#: runs nothing on several keys before it has them all, and a stream must not grow in two places.
UNDER_WAY = ("ASK", "TRYAGAIN")
#: Pause before a command that met a slot under way is sent again.
UNDER_WAY_S = 0.005
#: A command is sent again only while this much of its call's time is left, or a quarter of it where that is less: one
#: that is under way at the deadline may run, and its call could not say any more that it did not.
ANSWER_S = 0.25
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


_MEANING: dict[str, type[LedgerDown]] = {
    **dict.fromkeys(NOT_NOW, NotRun), **dict.fromkeys(ELSEWHERE + UNDER_WAY, _Redirected),
}  # fmt: skip


class _Stream(asyncio.Protocol):
    """Bytes in, replies out, in order."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._waiting: deque[asyncio.Future[Any] | Carrier] = deque()
        self._out: list[bytes | Carrier] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_at_s = 0.0
        #: Calls without an answer, those included that nobody waits for any more.
        self.pending = 0
        self.closed = asyncio.Event()
        #: Takes no more commands and closes with its last reply.
        self.retired = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._heard_at_s = self._loop.time()
        while (reply := self._reader.gets()) is not _INCOMPLETE:
            waiting = self._waiting.popleft()
            self.pending -= len(waiting) if isinstance(waiting, Carrier) else 1
            if not waiting.done():
                waiting.set_result(reply)
        if self.retired and not self._waiting:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(OutcomeUnknown(f"connection lost: {exc or 'closed by the server'}"))
        self._transport = None
        self.closed.set()

    @property
    def peer(self) -> str:
        """The address of the other side; only while it is connected over TCP."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("peername")[0])

    @property
    def stalled(self) -> bool:
        """Whether calls wait and the server has said nothing for STALL_S."""
        return bool(self._waiting) and self._loop.time() - self._heard_at_s > STALL_S

    def send(self, command: bytes | Part) -> asyncio.Future[Any]:
        """The reply to a command, or the answer to a part, which travels with those sent just before it."""
        if self._transport is None or self.retired or self._transport.is_closing():
            raise NotRun("the ledger's connection is closed")
        future = self._loop.create_future()
        self.pending += 1
        if isinstance(command, bytes):
            self._put(command, future)
            return future
        last = self._out[-1] if self._out else None
        if not isinstance(last, Carrier) or not last.takes(command):
            last = Carrier(command.kind)
            self._put(last, last)
        last.add(command, future)
        return future

    def _put(self, command: bytes | Carrier, waiting: asyncio.Future[Any] | Carrier) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)
        if not self._waiting:
            self._heard_at_s = self._loop.time()
        self._waiting.append(waiting)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(b"".join([each if isinstance(each, bytes) else each.packed() for each in out]))

    def retire(self) -> None:
        """Take no more commands; close when what is under way has its replies."""
        self.retired = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _expire(future: asyncio.Future[Any]) -> None:
    """The deadline; a reply that came in the same turn of the loop comes first."""
    if not future.done():
        future.set_exception(TimeoutError())


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
        #: Why the connection is being built anew while nothing is wrong with the server: calls wait for it.
        self._sent_on: str | None = None
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
        if self._stream is not None:
            await self._stream.closed.wait()
        self._leave("closed")
        await asyncio.sleep(0)  # a connection attempt that was just cancelled closes its socket in the next turn

    def _leave(self, why: str) -> None:
        """Send nothing more on this connection; the background task builds a new one when it is closed."""
        self.up.clear()
        self._stream, self.last_error = None, why
        self._failures, self._open_until_s = 0, 0.0

    @property
    def usable(self) -> bool:
        """Whether a call would be tried: connected, and answering in time."""
        return self.up.is_set() and time.monotonic() >= self._open_until_s

    async def call(self, command: bytes | Part, timeout_s: float) -> Any:
        """One command's reply, or a part's answer; errors as ``NotRun``, ``OutcomeUnknown`` or another ``LedgerDown``."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        again_until_s = until_s - min(ANSWER_S, timeout_s / 4)
        while True:
            if self._sent_on is None:
                stream = self._there(timeout_s)
                reply = await self._answer(stream, stream.send(command), until_s, timeout_s)
                if not isinstance(reply, hiredis.ReplyError):
                    return reply
                refused = self._refused(str(reply), stream)
                if not isinstance(refused, _Redirected):
                    raise refused
            else:
                refused = _Redirected(f"ledger answered {self._sent_on}")
            await self._until_there(again_until_s, refused)

    def _there(self, timeout_s: float) -> _Stream:
        """The connection, for a call with this deadline; raises ``NotRun`` where it would not be tried."""
        stream = self._stream
        if stream is None or (timeout_s < PATIENT_S and not self.usable):
            raise NotRun(f"ledger away: {self.last_error}")
        if stream.pending >= MAX_PENDING:
            raise NotRun(f"{MAX_PENDING} ledger calls unanswered")
        return stream

    async def _answer(self, stream: _Stream, future: asyncio.Future[Any], until_s: float, timeout_s: float) -> Any:
        expiry = asyncio.get_running_loop().call_at(until_s, _expire, future)
        try:
            reply = await future
        except TimeoutError:
            self._timed_out(stream, timeout_s)
            raise OutcomeUnknown(f"no answer within {timeout_s * 1000:.0f} ms") from None
        finally:
            expiry.cancel()
        if timeout_s < PATIENT_S:
            self._failures, self._open_until_s = 0, 0.0
        return reply

    async def _until_there(self, until_s: float, redirected: _Redirected) -> None:
        """Wait until a command that was sent elsewhere may be sent again; raises ``redirected`` where that is too late."""
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
        stream = self._there(PATIENT_S)
        try:
            async with asyncio.timeout(timeout_s):
                replies = await asyncio.gather(*map(stream.send, packed), return_exceptions=True)
        except TimeoutError:
            raise OutcomeUnknown(f"no answer within {timeout_s * 1000:.0f} ms") from None
        return [self._refused(str(r), stream) if isinstance(r, hiredis.ReplyError) else r for r in replies]

    def _timed_out(self, stream: _Stream, timeout_s: float) -> None:
        if stream is self._stream and timeout_s < PATIENT_S:
            self._failures += 1
            if self._failures >= FAILURES_TO_OPEN:
                self.last_error = f"{self._failures} calls in a row without an answer in time"
                self._open_until_s = time.monotonic() + OPEN_S

    def _refused(self, message: str, stream: _Stream) -> LedgerDown:
        """What an error reply means; the first that says "elsewhere" retires its connection."""
        code = message.split(" ", 1)[0]
        if code in ELSEWHERE and not stream.retired:
            if code == "MOVED":
                host, _, port = message.split(" ")[2].rpartition(":")
                # A node that does not know the other's name means its own.
                self._moved_to = (stream.peer if host in ("", "?") else host, int(port))
            stream.retire()
            if stream is self._stream:
                self._leave(message)
                self._sent_on = message
        return _MEANING.get(code, LedgerDown)(f"ledger answered {message}")

    async def _run(self) -> None:
        pause_s, told = RETRY_MIN_S, ""
        while True:
            try:
                stream = await self._open()
            except (OSError, TimeoutError, LedgerDown) as e:
                self.last_error = str(e) or "timed out"
                if self._moved_to is None:  # being sent on is no news, and its calls go on waiting
                    self._sent_on = None
                    self._first += 1
                    if self.last_error != told:
                        told = self.last_error
                        log.warning("ledger %s away: %s", self._address.printable, told)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2)
                continue
            pause_s, told = RETRY_MIN_S, ""
            self._stream, self._sent_on = stream, None
            self.up.set()
            log.info("ledger %s connected", self._address.printable)
            try:
                why = await self._gone(stream)
            finally:
                stream.close()
            if stream is self._stream:
                self._leave(why)

    async def _gone(self, stream: _Stream) -> str:
        """Wait until a connection is closed or stalls; says which."""
        while not stream.closed.is_set():
            try:
                async with asyncio.timeout(WATCH_S):
                    await stream.closed.wait()
            except TimeoutError:
                if stream.stalled:
                    return f"nothing received for {STALL_S} s"
        return "connection lost"

    async def _open(self) -> _Stream:
        moved, self._moved_to = self._moved_to, None
        host = moved or await self._master()
        stream = await self._connect(host)
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                await self._prepare(stream)
            if self._address.kind == "sentinel" and host != await self._master():
                # It was stopped while another was promoted, and has not heard of it yet.
                raise NotRun("the master changed while it was asked")
        except BaseException:
            stream.close()
            raise
        return stream

    async def _prepare(self, stream: _Stream) -> None:
        """Log in, and do what has to be done on every new connection."""

        async def ask(*parts: bytes | str | int) -> Any:
            reply = await stream.send(pack(*parts))
            if isinstance(reply, hiredis.ReplyError):
                raise self._refused(str(reply), stream)
            return reply

        login = self._address.login.command()
        if login is not None:
            await ask(*login)
        if self._address.db:
            await ask("SELECT", self._address.db)
        await self._on_up(ask)

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
        """The host to connect to: the URL's, whichever of a cluster's is next, or what the Sentinels name."""
        a = self._address
        if a.kind == "sentinel":
            return await self._named()
        return a.hosts[self._first % len(a.hosts)] if a.hosts else None

    async def _named(self) -> tuple[str, int]:
        """The master by the Sentinel that knows of the latest failover: the others hear of one seconds later."""
        views = await asyncio.gather(*(self._view(host) for host in self._address.hosts))
        known = [view for view in views if not isinstance(view, str)]
        if not known:
            raise NotRun("; ".join(view for view in views if isinstance(view, str)))
        return max(known, key=lambda view: view[0])[1]

    async def _view(self, sentinel: tuple[str, int]) -> tuple[int, tuple[str, int]] | str:
        """The number of the last failover this Sentinel knows of, and the master since; or what is wrong with it."""
        where = f"{sentinel[0]}:{sentinel[1]}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found, state = await self._ask_sentinel(sentinel)
        except (OSError, TimeoutError, LedgerDown) as e:
            return f"{where}: {str(e) or 'timed out'}"
        if found is None or isinstance(found, hiredis.ReplyError):
            return f"{where}: knows no master {self._address.service!r}"
        # One that may not be asked for its state knows of no failover.
        fields = {} if isinstance(state, hiredis.ReplyError) else dict(zip(state[::2], state[1::2], strict=True))
        return int(fields.get(b"config-epoch", -1)), (found[0].decode(), int(found[1]))

    async def _ask_sentinel(self, host: tuple[str, int]) -> tuple[Any, Any]:
        """The replies about the master's address and about its state."""
        stream = await self._connect(host)
        try:
            login = self._address.sentinel_login.command()
            if login is not None:
                await stream.send(pack(*login))
            found, state = await asyncio.gather(
                stream.send(pack("SENTINEL", "get-master-addr-by-name", self._address.service)),
                stream.send(pack("SENTINEL", "MASTER", self._address.service)),
            )
            return found, state
        finally:
            stream.close()
