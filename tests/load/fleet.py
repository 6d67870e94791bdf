"""The stack under load: equal emulated engines behind one Envoy, and what each of them says afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.stack import Stack, running


@dataclass(frozen=True, slots=True)
class Shape:
    """``engines`` of ``blocks`` KV blocks each, a step every ``step_s``."""

    engines: int
    blocks: int
    step_s: float = 0.04
    decode_tokens_per_s: float = 20_000.0
    prefill_tokens_per_s: float = 100_000.0
    chunk_s: float = 0.5
    max_model_tokens: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replicas."""
        return tuple(f"engine-{number}" for number in range(self.engines))

    def arguments(self) -> list[str]:
        """The emulator's command line; one block is the null block."""
        words = {
            "--blocks": self.blocks + 1, "--served-model": "m", "--step-base-ms": self.step_s * 1000,
            "--decode-tokens-per-s": self.decode_tokens_per_s, "--prefill-tokens-per-s": self.prefill_tokens_per_s,
            "--chunk-interval-ms": self.chunk_s * 1000, "--max-model-tokens": self.max_model_tokens,
        }  # fmt: skip
        return [str(part) for word, value in words.items() if value is not None for part in (word, value)]


@contextmanager
def fleet(shape: Shape, *, serves: int = 2, target: Mapping[str, Any] | None = None, **rest: Any) -> Iterator[Stack]:
    """A running stack with one target ``m`` on all engines; ``target`` adds to its configuration.

    Envoy and kvgate wait longer than in production (``stack.PATIENT``), since clients, engines and gateway share a
    machine's cores here. Unless told otherwise KV blocks are the only limit, so that the packer and kvgate answer the same question.
    """
    replicas = [{"name": name} for name in shape.names]
    engines = {name: shape.arguments() for name in shape.names}
    targets = {
        "m": {"engine": "vllm", "servedModel": "m", "maxWaiting": None, "ttftBudgetMs": 3_600_000, "replicas": replicas}
        | dict(target or {})
    }
    config = {"lanes": {"all": {}}, "aliases": {"m": {"lane": "all", "targets": ["m"]}}} | rest
    with running(engines, targets, serves=serves, **config) as stack:
        yield stack


def stats_of(stack: Stack) -> dict[str, dict[str, Any]]:
    """What every engine counted itself."""
    return {name: engine.stats() for name, engine in stack.engines.items()}
