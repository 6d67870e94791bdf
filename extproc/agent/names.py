"""Every metric name the agent exports; ``docs/agent.md`` holds the same table and a test keeps them equal.

Names are gauges and counters that exist from the first scrape on. NaN is never exported: what is not known has
no series, and ``kvgate_agent_replica_state`` says why.
"""

from __future__ import annotations

from extproc.telemetry.names import Metric

_REPLICA = ("target", "replica")

ROUNDS = Metric("kvgate_agent_rounds", "counter", "Rounds of looking and publishing.")
ROUND_SECONDS = Metric("kvgate_agent_round_seconds", "gauge", "Wall time of the last round.")
PUBLISH_FAILURES = Metric("kvgate_agent_publish_failures", "counter", "Rounds whose publish the ledger did not take.")
COMPONENT = Metric("kvgate_agent_component_ok", "gauge", "1 while the component works.", ("component",))
ALARM = Metric("kvgate_agent_alarms", "gauge", "Sharing alarms raised now.", ("kind",))

STATE = Metric(
    "kvgate_agent_replica_state", "gauge", "1 for the state the replica is in, else 0.", (*_REPLICA, "state")
)
SCRAPES = Metric("kvgate_agent_scrapes", "counter", "Visits to the engine.", _REPLICA)
SCRAPE_FAILURES = Metric("kvgate_agent_scrape_failures", "counter", "Visits without a usable answer.", _REPLICA)
BAD_LINES = Metric(
    "kvgate_agent_bad_lines", "gauge", "Lines of the last /metrics body that could not be read.", _REPLICA
)
RESTARTS = Metric("kvgate_agent_engine_restarts", "counter", "Engine restarts seen.", _REPLICA)
AGE = Metric("kvgate_agent_reading_age_seconds", "gauge", "Age of the last good reading.", _REPLICA)
CAPACITY = Metric("kvgate_agent_kv_capacity_blocks", "gauge", "KV blocks the engine reports.", _REPLICA)
USED = Metric("kvgate_agent_kv_used_blocks", "gauge", "KV blocks in use as the engine reports them.", _REPLICA)
BLOCK_BYTES = Metric(
    "kvgate_agent_kv_block_bytes", "gauge", "Bytes of one KV block as the engine reports them.", _REPLICA
)
FORMULA_RATIO = Metric(
    "kvgate_agent_kv_formula_ratio",
    "gauge",
    "Requests of full length that fit by the engine's report, over those by the model's geometry.",
    _REPLICA,
)
WEIGHTS = Metric(
    "kvgate_agent_weights_and_overhead_bytes",
    "gauge",
    "Process memory on the replica's devices less its KV pool, where it has them for itself.",
    _REPLICA,
)
POOL_USED = Metric("kvgate_agent_pool_used_blocks", "gauge", "The same per data-parallel engine.", (*_REPLICA, "pool"))
RUNNING = Metric("kvgate_agent_running", "gauge", "Requests running.", _REPLICA)
WAITING = Metric("kvgate_agent_waiting", "gauge", "Requests waiting inside the engine.", _REPLICA)
PREFILL_RATE = Metric("kvgate_agent_prefill_tokens_per_second", "gauge", "Measured prefill capacity.", _REPLICA)
DECODE_RATE = Metric(
    "kvgate_agent_decode_tokens_per_second", "gauge", "Measured decode rate of one sequence.", _REPLICA
)
OUTPUT_RATE = Metric("kvgate_agent_output_tokens_per_second", "gauge", "Measured output of the whole engine.", _REPLICA)
TTFT = Metric("kvgate_agent_ttft_seconds", "gauge", "Mean time to first token as the engine counts it.", _REPLICA)
QUEUE = Metric("kvgate_agent_queue_seconds", "gauge", "Mean time in the engine's queue.", _REPLICA)
HIT_SHARE = Metric(
    "kvgate_agent_prefix_hit_share", "gauge", "Share of prompt tokens found in the prefix cache.", _REPLICA
)
PREEMPTIONS = Metric("kvgate_agent_preemptions_per_request", "gauge", "Preemptions per finished request.", _REPLICA)

DEVICE_STATE = Metric(
    "kvgate_agent_device_state", "gauge", "1 for the state the device is in, else 0.", ("device", "state")
)
DEVICE_TOTAL = Metric("kvgate_agent_device_total_bytes", "gauge", "Memory of the device.", ("device",))
DEVICE_FREE = Metric("kvgate_agent_device_free_bytes", "gauge", "Free memory as the driver says.", ("device",))
DEVICE_USED = Metric("kvgate_agent_device_used_bytes", "gauge", "Used memory as the driver says.", ("device",))
DEVICE_ENGINE = Metric("kvgate_agent_device_process_bytes", "gauge", "Memory of all listed processes.", ("device",))
DEVICE_TEMPERATURE = Metric("kvgate_agent_device_temperature_celsius", "gauge", "Temperature.", ("device",))
DEVICE_THROTTLED = Metric("kvgate_agent_device_throttled", "gauge", "1 while clocks are held down.", ("device",))
DEVICE_ECC = Metric(
    "kvgate_agent_device_ecc_uncorrected", "gauge", "Uncorrected memory errors since the driver's start.", ("device",)
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
