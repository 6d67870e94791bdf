"""The decision record: one plain object that ``explain --json``, the decision log, the span and ``status`` share.

Pure. Knows the decision's types and nothing of where a record goes. Text that came from a client is cleaned here
once, so that no encoder behind it (UTF-8, protobuf, Prometheus) can stumble over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from extproc.types import ConsideredCandidate, Decision, Need

#: Longest client-supplied text in a record; a model name is far shorter.
MAX_TEXT = 200

Record = dict[str, Any]


def clean(text: str | None, limit: int = MAX_TEXT) -> str | None:
    """``text`` without control characters and lone surrogates (JSON can carry both), at most ``limit`` characters."""
    if text is None or (len(text) <= limit and text.isascii() and text.isprintable()):
        return text
    kept = text[:limit].encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() else "?" for char in kept)


def decision_record(
    decision: Decision, *, at_s: float, decision_ms: float, count_ms: float, request_id: str | None = None
) -> Record:
    """The record of one decision: JSON-ready, without any prompt text.

    ``at_s`` is Unix time; ``decision_ms`` runs from the end of the body, ``count_ms`` is its part for counting.
    ``request_id`` is the client's; absent, the one in the decision's metadata is taken.
    """
    refusal = decision.refusal
    found = request_id if request_id is not None else decision.metadata.get("request_id")
    return {
        "at": utc(at_s),
        "rid": decision.rid or None,
        "request_id": clean(found) if isinstance(found, str) and found else None,
        "mode": decision.mode,
        "lane": clean(decision.lane),
        "model": clean(decision.model),
        "dialect": decision.dialect,
        "input_tokens": decision.input_tokens,
        "count_source": decision.count_source,
        "max_output_tokens": decision.max_output_tokens,
        "expected_output_tokens": decision.expected_output_tokens,
        "decision": decision.decision,
        "outcome": decision.outcome,
        "target": decision.target,
        "replica": decision.replica,
        "reason": decision.reason,
        "status": refusal.status if refusal else None,
        "retry_after_ms": refusal.retry_after_ms if refusal else None,
        "waited_ms": decision.waited_ms,
        "decision_ms": round(decision_ms, 3),
        "count_ms": round(count_ms, 3),
        "ledger": decision.ledger,
        "warnings": [clean(line) for line in decision.warnings],
        "candidates": [_candidate(candidate) for candidate in decision.candidates],
    }


def figures_of(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The candidate whose three figures stand for the whole decision.

    The one that was taken; where that one has no pool (a remote) or nothing was taken, the first that has figures,
    which is the one whose refusal is the reason. None where no candidate has any.
    """
    candidates = record.get("candidates") or ()
    taken = [
        c
        for c in candidates
        if c["refused_by"] is None and c["target"] == record.get("target") and c["replica"] == record.get("replica")
    ]
    return next((c for c in (*taken, *candidates) if c["need"] and c["free_before"]["kv_blocks"] is not None), None)


def utc(at_s: float) -> str:
    """Unix seconds as RFC 3339 in UTC with milliseconds."""
    second, millis = divmod(int(at_s * 1000), 1000)
    return f"{_second(second)}.{millis:03d}Z"


@lru_cache(maxsize=4)
def _second(at_s: int) -> str:
    """The whole second; many decisions share it, and writing it costs a tenth of their records' time."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _candidate(candidate: ConsideredCandidate) -> Record:
    need, figures = candidate.need, candidate.figures
    terms = candidate.terms
    return {
        "target": candidate.target,
        "replica": candidate.replica,
        "score": _finite(candidate.score),
        "terms": {name: _finite(value) for name, value in terms.items()} if terms is not None else None,
        "need": _need(need) if need else None,
        "free_before": _room(figures.kv_blocks_before, figures.kv_bytes_before, need),
        "free_after": _room(figures.kv_blocks_after, figures.kv_bytes_after, need),
        "refused_by": candidate.refused_by,
    }


def _need(need: Need) -> Record:
    return {
        "kv_blocks": need.kv_blocks,
        "kv_bytes": need.kv_bytes,
        "prefill_tokens": need.prefill_tokens,
        "sequences": need.sequences,
        "vram_bytes": sum(need.vram_bytes),
    }


def _room(blocks: int | None, size_bytes: int | None, need: Need | None) -> Record:
    if size_bytes is None and blocks is not None and need and need.kv_blocks and need.kv_bytes:
        size_bytes = blocks * need.kv_bytes // need.kv_blocks
    return {"kv_blocks": blocks, "kv_bytes": size_bytes}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
