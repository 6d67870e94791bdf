"""Decisions and snapshots that the telemetry tests share."""

from __future__ import annotations

from msgspec.structs import replace

from extproc.ledger.base import (
    DeviceReport,
    LedgerSnapshot,
    LiveReservation,
    ReplicaReport,
    ReplicaState,
    ReplicaView,
    Reservation,
    State,
)
from extproc.types import ConsideredCandidate, Decision, Figures, Need, Reason, Refusal

NEED = Need(kv_blocks=278, input_blocks=258, kv_bytes=278 * 262144, prefill_tokens=4123, sequences=1)
PRIMARY_FULL = ConsideredCandidate(
    "primary-32b",
    "gpu-a-0",
    NEED,
    Figures(120, -158, 120 * 262144, -158 * 262144),
    "insufficient_headroom",
    score=0.81,
    terms={"capability": 0.34},
)
SMALL_FREE = ConsideredCandidate("qwen-14b-q4", "gpu-b-0", NEED, Figures(900, 622), None)
REMOTE = ConsideredCandidate("remote", "remote", Need(0, 0, 0, 0, 0), Figures(None, None), None)

FALLBACK = Decision(
    decision="fallback",
    mode="enforce",
    rid="rid-1",
    lane="fast-edit",
    model="qwen-coder",
    target="qwen-14b-q4",
    replica="gpu-b-0",
    reason="insufficient_headroom",
    refusal=None,
    candidates=(PRIMARY_FULL, SMALL_FREE),
    input_tokens=4123,
    count_source="exact",
    expected_output_tokens=310,
    max_output_tokens=1200,
    dialect="openai.chat",
)
TO_REMOTE = replace(FALLBACK, rid="rid-2", target="remote", replica="remote", candidates=(PRIMARY_FULL, REMOTE))
REJECT = replace(
    FALLBACK,
    rid="rid-3",
    decision="reject",
    target=None,
    replica=None,
    candidates=(PRIMARY_FULL,),
    refusal=Refusal(Reason.INSUFFICIENT_HEADROOM, 429, "busy", retry_after_ms=1300),
)


def snapshot() -> tuple[LedgerSnapshot, dict[str, list[LiveReservation]]]:
    """One busy replica with one reservation, one replica that no agent ever reported, one device, one lane."""
    held = Reservation(
        rid="r1",
        target="primary-32b",
        replica="gpu-a-0",
        lane="fast-edit",
        owner="envoy-1",
        request_id="x-1",
        klass="none:s",
        reserved_at_s=1990.0,
        need=Need(180, 125, 180 * 262144, 2000, 1, (4096,)),
        input_tokens=2000,
        expected_output_tokens=700,
        max_output_tokens=None,
        cap_blocks=400,
        cap_s=120.0,
        devices=("GPU-1",),
        expected_s=17.5,
    )
    live = LiveReservation(held, State.ORPHANED, lease_at_s=1999.5, current_blocks=190, first_byte_at_s=1992.0)
    report = ReplicaReport(
        replica="gpu-a-0",
        target="primary-32b",
        engine="vllm",
        node="node-a",
        instance="agent-1",
        state=ReplicaState.READY,
        scrape_start_at_s=1999.5,
        scrape_end_at_s=1999.75,
        capacity_blocks=4096,
        block_tokens=16,
        used_blocks=1200,
        shows_used=True,
        running=7,
        waiting=0,
        max_sequences=256,
        max_model_tokens=32768,
        prefill_tokens_per_s=7800.0,
        decode_tokens_per_s=40.0,
        engine_started_at_s=1000.0,
        preemptions_total=3.0,
        prefix_hit_share=0.5,
    )
    busy = ReplicaView(
        report=report,
        replica="gpu-a-0",
        target="primary-32b",
        state=ReplicaState.READY,
        age_s=0.5,
        reserved_blocks=190,
        foreign_blocks=1010,
        committed_blocks=1200,
        headroom_blocks=2896,
        sequences=1,
        prefill_level_tokens=2000.0,
        reservations=1,
        orphaned=1,
        over_admissions=2,
        bypass=True,
        over_grew=2,
        lane_blocks={"fast-edit": 190},
    )
    silent = ReplicaView(
        report=None,
        replica="gpu-b-0",
        target="qwen-14b-q4",
        state=ReplicaState.UNKNOWN,
        age_s=None,
        reserved_blocks=0,
        foreign_blocks=None,
        committed_blocks=0,
        headroom_blocks=None,
        sequences=0,
        prefill_level_tokens=0.0,
        reservations=0,
        orphaned=0,
        over_admissions=0,
        drained_by_operator=True,
    )
    device = DeviceReport("GPU-1", "node-a", "agent-1", 1999.5, "ok", 85899345920, 6442450944, 79456894976, 0, "H100")
    found = LedgerSnapshot(
        now_s=2000.0,
        replicas={"gpu-a-0": busy, "gpu-b-0": silent},
        lanes={"fast-edit": 1},
        devices={"GPU-1": device},
        device_reserved_bytes={"GPU-1": 4096},
        epoch="e1",
        live_sidecars=2,
        loss_at_s=1500.0,
    )
    return found, {"gpu-a-0": [live], "gpu-b-0": []}
