"""The decision log: a capped Redis stream of decision records and of how they ended.

Owns the stream's entries and their join. Writing never waits for Redis: ``append`` and ``end`` put into a bounded
queue that a background task empties in batches; what finds the queue full is dropped and counted. Without Redis a
ring in memory keeps the same promise for one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from extproc.errors import LedgerDown
from extproc.ledger.address import parse
from extproc.ledger.keys import decisions_key, key
from extproc.ledger.link import Link, pack
from extproc.telemetry.record import Record, figures_of, utc

log = logging.getLogger("kvgate.decisionlog")

#: Entries that wait for Redis at most; about 2 KB each, so 8 MB and some 10 s of a busy gate.
QUEUE_ENTRIES = 4096
#: Entries of one pipeline.
BATCH_ENTRIES = 128
#: Wait after a full round: batches form, and a quiet gate shows its decision soon enough.
FLUSH_S = 0.1
#: Wait after Redis failed.
RETRY_S = 1.0
#: Longest wait for one answer, with no request in hand.
CALL_S = 1.0
#: Longest that ``close`` tries to write what is queued.
CLOSE_S = 1.0
#: Entries read at once when the log is read backwards.
PAGE_ENTRIES = 200
#: Field of a stream entry that holds the JSON, by kind.
DECISION_FIELD, END_FIELD = "decision", "end"

_Entry = tuple[str, Record]

_to_json = msgspec.json.Encoder(enc_hook=str).encode


def end_record(
    rid: str,
    *,
    ended: str,
    at_s: float | None = None,
    free_at_end_bytes: int | None = None,
    actual_input_tokens: int | None = None,
    actual_output_tokens: int | None = None,
) -> Record:
    """What is known at the end of a request; ``ended`` as in ``ledger.base.Ended``, None where nobody measured.

    ``at_s`` is the Unix time at which this process heard of the end.
    """
    return {
        "at": None if at_s is None else utc(at_s),
        "rid": rid,
        "ended": ended,
        "free_at_end_bytes": free_at_end_bytes,
        "actual_input_tokens": actual_input_tokens,
        "actual_output_tokens": actual_output_tokens,
    }


def recent_row(record: Mapping[str, Any], end: Mapping[str, Any] | None) -> Record:
    """One row of ``status --recent``: the decision's figures, and the end's where it has ended.

    The figures are those of ``figures_of``; ``figures_of`` in the row names that candidate.
    """
    shown = figures_of(record)
    need = shown["need"] if shown else {}
    before, after = (shown["free_before"], shown["free_after"]) if shown else ({}, {})
    copied = (
        "at",
        "rid",
        "request_id",
        "lane",
        "model",
        "input_tokens",
        "expected_output_tokens",
        "outcome",
        "target",
        "replica",
        "reason",
        "waited_ms",
        "decision_ms",
        "mode",
    )
    return {
        **{key: record.get(key) for key in copied},
        "figures_of": (shown["replica"] or shown["target"]) if shown else None,
        "projected_kv_blocks": need.get("kv_blocks"),
        "projected_kv_bytes": need.get("kv_bytes") or None,
        "free_before_blocks": before.get("kv_blocks"),
        "free_before_bytes": before.get("kv_bytes"),
        "free_after_blocks": after.get("kv_blocks"),
        "free_after_bytes": after.get("kv_bytes"),
        "free_at_end_bytes": end.get("free_at_end_bytes") if end else None,
        "actual_input_tokens": end.get("actual_input_tokens") if end else None,
        "actual_output_tokens": end.get("actual_output_tokens") if end else None,
        "ended": end.get("ended") if end else None,
    }


class DecisionLog(Protocol):
    """Where decision records go."""

    def append(self, record: Record) -> None:
        """Keep one decision record; never waits, never raises."""
        ...

    def end(self, record: Record) -> None:
        """Keep one ``end_record``; the first of a rid counts."""
        ...

    async def recent(self, count: int) -> list[Record]:
        """The last ``count`` decisions, newest first, as ``recent_row``."""
        ...

    async def close(self) -> None:
        """Write what is queued where that is possible at once, and stop."""
        ...


class RingLog:
    """The log of one process without Redis: the last ``maxlen`` decisions."""

    def __init__(self, maxlen: int) -> None:
        self._entries: deque[_Entry] = deque(maxlen=2 * maxlen)

    def append(self, record: Record) -> None:
        """Keep one decision record, in place of the oldest when full."""
        self._entries.append((DECISION_FIELD, record))

    def end(self, record: Record) -> None:
        """Keep one end record."""
        self._entries.append((END_FIELD, record))

    async def recent(self, count: int) -> list[Record]:
        """The last ``count`` decisions, newest first."""
        joined = _Join(count)
        joined.feed(reversed(self._entries))
        return joined.rows()

    async def close(self) -> None:
        """Nothing to write."""


class StreamLog:
    """The log of a pool in a Redis stream, shared by every process of the pool.

    It has a connection of its own, so that its bytes never stand before a reservation's. The stream is capped at
    about two entries per decision kept. An entry whose write was not answered is sent again and may then stand
    twice; readers join by rid.
    """

    def __init__(self, url: str, pool: str, maxlen: int, *, on_drop: Callable[[int], None] | None = None) -> None:
        """``url`` as in ``ledger.address``; connects at the first use. ``on_drop`` hears of entries without room."""
        self._link = Link(parse(url), _nothing_to_prepare, key(pool, "meta"))
        self._key = decisions_key(pool)
        self._maxlen = maxlen
        # The constant beginning of every command: of eight parts the first six.
        self._head = b"*8" + pack("XADD", self._key, "MAXLEN", "~", 2 * maxlen, "*")[2:]
        self._on_drop = on_drop or (lambda _count: None)
        self._queue: deque[_Entry] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0

    def append(self, record: Record) -> None:
        """Queue one decision record."""
        self._put((DECISION_FIELD, record))

    def end(self, record: Record) -> None:
        """Queue one end record."""
        self._put((END_FIELD, record))

    async def recent(self, count: int) -> list[Record]:
        """The last ``count`` decisions, newest first; ``LedgerDown`` where Redis cannot be read."""
        self._start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                await self._link.up.wait()
        joined = _Join(count)
        upper, left, last = "+", 2 * self._maxlen + PAGE_ENTRIES, False
        while left > 0 and not last:
            # One page more than needed: another process may have written an end before its decision was flushed.
            last = joined.full
            page = await self._link.call(pack("XREVRANGE", self._key, upper, "-", "COUNT", PAGE_ENTRIES), CALL_S)
            if not page:
                break
            joined.feed(entry for _, fields in page for entry in _decode(fields))
            upper, left = f"({_text(page[-1][0])}", left - len(page)
        return joined.rows()

    async def close(self) -> None:
        """Try once to write what is queued, then stop."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._queue:
                    await self._link.up.wait()
                while self._queue and await self._flush():
                    pass
        await self._link.close()

    def _start(self) -> None:
        if self._task is None:
            self._link.start()
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kvgate-decisionlog")

    def _put(self, entry: _Entry) -> None:
        if len(self._queue) >= QUEUE_ENTRIES:
            self.dropped += 1
            self._on_drop(1)
            return
        self._queue.append(entry)
        self._start()
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(FLUSH_S)
            while self._queue:
                await self._link.up.wait()
                if not await self._flush():
                    await asyncio.sleep(RETRY_S)

    async def _flush(self) -> bool:
        """Write one batch; what Redis did not take goes back to the head of the queue."""
        batch = [self._queue.popleft() for _ in range(min(BATCH_ENTRIES, len(self._queue)))]
        answers: Sequence[object]
        try:
            answers = await self._link.calls([self._command(*entry) for entry in batch], CALL_S)
        except LedgerDown as down:
            answers = [down] * len(batch)
        except asyncio.CancelledError:
            self._queue.extendleft(reversed(batch))
            raise
        missed = [entry for entry, answer in zip(batch, answers, strict=True) if isinstance(answer, LedgerDown)]
        self._queue.extendleft(reversed(missed))
        if missed:
            log.warning("the decision log waits for Redis", extra={"queued": len(self._queue)})
        return not missed

    def _command(self, field: str, record: Record) -> bytes:
        line = _to_json(record)
        return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n" % (self._head, len(field), field.encode(), len(line), line)


