"""What happens after the decision: leases renewed, ends told to the ledger, answers learned from.

Owns the queues between the access log and the ledger, and the reaper. Nothing here ever ends a reservation for
any reason but an end record, an operator, or the rules of ``Ledger.reap``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from extproc.accesslog import EntryKind, LogRecord
from extproc.backlog import Backlog
from extproc.config.models import Config
from extproc.decisions import Identity
from extproc.errors import LedgerDown
from extproc.gateway.names import replica_cluster
from extproc.learning import Learning
from extproc.ledger.base import (
    CLEAN_ENDS,
    COOLING_S,
    SILENCE_S,
    End,
    Ended,
    Ledger,
    ReplicaReport,
    ReplicaState,
    ReplicaView,
    Reservation,
    Upsert,
)
from extproc.ledger.posture import LocalShare
from extproc.metadata import exchange_id, reservation_from

#: How often expired leases are looked at.
REAP_S = 1.0
#: A gap in our own loop longer than this means that we did not listen.
PAUSE_S = 2.0
#: Records kept while the ledger is away; renewals beyond it are dropped (periodic records come again).
MAX_RENEWALS = 20_000
#: A remote API that said "no more" is told to the ledger once in this long; many answers say the same.
CLOSE_EVERY_S = 1.0
#: Exchanges remembered in case that our answer and their end cross on the way; that takes milliseconds.
MAX_CROSSING = 4096


class Observer(Protocol):
    """Who is told about completions (metrics, the decision log)."""

    def completed(self, record: LogRecord, output_tokens: int | None) -> None:
        """An exchange ended."""
        ...

    def unsent(self, rid: str) -> None:
        """Envoy gave an exchange up before it read our answer: no engine saw the request that was decided."""
        ...

    def misrouted(self, record: LogRecord) -> None:
        """An exchange was served by another replica than the reserved one."""
        ...


class Completion:
    """Queues of one process; ``clock_s`` is monotonic."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        learning: Learning,
        share: LocalShare,
        observer: Observer,
        view: Callable[[str], ReplicaView | None],
        room_came_free: Callable[[], None],
        clock_s: Callable[[], float],
        backlog: Backlog,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._learning = learning
        self._share = share
        self._observer = observer
        self._view = view
        self._room_came_free = room_came_free
        self._clock_s = clock_s
        self._backlog = backlog
        self._pool = config.ledger.pool
        self._lags = {name: target.abort_lag_ms / 1000.0 for name, target in config.targets.items()}
        self._target_of = {replica.name: name for name, _, replica in config.local_replicas()}
        self._target_of |= {name: name for name, target in config.targets.items() if target.remote}
        self._ends: list[End] = []
        self._renewals: dict[str, Upsert] = {}
        self._discovered = frozenset(config.discovered())
        self._remotes = frozenset(name for name, target in config.targets.items() if target.remote)
        #: Remote APIs that want no more -> for how long, and when that was last told to the ledger.
        self._closed: dict[str, float] = {}
        self._closed_at_s: dict[str, float] = {}
        #: (Envoy, exchange) -> the rid it was answered under, or "" where it was over before it was answered.
        self._crossing: dict[tuple[str, str], str] = {}
        self._wake = asyncio.Event()
        self._listening_since_s = clock_s()
        self._last_tick_s = clock_s()
        #: Envoys whose access log this process receives -> open log streams, and since when there is one.
        self._owners: dict[str, tuple[int, float]] = {}
        self.dropped = 0

    def attach(self, owner: str) -> None:
        """An access-log stream of this Envoy opened."""
        streams, since_s = self._owners.get(owner, (0, self._clock_s()))
        self._owners[owner] = (streams + 1, since_s)

    def detach(self, owner: str) -> None:
        """An access-log stream of this Envoy closed."""
        streams, since_s = self._owners.get(owner, (0, 0.0))
        if streams > 1:
            self._owners[owner] = (streams - 1, since_s)
        else:
            self._owners.pop(owner, None)

    def listened(self, now_s: float) -> tuple[float | None, tuple[str, ...]]:
        """The Envoys whose silence proves something by now, and how long all of them have been listened to."""
        heard = {owner: now_s - max(since_s, self._listening_since_s) for owner, (_, since_s) in self._owners.items()}
        long = {owner: seconds for owner, seconds in heard.items() if seconds >= SILENCE_S}
        return (min(long.values()), tuple(long)) if long else (None, ())

    def record(self, record: LogRecord, owner: str) -> None:
        """Take one entry of ``owner``'s access log."""
        if record.kind is EntryKind.ALIVE:
            self._renew(record)
        elif record.kind is EntryKind.ATTEMPT_END:
            if record.rid is not None and record.cluster in self._target_of:
                # A plan has one local place, so an attempt at found replicas was made at the reserved one.
                found = record.cluster in self._discovered
                self._end(record, owner, replica=None if found else record.cluster)
            if record.closed_for_s is not None and record.cluster in self._remotes:
                self._close(record.cluster, record.closed_for_s)
        else:
            self._finish(record, owner)

    def answered(self, who: Identity) -> None:
        """Our answer for this exchange is about to be written; Envoy may have given the exchange up already."""
        if who.exchange_id == who.request_id:
            return  # this Envoy does not say which exchange it is
        key = (who.owner, who.exchange_id)
        if self._crossing.pop(key, None) is None:
            self._remember(key, who.rid)
        else:
            self._ends.append(End(who.rid, who.owner, who.exchange_id, Ended.UNSENT))
            self._backlog.add(partial(self._observer.unsent, who.rid))
            self._wake.set()

    def _remember(self, key: tuple[str, str], rid: str) -> None:
        self._crossing[key] = rid
        if len(self._crossing) > MAX_CROSSING:
            del self._crossing[next(iter(self._crossing))]

    async def flush(self) -> None:
        """Send what was heard; what the ledger does not take stays queued (ends) or is dropped (renewals)."""
        await self._backlog.clear()
        self._wake.clear()
        ends, self._ends = self._ends, []
        renewals, self._renewals = self._renewals, {}
        try:
            if ends:
                await self._ledger.end(_without_repeats(ends))
                self._room_came_free()
            if renewals:
                await self._ledger.renew(list(renewals.values()))
            if self._closed:
                await self._tell_closed()
        except LedgerDown:
            # The adapter keeps ends of an outage; renewals come again with the next periodic record.
            self.dropped += len(renewals)
            # What was heard did not reach the ledger, so its silence means nothing.
            self._listening_since_s = self._clock_s()

    async def run(self) -> None:
        """Flush until cancelled; at the end what is left is sent once more."""
        try:
            while True:
                # What is heard has gathered in the backlog before it was read.
                await self._wake.wait()
                await self.flush()
        finally:
            await self.flush()

    async def reap(self) -> None:
        """Watch for pauses of our own and let the ledger give up what its rules allow, until cancelled."""
        while True:
            await asyncio.sleep(REAP_S)
            now = self._clock_s()
            if now - self._last_tick_s > PAUSE_S:
                self._listening_since_s = now
            self._last_tick_s = now
            try:
                await self.flush()
                listened_s, owners = self.listened(now)
                await self._ledger.reap(listened_s=listened_s, owners=owners)
            except LedgerDown:
                self._listening_since_s = self._clock_s()

    def _close(self, target: str, seconds: float) -> None:
        """A remote API wants no more: every sidecar of the pool shall know, until its next visit or until then."""
        now_s = self._clock_s()
        if now_s - self._closed_at_s.get(target, float("-inf")) >= CLOSE_EVERY_S:
            self._closed[target] = seconds
            self._closed_at_s[target] = now_s
            self._wake.set()

    async def _tell_closed(self) -> None:
        closed, self._closed = self._closed, {}
        for target, seconds in closed.items():
            now_s = await self._ledger.time_s()
            report = ReplicaReport(
                replica=target, target=target, engine="openai", node="", instance="", state=ReplicaState.DRAINING,
                scrape_start_at_s=now_s, scrape_end_at_s=now_s, capacity_blocks=0, block_tokens=1,
                running=0, waiting=0,
            )  # fmt: skip
            await self._ledger.publish([report], [], seconds)

    def _renew(self, record: LogRecord) -> None:
        reservation = reservation_from(record.fields, self._pool)
        if reservation is None:
            return
        if len(self._renewals) >= MAX_RENEWALS:
            self.dropped += 1
            return
        self._renewals[reservation.rid] = Upsert(
            reservation,
            self._config.ledger.lease_s,
            seen_age_s=record.ended_age_s,
            first_byte_age_s=record.first_byte_age_s,
            current_blocks=self._grown(record, reservation),
        )
        self._wake.set()

    def _grown(self, record: LogRecord, reservation: Reservation) -> int | None:
        """Blocks the request holds by now if it outgrew its prediction, as far as its answer so far tells; else None."""
        output = record.usage.get("output_tokens")
        if output is None:
            output = self._learning.tokens_from_bytes(
                _bytes_key(reservation.target, reservation.klass), record.response_bytes
            )
        view = self._view(reservation.replica)
        if output is None or view is None or view.report is None:
            return None
        need, block = reservation.need, view.report.block_tokens
        each = -(-output // (max(1, need.sequences) * block))
        blocks = min(reservation.cap_blocks, need.input_blocks + need.sequences * each)
        return blocks if blocks > need.kv_blocks else None

    def _end(self, record: LogRecord, owner: str, *, replica: str | None) -> None:
        target = str(record.fields.get("target") or self._target_of.get(record.cluster, ""))
        cool_s = self._lags.get(target, COOLING_S)
        if record.rid is not None:
            # The share cools as the ledger does: an engine frees later than a client leaves.
            if record.how in CLEAN_ENDS:
                self._share.ended(record.rid)
            else:
                asyncio.get_running_loop().call_later(cool_s, self._share.ended, record.rid)
        self._ends.append(
            End(
                rid=record.rid,
                owner=owner,
                request_id=record.request_id,
                how=record.how,
                ended_age_s=record.ended_age_s,
                replica=replica,
                cool_s=cool_s,
                first_byte_age_s=record.first_byte_age_s,
                began_age_s=record.began_age_s,
            )
        )
        self._wake.set()

    def _undecided(self, record: LogRecord, owner: str) -> None:
        """An exchange over without our metadata: Envoy never took our answer, so no engine saw the request.

        The client left, or Envoy waited too long, while we decided. The stream that decided gives its reservation
        back itself, unless its answer crossed the end on the way: that one is joined by the exchange it was made for.
        """
        exchange = exchange_id(record.request_id, record.began_us)
        rid = self._crossing.pop((owner, exchange), None)
        if rid is None:
            self._remember((owner, exchange), "")
        elif rid:
            self._observer.unsent(rid)
        self._ends.append(
            End(rid or None, owner, exchange, Ended.UNSENT, record.ended_age_s, began_age_s=record.began_age_s)
        )
        if record.how is Ended.CLIENT_ABORT and record.status is None:
            # An Envoy that was not told to send `request.time` knows its exchanges by request id alone.
            self._end(record, owner, replica=None)
        self._wake.set()

    def _finish(self, record: LogRecord, owner: str) -> None:
        if record.rid is None:
            self._undecided(record, owner)
            return
        # This end knows our answer, so the two did not cross.
        self._crossing.pop((owner, exchange_id(record.request_id, record.began_us)), None)
        if "pool" in record.fields:
            self._end(record, owner, replica=None)
        if "class" in record.fields:
            self._learn(record)
            self._observer.completed(record, record.usage.get("output_tokens"))
            plan = str(record.fields.get("plan") or record.fields.get("replica") or "").split(",")
            if record.cluster and record.cluster not in {replica_cluster(name, self._discovered) for name in plan}:
                self._observer.misrouted(record)

    def _learn(self, record: LogRecord) -> None:
        """Teach the predictors a complete answer: its tokens as reported, or as guessed from its bytes."""
        if record.how is not Ended.COMPLETE:
            return
        lane, klass = str(record.fields["lane"]), str(record.fields["class"])
        target = self._target_of.get(record.cluster, str(record.fields["target"]))
        # Until now, not until its end: what it held is free only once its end is known here.
        self._learning.observe_run((lane, target, klass), record.began_age_s)
        bytes_key = _bytes_key(target, klass)
        output = record.usage.get("output_tokens")
        if output is not None:
            self._learning.observe_bytes(bytes_key, record.response_bytes, output)
        else:
            output = self._learning.tokens_from_bytes(bytes_key, record.response_bytes)
        if output is None:
            return
        sequences = record.fields.get("sequences")
        each = math.ceil(output / max(1.0, sequences if isinstance(sequences, float) else 1.0))
        self._learning.observe_output((lane, target, klass), each)
        self._learning.observe_pace(target, record.began_age_s, each)


def _without_repeats(ends: Sequence[End]) -> Sequence[End]:
    """``ends`` without those of an attempt whose exchange ended in the same way and is told of in the same call.

    Nearly every request has one attempt, which ends with it; whoever hears of both at once needs to say it once.
    """
    whole = {end.rid: end.how for end in ends if end.replica is None and end.rid is not None}
    return [end for end in ends if end.replica is None or end.rid is None or whole.get(end.rid) is not end.how]


def _bytes_key(target: str, klass: str) -> tuple[str, bool, bool]:
    """What bytes per token depend on: the target, and whether the answer streams and calls tools."""
    _, stream, tools, _ = ([*klass.split(":"), "", "", "", ""])[:4]
    return target, stream == "s", tools == "t"
