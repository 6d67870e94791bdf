"""llama.cpp's server: capacity from /props and /slots, counts from /metrics or /slots.

Its API does not say whether the cache is unified. Measured on b10434: eight slots report ``n_ctx`` 1024 both
with ``-c 8192`` split and with ``-c 1024 --kv-unified``, so the pool is one slot's ``n_ctx``, the smaller of
both readings; a split server's whole pool is stated by the operator as ``kvTokens`` = slots x n_ctx. A cell
holds one token, so ``block_tokens`` is 1 (256 is only what n_ctx is rounded to at load). Gauges of KV use
(``kv_cache_usage_ratio``) were removed in mid-2025; /slots shows prompts, not cells, so used is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.agent.engines.base import (
    Answer,
    Availability,
    Counters,
    Endpoint,
    Hints,
    Reading,
    added,
    count,
    dig,
    number,
    ok,
    total,
    whole,
)
from extproc.agent.exposition import Exposition, parse

#: n_ctx is rounded up to this many cells at load (llama.cpp src/llama-context.cpp), per slot.
CELL_PADDING = 256


class LlamaCpp:
    """The row of llama-server."""

    name = "llamacpp"
    outside = False
    endpoints = (
        Endpoint("/health"),
        Endpoint("/slots", required=False),
        Endpoint("/metrics", required=False, metrics=True),
        Endpoint("/props", every=10),
    )

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """One reading; capacity comes from /props, else /slots, else it is missing."""
        props, slots = _json(answers.get("/props")), _json(answers.get("/slots"))
        metrics = answers.get("/metrics")
        exposition = parse(metrics.text()) if metrics is not None and ok(metrics) else Exposition()
        slots = slots if isinstance(slots, list) else None
        n_slots = whole(dig(props, "total_slots")) or (len(slots) if slots else None)
        per_slot = _slot_context(props, slots)
        pool, pool_note = _pool(per_slot, n_slots, hints.kv_tokens)
        running, waiting = _work(exposition, slots)
        notes = [pool_note] if pool_note else []
        if not exposition.samples:
            notes.append("metrics_off: start llama-server with --metrics")
        return Reading(
            availability=_availability(answers.get("/health"), props),
            block_tokens=1,
            capacity_blocks=pool,
            running=running,
            waiting=waiting,
            max_sequences=n_slots or hints.max_sequences,
            max_model_tokens=per_slot or hints.max_model_tokens,
            counters=_counters(exposition, slots),
            identity=_identity(props),
            missing=() if pool is not None else ("capacity",),
            notes=tuple(notes),
            bad_lines=exposition.bad_lines,
        )


def _json(answer: Answer | None) -> Any:
    return answer.json() if answer is not None and ok(answer) else None


def _slot_context(props: Any, slots: list[Any] | None) -> int | None:
    """The context one request may fill: the smallest any slot reports."""
    reported = [whole(dig(props, "default_generation_settings", "n_ctx"))]
    reported += [whole(dig(slot, "n_ctx")) for slot in slots or ()]
    known = [value for value in reported if value is not None]
    return min(known) if known else None


def _pool(per_slot: int | None, n_slots: int | None, stated: int | None) -> tuple[int | None, str | None]:
    """The pool in cells, and what the operator should know about it."""
    if per_slot is None:
        return stated, None
    if n_slots in (None, 1):
        return per_slot, None
    most = per_slot * (n_slots or 1)
    if stated is not None and per_slot <= stated <= most:
        return stated, None
    note = f"pool_assumed_unified: taken as {per_slot} cells; if slots are split, set kvTokens: {most}"
    if stated is not None:
        note = f"kv_tokens_ignored: {stated} is not within {per_slot}..{most}; {note}"
    return per_slot, note


def _work(exposition: Exposition, slots: list[Any] | None) -> tuple[int | None, int | None]:
    running = count(total(exposition, ["llamacpp:requests_processing"]))
    waiting = count(total(exposition, ["llamacpp:requests_deferred"]))
    if slots is not None:
        busy = sum(1 for slot in slots if dig(slot, "is_processing") is True)
        running = busy if running is None else max(running, busy)
    return running, waiting


def _availability(health: Answer | None, props: Any) -> Availability:
    if health is None or (health.body.strip() and health.json() is None):
        return Availability.UNHEALTHY  # a page, so something else answers there
    if health.status == 503 and dig(health.json(), "error", "message") == "Loading model":
        return Availability.STARTING
    if not ok(health):
        return Availability.UNHEALTHY
    return Availability.ASLEEP if dig(props, "is_sleeping") is True else Availability.SERVING


def _counters(exposition: Exposition, slots: list[Any] | None) -> Counters:
    def series(name: str) -> float | None:
        return total(exposition, [f"llamacpp:{name}"])

    # tokens_predicted_total moves only when a request ends; decode calls and the slots' own figures move at once.
    decoded = [dig(slot, "next_token", 0, "n_decoded") or 0 for slot in slots or ()]
    prefilled = [dig(slot, "n_prompt_tokens_processed") or 0 for slot in slots or ()]
    live = [number(value) for value in decoded + prefilled]
    computed, cached = series("prompt_tokens_total"), series("prompt_tokens_cached_total")
    return Counters(
        prompt_tokens=added(computed, cached),
        computed_tokens=computed,
        cached_tokens=cached,
        looked_up_tokens=None if cached is None else added(computed, cached),
        output_tokens=series("tokens_predicted_total"),
        prefilled_tokens=computed,
        prefill_s=series("prompt_seconds_total"),
        decode_steps=series("tokens_predicted_total"),
        decode_s=series("tokens_predicted_seconds_total"),
        progress=added(series("n_decode_total"), *live),
    )


def _identity(props: Any) -> str | None:
    """Recent servers draw a random media marker per process; older ones show nothing of the kind."""
    marker = dig(props, "media_marker")
    return marker if isinstance(marker, str) and marker != "<__media__>" else None
