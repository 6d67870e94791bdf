"""The reference ledger: every rule in plain Python, one process, time as an argument.

Synchronous and pure; it answers exactly as the Lua scripts do (the contract, property and model tests run both side
by side). ``inmemory.InMemoryLedger`` puts it behind the ``Ledger`` protocol.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from extproc.ledger import audit as audits
from extproc.ledger.base import (
    CLEAN_ENDS,
    SCRAPE_GRACE_S,
    SILENCE_S,
    AuditLine,
    Candidate,
    End,
    Ended,
    EndResult,
    LedgerSnapshot,
    LiveReservation,
    Reservation,
    ReserveRequest,
    ReserveResult,
    State,
    Upsert,
    Verdict,
)
from extproc.ledger.book import COOLING, ORPHANED, RESERVED, TOMBSTONE_US, Record, Tombstone, ghost_of, vram_of
from extproc.ledger.line import Due
from extproc.ledger.rules import (
    Room,
    Sums,
    expected_s,
    frees_in_us,
    health,
    refusal,
    starts_in_us,
    to_us,
    whole,
)
from extproc.ledger.scrapes import Scrapes
from extproc.ledger.views import view
from extproc.types import Reason

SILENCE_US, GRACE_US = to_us(SILENCE_S), to_us(SCRAPE_GRACE_S)
#: An exchange's begin is known this much too late at worst: its record was on the way for a while.
JOIN_SLACK_US = 1_000_000
#: How many due entries a reserve that was refused, and each end, look after on the way.
SWEEP_RESERVE, SWEEP_END = 64, 2
STATES = {RESERVED: State.RESERVED, COOLING: State.COOLING, ORPHANED: State.ORPHANED}


class ReferenceLedger(Scrapes):
    """One pool in memory; every method takes ``now_s``, seconds on the ledger's clock, which never runs backwards."""

    # -- reserve ----------------------------------------------------------------------------------------------

    def reserve(self, q: ReserveRequest, now_s: float) -> ReserveResult:
        """Reserve on the first candidate with room for everything."""
        now, book = to_us(now_s), self.book
        book.pool(now, self._fresh)
        known = book.records.get(q.rid)
        if known is not None:
            return self._again(q, known, now)
        fits, verdicts = self._look(q, now)
        if fits != 0 and book.is_due(now):
            book.sweep(now, SWEEP_RESERVE)
            fits, verdicts = self._look(q, now)
        chosen = fits
        if q.force:
            chosen = next((i for i, c in enumerate(q.candidates) if not c.remote), fits)
        if chosen is not None and not q.candidates[chosen].remote:
            self._take(q, q.candidates[chosen], verdicts[chosen], now)
        return ReserveResult(chosen, tuple(verdicts), now / 1e6)

    def _look(self, q: ReserveRequest, now: int) -> tuple[int | None, list[Verdict]]:
        verdicts: list[Verdict] = []
        fits: int | None = None
        for i, c in enumerate(q.candidates):
            verdicts.append(self._assess(q, c, fits is not None, now))
            if fits is None and verdicts[i].refused_by is None:
                fits = i
        return fits, verdicts

    def _again(self, q: ReserveRequest, known: Record | Tombstone, now: int) -> ReserveResult:
        live = known if isinstance(known, Record) and known.state != COOLING else None
        chosen: int | None = None
        verdicts = []
        for i, c in enumerate(q.candidates):
            v = Verdict("not_tried", "unknown")
            if live is not None and chosen is None:
                res = live.reservation
                if (c.target, c.replica) == (res.target, res.replica):
                    chosen, room, committed = i, live.pool_then, live.committed_then
                    v = Verdict(None, "ready", room, committed, room - committed)
                    if room < 0:
                        v = Verdict(None, "ready")
            verdicts.append(v)
        return ReserveResult(chosen, tuple(verdicts), now / 1e6, ended=live is None)

    def _assess(self, q: ReserveRequest, c: Candidate, tried: bool, now: int) -> Verdict:
        if c.remote:
            return Verdict("not_tried" if tried else None, "ready")
        book = self.book
        scrape, sums = book.scrapes.get(c.replica), book.sum_of(c.replica)
        epoch = book.pool(now)
        h = health(scrape, sums, whole(c.static_capacity_blocks), epoch, to_us(q.fresh_s), to_us(q.unknown_s), now)
        if h.size < 0:
            return Verdict("not_tried" if tried else str(h.refused_by), h.state)
        room = h.size - math.ceil(h.size * c.watermark)
        foreign = max(0, scrape.foreign) if scrape is not None and scrape.expires_us > now else 0
        committed = sums.kv + foreign
        refused, retry_us = h.refused_by, -1
        if tried:
            refused = "not_tried"
        elif refused is None:
            refused, retry_us = refusal(c, self._room(q, c, room, committed, h.state == "ready", now))
        refused = None if refused is None else str(refused)  # a plain string, as Redis answers
        return Verdict(refused, h.state, room, committed, room - committed, None if retry_us < 0 else retry_us / 1e6)

    def _room(self, q: ReserveRequest, c: Candidate, room: int, committed: int, fresh: bool, now: int) -> Room:
        book, own_us = self.book, to_us(expected_s(c, q))

        def frees_in(wanted: int, by_blocks: bool, lane: str | None, others: bool) -> int:
            return frees_in_us(book.walk(c.replica, by_blocks), wanted, lane, others, now, own_us)

        def starts_in(free: int, need: int, promised: Sequence[Due]) -> int:
            return starts_in_us(book.walk(c.replica, True), promised, free, need, now, own_us)

        def lane_frees_in() -> int:
            times = [
                frees_in_us(book.walk(o.replica, False), 0, q.lane, False, now, own_us)
                for o in q.candidates
                if not o.remote
            ]
            return min((t for t in times if t >= 0), default=-1)

        return Room(
            room, committed, book.sum_of(c.replica), book.scrapes.get(c.replica), fresh, now, q.lane,
            whole(q.lane_concurrency), lambda: book.lanes.get(q.lane, 0), lane_frees_in, frees_in, starts_in,
            lambda: self._device_refusal(c, to_us(q.unknown_s), now),
        )  # fmt: skip

    def _device_refusal(self, c: Candidate, known_for_us: int, now: int) -> str | None:
        for i, uuid in enumerate(c.devices):
            need = c.need.vram_bytes[i] if i < len(c.need.vram_bytes) else 0
            d = self.book.devices.get(uuid)
            if d is not None and d.report.state == "lost":
                return Reason.UNKNOWN_STATE
            free = whole(d.report.free_bytes) if d is not None and d.report.state != "unknown" else -1
            if d is None or d.expires_us <= now or now - d.start_us > known_for_us or free < 0:
                if need > 0:
                    return Reason.UNKNOWN_STATE
            elif free - self.book.pending_bytes.get(uuid, 0) - need < c.device_guard_bytes:
                return Reason.INSUFFICIENT_HEADROOM
        return None

    def _take(self, q: ReserveRequest, c: Candidate, v: Verdict, now: int) -> None:
        res = Reservation(
            q.rid, c.target, c.replica, q.lane, q.owner, q.request_id, q.klass, now / 1e6, c.need, q.input_tokens,
            q.expected_output_tokens, q.max_output_tokens, c.cap_blocks, c.cap_s, c.devices, to_us(expected_s(c, q)) / 1e6,
        )  # fmt: skip
        s, rate = self.book.sum_of(c.replica), c.prefill_rate or 0.0
        r = _record(res, now, now + to_us(q.lease_s), seen=now, first=-1)
        r.ahead = s.level_now(rate, now) if rate > 0 else 0.0
        r.pool_then, r.committed_then = whole(v.capacity_blocks), whole(v.committed_blocks)
        self.book.insert(q.rid, r)
        if rate > 0:
            s.level, s.level_at_us, s.rate = r.ahead + c.need.prefill_tokens, now, rate

    # -- renew ------------------------------------------------------------------------------------------------

    def renew(self, records: Sequence[Upsert], now_s: float) -> list[bool]:
        """Renew or rebuild; False where the rid had ended."""
        now = to_us(now_s)
        self.book.pool(now, self._fresh)
        return [self._upsert(u, now) for u in records]

    def _upsert(self, u: Upsert, now: int) -> bool:
        book, rid = self.book, u.reservation.rid
        seen = now - max(0, to_us(u.seen_age_s))
        first = -1 if u.first_byte_age_s is None else now - to_us(u.first_byte_age_s)
        old = book.records.get(rid)
        if seen < now - TOMBSTONE_US or isinstance(old, Tombstone) or (old is not None and old.state == COOLING):
            return False
        new = _record(u.reservation, now, seen + to_us(u.lease_s), seen=seen, first=first)
        new.current = max(new.current, whole(u.current_blocks))
        if old is None:
            self._adopt(rid, new)
        elif old.reservation.replica != u.reservation.replica:
            if seen > old.seen_us:
                self._move(rid, old, new, now)
        else:
            self._extend(rid, old, new, whole(u.current_blocks))
        return True

    def _extend(self, rid: str, old: Record, new: Record, blocks: int) -> None:
        book = self.book
        if blocks > old.current:
            s = book.sum_of(old.reservation.replica)
            before = s.kv
            book.move_stock(rid, old, blocks)
            if self._over(old.reservation.replica, s, before):
                s.over_grew += 1
        book.unorphan(rid, old)
        old.state = RESERVED
        old.lease_us, old.seen_us = max(old.lease_us, new.lease_us), max(old.seen_us, new.seen_us)
        if new.first_us >= 0 and (old.first_us < 0 or new.first_us < old.first_us):
            old.first_us = new.first_us
        book.set_due(rid, old.lease_us)

    def _over(self, replica: str, s: Sums, before: int) -> bool:
        p = self.book.scrapes.get(replica)
        return p is not None and p.capacity >= 0 and s.kv + max(0, p.foreign) > p.capacity and s.kv > before

    def _adopt(self, rid: str, r: Record) -> None:
        before = self.book.sum_of(r.reservation.replica).kv
        s = self.book.insert(rid, r)
        if self._over(r.reservation.replica, s, before):
            s.over_adopted += 1

    def _move(self, rid: str, old: Record, new: Record, now: int) -> None:
        book = self.book
        book.release(rid, old, Ended.MOVED, now, now)
        book.ended[old.reservation.replica].remove((now, rid))
        for device, size in vram_of(old.reservation):
            book.settle_vram(device, rid, size)
        ghost = f"{rid}~{old.reservation.replica}"
        if ghost not in book.records:
            left = ghost_of(old, ghost, now, now + GRACE_US)
            book.insert(ghost, left)
            book.unjoin(left)
        self._adopt(rid, new)

    # -- end, reap --------------------------------------------------------------------------------------------

    def end(self, ends: Sequence[End], now_s: float) -> list[EndResult]:
        """End reservations; each leaves a tombstone, known or not."""
        now = to_us(now_s)
        self.book.pool(now, self._fresh)
        self.book.sweep(now, SWEEP_END * len(ends))
        return [self._end(e, now) for e in ends]

    def _end(self, e: End, now: int) -> EndResult:
        book, ended = self.book, now - max(0, to_us(e.ended_age_s))
        rid = e.rid
        if not rid:
            self._join(e, ended, now)
            return EndResult(False)
        if rid not in book.records:
            book.bury(rid, Tombstone(e.how, e.replica or "", ended, 0, 0, 0, -1, ended, ()), now)
        r = book.live(rid)
        if r is None or (e.replica and e.replica != r.reservation.replica):
            return EndResult(False)
        if r.state == COOLING:
            if e.how == Ended.OPERATOR:
                book.add_back(r)
                book.release(rid, r, e.how, r.ended_us, now)
            return EndResult(False)
        self._finish(rid, r, e, min(now, max(ended, r.made_us)), now)
        if e.how == Ended.OPERATOR:
            book.add_back(r)
        return EndResult(True)

    def _join(self, e: End, ended: int, now: int) -> None:
        """Orphan the undecided reservation of this exchange; the request id may be another's, so no release."""
        rid = self.book.joins.get((e.owner, e.request_id), "")
        r = self.book.live(rid)
        began = 0 if e.began_age_s is None else now - to_us(e.began_age_s) - JOIN_SLACK_US
        if r is not None and r.state == RESERVED and began <= r.made_us <= ended and r.seen_us <= r.made_us:
            self.book.orphan(rid, r)

    def _finish(self, rid: str, r: Record, e: End, ended: int, now: int) -> None:
        book = self.book
        if e.first_byte_age_s is not None and r.first_us < 0:
            r.first_us = now - to_us(e.first_byte_age_s)
        if e.how != Ended.COMPLETE:
            book.give_back(r, ended, now)
        cool_until = ended + to_us(e.cool_s)
        if e.how in CLEAN_ENDS or cool_until <= now:
            book.release(rid, r, e.how, ended, now)
            return
        book.unorphan(rid, r)
        r.state, r.ended_us, r.how, r.lease_us = COOLING, ended, e.how.value, cool_until
        book.unjoin(r)
        book.set_due(rid, cool_until)

    def reap(
        self, now_s: float, *, listened_s: float | None = None, owners: Sequence[str] = (), limit: int = 500,
        asked_s: float | None = None,
    ) -> tuple[int, bool]:  # fmt: skip
        """One round of rules 4 and 6; returns (released, whether more is due).

        ``asked_s`` is when it was asked for, where that was earlier: the silence counts up to then.
        """
        now, book = to_us(now_s), self.book
        book.pool(now, self._fresh)
        looked, released = book.sweep(now, limit)
        asked = now if asked_s is None else min(now, to_us(asked_s))
        if listened_s is not None and to_us(listened_s) >= SILENCE_US:
            for owner in owners:
                for rid in list(book.orphans.get(owner, ()))[:limit]:
                    r = book.live(rid)
                    if r is not None and asked - r.seen_us >= SILENCE_US:
                        book.lapse(rid, r, now)
                        released += 1
        return released, looked >= limit

    # -- reading, operator ------------------------------------------------------------------------------------

    def snapshot(self, now_s: float) -> LedgerSnapshot:
        """Sums and reports of the whole pool."""
        now, book = to_us(now_s), self.book
        epoch = book.epoch
        replicas = {
            name: view(name, book.scrapes.get(name), book.sums.get(name, Sums()), epoch, now)
            for name in {*book.scrapes, *book.sums}
        }
        return LedgerSnapshot(
            now / 1e6, replicas, dict(book.lanes), {k: d.report for k, d in book.devices.items()},
            dict(book.pending_bytes), epoch.name if epoch else "", sum(1 for at in book.alive.values() if at > now),
            epoch.loss_us / 1e6 if epoch and epoch.loss_us else None,
        )  # fmt: skip

    def reservations(self, replica: str) -> list[LiveReservation]:
        """Every live reservation of one replica, earliest expected end first."""
        out = []
        for rid in self.book.rids(replica):
            r = self.book.records[rid]
            assert isinstance(r, Record)
            first = None if r.first_us < 0 else r.first_us / 1e6
            out.append(LiveReservation(r.reservation, STATES[r.state], r.lease_us / 1e6, r.current, first))
        return out

    def drain(self, replica: str, on: bool) -> None:
        """Stop (or resume) new work on a replica."""
        self.book.sum_of(replica).drained = on

    def audit(self) -> list[AuditLine]:
        """Every stored sum beside the same sum recomputed from the records."""
        return audits.audit(self.book)

    def heartbeat(self, instance: str, ttl_s: float, now_s: float) -> int:
        """One sidecar's sign of life; returns how many live."""
        now, alive = to_us(now_s), self.book.alive
        self.book.pool(now, self._fresh)
        for name in [n for n, at in alive.items() if at <= now]:
            del alive[name]
        if ttl_s > 0:
            alive[instance] = now + to_us(ttl_s)
        else:
            alive.pop(instance, None)
        return len(alive)


def _record(res: Reservation, now: int, lease: int, *, seen: int, first: int) -> Record:
    made = min(to_us(res.reserved_at_s), now)
    return Record(res, RESERVED, made, to_us(res.cap_s), to_us(res.expected_s), res.need.kv_blocks, lease, first, seen)
