"""Every name that leaves the process: metrics with their labels, spans, events and attributes.

Owns nothing but names, help texts and buckets. ``docs/metrics.md`` and ``docs/tracing.md`` hold the same tables
and a test keeps them equal, so a rename here is a rename that users can read about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

#: Seconds; a decision without counting takes about a millisecond, the deadlines are 50 and 300 ms.
FAST_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 1.0)
#: Seconds; from a short answer to an agent's long one.
SLOW_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
#: Tokens; powers of four up to the longest contexts in use.
TOKENS: Final = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
#: KV blocks of one request.
BLOCKS: Final = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
#: Tokens between actual and expected output.
ERROR_TOKENS: Final = (0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)


@dataclass(
    frozen=True, slots=True, eq=False
)  # compared and hashed by identity: it is a dictionary key on the request path
class Metric:
    """One metric as Prometheus sees it; ``name`` without the ``_total`` that counters get in the exposition."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name as it stands in the exposition and in queries."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_REPLICA = ("target", "replica")

# The request path.
DECISIONS = Metric("kvgate_decisions", "counter", "Decisions.", ("mode", "decision", "lane", "target", "reason"))
REQUESTED_MODELS = Metric(
    "kvgate_requested_models", "counter", "Decisions by the model name the client sent.", ("model", "decision")
)
DECISION_SECONDS = Metric(
    "kvgate_decision_duration_seconds",
    "histogram",
    "End of body to decision, counting and waiting included.",
    ("decision",),
    FAST_S,
)
COUNT_SECONDS = Metric(
    "kvgate_count_duration_seconds", "histogram", "Counting one request's tokens.", ("source",), FAST_S
)
COUNT_DEADLINES = Metric(
    "kvgate_count_deadlines", "counter", "Counts cut short by the deadline and answered with the bound."
)
COUNT_REFUSED = Metric(
    "kvgate_count_refused", "counter", "Counts answered with the bound because too many bytes waited to be counted."
)
COUNT_PENDING_BYTES = Metric("kvgate_count_pending_bytes", "gauge", "Bytes that wait to be counted.")
QUEUE_WAIT_SECONDS = Metric(
    "kvgate_queue_wait_seconds", "histogram", "Time that held requests waited at the gate.", ("lane",), SLOW_S
)
QUEUE_DEPTH = Metric("kvgate_queue_depth", "gauge", "Requests held at the gate now.", ("lane",))
INPUT_TOKENS = Metric("kvgate_input_tokens", "histogram", "Input tokens of a request.", ("lane",), TOKENS)
RESERVED_BLOCKS = Metric(
    "kvgate_reserved_blocks", "histogram", "KV blocks reserved by an admitted request.", ("target",), BLOCKS
)
DEGRADED_DECISIONS = Metric(
    "kvgate_degraded_decisions", "counter", "Decisions made without a healthy ledger.", ("ledger",)
)
INTERNAL_ERRORS = Metric(
    "kvgate_internal_errors",
    "counter",
    "Errors answered with the reason `internal` or logged after the answer.",
    ("where",),
)
STREAMS = Metric("kvgate_extproc_streams", "gauge", "Open ext_proc streams.")
EXCHANGES = Metric("kvgate_exchanges_undecided", "gauge", "Exchanges that wait for their decision.")

# The end of a request.
COMPLETIONS = Metric(
    "kvgate_completions",
    "counter",
    "Ended requests that held a reservation or a remote place.",
    ("ended", "lane", "target"),
)
OUTPUT_TOKENS = Metric(
    "kvgate_output_tokens", "histogram", "Output tokens of a completed request.", ("target",), TOKENS
)
OUTPUT_ERROR_TOKENS = Metric(
    "kvgate_output_error_tokens",
    "histogram",
    "Distance of a completed request's output from what was expected; `over` took more than it had reserved for.",
    ("target", "direction"),
    ERROR_TOKENS,
)
FIRST_BYTE_SECONDS = Metric(
    "kvgate_first_byte_seconds", "histogram", "Request start to the upstream's first byte.", ("target",), SLOW_S
)
REQUEST_SECONDS = Metric(
    "kvgate_request_duration_seconds", "histogram", "Request start to its end.", ("target",), SLOW_S
)
MISROUTED = Metric(
    "kvgate_misrouted", "counter", "Requests served by another endpoint than the reserved one.", ("target",)
)

