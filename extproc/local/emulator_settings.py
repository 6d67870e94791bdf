"""What one emulated engine is (``Settings``) and what is wrong with it on purpose (``Faults``).

Owns values and their bounds; knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from extproc.local.paged import EngineShape


@dataclass(slots=True)
class Faults:
    """What is wrong with the engine on purpose; ``POST /emulator/faults`` sets fields, ``{"clear": true}`` all of them.

    ``status`` answers the next ``count`` requests with that status (503, 500, 429 …) and, where it is not 0, with
    ``retry_after_s`` as Retry-After. ``reset`` breaks the next N
    connections, each after ``reset_after_chunks`` chunks. ``hang`` stops the engine's steps while /health stays 200.
    ``dead_health`` makes /health 503. ``silent_metrics`` never answers /metrics. ``first_byte_delay_s`` holds every
    request before the engine sees it. ``rate`` scales speed (0.1 = ten times slower). ``abort_lag_s`` is how long a
    gone client's request still runs.
    """

    status: int = 503
    count: int = 0
    retry_after_s: int = 0
    reset: int = 0
    reset_after_chunks: int = 0
    hang: bool = False
    dead_health: bool = False
    silent_metrics: bool = False
    first_byte_delay_s: float = 0.0
    rate: float = 1.0
    abort_lag_s: float = 0.0

    def update(self, data: dict[str, object]) -> None:
        """Set fields from a JSON object; ``ValueError`` names an unknown field or a wrong type, and nothing is set."""
        known = {item.name: item for item in fields(self)}
        for name, value in data.items():
            if name not in known:
                raise ValueError(f"unknown fault {name}; known: clear, {', '.join(known)}")
            wanted = type(getattr(self, name))
            if isinstance(value, bool) != (wanted is bool) or not isinstance(value, (wanted, int)):
                raise ValueError(f"{name} must be of type {wanted.__name__}")
            if not isinstance(value, bool) and (value < 0 or (name == "rate" and value == 0)):
                raise ValueError(f"{name} must not be {value}")
        for name, value in data.items():
            setattr(self, name, type(getattr(self, name))(value))


@dataclass(frozen=True, slots=True)
class Settings:
    """One emulated engine: its shape, its names, how it counts and how long its answers are."""

    shape: EngineShape = field(default_factory=EngineShape)
    served: tuple[str, ...] = ("emulated",)
    personality: str = "vllm"  # vllm | llamacpp
    tokenizer: str | None = None
    seed: int = 0
    mean_output_tokens: float = 200.0
    chunk_interval_s: float = 0.1
    keep_alive_s: float = 5.0
