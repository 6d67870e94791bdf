"""The in-memory ledger's side of an agent's round: what a scrape proves, what is foreign, what a restart voids.

Pure, as ``lua/publish.lua`` states it; ``reference.ReferenceLedger`` adds the calls of the sidecars.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from extproc.ledger.base import (
    IDLE_AFTER_S,
    IDLE_SILENT_S,
    LOSS_PERIODS,
    SCRAPE_GRACE_S,
    DeviceReport,
    Ended,
    PublishResult,
    ReplicaReport,
)
from extproc.ledger.book import COOLING, ORPHANED, Book, Record, StoredDevice, Tombstone
from extproc.ledger.rules import BYPASS_US, Scrape, Trial, foreign_blocks, to_us, whole

GRACE_US = to_us(SCRAPE_GRACE_S)
IDLE_US, IDLE_SILENT_US = to_us(IDLE_AFTER_S), to_us(IDLE_SILENT_S)
#: A scrape this far ahead of the ledger's clock is not believed.
FUTURE_US = 1_000_000
#: Every TIDY_US, reports that lapsed FORGET_US ago are forgotten.
TIDY_US, FORGET_US = 60_000_000, 3_600_000_000
#: How many due entries a publish looks after on the way.
SWEEP_PUBLISH = 64


#: A scrape that was not confirmed for this long gives its place to a newer one.
TRIAL_US = 3_000_000
#: Ends that Envoy saw, at the time that it saw them.
WITNESSES = frozenset({Ended.COMPLETE, Ended.CLIENT_ABORT, Ended.UPSTREAM_RESET, Ended.UPSTREAM_ERROR, Ended.TIMEOUT})


def _next_trial(trial: Trial | None, latest: Trial, ripe_us: int) -> Trial | None:
    """The scrape that has to be confirmed: an empty one at once, else the earlier for as long as it may still be."""
    if latest.start_us < ripe_us or latest.load < 0:
        return None
    if latest.load == 0 or trial is None or trial.start_us < ripe_us or latest.start_us - trial.start_us >= TRIAL_US:
        return latest
    return trial


class Scrapes:
    """The state of one pool and what agents do to it.

    ``fresh`` says that nothing ran before, so that the first use is a beginning and not a loss of data;
    ``periodic_s`` is the access log's flush interval.
    """

    def __init__(self, *, fresh: bool = True, periodic_s: float = 1.0) -> None:
        self.book = Book()
        self._fresh = fresh
        self._periodic_us = to_us(periodic_s)

    def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float, now_s: float
    ) -> PublishResult:
        """Store one agent round and recompute what foreign load it shows."""
        now = to_us(now_s)
        self.book.pool(now, self._fresh)
        self.book.sweep(now, SWEEP_PUBLISH)
        result = PublishResult({}, {}, {})
        for report in replicas:
            foreign, bypass, voided = self._take_report(report, to_us(ttl_s), now)
            result.foreign_blocks[report.replica] = None if foreign < 0 else foreign
            result.bypass[report.replica], result.voided[report.replica] = bypass, voided
        for device in devices:
            self._take_device(device, to_us(ttl_s), now)
        if now - self.book.tidied_us >= TIDY_US:
            self._tidy(now)
        return result

    def _tidy(self, now: int) -> None:
        """Forget replicas and devices that nobody has reported for an hour and that hold nothing."""
        book = self.book
        book.tidied_us = now
        for name in [n for n, p in book.scrapes.items() if now - p.expires_us >= FORGET_US]:
            s = book.sum_of(name)
            if s.reservations == 0 and not s.drained:
                del book.scrapes[name], book.sums[name]
        for uuid in [u for u, d in book.devices.items() if now - d.expires_us >= FORGET_US]:
            del book.devices[uuid]

    def _take_report(self, c: ReplicaReport, ttl_us: int, now: int) -> tuple[int, bool, int]:
        book, old, epoch = self.book, self.book.scrapes.get(c.replica), self.book.pool(now)
        told_us = to_us(c.scrape_start_at_s)
        start = min(told_us, now)
        if told_us > now + FUTURE_US or (old is not None and old.start_us > start):
            return (old.foreign if old is not None else -1), False, 0
        stop = min(max(to_us(c.scrape_end_at_s), start), now)
        running, capacity = whole(c.running), whole(c.capacity_blocks)
        load = running + max(0, whole(c.waiting)) if running >= 0 else -1
        started = -1 if c.engine_started_at_s is None else to_us(c.engine_started_at_s)
        sequences, blocks, inputs, voided = self._ours(c.replica, start, stop, started, load == 0, now)
        bypass_at, proven = (old.bypass_at_us, old.proven) if old is not None else (-1, "")
        if load > sequences:
            bypass_at = stop
        bypass = (bypass_at >= 0 and now - bypass_at <= BYPASS_US) or (load < 0 and c.shows_used)
        foreign = foreign_blocks(whole(c.used_blocks), c.shows_used, bypass, blocks, inputs)
        trial = old.trial if old is not None else None
        if proven != epoch.name:
            ripe_us = epoch.loss_us + LOSS_PERIODS * self._periodic_us
            trial = _next_trial(trial, Trial(start, stop, load), ripe_us)
            if trial is not None and trial.load <= self._witnessed(c.replica, trial):
                proven, trial = epoch.name, None
        s = book.sum_of(c.replica)
        if capacity >= 0 and foreign > max(0, old.foreign if old is not None else 0) and s.kv + foreign > capacity:
            s.over_foreign += 1
        book.scrapes[c.replica] = Scrape(
            c, start, stop, capacity, whole(c.waiting), whole(c.max_sequences), now + ttl_us, foreign, bypass_at,
            bypass, proven, trial,
        )  # fmt: skip
        return foreign, bypass, voided

    def _witnessed(self, replica: str, trial: Trial) -> int:
        """Sequences that later records show to have been there during the whole of that scrape.

        A reservation that is merely not known to have ended may have, and then its place in the engine's count is
        another's: one that the lost data held (model seed 913892).
        """
        book, sequences = self.book, 0
        buried = book.ended.get(replica, [])
        for _, rid in buried[bisect_left(buried, (trial.stop_us, "")) :]:
            t = book.records[rid]
            if isinstance(t, Tombstone) and t.made_us < trial.start_us and t.how in WITNESSES:
                sequences += t.sequences
        for rid in book.rids(replica):
            r = book.records[rid]
            assert isinstance(r, Record)
            last_us = r.seen_us if r.state != COOLING else r.ended_us if r.how in WITNESSES else -1
            if r.made_us < trial.start_us and last_us >= trial.stop_us:
                sequences += r.reservation.need.sequences
        return sequences

    def _ours(
        self, replica: str, start: int, stop: int, started: int, idle: bool, now: int
    ) -> tuple[int, int, int, int]:
        """(sequences, blocks, input blocks, voided) of the reservations a scrape can have seen."""
        book = self.book
        total = [0, 0, 0, 0]

        def tally(made: int, first: int, ended: int, blocks: int, inputs: int, sequences: int) -> None:
            if made >= stop:
                return
            if ended < 0 or ended >= start - GRACE_US:
                total[0] += sequences
                total[1] += blocks
            if 0 <= first < start and (ended < 0 or ended >= stop):
                total[2] += inputs

        buried = book.ended.get(replica, [])
        for _, rid in buried[bisect_left(buried, (max(0, start - GRACE_US), "")) :]:
            t = book.records[rid]
            if isinstance(t, Tombstone) and t.made_us >= started:
                tally(t.made_us, t.first_us, t.ended_us, t.current, t.input_blocks, t.sequences)
        for rid in book.rids(replica):
            r = book.records[rid]
            assert isinstance(r, Record)
            silent = r.seen_us <= start - IDLE_SILENT_US and start >= r.made_us + IDLE_US
            if r.made_us < started:
                book.give_back(r, now, now)
                book.release(rid, r, Ended.VOIDED, r.ended_us if r.ended_us >= 0 else now, now)
                total[3] += 1
            elif idle and r.state == ORPHANED and silent:
                book.lapse(rid, r, now)
            else:
                need = r.reservation.need
                tally(r.made_us, r.first_us, r.ended_us, r.current, need.input_blocks, need.sequences)
        return total[0], total[1], total[2], total[3]

    def _take_device(self, d: DeviceReport, ttl_us: int, now: int) -> None:
        book, told_us = self.book, to_us(d.scrape_start_at_s)
        start, old = min(told_us, now), self.book.devices.get(d.uuid)
        if told_us > now + FUTURE_US or (old is not None and old.start_us > start):
            return
        for device, rid, size in [p for p in book.pending if p[0] == d.uuid]:
            r = book.records.get(rid)
            if r is None or 0 <= r.first_us < start or 0 <= r.ended_us < start:
                book.settle_vram(device, rid, size)
        book.devices[d.uuid] = StoredDevice(d, start, now + ttl_us)