async def _nothing_to_prepare(_ask: object) -> None:
    """The log needs no scripts."""


class _Join:
    """Joins decisions with their ends while the log is read from its newest entry backwards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends: dict[str, Record] = {}
        self._decisions: list[Record] = []
        self._seen: set[str] = set()

    @property
    def full(self) -> bool:
        """Whether enough decisions were found."""
        return len(self._decisions) >= self._count

    def feed(self, entries: Iterable[_Entry]) -> None:
        """Take entries, newest first; of several ends of one rid the oldest counts."""
        for kind, record in entries:
            rid = record.get("rid")
            if kind == END_FIELD:
                if rid:
                    self._ends[rid] = record
            elif not self.full and rid not in self._seen:
                self._decisions.append(record)
                if rid:
                    self._seen.add(rid)

    def rows(self) -> list[Record]:
        """The rows found, newest first."""
        return [recent_row(record, self._ends.get(record.get("rid") or "")) for record in self._decisions]


def _decode(fields: Sequence[bytes]) -> Iterable[_Entry]:
    """The entries in one stream entry (field, value, ...); what is not ours or not readable is passed over."""
    for field, value in zip(fields[::2], fields[1::2], strict=True):
        kind = _text(field)
        if kind not in (DECISION_FIELD, END_FIELD):
            continue
        try:
            record = json.loads(value)
        except ValueError:
            continue
        if (
            isinstance(record, dict)
            and isinstance(record.get("rid"), str | None)
            and (kind == END_FIELD or _readable(record))
        ):
            yield kind, record


def _readable(record: Record) -> bool:
    """Whether ``recent_row`` can show it: a later release may have changed the shape."""
    try:
        recent_row(record, None)
    except (KeyError, TypeError, AttributeError):
        return False
    return True


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
