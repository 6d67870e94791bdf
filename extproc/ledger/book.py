"""The in-memory ledger's stock-keeping: records, sums and indexes, as ``lua/_lib.lua`` keeps them.

Owns state and its bookkeeping; knows neither callers nor clocks: every time is an argument in whole microseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

from msgspec import structs

from extproc.ledger.base import RETRY_WALK, TOMBSTONE_S, DeviceReport, Ended, Reservation
from extproc.ledger.rules import SEPARATOR, Epoch, Scrape, Sums, to_us

TOMBSTONE_US = to_us(TOMBSTONE_S)
RESERVED, COOLING, ORPHANED = "r", "c", "o"


@dataclass(slots=True)
class Record:
    """One live reservation; -1 for "not yet" in ``first_us`` and ``ended_us``."""

    reservation: Reservation
    state: str
    made_us: int
    cap_us: int
    expected_us: int
    current: int
    lease_us: int
    first_us: int
    seen_us: int
    ended_us: int = -1
    ahead: float = 0.0
    pool_then: int = -1
    committed_then: int = -1
    how: str = ""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What remains of an ended reservation for 60 s."""

    how: str
    replica: str
    made_us: int
    current: int
    input_blocks: int
    sequences: int
    first_us: int
    ended_us: int
    vram: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class StoredDevice:
    """The last accepted report of one device."""

    report: DeviceReport
    start_us: int
    expires_us: int


def vram_of(r: Reservation) -> tuple[tuple[str, int], ...]:
    """(device, bytes) of every shard that takes something."""
    return tuple((d, b) for d, b in zip(r.devices, r.need.vram_bytes, strict=False) if b > 0)


