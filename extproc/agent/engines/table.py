"""Engines that differ only in names: one reader over a row of metric names and JSON paths.

Owns the reading of SGLang, TensorRT-LLM (trtllm-serve and Triton) and TGI. Rows say where each figure stands;
a figure under several names is taken from the first one there. Ranks inside a data-parallel group repeat one
figure (the largest counts), groups add up, and a request must fit into one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.agent.engines.base import (
    Answer,
    Availability,
    Counters,
    Endpoint,
    Hints,
    PoolView,
    Reading,
    Signal,
    added,
    count,
    dig,
    grouped,
    normalise_names,
    ok,
    roomiest,
    summed,
    whole,
)
from extproc.agent.exposition import Exposition, parse

#: No ratio of small whole numbers comes near it.
GOLDEN = 0.6180339887498949
#: A figure the engine has no metric for.
NOT_SHOWN = Signal(())
#: Where a JSON figure stands: the endpoint's path, then the steps inside its body.
Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Where one engine keeps its figures.

    ``capacity_tokens``/``capacity_blocks``, ``used_tokens``/``used_blocks``/``usage`` (a fraction): whichever the
    engine shows. ``capacity_label``: an info metric with its labels for blocks and block size. ``required`` names
    the signals without which the replica is unknown. ``progress`` names what moves while work is in flight,
    ``progress_otherwise`` what changes then where none of these is shown. ``metrics`` lists paths of which the first good one is read.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    metrics: tuple[str, ...] = ("/metrics",)
    health: tuple[str, ...] = ("/health",)
    rank: str = "dp_rank"
    running: Signal = NOT_SHOWN
    waiting: Signal = NOT_SHOWN
    usage: Signal = NOT_SHOWN
    used_tokens: Signal = NOT_SHOWN
    used_blocks: Signal = NOT_SHOWN
    capacity_tokens: Signal = NOT_SHOWN
    capacity_blocks: Signal = NOT_SHOWN
    block_tokens: Signal = NOT_SHOWN
    max_sequences: Signal = NOT_SHOWN
    capacity_label: tuple[str, str, str] | None = None
    capacity_tokens_at: tuple[Place, ...] = ()
    block_tokens_at: tuple[Place, ...] = ()
    max_sequences_at: tuple[Place, ...] = ()
    max_model_tokens_at: tuple[Place, ...] = ()
    block_tokens_default: int = 1
    counters: Mapping[str, Signal] = field(default_factory=dict)
    progress: tuple[str, ...] = ()
    progress_otherwise: tuple[str, ...] = ()
    progress_signals: Mapping[str, Signal] = field(default_factory=dict)
    required: tuple[str, ...] = ("capacity", "used", "running", "waiting")
    metrics_hint: str = ""
    started: tuple[str, ...] = ("process_start_time_seconds",)
    wedged_after_s: float | None = None


class TableEngine:
    """One row as an ``Engine``."""

    outside = False

    def __init__(self, row: Row) -> None:
        self.row = row
        signals = [value for value in (getattr(row, name) for name in Row.__slots__) if isinstance(value, Signal)]
        signals += [*row.counters.values(), *row.progress_signals.values()]
        extra = [*row.started, *(row.capacity_label[:1] if row.capacity_label else ())]
        self._wanted = normalise_names(name for signal in signals for name in signal.names) | normalise_names(extra)

    @property
    def name(self) -> str:
        """The engine's name in the configuration."""
        return self.row.name

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """What to read, in order."""
        return self.row.endpoints

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """One reading from the row's places."""
        row = self.row
        body = next((answers[path] for path in row.metrics if path in answers and ok(answers[path])), None)
        exposition = parse(body.text(), self._wanted) if body is not None else Exposition()
        json = {path: answer.json() for path, answer in answers.items() if ok(answer) and path not in row.metrics}
        block = self._block_tokens(exposition, json)
        views = self._pools(exposition, json, hints, block)
        notes = []
        capacity, used = roomiest(views)
        running, waiting = summed(view.running for view in views), summed(view.waiting for view in views)
        found = {"capacity": capacity, "used": used, "running": running, "waiting": waiting}
        if not exposition.samples and row.metrics_hint:
            notes.append(f"metrics_off: {row.metrics_hint}")
        started = next((value for name in row.started if (value := _newest(exposition, name)) is not None), None)
        most = self._gauge(exposition, row.max_sequences)
        return Reading(
            availability=Availability.SERVING
            if any(ok(answers.get(path)) for path in row.health)
            else Availability.UNHEALTHY,
            block_tokens=block,
            capacity_blocks=capacity,
            used_blocks=used,
            shows_used=True,
            running=running,
            waiting=waiting,
            max_sequences=count(most) or _first(json, row.max_sequences_at) or hints.max_sequences,
            max_model_tokens=_first(json, row.max_model_tokens_at) or hints.max_model_tokens,
            counters=self._counters(exposition),
            identity=None if started is None else repr(started),
            started_unix_s=started,
            pools=views if len(views) > 1 else (),
            missing=tuple(name for name in row.required if found[name] is None),
            notes=tuple(notes),
            bad_lines=exposition.bad_lines,
            wedged_after_s=row.wedged_after_s,
        )

    def _block_tokens(self, exposition: Exposition, json: Mapping[str, object]) -> int:
        row = self.row
        shown = whole(self._gauge(exposition, row.block_tokens))
        if shown is None and row.capacity_label is not None:
            shown = whole(_label(exposition, row.capacity_label[0], row.capacity_label[2]))
        return shown or _first(json, row.block_tokens_at) or row.block_tokens_default

    def _pools(
        self, exposition: Exposition, json: Mapping[str, object], hints: Hints, block: int
    ) -> tuple[PoolView, ...]:
        row = self.row
        running = self._groups(exposition, row.running)
        waiting = self._groups(exposition, row.waiting)
        usage = self._groups(exposition, row.usage)
        tokens, blocks = self._groups(exposition, row.used_tokens), self._groups(exposition, row.used_blocks)
        sizes = self._groups(exposition, row.capacity_blocks)
        sizes |= {group: value // block for group, value in self._groups(exposition, row.capacity_tokens).items()}
        labels = sorted(set(running) | set(usage) | set(tokens) | set(blocks) | set(sizes)) or [""]
        shown = self._capacity(exposition, json, hints, block)
        views = []
        for label in labels:
            # A capacity without the rank label stands for each group.
            capacity = count(sizes.get(label, sizes.get("") if len(sizes) == 1 else None))
            if not capacity:
                capacity = shown
            used = _used(capacity, blocks.get(label), tokens.get(label), usage.get(label), block)
            views.append(PoolView(label, capacity, used, count(running.get(label)), count(waiting.get(label))))
        return tuple(views)

    def _capacity(self, exposition: Exposition, json: Mapping[str, object], hints: Hints, block: int) -> int | None:
        """One group's blocks where no gauge tells them: an info metric, a JSON figure, the operator's."""
        row = self.row
        if row.capacity_label is not None:
            labelled = whole(_label(exposition, row.capacity_label[0], row.capacity_label[1]))
            if labelled is not None:
                return labelled
        tokens = _first(json, row.capacity_tokens_at) or hints.kv_tokens
        return None if tokens is None else tokens // block

    def _groups(self, exposition: Exposition, signal: Signal) -> dict[str, float]:
        return grouped(signal.samples(exposition)[0], self.row.rank)

    def _gauge(self, exposition: Exposition, signal: Signal) -> float | None:
        samples, _ = signal.samples(exposition)
        return max((sample.value for sample in samples), default=None)

    def _counters(self, exposition: Exposition) -> Counters:
        found: dict[str, float | None] = {}
        for name, signal in {**self.row.counters, **self.row.progress_signals}.items():
            groups = self._first_name(exposition, signal)
            value = added(*groups.values())
            found[name] = value if value is not None and value >= 0 else None
        progress = added(*(found.get(name) for name in self.row.progress))
        if progress is None:
            # A gauge among these may fall while a counter rises: unequal weights keep the sum from standing still.
            weighted = [(1.0 + GOLDEN * at, found.get(name)) for at, name in enumerate(self.row.progress_otherwise)]
            progress = added(*(None if value is None else weight * value for weight, value in weighted))
        for name in self.row.progress_signals:
            found.pop(name)
        prompt, computed = found.get("prompt_tokens"), found.get("computed_tokens")
        if computed is None and prompt is not None:
            found["computed_tokens"] = max(0.0, prompt - (found.get("cached_tokens") or 0.0))
        return Counters(**found, progress=progress)

    def _first_name(self, exposition: Exposition, signal: Signal) -> dict[str, float]:
        for name in signal.names:
            samples, _ = Signal((name,), signal.where).samples(exposition)
            if samples:
                # Ranks repeat a figure, other labels (model, finish reason) split it: add the latter up per rank first.
                ranks: dict[tuple[str, str], float] = {}
                for sample in samples:
                    inner = "/".join(sample.labels.get(key, "") for key in INNER_RANKS)
                    key = (sample.labels.get(self.row.rank, ""), inner)
                    ranks[key] = ranks.get(key, 0.0) + sample.value
                groups: dict[str, float] = {}
                for (group, _inner), value in ranks.items():
                    groups[group] = max(groups.get(group, -math.inf), value)
                return groups
        return {}


#: Labels of ranks that repeat a figure within one data-parallel group; pid is one per rank.
INNER_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank", "cp_rank", "pid")


def _used(
    capacity: int | None, blocks: float | None, tokens: float | None, usage: float | None, block: int
) -> int | None:
    if capacity is None:
        return None
    if blocks is not None:
        used = blocks
    elif tokens is not None:
        used = math.ceil(tokens / block)
    elif usage is not None and 0.0 <= usage <= 1.01:
        used = math.ceil(usage * capacity - 1e-6)
    else:
        return None
    return min(capacity, int(used)) if math.isfinite(used) and used >= 0 else None


def _first(json: Mapping[str, object], places: Sequence[Place]) -> int | None:
    for path, *steps in places:
        value = whole(dig(json.get(str(path)), *steps))
        if value is not None:
            return value
    return None


def _label(exposition: Exposition, metric: str, label: str) -> str | None:
    samples, _ = Signal((metric,)).samples(exposition)
    return samples[0].labels.get(label) if samples else None


def _newest(exposition: Exposition, name: str) -> float | None:
    samples, _ = Signal((name,)).samples(exposition)
    return max((sample.value for sample in samples if sample.value > 0), default=None)
