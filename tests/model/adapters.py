"""The real scripts behind the reference's synchronous interface, and both side by side.

One blocking socket, the product's own wire format, the clock injected: a call costs one loopback round trip.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import hiredis

from extproc.ledger import keys, scripts, wire
from extproc.ledger.base import (
    AuditLine,
    DeviceReport,
    End,
    EndResult,
    LedgerSnapshot,
    PublishResult,
    ReplicaReport,
    ReserveRequest,
    ReserveResult,
    Upsert,
)
from extproc.ledger.reference import ReferenceLedger
from extproc.ledger.rules import to_us


class ScriptLedger:
    """One pool on a real server; ``wipe`` loses its data."""

    def __init__(self, port: int, pool: str, *, fresh: bool = True, periodic_s: float = 1.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self._scripts = scripts.load_all()
        for script in self._scripts.values():
            self.command("SCRIPT", "LOAD", script.text)
        self._fresh, self._periodic_s = fresh, periodic_s
        self.reset(pool, fresh=fresh)

    def reset(self, pool: str, *, fresh: bool) -> None:
        """Go on with another pool; the old one's data is removed."""
        if hasattr(self, "_keys"):
            self.wipe()
        self._keys, self._fresh = keys.script_keys(pool), fresh

    def command(self, *parts: Any) -> Any:
        """One command's reply; an error reply is raised."""
        self._socket.sendall(hiredis.pack_command(parts))  # type: ignore[arg-type]
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def _run(self, name: str, payload: bytes, now_s: float) -> Any:
        sha = self._scripts[name].sha
        return self.command("EVALSHA", sha, len(self._keys), *self._keys, str(to_us(now_s)), payload)

    def wipe(self) -> None:
        """Lose everything of this pool."""
        self.command("DEL", *self._keys)
        self._fresh = False

    def close(self) -> None:
        """Remove the pool and give the connection back."""
        self.wipe()
        self._socket.close()

    def init(self, now_s: float) -> None:
        """Make the epoch."""
        self._run("init", wire.encode([int(self._fresh)]), now_s)

    def reserve(self, q: ReserveRequest, now_s: float) -> ReserveResult:
        """See ``ReferenceLedger.reserve``."""
        return self.reserve_all([q], now_s)[0]

    def reserve_all(self, requests: Sequence[ReserveRequest], now_s: float) -> list[ReserveResult]:
        """Several requests in one call, decided one after the other."""
        raw = self._run("reserve", wire.together([wire.reserve(q) for q in requests]), now_s)
        return [wire.reserve_result(answer) for answer in wire.decode(raw)]

    def renew(self, records: Sequence[Upsert], now_s: float) -> list[bool]:
        """See ``ReferenceLedger.renew``."""
        return [bool(a) for a in wire.decode(self._run("renew", wire.renew(records), now_s))]

    def end(self, ends: Sequence[End], now_s: float) -> list[EndResult]:
        """See ``ReferenceLedger.end``."""
        raw = self._run("end", wire.together([wire.ends(ends, [0.0] * len(ends))]), now_s)
        return [EndResult(bool(done)) for (batch,) in [wire.decode(raw)] for done in batch]

    def reap(
        self, now_s: float, *, listened_s: float | None = None, owners: Sequence[str] = (), limit: int = 500
    ) -> tuple[int, bool]:
        """See ``ReferenceLedger.reap``."""
        listened = -1 if listened_s is None else to_us(listened_s)
        released, more = wire.decode(self._run("reap", wire.encode([listened, list(owners), limit]), now_s))
        return released, bool(more)

    def publish(
        self, replicas: Sequence[ReplicaReport], devices: Sequence[DeviceReport], ttl_s: float, now_s: float
    ) -> PublishResult:
        """See ``ReferenceLedger.publish``."""
        result = PublishResult({}, {}, {})
        raw = self._run("publish", wire.publish(replicas, devices, ttl_s, self._periodic_s), now_s)
        for name, foreign, bypass, voided, _taken in wire.decode(raw):
            result.foreign_blocks[name] = None if foreign < 0 else int(foreign)
            result.bypass[name], result.voided[name] = bool(bypass), voided
        return result

    def snapshot(self, now_s: float) -> LedgerSnapshot:
        """See ``ReferenceLedger.snapshot``."""
        return wire.snapshot(self._run("snapshot", b"", now_s))

    def audit(self) -> list[AuditLine]:
        """See ``ReferenceLedger.audit``."""
        return [AuditLine(*line) for line in wire.decode(self._run("audit", b"", 0.0))]


class Reference(ReferenceLedger):
    """The reference with the data loss and the reset of ``ScriptLedger``."""

    def reset(self, pool: str, *, fresh: bool) -> None:
        """Begin anew."""
        super().__init__(fresh=fresh)

    def wipe(self) -> None:
        """Lose everything."""
        super().__init__(fresh=False)

    def init(self, now_s: float) -> None:
        """Make the epoch."""
        self.book.pool(to_us(now_s), self._fresh)

    def close(self) -> None:
        """Nothing to give back."""


class Both:
    """The scripts and the reference in lockstep: every answer is compared."""

    def __init__(self, real: ScriptLedger) -> None:
        self.real, self.reference = real, Reference()

    def _both(self, name: str, *args: Any, **kwargs: Any) -> Any:
        expected = getattr(self.reference, name)(*args, **kwargs)
        actual = getattr(self.real, name)(*args, **kwargs)
        assert actual == expected, f"{name}: the scripts said {actual}, the reference {expected}"
        return actual

    def __getattr__(self, name: str) -> Any:
        if name == "audit":
            return self.real.audit
        return lambda *args, **kwargs: self._both(name, *args, **kwargs)
