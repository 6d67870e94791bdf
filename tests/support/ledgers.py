"""Builders for ledger tests: small values with everything that does not matter left out, and a clock to set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from extproc.ledger.base import (
    Candidate,
    DeviceReport,
    End,
    Ended,
    ReplicaReport,
    ReplicaState,
    Reservation,
    ReserveRequest,
    Upsert,
)
from extproc.types import Need

#: Where the tests' clock begins: a present-day epoch, so that microseconds use all their digits.
START_S = 1_764_426_148.125


@dataclass
class Clock:
    """The ledger's clock of a test, in seconds."""

    now_s: float = START_S

    def __call__(self) -> float:
        return self.now_s

    def tick(self, seconds: float) -> float:
        """Let time pass; returns the new time."""
        self.now_s = round((self.now_s + seconds) * 1e6) / 1e6  # whole microseconds, as the ledger keeps them
        return self.now_s


def need(blocks: int = 10, *, inputs: int | None = None, prefill: int = 0, sequences: int = 1, **more: Any) -> Need:
    """What a request takes; its prompt takes half the blocks unless told."""
    return Need(blocks, blocks // 2 if inputs is None else inputs, 0, prefill, sequences, **more)


def candidate(
    replica: str = "a", *, target: str = "", n: Need | None = None, remote: bool = False, **more: Any
) -> Candidate:
    """A place to go; ``watermark`` is 0 so that the figures are easy to follow."""
    settings: dict[str, Any] = {"watermark": 0.0, "cap_s": 600.0, "expected_s": 10.0, **more}
    return Candidate(target or f"t-{replica}", replica, remote, n or need(), **settings)


def ask(rid: str, *candidates: Candidate, lane: str = "fast", **more: Any) -> ReserveRequest:
    """One decision."""
    settings: dict[str, Any] = {
        "owner": "envoy-1", "request_id": f"x-{rid}", "klass": "chat", "input_tokens": 100, "expected_output_tokens": 50,
        "max_output_tokens": 100, **more,
    }  # fmt: skip
    return ReserveRequest(rid=rid, lane=lane, candidates=candidates or (candidate(),), **settings)


def reservation(rid: str, made_s: float, replica: str = "a", n: Need | None = None, **more: Any) -> Reservation:
    """A reservation as Envoy's metadata carries it."""
    settings: dict[str, Any] = {
        "target": f"t-{replica}", "lane": "fast", "owner": "envoy-1", "request_id": f"x-{rid}", "klass": "chat",
        "input_tokens": 100, "expected_output_tokens": 50, "max_output_tokens": 100, "cap_blocks": 10, "cap_s": 600.0,
        "expected_s": 10.0, **more,
    }  # fmt: skip
    return Reservation(rid=rid, replica=replica, reserved_at_s=made_s, need=n or need(), **settings)


def record(r: Reservation, **more: Any) -> Upsert:
    """A periodic record of it."""
    return Upsert(**{"reservation": r, "lease_s": 10.0, **more})


def end(rid: str | None, how: Ended = Ended.COMPLETE, **more: Any) -> End:
    """An end record."""
    return End(**{"rid": rid, "owner": "envoy-1", "request_id": f"x-{rid}", "how": how, **more})


def report(at_s: float, replica: str = "a", **more: Any) -> ReplicaReport:
    """One scrape of a paged engine with 100 blocks that took 0.1 s and shows an idle engine."""
    base = ReplicaReport(
        replica=replica, target=f"t-{replica}", engine="vllm", node="n", instance="i", state=ReplicaState.READY,
        scrape_start_at_s=at_s, scrape_end_at_s=at_s + 0.1, capacity_blocks=100, block_tokens=16, used_blocks=0,
        shows_used=True, running=0, waiting=0, max_sequences=None,
    )  # fmt: skip
    return replace(base, **more)


def device(at_s: float, uuid: str = "GPU-1", **more: Any) -> DeviceReport:
    """One look at a device with 1,000 bytes free."""
    base = DeviceReport(uuid, "n", "i", at_s, "ok", total_bytes=10_000, free_bytes=1_000)
    return replace(base, **more)
