"""One connection to the ledger's server, shared by all concurrent calls, that comes back by itself.

Owns connecting, deadlines and being sent elsewhere; knows nothing of reservations. All calls share one ``Stream``, so
concurrency makes batches by itself. Where a cluster's slot is, ``owner`` finds out.

There is no offline queue: while the connection is away a call fails at once. A failure says whether the command can
have run: ``NotRun`` (it did not) or ``OutcomeUnknown``. Only a command that the server sent elsewhere is sent again, to
where it belongs by then, and early enough for its answer to come before the call's deadline. A connection that is given
up because of that answers first what is under way on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import hiredis

from extproc.errors import LedgerDown
from extproc.ledger.address import Address
from extproc.ledger.owner import MAX_ASKED, Host, find, hosts_in, moved_to, named_by
from extproc.ledger.shared import Part
from extproc.ledger.stream import STALL_S, NotRun, OutcomeUnknown, Stream

log = logging.getLogger("kvgate.ledger")

CONNECT_TIMEOUT_S = 1.0
#: Logging in and loading the scripts, on a new connection.
PREPARE_TIMEOUT_S = 2.0
#: Reconnecting starts this fast, so that a call that was sent elsewhere finds the way there within its deadline, and
#: slows down to RETRY_MAX_S.
RETRY_MIN_S, RETRY_MAX_S = 0.005, 1.0
#: In a cluster that says where the slot went, the way there is looked for without a pause so many times in a row ...
HOPS = 16
#: ... and calls wait this long for it after the last such word, and the pauses are no longer than that.
SENT_ON_S, SENT_ON_PAUSE_S = 1.0, 0.05
#: So many times in a row without an answer in time open the circuit: what waits in vain at the same time, a command's
#: many calls and many commands, fails of one cause and counts once ...
FAILURES_TO_OPEN = 3
#: ... for this long: calls with a shorter deadline than PATIENT_S fail at once, the patient ones go on.
OPEN_S, PATIENT_S = 0.5, 0.5
#: How often a connection is looked at, whether it stalls.
WATCH_S = 0.25
#: More unanswered calls than this are refused at once: they could not be served in time.
MAX_PENDING = 8192
#: Replies that say "not here", or "not on a connection like this" (a server that forgot the scripts is prepared again):
#: the connection is built anew. The command did not run.
ELSEWHERE = ("MOVED", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOSCRIPT")
#: Replies of a cluster whose slot is between two nodes. Following ASK would not help: the node that takes the slot over
#: runs nothing on several keys before it has them all, and a stream must not grow in two places.
UNDER_WAY = ("ASK", "TRYAGAIN")
#: Pause before a command that met a slot under way is sent again.
UNDER_WAY_S = 0.005
#: A command is sent again only while this much of its call's time is left, or a quarter of it where that is less: one
#: that is under way at the deadline may run, and its call could not say any more that it did not.
ANSWER_S = 0.25
#: Replies that say "not now"; the command did not run.
NOT_NOW = ("LOADING", "BUSY", "OOM", "NOAUTH", "WRONGPASS", "NOPERM", "MISCONF", "NOREPLICAS",
           "UNKILLABLE")  # fmt: skip


class Redirected(NotRun):
    """It belongs elsewhere, or will in a moment."""


class UnderWay(Redirected):
    """Its slot is on its way from here to another node."""


_MEANING: dict[str, type[LedgerDown]] = {
    **dict.fromkeys(NOT_NOW, NotRun), **dict.fromkeys(ELSEWHERE, Redirected),
    **dict.fromkeys(UNDER_WAY, UnderWay),
}  # fmt: skip


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
    ``LedgerDown`` where the server is not usable. ``key`` is a key of the slot that the calls are about.
    """

    def __init__(
        self, address: Address, on_up: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]], key: str
    ) -> None:
        self._address = address
        self._on_up = on_up
        self._stream: Stream | None = None
        self._whose = pack("HGET", key, "")
        self._failures, self._failed_at_s = 0, 0.0
        self._open_until_s = 0.0
        #: The newest word on where the slot is, until it was followed.
        self._moved_to: Host | None = None
        #: Nodes of the cluster that the URL need not name.
        self._learned: tuple[Host, ...] = ()
        #: Why the connection is being built anew while nothing is wrong with the server: calls wait for it.
        self._sent_on: str | None = None
        self._sent_until_s = 0.0
        self._hops = 0
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
                reply = await self._answer(stream, command, until_s, timeout_s)
                if not isinstance(reply, hiredis.ReplyError):
                    return reply
                refused = self._refused(str(reply), stream)
                if not isinstance(refused, Redirected):
                    raise refused
            else:
                refused = Redirected(f"ledger answered {self._sent_on}")
            await self._until_there(again_until_s, refused)

    def _there(self, timeout_s: float) -> Stream:
        """The connection, for a call with this deadline; raises ``NotRun`` where it would not be tried."""
        stream = self._stream
        if stream is None or (timeout_s < PATIENT_S and not self.usable):
            raise NotRun(f"ledger away: {self.last_error}")
        if stream.pending >= MAX_PENDING:
            raise NotRun(f"{MAX_PENDING} ledger calls unanswered")
        return stream

    async def _answer(self, stream: Stream, command: bytes | Part, until_s: float, timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        future, sent_s = stream.send(command), loop.time()
        expiry = loop.call_at(until_s, _expire, future)
        try:
            reply = await future
        except TimeoutError:
            self._timed_out(stream, timeout_s, sent_s)
            raise OutcomeUnknown(f"no answer within {timeout_s * 1000:.0f} ms") from None
        finally:
            expiry.cancel()
        if timeout_s < PATIENT_S:
            self._failures, self._open_until_s = 0, 0.0
        return reply

    async def _until_there(self, until_s: float, redirected: Redirected) -> None:
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
                replies = await stream.send_all(packed)
        except TimeoutError:
            raise OutcomeUnknown(f"no answer within {timeout_s * 1000:.0f} ms") from None
        return [self._refused(str(r), stream) if isinstance(r, hiredis.ReplyError) else r for r in replies]

    def _timed_out(self, stream: Stream, timeout_s: float, sent_s: float) -> None:
        # What was under way already when a call gave up last says nothing new.
        if stream is self._stream and timeout_s < PATIENT_S and sent_s >= self._failed_at_s:
            self._failures, self._failed_at_s = self._failures + 1, asyncio.get_running_loop().time()
            if self._failures >= FAILURES_TO_OPEN:
                self.last_error = f"{self._failures} times in a row no answer in time"
                self._open_until_s = time.monotonic() + OPEN_S

    def _refused(self, message: str, stream: Stream) -> LedgerDown:
        """What an error reply means; the first that says "elsewhere" retires its connection."""
        code = message.split(" ", 1)[0]
        if code in ELSEWHERE and not stream.retired:
            if code == "MOVED":
                self._moved_to = moved_to(message, stream.host)
                self._learned = (self._moved_to, *self._learned)[:MAX_ASKED]
                if self._hops < HOPS:
                    self._sent_until_s = asyncio.get_running_loop().time() + SENT_ON_S
            stream.retire()
            if stream is self._stream:
                self._leave(message)
                self._sent_on = message
        return _MEANING.get(code, LedgerDown)(f"ledger answered {message}")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s, told = RETRY_MIN_S, ""
        while True:
            try:
                stream = await self._open()
            except (OSError, TimeoutError, LedgerDown) as e:
                self.last_error = str(e) or "timed out"
                self._hops += 1
                if self._moved_to is not None and self._hops <= HOPS:
                    continue  # a newer word came meanwhile
                if loop.time() < self._sent_until_s:  # being sent on is no news, and its calls go on waiting
                    pause_s = min(SENT_ON_PAUSE_S, pause_s)
                else:
                    self._sent_on = None
                    self._first += 1
                    if self.last_error != told:
                        told = self.last_error
                        log.warning("ledger %s away: %s", self._address.printable, told)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2)
                continue
            pause_s, told = RETRY_MIN_S, ""
            self._stream, self._sent_on, self._hops = stream, None, 0
            self.up.set()
            log.info("ledger %s connected", self._address.printable)
            try:
                why = await self._gone(stream)
            finally:
                stream.close()
            if stream is self._stream:
                self._leave(why)

    async def _gone(self, stream: Stream) -> str:
        """Wait until a connection is closed or stalls; says which."""
        while not stream.closed.is_set():
            try:
                async with asyncio.timeout(WATCH_S):
                    await stream.closed.wait()
            except TimeoutError:
                if stream.stalled:
                    return f"nothing received for {STALL_S} s"
        return "connection lost"

    async def _open(self) -> Stream:
        newest, self._moved_to = self._moved_to, None
        if self._address.kind == "cluster":
            known = tuple(dict.fromkeys((*self._address.hosts, *self._learned)))
            stream = await find(known, newest, self._ask_owner)
        else:
            host = await self._master()
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

    async def _ask_owner(self, host: Host) -> tuple[Host, Stream]:
        """Whom a node of the cluster names, and the connection to it; see ``owner.find``."""
        stream = await self._connect(host)
        try:
            await self._log_in(stream)
            return named_by(await stream.send(self._whose), host), stream
        except BaseException:
            stream.close()
            raise

    async def _ask(self, stream: Stream, *parts: bytes | str | int) -> Any:
        reply = await stream.send(pack(*parts))
        if isinstance(reply, hiredis.ReplyError):
            raise self._refused(str(reply), stream)
        return reply

    async def _log_in(self, stream: Stream) -> None:
        login = self._address.login.command()
        if login is not None:
            await self._ask(stream, *login)
        if self._address.db:
            await self._ask(stream, "SELECT", self._address.db)

    async def _prepare(self, stream: Stream) -> None:
        """Do what has to be done on every new connection."""
        cluster = self._address.kind == "cluster"
        if not cluster:  # where it was found it has logged in
            await self._log_in(stream)
        await self._on_up(partial(self._ask, stream))
        if cluster:
            self._learned = hosts_in(await stream.send(pack("CLUSTER", "SLOTS")), stream.host) or self._learned

    async def _connect(self, host: Host | None) -> Stream:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if self._address.path is not None:
                _, stream = await loop.create_unix_connection(Stream, self._address.path)
            else:
                assert host is not None
                made = partial(Stream, host[0])
                _, stream = await loop.create_connection(made, host[0], host[1], ssl=self._address.tls)
        return stream

    async def _master(self) -> Host | None:
        """The host to connect to: the URL's, or what the Sentinels name."""
        a = self._address
        if a.kind == "sentinel":
            return await self._named()
        return a.hosts[self._first % len(a.hosts)] if a.hosts else None

    async def _named(self) -> Host:
        """The master by the Sentinel that knows of the latest failover: the others hear of one seconds later."""
        views = await asyncio.gather(*(self._view(host) for host in self._address.hosts))
        known = [view for view in views if not isinstance(view, str)]
        if not known:
            raise NotRun("; ".join(view for view in views if isinstance(view, str)))
        return max(known, key=lambda view: view[0])[1]

    async def _view(self, sentinel: Host) -> tuple[int, Host] | str:
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

    async def _ask_sentinel(self, host: Host) -> tuple[Any, Any]:
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
