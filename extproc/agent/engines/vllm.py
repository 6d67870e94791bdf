"""vLLM 0.6 to 0.33: one row for V0 and V1, with every name its gauges had.

Pool: ``cache_config_info`` gives blocks (one of them the null block, never handed out) and the block size.
On hybrid models the ``block_size`` label is the smallest of several groups and blocks are no measure of
tokens (vllm#51163). With a geometry requests are counted group by group in the engine's own blocks, so those are the
pool; should the engine fit fewer requests of full length than the geometry says, the pool shrinks in that measure.
Without one the pool is ``kv_cache_max_concurrency`` x max_model_len, in blocks of that label.
Decode-context parallelism multiplies a block's tokens without saying so (vllm#40895): the factor follows from
``kv_cache_max_concurrency`` where there is one, else from the operator's ``kvTokens``.
Data-parallel engines: counts add up; a request must fit into one engine, so the used figure is chosen such
that capacity - used is the room of the roomiest engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    number,
    ok,
    roomiest,
    summed,
    total,
    whole,
)
from extproc.agent.exposition import Exposition, normalise, parse
from extproc.memory import KvModel, drift

RUNNING = Signal(("vllm:num_requests_running",))
WAITING = Signal(("vllm:num_requests_waiting",))
#: V0 only; a swapped request still needs its blocks back, so it counts as waiting.
SWAPPED = Signal(("vllm:num_requests_swapped",))
USAGE = Signal(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"))
CONFIG = "vllm:cache_config_info"
SLEEP = "vllm:engine_sleep_state"

#: Counters and histograms by the field they feed; the first name that is there counts.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "cached_tokens": (
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
    ),
    "hit_tokens": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "looked_up_tokens": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
    ),
    "output_tokens": ("vllm:generation_tokens_total",),
    "prefilled_tokens": ("vllm:request_prefill_kv_computed_tokens_sum",),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum",),
    "decode_steps": (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_count",
    ),
    "decode_s": ("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
    "ttft_s": ("vllm:time_to_first_token_seconds_sum",),
    "ttft_count": ("vllm:time_to_first_token_seconds_count",),
    "queue_s": ("vllm:request_queue_time_seconds_sum", "vllm:time_in_queue_requests_sum"),
    "queue_count": ("vllm:request_queue_time_seconds_count", "vllm:time_in_queue_requests_count"),
    "preemptions": ("vllm:num_preemptions_total",),
    "finished": ("vllm:request_success_total",),
    "iterations": ("vllm:iteration_tokens_total_count",),
}
STARTED = "process_start_time_seconds"
#: Written per process even where prometheus' multiprocess mode drops the process_* series.
CREATED = ("vllm:num_preemptions_created", "vllm:prompt_tokens_created")
#: A time stamp per set of adapters; old sets stay, so the newest counts.
LORA = "vllm:lora_requests_info"
WAITING_REASON = "vllm:num_requests_waiting_by_reason"

WANTED = frozenset(
    normalise(name)
    for name in (
        *RUNNING.names, *WAITING.names, *SWAPPED.names, *USAGE.names, CONFIG, SLEEP, LORA, WAITING_REASON, STARTED, *CREATED,
        *(name for names in COUNTERS.values() for name in names),
    )
)  # fmt: skip

#: A concurrency figure is printed from a float; a uniform model's agrees with its blocks to this share.
CONCURRENCY_TOLERANCE = 0.01
#: Rounds between two looks at whether /pause was called. Only a server in development mode can be paused, and that one
#: has /is_paused; a paused one shows neither running nor waiting requests while they hang.
PAUSED_ROUNDS = 3
#: Context-parallel factors that exist (powers of two).
PARALLEL_FACTORS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Pool:
    """One engine's pool: blocks a request can get, tokens in each, and how blocks relate to vLLM's own."""

    blocks: int | None
    block_tokens: int
    note: str | None = None
    ratio: float | None = None


class Vllm:
    """The row of vLLM's OpenAI server."""

    name = "vllm"
    outside = False
    endpoints = (
        Endpoint("/health"),
        Endpoint("/metrics", metrics=True),
        Endpoint("/v1/models", every=10, required=False),
        Endpoint("/is_paused", every=PAUSED_ROUNDS, required=False),
    )

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """One reading; capacity, usage, running and waiting are required."""
        metrics = answers.get("/metrics")
        exposition = parse(metrics.text(), WANTED) if metrics is not None and ok(metrics) else Exposition()
        max_model_tokens, served = _model(answers.get("/v1/models"), hints)
        pools = _pools(exposition, max_model_tokens, hints)
        usage_samples, usage_name = USAGE.samples(exposition)
        running_samples, running_name = RUNNING.samples(exposition)
        waiting_samples, _ = WAITING.samples(exposition)
        swapped_samples, _ = SWAPPED.samples(exposition)
        views = _views(
            pools,
            grouped(usage_samples, "engine"),
            grouped(running_samples, "engine"),
            grouped(waiting_samples, "engine"),
            grouped(swapped_samples, "engine"),
        )
        capacity, used = roomiest(views)
        running, waiting = summed(view.running for view in views), summed(view.waiting for view in views)
        wanted = {"capacity": capacity, "used": used, "running": running, "waiting": waiting}
        started = _started(exposition)
        notes = [pool.note for pool in pools.values() if pool.note] + _remarks(exposition)
        if metrics is not None and metrics.status == 404:
            notes.append("metrics_off: /metrics is 404")
        if _paused(answers):
            notes.append("paused: /pause was called; requests hang until /resume")
        if not served:
            notes.append(f"model_not_served: {hints.served_model}")
        return Reading(
            availability=Availability.UNHEALTHY if not served else _availability(answers, exposition),
            block_tokens=min((pool.block_tokens for pool in pools.values()), default=16),
            capacity_blocks=capacity,
            used_blocks=used,
            shows_used=True,
            running=running,
            waiting=waiting,
            max_sequences=hints.max_sequences,
            max_model_tokens=max_model_tokens,
            counters=_counters(exposition),
            identity=None if started is None else repr(started),
            started_unix_s=started,
            pools=views if len(views) > 1 else (),
            missing=tuple(name for name, value in wanted.items() if value is None),
            notes=tuple(notes),
            aliases={"usage": usage_name or "", "running": running_name or ""},
            bad_lines=exposition.bad_lines,
            kv_bytes_per_block=_bytes_per_block(exposition),
            formula_ratio=min((pool.ratio for pool in pools.values() if pool.ratio is not None), default=None),
        )


