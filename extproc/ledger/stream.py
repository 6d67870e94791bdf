"""One connection: commands out, replies in, in order; and what it means where no reply comes.

Owns bytes; knows neither where the server is nor what is asked. Calls made in the same turn of the event loop leave in
one write and their replies are read in one go; those of one kind that follow each other make one command (``shared``).
Replies come in the order of the calls; a call that gave up leaves its place, and its late reply is thrown away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis

from extproc.errors import LedgerDown
from extproc.ledger.shared import Carrier, Part, Together

#: A connection on which calls wait and nothing at all has come for this long is dropped and built anew. With Sentinels
#: or a cluster a failover has to take longer than this, or a stopped master that goes on is believed.
STALL_S = 1.5

_INCOMPLETE = object()


class NotRun(LedgerDown):
    """The server did not run the command."""


class OutcomeUnknown(LedgerDown):
    """No answer: the command may have run, or may run yet."""


class Stream(asyncio.Protocol):
    """A connection to ``host``, as it was dialled ('' over a Unix socket)."""

    def __init__(self, host: str = "") -> None:
        self.host = host
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._waiting: deque[asyncio.Future[Any] | Carrier | Together] = deque()
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
        """See ``asyncio.Protocol``."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
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
        """See ``asyncio.Protocol``."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(OutcomeUnknown(f"connection lost: {exc or 'closed by the server'}"))
        self._transport = None
        self.closed.set()

    @property
    def stalled(self) -> bool:
        """Whether calls wait and the server has said nothing for STALL_S."""
        return bool(self._waiting) and self._loop.time() - self._heard_at_s > STALL_S

    def send(self, command: bytes | Part) -> asyncio.Future[Any]:
        """The reply to a command, or the answer to a part, which travels with those sent just before it."""
        self._refuse_closed()
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

    def send_all(self, commands: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """The replies to some commands, once all are there; an error stands for one that got none."""
        self._refuse_closed()
        future = self._loop.create_future()
        if not commands:
            future.set_result([])
        together = Together(future, len(commands))
        self.pending += len(commands)
        for command in commands:
            self._put(command, together)
        return future

    def _refuse_closed(self) -> None:
        if self._transport is None or self.retired or self._transport.is_closing():
            raise NotRun("the ledger's connection is closed")

    def _put(self, command: bytes | Carrier, waiting: asyncio.Future[Any] | Carrier | Together) -> None:
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
        """Close at once; whoever waits hears that its outcome is unknown."""
        if self._transport is not None:
            self._transport.abort()
