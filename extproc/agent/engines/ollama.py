"""Ollama: which models are loaded and with what context, from /api/ps and /api/tags; it has no metrics.

A model's ``context_length`` there is what one request may use; how many run in parallel is not shown, so the
pool is one context unless the operator states ``kvTokens``. A model that is not loaded is loaded on demand,
with at least 4,096 tokens of context (docs/faq.md, OLLAMA_CONTEXT_LENGTH). Requests running are not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.agent.engines.base import Answer, Availability, Endpoint, Hints, Reading, dig, ok, whole

#: Smallest context Ollama loads a model with when nobody asks for another one.
DEFAULT_CONTEXT_TOKENS = 4096


class Ollama:
    """The row of Ollama's server."""

    name = "ollama"
    outside = False
    endpoints = (Endpoint("/api/ps"), Endpoint("/api/tags", every=10, required=False))

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """One reading; a model that is neither loaded nor stored is not served."""
        running = _models(answers.get("/api/ps"))
        if running is None:
            return Reading(Availability.UNHEALTHY, missing=("capacity",))
        stored = _models(answers.get("/api/tags"))
        wanted = None if hints.served_model is None else _tagged(hints.served_model)
        loaded = next((model for model in running if wanted in (None, _name(model))), None)
        context = whole(dig(loaded, "context_length"))
        notes = []
        if loaded is None:
            if stored is not None and wanted is not None and wanted not in map(_name, stored):
                return Reading(
                    Availability.UNHEALTHY, missing=("capacity",), notes=(f"model_not_served: {hints.served_model}",)
                )
            notes.append("not_loaded: loaded on the first request")
        elif (size := whole(dig(loaded, "size"))) and (vram := dig(loaded, "size_vram")) != size:
            notes.append(f"partly_on_cpu: {vram} of {size} bytes on the device")
        if context is None:
            notes.append(f"context_assumed: {DEFAULT_CONTEXT_TOKENS} tokens; set kvTokens if it is larger")
        per_request = context or min(hints.max_model_tokens or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS)
        # One context is the pool unless the operator says how many run side by side.
        pool = max(hints.kv_tokens, per_request) if hints.kv_tokens is not None else per_request
        return Reading(
            availability=Availability.SERVING,
            block_tokens=1,
            capacity_blocks=pool,
            max_sequences=hints.max_sequences or max(1, pool // per_request),
            max_model_tokens=per_request,
            notes=tuple(notes),
        )


def _models(answer: Answer | None) -> list[Any] | None:
    models = dig(answer.json(), "models") if answer is not None and ok(answer) else None
    return models if isinstance(models, list) else None


def _name(model: Any) -> str | None:
    name = dig(model, "model") or dig(model, "name")
    return _tagged(name) if isinstance(name, str) else None


def _tagged(name: str) -> str:
    """The name with its tag; Ollama reads a missing tag as ``latest``."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
