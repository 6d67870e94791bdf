"""One row per reason: status, whether a retry can help, and the sentence a person reads.

Pure. The dialect's own error codes and wordings live with the dialects; the random spread of Retry-After is an
argument, so that a decision can be replayed.
"""

from __future__ import annotations

import math

from extproc.types import Reason, Refusal

#: reason -> (status, retryable, sentence); the statuses are part of the contract with clients.
TABLE: dict[Reason, tuple[int, bool, str]] = {
    Reason.PROMPT_BUDGET_EXCEEDED: (400, False, "The input is longer than its lane allows."),
    Reason.EXCEEDS_CONTEXT: (400, False, "The input and the requested output are longer than the model's context."),
    Reason.EXCEEDS_POOL: (400, False, "The request is larger than the engine's whole KV cache."),
    Reason.BODY_TOO_LARGE: (413, False, "The request body is too large."),
    Reason.BAD_REQUEST: (400, False, "The request cannot be understood."),
    Reason.UNSUPPORTED_CONTENT_ENCODING: (415, False, "The content encoding is not supported."),
    Reason.UNKNOWN_MODEL: (404, False, "The model does not exist here."),
    Reason.INSUFFICIENT_HEADROOM: (429, True, "There is not enough free KV cache for this request now."),
    Reason.PREFILL_BUSY: (429, True, "The engines are busy with prompts that came before this one."),
    Reason.SEQUENCES_FULL: (429, True, "The engines run as many sequences as they can."),
    Reason.LANE_FULL: (429, True, "The lane runs as many requests as it may."),
    Reason.LANE_SHARE: (429, True, "The lane has used its share of the KV cache."),
    Reason.ENGINE_QUEUE: (429, True, "The engine's own queue is full."),
    Reason.QUEUE_FULL: (429, True, "The queue at the gate is full."),
    Reason.QUEUE_TIMEOUT: (429, True, "No place came free while the request waited."),
    Reason.UNKNOWN_STATE: (503, True, "The state of the engines is not known, so nothing is admitted."),
    Reason.NOT_READY: (503, True, "The service is not ready."),
    Reason.LEDGER_DOWN: (503, True, "The reservation ledger does not answer."),
    Reason.INTERNAL: (503, True, "The admission service failed on this request."),
}

#: Reasons that no waiting cures.
PERMANENT = frozenset(reason for reason, (_, retry, _) in TABLE.items() if not retry)
#: Retry-After when nothing is known of what is in flight.
UNKNOWN_RETRY_S = 5.0
#: Clients honour Retry-After only within these seconds (OpenAI SDKs: 0 < x <= 60).
RETRY_MIN_S, RETRY_MAX_S = 1, 60


def refuse(
    reason: Reason, *, earliest_s: float | None, spread: float, message: str | None = None, param: str | None = None
) -> Refusal:
    """A refusal for ``reason``; ``earliest_s`` is when the binding resource fits (None: unknown), ``spread`` in [0, 1).

    ``retry_after_ms`` = t x U(1, 1.3), or 5 s x U(0.6, 1.4) where t is unknown, so that refused clients do not
    come back together.
    """
    status, retryable, sentence = TABLE[reason]
    retry_after_ms = None
    if retryable:
        seconds = UNKNOWN_RETRY_S * (0.6 + 0.8 * spread) if earliest_s is None else earliest_s * (1.0 + 0.3 * spread)
        retry_after_ms = max(1, math.ceil(min(max(seconds, 0.0), float(RETRY_MAX_S)) * 1000))
    return Refusal(reason, status, message or sentence, retry_after_ms, None, param)


def retry_after_seconds(retry_after_ms: int) -> int:
    """The whole seconds of the ``Retry-After`` header: rounded up, within what SDKs honour."""
    return min(RETRY_MAX_S, max(RETRY_MIN_S, math.ceil(retry_after_ms / 1000)))