@dataclass(slots=True)
class Book:
    """All state of one pool. Sums equal their parts after every method."""

    epoch: Epoch | None = None
    records: dict[str, Record | Tombstone] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)
    scrapes: dict[str, Scrape] = field(default_factory=dict)
    devices: dict[str, StoredDevice] = field(default_factory=dict)
    pending: dict[tuple[str, str, int], None] = field(default_factory=dict)
    pending_bytes: dict[str, int] = field(default_factory=dict)
    index: dict[str, list[str]] = field(default_factory=dict)
    joins: dict[tuple[str, str], str] = field(default_factory=dict)
    ended: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    orphans: dict[str, list[str]] = field(default_factory=dict)
    tidied_us: int = 0
    alive: dict[str, int] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    due_heap: list[tuple[int, str]] = field(default_factory=list)

    def pool(self, now: int, declared_new: bool = False) -> Epoch:
        """The pool's epoch; a missing one is a loss seen now, unless the caller knows that nothing ran before."""
        if self.epoch is None:
            self.epoch = Epoch(f"{now:016d}", 0 if declared_new else now)
        return self.epoch

    def sum_of(self, replica: str) -> Sums:
        """The sums of one replica, made on first use."""
        return self.sums.setdefault(replica, Sums())

    def live(self, rid: str) -> Record | None:
        """The live record of a rid."""
        found = self.records.get(rid)
        return found if isinstance(found, Record) else None

    def set_due(self, rid: str, at: int) -> None:
        """Something happens to this rid by itself at that time."""
        self.due[rid] = at
        heapq.heappush(self.due_heap, (at, rid))

    @staticmethod
    def entry(rid: str, r: Record) -> str:
        """The record's place in its replica's index: earliest expected end first."""
        parts = (f"{r.made_us + r.expected_us:016d}", str(r.current), str(r.reservation.need.sequences))
        return SEPARATOR.join((*parts, r.reservation.lane, rid))

    def place(self, rid: str, r: Record) -> None:
        """Put a record into its replica's index."""
        insort(self.index.setdefault(r.reservation.replica, []), self.entry(rid, r))

    def unplace(self, rid: str, r: Record) -> None:
        """Take a record out of its replica's index."""
        entries, entry = self.index[r.reservation.replica], self.entry(rid, r)
        at = bisect_left(entries, entry)
        if entries[at] == entry:
            del entries[at]

    def rids(self, replica: str) -> list[str]:
        """Live reservation ids of one replica, earliest expected end first."""
        return [entry.rsplit(SEPARATOR, 1)[1] for entry in self.index.get(replica, ())]

    def walk(self, replica: str, by_blocks: bool) -> list[tuple[int, int, str]]:
        """(expected end, blocks or sequences, lane) of the first RETRY_WALK entries."""
        out = []
        for entry in self.index.get(replica, [])[:RETRY_WALK]:
            end, blocks, sequences, lane, _rid = entry.split(SEPARATOR)
            out.append((int(end), int(blocks if by_blocks else sequences), lane))
        return out

    def add_stock(self, r: Record, sign: int) -> Sums:
        """Add (1) or take away (-1) what a record takes."""
        res = r.reservation
        s = self.sum_of(res.replica)
        s.kv += sign * r.current
        s.sequences += sign * res.need.sequences
        s.reservations += sign
        blocks = s.lanes.get(res.lane, 0) + sign * r.current
        if blocks:
            s.lanes[res.lane] = blocks
        else:
            s.lanes.pop(res.lane, None)
        live = self.lanes.get(res.lane, 0) + sign
        if live > 0:
            self.lanes[res.lane] = live
        else:
            self.lanes.pop(res.lane, None)
        return s

    def insert(self, rid: str, r: Record) -> Sums:
        """A new live record, with all its index entries."""
        s = self.add_stock(r, 1)
        self.records[rid] = r
        self.place(rid, r)
        self.set_due(rid, r.lease_us)
        self.joins[r.reservation.owner, r.reservation.request_id] = rid
        for device, size in vram_of(r.reservation):
            if (device, rid, size) not in self.pending:
                self.pending[device, rid, size] = None
                self.pending_bytes[device] = self.pending_bytes.get(device, 0) + size
        return s

    def settle_vram(self, device: str, rid: str, size: int) -> None:
        """These bytes are in the device's own figure by now, or gone."""
        if (device, rid, size) in self.pending:
            del self.pending[device, rid, size]
            self.pending_bytes[device] -= size
            if self.pending_bytes[device] <= 0:
                del self.pending_bytes[device]

    def unjoin(self, r: Record) -> None:
        """An ended reservation is not found by request id any more (nor another that shared the id)."""
        self.joins.pop((r.reservation.owner, r.reservation.request_id), None)

    def unorphan(self, rid: str, r: Record) -> None:
        """A record leaves the state ``orphaned``."""
        if r.state == ORPHANED:
            self.sum_of(r.reservation.replica).orphans -= 1
            self.orphans[r.reservation.owner].remove(rid)

    def bury(self, rid: str, t: Tombstone, now: int) -> None:
        """Leave a tombstone for 60 s."""
        self.records[rid] = t
        self.set_due(rid, now + TOMBSTONE_US)
        insort(self.ended.setdefault(t.replica, []), (t.ended_us, rid))

    def release(self, rid: str, r: Record, how: str, ended: int, now: int) -> None:
        """The record leaves the sums; only its tombstone stays."""
        self.add_stock(r, -1)
        self.unplace(rid, r)
        if r.state != COOLING:
            self.unjoin(r)
        self.unorphan(rid, r)
        res = r.reservation
        need = res.need
        self.bury(
            rid,
            Tombstone(how, res.replica, r.made_us, r.current, need.input_blocks, need.sequences, r.first_us, ended,
                      vram_of(res)),
            now,
        )  # fmt: skip

    def add_back(self, r: Record) -> None:
        """What was subtracted from the engine's used blocks and leaves without an end record may still be there."""
        p = self.scrapes.get(r.reservation.replica)
        if p is not None and p.bypass_formula and p.foreign >= 0 and 0 <= r.first_us < p.start_us:
            p.foreign += r.reservation.need.input_blocks

    def give_back(self, r: Record, ended: int, now: int) -> None:
        """The unserved rest of a prompt that was aborted before its first byte leaves the bucket."""
        s, charge = self.sum_of(r.reservation.replica), r.reservation.need.prefill_tokens
        if charge <= 0 or r.first_us >= 0 or s.rate <= 0:
            return
        level = s.level_now(s.rate, now)
        served = min(charge, max(0.0, s.rate * (ended - r.made_us) / 1000000 - r.ahead))
        s.level, s.level_at_us = max(0.0, level - (charge - served)), now

    def lapse(self, rid: str, r: Record, now: int) -> None:
        """Give up an orphan."""
        self.add_back(r)
        self.give_back(r, now, now)
        self.release(rid, r, Ended.ORPHANED, now, now)

    def orphan(self, rid: str, r: Record) -> None:
        """A lease ran out: the reservation goes on counting, in full."""
        r.state = ORPHANED
        self.sum_of(r.reservation.replica).orphans += 1
        insort(self.orphans.setdefault(r.reservation.owner, []), rid)
        self.set_due(rid, r.made_us + r.cap_us)

    def forget(self, rid: str, t: Tombstone) -> None:
        """A tombstone's time is over."""
        for device, size in t.vram:
            self.settle_vram(device, rid, size)
        del self.records[rid], self.due[rid]
        self.ended[t.replica].remove((t.ended_us, rid))

    def is_due(self, now: int) -> bool:
        """Whether a sweep would find anything."""
        heap = self.due_heap
        while heap and self.due.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return bool(heap) and heap[0][0] <= now

    def sweep(self, now: int, limit: int) -> tuple[int, int]:
        """Do what is due, oldest first, at most ``limit`` entries; returns (looked at, released)."""
        rids: list[str] = []
        while self.due_heap and self.due_heap[0][0] <= now and len(rids) < limit:
            at, rid = heapq.heappop(self.due_heap)
            if self.due.get(rid) == at and rid not in rids:
                rids.append(rid)
        released = 0
        for rid in rids:
            r = self.records[rid]
            if isinstance(r, Tombstone):
                self.forget(rid, r)
            elif r.state == COOLING:
                self.release(rid, r, r.how, r.ended_us, now)
                released += 1
            elif r.state == ORPHANED:
                self.lapse(rid, r, now)
                released += 1
            else:
                self.orphan(rid, r)
        return len(rids), released

    def move_stock(self, rid: str, r: Record, blocks: int) -> None:
        """A running request outgrew its prediction."""
        self.unplace(rid, r)
        self.add_stock(r, -1)
        r.current = blocks
        self.add_stock(r, 1)
        self.place(rid, r)


def ghost_of(r: Record, rid: str, now: int, until: int) -> Record:
    """What a moved reservation leaves cooling on its old replica, under an id of its own."""
    res = structs.replace(r.reservation, rid=rid)
    return replace(r, reservation=res, state=COOLING, ended_us=now, how=Ended.MOVED.value, lease_us=until)