def _model(answer: Answer | None, hints: Hints) -> tuple[int | None, bool]:
    """The context length of the served model, and whether the model is served at all (unknown counts as yes)."""
    cards = dig(answer.json(), "data") if answer is not None and ok(answer) else None
    if not isinstance(cards, list):
        return hints.max_model_tokens, True
    wanted = [card for card in cards if hints.served_model in (None, dig(card, "id"))]
    lengths = [length for card in wanted or cards if (length := whole(dig(card, "max_model_len"))) is not None]
    return (min(lengths) if lengths else hints.max_model_tokens), bool(wanted)


def _pools(exposition: Exposition, max_model_tokens: int | None, hints: Hints) -> dict[str, Pool]:
    """Every engine's pool by its label; of several series for one engine (a size that was told later) the smallest known."""
    pools: dict[str, Pool] = {}
    for sample in exposition.get(normalise(CONFIG)):
        label, pool = sample.labels.get("engine", ""), _pool(sample.labels, max_model_tokens, hints)
        known = pools.get(label)
        if known is None or known.blocks is None or (pool.blocks is not None and _tokens(pool) < _tokens(known)):
            pools[label] = pool
    return pools


def _tokens(pool: Pool) -> int:
    return (pool.blocks or 0) * pool.block_tokens


def _pool(labels: Mapping[str, str], max_model_tokens: int | None, hints: Hints) -> Pool:
    """One engine's pool from its cache_config_info labels."""
    total_blocks, block = whole(labels.get("num_gpu_blocks")), whole(labels.get("block_size"))
    if total_blocks is None or block is None:
        # Early V1 wrote num_gpu_blocks="None"; the operator's figure stands in, else the capacity is unknown.
        size = block or 16
        return Pool(None if hints.kv_tokens is None else hints.kv_tokens // size, size, "num_gpu_blocks_unknown")
    concurrency = number(labels.get("kv_cache_max_concurrency"))
    kv = hints.kv(block) if hints.kv is not None else None
    if not concurrency or not max_model_tokens:
        return _stated(total_blocks, block, hints.kv_tokens)
    if kv is None or not kv.is_hybrid:
        for factor in PARALLEL_FACTORS:
            uniform = total_blocks / math.ceil(max_model_tokens / (block * factor))
            if abs(concurrency - uniform) <= CONCURRENCY_TOLERANCE * uniform:
                ratio = None if kv is None else 1.0
                return Pool(
                    total_blocks - 1, block * factor, f"context_parallel: {factor}" if factor > 1 else None, ratio
                )
    if kv is not None:
        return _by_geometry(total_blocks, block, concurrency, max_model_tokens, kv)
    if hints.by_geometry:
        return Pool(total_blocks - 1, block, "hybrid_pool: counted by a geometry that this host cannot read")
    tokens = concurrency * max_model_tokens * (total_blocks - 1) / total_blocks
    return Pool(int(tokens) // block, block, "hybrid_pool: from kv_cache_max_concurrency; name a geometry to count short requests exactly")  # fmt: skip


def _stated(total_blocks: int, block: int, stated_tokens: int | None) -> Pool:
    """Releases that report no concurrency: the operator's kvTokens may tell a context-parallel factor."""
    if stated_tokens is not None:
        factor = round(stated_tokens / (total_blocks * block))
        if factor in PARALLEL_FACTORS[1:] and abs(stated_tokens - factor * total_blocks * block) <= block * factor:
            return Pool(total_blocks - 1, block * factor, f"context_parallel: {factor}, from kvTokens")
    return Pool(total_blocks - 1, block)


def _by_geometry(total_blocks: int, block: int, concurrency: float, max_model_tokens: int, kv: KvModel) -> Pool:
    """The engine's blocks as ``kv`` counts them; fewer where the engine itself charges a request more than ``kv`` does."""
    found = drift("max concurrency", concurrency, total_blocks / max(1, kv.charged_blocks(max_model_tokens)))
    usable = total_blocks - 1
    if found.beyond:
        return Pool(int(usable * min(1.0, found.ratio)), block, f"formula_drift: {found.message}", found.ratio)
    return Pool(usable, block, None, found.ratio)


def _bytes_per_block(exposition: Exposition) -> int | None:
    """Bytes of one block on one device, of the largest engine; None where the label is what was asked, not what is.

    With ``num_gpu_blocks_override`` the label ``kv_cache_memory_bytes`` keeps the asked size (measured, 0.32).
    """
    sizes = [
        size // blocks
        for sample in exposition.get(normalise(CONFIG))
        if sample.labels.get("num_gpu_blocks_override", "None") == "None"
        and (size := whole(sample.labels.get("kv_cache_memory_bytes"))) is not None
        and (blocks := whole(sample.labels.get("num_gpu_blocks"))) is not None
    ]
    return max(sizes, default=None)


def _views(
    pools: Mapping[str, Pool],
    usage: Mapping[str, float],
    running: Mapping[str, float],
    waiting: Mapping[str, float],
    swapped: Mapping[str, float],
) -> tuple[PoolView, ...]:
    """Every engine of the server; V0 wrote no engine label on the configuration and none on gauges."""
    shown = set(usage) | set(running) | set(waiting)
    # An engine that is named but shows nothing is unknown, not absent.
    labels = sorted(shown | set(pools) if len(pools) > 1 or not shown else shown)
    only = next(iter(pools.values())) if len(pools) == 1 else None
    views = []
    for label in labels:
        pool = pools.get(label, only)
        blocks = pool.blocks if pool else None
        share = usage.get(label)
        used = None
        if blocks is not None and share is not None and 0.0 <= share <= 1.0 + CONCURRENCY_TOLERANCE:
            used = min(blocks, math.ceil(share * blocks - 1e-6))
        queued = added(waiting.get(label), swapped.get(label)) if label in waiting else None
        views.append(PoolView(label, blocks, used, count(running.get(label)), count(queued)))
    return tuple(views)


def _paused(answers: Mapping[str, Answer]) -> bool:
    answer = answers.get("/is_paused")
    return answer is not None and ok(answer) and dig(answer.json(), "is_paused") is True


def _availability(answers: Mapping[str, Answer], exposition: Exposition) -> Availability:
    if not ok(answers.get("/health")):
        return Availability.UNHEALTHY
    if _paused(answers):
        return Availability.ASLEEP
    awake = [s.value for s in exposition.get(normalise(SLEEP)) if s.labels.get("sleep_state") == "awake"]
    return Availability.ASLEEP if awake and min(awake) == 0 else Availability.SERVING


def _remarks(exposition: Exposition) -> list[str]:
    """What an operator wants to see and no decision needs: adapters in use, why requests wait."""
    remarks = []
    adapters = [s for s in exposition.get(normalise(LORA)) if math.isfinite(s.value)]
    if adapters:
        labels = max(adapters, key=lambda sample: sample.value).labels
        running, waiting = labels.get("running_lora_adapters", ""), labels.get("waiting_lora_adapters", "")
        remarks.append(f"lora: running [{running}], waiting [{waiting}], at most {labels.get('max_lora', '?')}")
    reasons = [s for s in exposition.get(normalise(WAITING_REASON)) if 0 < s.value < math.inf]
    return remarks + [f"waiting_{s.labels.get('reason', 'unknown')}: {s.value:.0f}" for s in reasons]


def _started(exposition: Exposition) -> float | None:
    """Start of the process that serves; the newest of several, so that a restarted part is seen."""
    for name in (STARTED, *CREATED):
        values = [s.value for s in exposition.get(normalise(name)) if math.isfinite(s.value) and s.value > 0]
        if values:
            return max(values)
    return None


def _counters(exposition: Exposition) -> Counters:
    found = {field: total(exposition, names) for field, names in COUNTERS.items()}
    iterations, hits = found.pop("iterations"), found.pop("hit_tokens")
    prompt, cached = found["prompt_tokens"], found["cached_tokens"]
    # Preempted requests are looked up again, so hits may exceed what prompts had; never below zero.
    computed = None if prompt is None else max(0.0, prompt - (cached or 0.0))
    return Counters(
        **found | {"cached_tokens": hits},
        computed_tokens=computed,
        progress=added(prompt, found["output_tokens"], iterations),
    )