# The ledger.
LEDGER_UP = Metric("kvgate_ledger_up", "gauge", "1 when the last call to the ledger was answered, else 0.")
LEDGER_SECONDS = Metric(
    "kvgate_ledger_call_duration_seconds", "histogram", "Calls to the ledger, answered or not.", ("call",), FAST_S
)
LEDGER_ERRORS = Metric("kvgate_ledger_errors", "counter", "Calls to the ledger without a usable answer.", ("call",))
REAPED = Metric(
    "kvgate_reaped_reservations", "counter", "Reservations released because nobody vouched for them any more."
)
RENEWALS_REFUSED = Metric("kvgate_renewals_refused", "counter", "Periodic records of requests that had already ended.")
UNDELIVERED_ENDS = Metric("kvgate_undelivered_ends", "gauge", "End records kept until the ledger answers again.")

# The fleet, as the last snapshot shows it.
SNAPSHOT_TIMESTAMP = Metric(
    "kvgate_snapshot_timestamp_seconds", "gauge", "Ledger time of the last snapshot; compare with time()."
)
REPLICA_STATE = Metric("kvgate_replica_state", "gauge", "1 for the state the replica is in.", (*_REPLICA, "state"))
REPLICA_AGE = Metric(
    "kvgate_replica_report_age_seconds", "gauge", "Age of the replica's last report at the snapshot.", _REPLICA
)
REPLICA_CAPACITY = Metric("kvgate_replica_capacity_blocks", "gauge", "KV blocks of the engine's pool.", _REPLICA)
REPLICA_RESERVED = Metric("kvgate_replica_reserved_blocks", "gauge", "KV blocks of all live reservations.", _REPLICA)
REPLICA_FOREIGN = Metric(
    "kvgate_replica_foreign_blocks", "gauge", "KV blocks used by traffic that bypassed kvgate.", _REPLICA
)
REPLICA_COMMITTED = Metric("kvgate_replica_committed_blocks", "gauge", "Reserved plus foreign blocks.", _REPLICA)
REPLICA_HEADROOM = Metric(
    "kvgate_replica_headroom_blocks",
    "gauge",
    "Capacity without the watermark minus committed blocks; may be negative.",
    _REPLICA,
)
REPLICA_DRIFT = Metric(
    "kvgate_replica_drift_blocks",
    "gauge",
    "Blocks the engine reports as used minus committed blocks; above zero the ledger promised too little.",
    _REPLICA,
)
REPLICA_SEQUENCES = Metric("kvgate_replica_sequences", "gauge", "Sequences of all live reservations.", _REPLICA)
REPLICA_PREFILL = Metric("kvgate_replica_prefill_level_tokens", "gauge", "Level of the prefill bucket.", _REPLICA)
REPLICA_RESERVATIONS = Metric(
    "kvgate_replica_reservations", "gauge", "Live reservations, orphaned ones included.", _REPLICA
)
REPLICA_ORPHANED = Metric(
    "kvgate_replica_orphaned_reservations", "gauge", "Reservations whose lease expired; they count in full.", _REPLICA
)
OVER_ADMISSIONS = Metric(
    "kvgate_over_admissions",
    "counter",
    "Times that committed blocks grew above capacity, by cause: adopted, grew or foreign.",
    (*_REPLICA, "cause"),
)
LANE_IN_FLIGHT = Metric("kvgate_lane_in_flight", "gauge", "Local requests in flight, all sidecars together.", ("lane",))
DEVICE_TOTAL = Metric("kvgate_device_total_bytes", "gauge", "Memory of the device.", ("device",))
DEVICE_FREE = Metric("kvgate_device_free_bytes", "gauge", "Free memory of the device.", ("device",))
DEVICE_RESERVED = Metric(
    "kvgate_device_reserved_bytes", "gauge", "Memory that reservations take on the device.", ("device",)
)
DEVICE_STATE = Metric("kvgate_device_state", "gauge", "1 for the state the device is in.", ("device", "state"))

