"""Which model x format x context x concurrency fits on devices, what binds, and what would help.

Owns the capacity plan's arithmetic; pure. A row answers for identical devices that share the model by tensor
parallelism (llama.cpp: by layers). KV is what remains after weights and overheads, on the fullest device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from extproc.errors import GeometryError
from extproc.memory.caches import GIB
from extproc.memory.engines import EngineRules, PoolStyle
from extproc.memory.flags import DEFAULT_FLAGS, Flags, default_batched_tokens
from extproc.memory.geometry import Geometry
from extproc.memory.kv import KvModel, build_kv_model
from extproc.memory.overheads import DeviceBudget, Term, default_max_sequences, engine_terms
from extproc.memory.weights import FORMATS, WeightFormat, geometry_weights, weights_bytes

#: Share of the pool that the safe concurrency leaves to bursts and longer answers.
SAFE_SHARE = 0.70
#: A llama.cpp server is not asked for more slots than this.
_MOST_SLOTS = 1024
#: Formats offered as a way out, from the largest to the smallest, by engine family.
_GPU_FORMATS = ("bf16", "fp8", "awq")
_GGUF_FORMATS = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "iq2_xxs")
_CONTEXTS = (262144, 131072, 65536, 32768, 16384, 8192, 4096, 2048)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One question: this model in this format on this engine, at this context, on these identical devices."""

    geometry: Geometry
    rules: EngineRules
    quantization: str
    context_tokens: int
    devices: tuple[DeviceBudget, ...]
    form: WeightFormat | None = None
    weights_size: int | None = None
    kv_dtype: str | None = None
    mean_tokens: int | None = None
    utilization: float | None = None
    flags: Flags = DEFAULT_FLAGS


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The answer. ``headroom_bytes`` is what remains over all devices beside ``max_sequences`` sequences; negative: missing.

    ``binding_term`` is the term that runs out first: weights, overhead, kv, or ``unsupported``. ``why`` says it in
    words, ``would`` what would make it fit.
    """

    model: str
    quantization: str
    engine: str
    context_tokens: int
    fits: bool
    weights_bytes: int
    kv_bytes_per_sequence: int
    max_sequences: int
    safe_sequences_70: int
    binding_term: str
    headroom_bytes: int
    overhead_bytes: int = 0
    devices: int = 1
    why: str = ""
    would: tuple[str, ...] = ()


def plan_row(request: PlanRequest) -> PlanRow:
    """One row with its reasons; a combination that cannot run is a row that does not fit."""
    row = _bare_row(request)
    return row if row.fits else replace(row, would=tuple(_ways_out(request))[:3])


def _bare_row(request: PlanRequest) -> PlanRow:
    try:
        kv = _kv(request)
        weights, _ = geometry_weights(request.geometry, request.form, request.weights_size)
    except GeometryError as error:
        return _unsupported(request, str(error))
    if request.geometry.context_tokens and request.context_tokens > request.geometry.context_tokens:
        return _unsupported(request, f"the model's context is {request.geometry.context_tokens} tokens")
    cells = request.rules.style is PoolStyle.CELLS
    return _cells_row(request, kv, weights) if cells else _pool_row(request, kv, weights)


def _kv(request: PlanRequest) -> KvModel:
    batched = request.flags.max_num_batched_tokens or default_batched_tokens(request.devices[0].total_bytes)
    return build_kv_model(
        request.geometry,
        request.rules,
        kv_dtype=request.kv_dtype,
        tp=len(request.devices),
        flags=replace(request.flags, max_num_batched_tokens=batched),
    )


def _unsupported(request: PlanRequest, why: str) -> PlanRow:
    return PlanRow(
        request.geometry.name, request.quantization, request.rules.engine, request.context_tokens, False, 0, 0, 0, 0,
        "unsupported", 0, devices=len(request.devices), why=why,
    )  # fmt: skip


def _budget(request: PlanRequest) -> int:
    """What the engine may take of the smallest device: its share of TOTAL memory, within what is usable.

    Before 0.20 vLLM's CUDA graphs came on top of its share; they must fit the device all the same.
    """
    share = request.utilization if request.utilization is not None else request.rules.utilization
    on_top = (
        0 if request.rules.graphs_in_budget else sum(t.bytes for t in _terms(request, 0) if t.name == "cuda_graphs")
    )
    return min(min(int(d.total_bytes * share), d.usable_bytes - on_top) for d in request.devices)


def _overhead(request: PlanRequest, n_ctx: int) -> int:
    """Overheads of one device that come out of the budget."""
    terms = _terms(request, n_ctx)
    return sum(t.bytes for t in terms if request.rules.graphs_in_budget or t.name != "cuda_graphs")


def _terms(request: PlanRequest, n_ctx: int) -> tuple[Term, ...]:
    total = request.devices[0].total_bytes
    return engine_terms(
        request.geometry, request.rules, tp=len(request.devices),
        batched_tokens=request.flags.max_num_batched_tokens or default_batched_tokens(total),
        max_sequences=default_max_sequences(total), n_ctx=n_ctx, n_ubatch=request.flags.n_ubatch,
    )  # fmt: skip


def _pool_row(request: PlanRequest, kv: KvModel, weights: int) -> PlanRow:
    """Engines that give all that remains to one pool."""
    n = len(request.devices)
    budget, overhead = _budget(request), _overhead(request, 0)
    per_device = int(weights_bytes_share(weights, n))
    available = budget - per_device - overhead
    need = max(1, kv.charged_blocks(request.context_tokens))
    states = _state_beside(kv)
    main = kv.pools[0]
    per_sequence = [need * b + s for b, s in zip(main.shard_block_bytes, states, strict=True)]
    each = sum(per_sequence) + sum(_other_pools(kv, request.context_tokens))
    worst = max(p + o for p, o in zip(per_sequence, _other_pools(kv, request.context_tokens), strict=True))
    fitting = _sequences(available, worst, kv, need, request.context_tokens) if available > 0 else 0
    mean = request.mean_tokens or request.context_tokens
    mean_need = max(1, kv.charged_blocks(mean))
    worst_mean = max(mean_need * b + s for b, s in zip(main.shard_block_bytes, states, strict=True))
    safe = int(SAFE_SHARE * max(0, available) / worst_mean) if worst_mean else 0
    return _finish(request, weights, per_device, overhead, budget, fitting, safe, each, worst, overhead * n)


def _sequences(available: int, worst: int, kv: KvModel, need: int, context_tokens: int) -> int:
    """Whole sequences of full length: by blocks where there is one pool, by bytes where states or pools add up."""
    if len(kv.pools) == 1 and not any(_state_beside(kv)):
        blocks = kv.pool_blocks(available)
        usable = blocks - (kv.rules.null_blocks if kv.rules else 0)
        return max(0, usable) // need
    states = max(_state_beside(kv))
    if len(kv.pools) > 1 and not states:
        # Pools of a fixed ratio: the tighter one decides, and the other's rest is lost.
        return kv.pool_blocks(available) // max(1, kv.blocks(context_tokens))
    if kv.rules is not None and kv.rules.style is PoolStyle.TWO_POOLS and states:
        # SGLang gives states their own pool of r / (1 + r) of the rest, which caps the running requests.
        ratio = kv.rules.state_ratio
        return int(min(available / (1 + ratio) // max(1, worst - states), available * ratio / (1 + ratio) // states))
    return available // worst if worst else 0


def _state_beside(kv: KvModel) -> tuple[int, ...]:
    return (0,) * kv.shards if kv.state_in_pool else kv.state_shard_bytes


def _other_pools(kv: KvModel, tokens: int) -> tuple[int, ...]:
    """Bytes a sequence takes in the pools beside the main one, on each shard."""
    return tuple(
        sum(sum(g.used(tokens) for g in p.groups) * p.shard_block_bytes[s] for p in kv.pools[1:])
        for s in range(kv.shards)
    )


def _cells_row(request: PlanRequest, kv: KvModel, weights: int) -> PlanRow:
    """llama.cpp: every slot is allocated at load, and the compute buffer grows with the total context."""
    n = len(request.devices)
    budget = _budget(request)
    per_device = int(weights_bytes_share(weights, n))
    per_shard = kv.sequence_bytes(-(-request.context_tokens // 256) * 256)
    worst, each = max(per_shard), sum(per_shard)

    def room(slots: int) -> int:
        return budget - per_device - _overhead(request, slots * request.context_tokens) - slots * worst

    low, high = 0, _MOST_SLOTS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if room(middle) >= 0 else (low, middle - 1)
    overhead = _overhead(request, max(1, low) * request.context_tokens)
    mean = request.mean_tokens or request.context_tokens
    available = budget - per_device - overhead
    worst_mean = max(kv.sequence_bytes(mean))
    safe = min(low, int(SAFE_SHARE * max(0, available) / worst_mean)) if worst_mean else 0
    return _finish(request, weights, per_device, overhead, budget, low, safe, each, worst, overhead * n)


def weights_bytes_share(weights: int, devices: int) -> float:
    """Weights of one of several devices; what tensor parallelism copies counted (+0.3 %)."""
    return weights / devices * (1.003 if devices > 1 else 1.0)


def _finish(request: PlanRequest, weights: int, per_device: int, overhead: int, budget: int, fitting: int, safe: int,
            each: int, worst: int, overhead_total: int) -> PlanRow:  # fmt: skip
    n = len(request.devices)
    left = budget - per_device - overhead
    term, why = _binding(budget, per_device, overhead, worst, fitting, request.context_tokens)
    headroom = n * left - fitting * each if fitting else n * (left - worst)
    return PlanRow(
        request.geometry.name, request.quantization, request.rules.engine, request.context_tokens, fitting > 0, weights, each,
        fitting, min(safe, fitting) if request.mean_tokens is None else safe, term, headroom, overhead_total, n, why,
    )  # fmt: skip


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f} GiB"


def _binding(budget: int, weights: int, overhead: int, worst: int, fitting: int, context: int) -> tuple[str, str]:
    if weights > budget:
        return (
            "weights",
            f"weights take {_gib(weights)} of {_gib(budget)} usable a device: {_gib(weights - budget)} missing",
        )
    if weights + overhead > budget:
        return "overhead", (f"weights {_gib(weights)} + overheads {_gib(overhead)} exceed {_gib(budget)} usable a device by"
                            f" {_gib(weights + overhead - budget)}")  # fmt: skip
    left = budget - weights - overhead
    if not fitting:
        return "kv", f"one sequence of {context} tokens needs {_gib(worst)} of KV a device, {_gib(left)} are left"
    return "kv", f"{_gib(left)} a device are left for KV, {_gib(worst)} a sequence"


# --- what would help ---------------------------------------------------------------------------------------


def _ways_out(request: PlanRequest) -> Iterable[str]:
    """Changes, one at a time, that make the row fit; the least change of each kind."""
    for found in (_smaller_format(request), _smaller_kv(request), _shorter_context(request), _more_devices(request)):
        if found:
            yield found


def _fits(request: PlanRequest) -> bool:
    return _bare_row(request).fits


def _smaller_format(request: PlanRequest) -> str | None:
    if request.geometry.params is None:
        return None
    names = _GGUF_FORMATS if request.rules.style is PoolStyle.CELLS else _GPU_FORMATS
    row = _bare_row(request)
    for name in names:
        form = FORMATS[name]
        smaller = weights_bytes(request.geometry.params, form) < 0.97 * row.weights_bytes
        if smaller and _fits(replace(request, form=form, weights_size=None, quantization=name)):
            return f"weights in {name}"
    return None


def _smaller_kv(request: PlanRequest) -> str | None:
    smaller = "q8_0" if request.rules.style is PoolStyle.CELLS else "fp8"
    if request.kv_dtype not in (None, "auto", "bf16", "f16"):
        return None
    return f"KV in {smaller}" if _fits(replace(request, kv_dtype=smaller)) else None


def _shorter_context(request: PlanRequest) -> str | None:
    for context in _CONTEXTS:
        if context < request.context_tokens and _fits(replace(request, context_tokens=context)):
            return f"context of {context} tokens"
    return None


def _more_devices(request: PlanRequest) -> str | None:
    for count in (2, 4, 8, 16):
        if count > len(request.devices) and _fits(replace(request, devices=request.devices[:1] * count)):
            return f"{count} such devices"
    return None


# --- a live replica ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaRoom:
    """A running replica as the ledger sees it: pool, what is committed, and its own limits. None is unknown.

    ``watermark_blocks`` is the part of the pool that admissions leave free.
    """

    capacity_blocks: int | None
    committed_blocks: int | None
    max_sequences: int | None
    sequences: int
    watermark_blocks: int = 0


def replica_row(name: str, quantization: str, engine: str, context_tokens: int, kv: KvModel, room: ReplicaRoom,
                weights: int, mean_tokens: int | None = None) -> PlanRow:  # fmt: skip
    """What still fits on a running replica now: sequences of full length beside what is committed."""
    need = max(1, kv.blocks(context_tokens))
    each = need * kv.bytes_per_block
    shape = (name, quantization, engine, context_tokens)
    if room.capacity_blocks is None or room.committed_blocks is None:
        return PlanRow(*shape, False, weights, each, 0, 0, "unknown", 0, why="the replica's pool is not reported now")
    pool = room.capacity_blocks - room.watermark_blocks
    free = pool - room.committed_blocks
    by_blocks = max(0, free) // need
    by_slots = None if room.max_sequences is None else max(0, room.max_sequences - room.sequences)
    fitting = by_blocks if by_slots is None else min(by_blocks, by_slots)
    mean_need = max(1, kv.blocks(mean_tokens or context_tokens))
    safe = max(0, int(SAFE_SHARE * pool / mean_need) - room.sequences)
    term = "sequences" if by_slots is not None and by_slots < by_blocks else "kv"
    if need > pool:
        why = f"a sequence of {context_tokens} tokens needs {need} blocks, the pool without its watermark has {pool}"
    elif not fitting and term == "sequences":
        why = f"all {room.max_sequences} sequences of the engine are taken"
    else:
        why = f"{free} of {pool} blocks are free, a sequence needs {need}"
    would: tuple[str, ...] = ()
    if not fitting and free > 0 and term == "kv":
        would = (f"a context of {_tokens_in(kv, free)} tokens",)
    return PlanRow(
        *shape, fitting > 0, weights, each, fitting, safe, term, free * kv.bytes_per_block, why=why, would=would
    )


def _tokens_in(kv: KvModel, blocks: int) -> int:
    """Longest sequence that so many blocks hold."""
    low, high = 0, blocks * kv.block_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if kv.blocks(middle) <= blocks else (low, middle - 1)
    return low
