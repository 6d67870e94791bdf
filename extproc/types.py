"""Frozen values that pass between the stages of a decision.

Owns the shapes; knows no I/O, no protobuf, no Redis. Units stand in the names. Times are seconds on the
clock that the field names: ``_s`` alone is a duration. What is made for every request is a struct: frozen and slotted
as the dataclasses elsewhere, and built in a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field


class Reason(StrEnum):
    """Stable machine strings of every refusal; the order has no meaning."""

    PROMPT_BUDGET_EXCEEDED = "prompt_budget_exceeded"
    EXCEEDS_CONTEXT = "exceeds_context"
    EXCEEDS_POOL = "exceeds_pool"
    BODY_TOO_LARGE = "body_too_large"
    BAD_REQUEST = "bad_request"
    UNSUPPORTED_CONTENT_ENCODING = "unsupported_content_encoding"
    UNKNOWN_MODEL = "unknown_model"
    INSUFFICIENT_HEADROOM = "insufficient_headroom"
    PREFILL_BUSY = "prefill_busy"
    SEQUENCES_FULL = "sequences_full"
    LANE_FULL = "lane_full"
    LANE_SHARE = "lane_share"
    ENGINE_QUEUE = "engine_queue"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    UNKNOWN_STATE = "unknown_state"
    NOT_READY = "not_ready"
    LEDGER_DOWN = "ledger_down"
    INTERNAL = "internal"


class RequestHead(Struct, frozen=True):
    """The HTTP head of one exchange as Envoy shows it.

    ``path`` has no query string; ``headers`` are lower-case names without pseudo headers, one value each
    (repeated headers joined by ", "). ``began_us`` is when its first byte came, on Envoy's wall clock, 0 where Envoy
    does not say.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    request_id: str = ""
    peer_address: str = ""
    began_us: int = 0


class ImageInput(Struct, frozen=True):
    """One image of a request: pixel size from its own header bytes, or None where unknown (remote URL)."""

    width: int | None
    height: int | None
    encoded_bytes: int
    source: str  # "data_uri" | "url" | "file"


class TokenCount(Struct, frozen=True):
    """Input tokens of a request, one figure per prompt, and how they were found.

    ``source`` is ``exact`` (the engine's own figure) or ``bound`` (a true upper bound). ``elapsed_ms`` is the wall time
    of counting. ``hidden_tokens`` is how many of the first prompt's are charged for text that nobody here saw (earlier
    turns that the engine keeps); no more of them need room than a context has.
    """

    per_prompt: tuple[int, ...]
    source: str
    elapsed_ms: float = 0.0
    hidden_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """Sum over the prompts."""
        return sum(self.per_prompt)


class Need(Struct, frozen=True):
    """What one request takes from one replica (see the decision model's resource table).

    ``kv_blocks`` is what is reserved: the prompt's blocks plus the blocks of the expected output;
    ``input_blocks`` the part the prompt alone takes; ``kv_bytes`` the same as ``kv_blocks`` in bytes over
    all shards (0 where the geometry is unknown); ``prefill_tokens`` the charge on the prefill bucket;
    ``vram_bytes`` one figure per device shard, only on engines that allocate per request.
    """

    kv_blocks: int
    input_blocks: int
    kv_bytes: int
    prefill_tokens: int
    sequences: int
    vram_bytes: tuple[int, ...] = ()


class Figures(Struct, frozen=True):
    """Room of one candidate around one decision; None where the replica's state is unknown or has no pool."""

    kv_blocks_before: int | None
    kv_blocks_after: int | None
    kv_bytes_before: int | None = None
    kv_bytes_after: int | None = None


class ConsideredCandidate(Struct, frozen=True):
    """A candidate as the decision record shows it, chosen or not."""

    target: str
    replica: str | None
    need: Need | None
    figures: Figures
    refused_by: str | None
    score: float | None = None
    terms: Mapping[str, float] | None = None


class Refusal(Struct, frozen=True):
    """The answer to a request that gets no place.

    ``retry_after_ms`` is None where a retry is pointless; ``code`` and ``param`` refine ``bad_request``;
    ``limit_tokens`` is what the request was too long for, where it was.
    """

    reason: Reason
    status: int
    message: str
    retry_after_ms: int | None = None
    code: str | None = None
    param: str | None = None
    limit_tokens: int | None = None


class Decision(Struct, frozen=True):
    """One decision, complete: what the client gets, what the log and the span show.

    ``decision`` is admit | fallback | reject | pass | bypass; ``plan`` the ordered Envoy clusters: the
    reserved replica's, then remote ones. ``body`` is the mutated body, or None where the client's bytes go on.
    """

    decision: str
    mode: str
    rid: str
    lane: str | None
    model: str | None
    target: str | None
    replica: str | None
    reason: str | None
    refusal: Refusal | None
    plan: tuple[str, ...] = ()
    candidates: tuple[ConsideredCandidate, ...] = ()
    input_tokens: int | None = None
    count_source: str | None = None
    expected_output_tokens: int | None = None
    max_output_tokens: int | None = None
    waited_ms: int = 0
    ledger: str = "ok"
    headers: tuple[tuple[str, str], ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)
    body: bytes | None = None
    dialect: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """The outcome string used everywhere: admit, fallback:<target>, reject:<reason>, pass."""
        if self.decision == "fallback":
            return f"fallback:{self.target}"
        if self.decision == "reject":
            return f"reject:{self.reason}"
        return self.decision