# kvgate itself.
REMEMBERED_BYTES = Metric(
    "kvgate_tokenizer_memory_bytes", "gauge", "Text that the tokenizers of this process remember of earlier prompts."
)
DECISION_LOG_DROPPED = Metric(
    "kvgate_decision_log_dropped", "counter", "Records that the decision log had no room for."
)
SPANS = Metric("kvgate_spans", "counter", "Spans recorded, delivered to the collector and lost.", ("result",))
BUILD = Metric("kvgate_build_info", "gauge", "1, labelled with the version.", ("version",))

#: Every metric of this module, in the order of the docs table.
METRICS: Final[tuple[Metric, ...]] = tuple(value for value in globals().values() if isinstance(value, Metric))

#: What a label shows once its distinct values have run out, and where there is no value.
OTHER: Final = "other"
NONE: Final = "none"

SPAN_DECIDE: Final = "kvgate.decide"
SPAN_COMPLETE: Final = "kvgate.complete"
EVENT_CANDIDATE: Final = "kvgate.candidate"

#: Spans and events with what they stand for, the docs' first table.
SPANS_AND_EVENTS: Final[dict[str, str]] = {
    SPAN_DECIDE: "one decision; child of Envoy's ext_proc span",
    EVENT_CANDIDATE: "event of `kvgate.decide`, one per candidate considered, in order",
    SPAN_COMPLETE: "the end of a request that held a place; same trace, same `kvgate.rid`",
}

#: Attribute -> where it stands and what it holds, the docs' second table.
ATTRIBUTES: Final[dict[str, str]] = {
    "gen_ai.operation.name": "decide, complete: chat, text_completion or embeddings",
    "gen_ai.request.model": "decide: the model name the client sent",
    "gen_ai.request.max_tokens": "decide: the client's cap on output tokens",
    "gen_ai.response.model": "complete: the model name in the engine's answer",
    "gen_ai.usage.input_tokens": "complete: input tokens as the engine counted them",
    "gen_ai.usage.output_tokens": "complete: output tokens as the engine counted them",
    "error.type": "decide: the reason of a refusal; complete: how it ended, unless complete",
    "kvgate.rid": "both: kvgate's own id of the request",
    "kvgate.request_id": "both: the client's x-request-id",
    "kvgate.mode": "decide: enforce or shadow",
    "kvgate.lane": "both: lane",
    "kvgate.target": "both: target",
    "kvgate.replica": "both: replica",
    "kvgate.decision": "decide: admit, fallback, reject, pass or bypass",
    "kvgate.outcome": "decide: the outcome string",
    "kvgate.reason": "decide: why it was refused, or why the first candidate was",
    "kvgate.status": "decide: HTTP status of a refusal",
    "kvgate.retry_after_ms": "decide: what a refused client was told to wait",
    "kvgate.input_tokens": "decide: counted input tokens",
    "kvgate.count_source": "decide: exact or bound",
    "kvgate.expected_output_tokens": "both: output tokens that were reserved for",
    "kvgate.waited_ms": "decide: time held at the gate",
    "kvgate.count_ms": "decide: time spent counting",
    "kvgate.ledger_ms": "decide: time spent in the ledger call",
    "kvgate.ledger": "decide: state of the ledger",
    "kvgate.free_before_blocks": "decide, candidate: headroom before this request",
    "kvgate.projected_blocks": "decide, candidate: what this request needs",
    "kvgate.free_after_blocks": "decide, candidate: headroom after it; negative where it did not fit",
    "kvgate.free_before_bytes": "decide, candidate: the same in bytes over all shards",
    "kvgate.projected_bytes": "decide, candidate: the same in bytes",
    "kvgate.free_after_bytes": "decide, candidate: the same in bytes",
    "kvgate.prefill_tokens": "candidate: charge on the prefill bucket",
    "kvgate.sequences": "candidate: sequences needed",
    "kvgate.vram_bytes": "candidate: device memory needed, all shards",
    "kvgate.score": "candidate: score, absent without scoring",
    "kvgate.refused_by": "candidate: first resource without room; absent where it fits",
    "kvgate.ended": "complete: how the request ended",
    "kvgate.free_at_end_bytes": "complete: headroom when it ended",
}
