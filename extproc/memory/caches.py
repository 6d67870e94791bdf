"""The figures engines print at start-up, computed: cache sizes, block counts, concurrency, compute buffers.

Owns the arithmetic of a whole replica (docs/memory.md); ``kv`` owns that of a request. Every function says
in whose log its result appears.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from extproc.memory.dtypes import KvTypes
from extproc.memory.engines import EngineRules
from extproc.memory.flags import Flags
from extproc.memory.geometry import Geometry, LayerKind
from extproc.memory.kv import KvModel
from extproc.memory.rows import row_bytes, state_bytes

GIB = 1 << 30
MIB = 1 << 20
_WINDOWED = (LayerKind.SLIDING, LayerKind.CHUNKED)


def pad_up(value: int, granule: int) -> int:
    """The next multiple of ``granule``."""
    return -(-value // granule) * granule


# --- vLLM --------------------------------------------------------------------------------------------------


def vllm_available_bytes(total_bytes: float, utilization: float, non_kv_bytes: Iterable[float]) -> float:
    """Memory left for KV on one rank: utilisation x TOTAL (never free) memory - weights - activation - non-torch (- graphs).

    Source: vllm v1/worker/gpu_worker.py determine_available_memory.
    """
    return utilization * total_bytes - sum(non_kv_bytes)


def vllm_max_concurrency(kv: KvModel, num_blocks: int, max_model_tokens: int) -> float:
    """The log's "Maximum concurrency for N tokens per request": blocks / blocks of one request of full length."""
    charged = kv.charged_blocks(max_model_tokens)
    return num_blocks / charged if charged else 0.0


def vllm_size_line(kv: KvModel, num_blocks: int, max_model_tokens: int, style: str) -> int:
    """The log's "GPU KV cache size: N tokens"; ``style`` is the rule table's ``size_line``.

    ``blocks``: blocks // groups x smallest block, 3 to 4 times below the real capacity of a hybrid.
    ``max_concurrency``: concurrency x max_model_len, right for every model.
    """
    groups = kv.pools[0].groups
    if style == "max_concurrency":
        return int(vllm_max_concurrency(kv, num_blocks, max_model_tokens) * max_model_tokens)
    blocks = [g.block_tokens for g in groups if g.block_tokens] or [kv.block_tokens]
    return num_blocks // sum(g.count for g in groups) * min(blocks)


def vllm_needed_bytes(kv: KvModel, max_model_tokens: int) -> int:
    """KV memory one rank needs to serve one request of ``max_model_tokens`` (the start-up error's "needed")."""
    return kv.charged_blocks(max_model_tokens) * max(kv.pools[0].shard_block_bytes)


# --- llama.cpp and Ollama ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellCache:
    """What llama.cpp allocates at load: bytes over all devices, cells per stream, number of streams."""

    full_bytes: int
    sliding_bytes: int
    state_bytes: int
    extra_bytes: int
    full_cells: int
    sliding_cells: int
    streams: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.full_bytes + self.sliding_bytes + self.state_bytes + self.extra_bytes


def cell_cache(geometry: Geometry, rules: EngineRules, types: KvTypes, n_ctx: int, flags: Flags,
               sliding_cells: int | None = None) -> CellCache:  # fmt: skip
    """llama.cpp's cache for a total context of ``n_ctx`` (the log's "KV self size", SWA and recurrent lines).

    Context padded to 256; per slot unless unified; sliding layers keep window + ubatch cells. Sources: llama.cpp
    src/llama-context.cpp, src/llama-kv-cache-iswa.cpp, src/llama-hparams.cpp.
    """
    slots = max(1, flags.n_parallel)
    # Ollama's num_ctx is one slot's; llama-server's is the total.
    n_ctx = pad_up(n_ctx * slots if rules.context_times_parallel else n_ctx, 256)
    streams = 1 if flags.unified else slots
    per_stream = n_ctx if flags.unified else pad_up(n_ctx // slots, 256)
    mla = flags.mla or rules.mla
    windowed = [g for g in geometry.groups if g.kind in _WINDOWED]
    no_sliding = flags.swa_full or not rules.has_sliding_cache or not geometry.has_full
    full = sliding = 0
    window = max((g.window for g in windowed), default=0)
    if sliding_cells is None:
        held = min(per_stream, window * (slots if flags.unified else 1) + flags.n_ubatch)
        sliding_cells = pad_up(held, 256) if windowed else 0
    for g in geometry.groups:
        layer = row_bytes(g, types, 1, mla) * g.layers * streams
        if g.kind in _WINDOWED and not no_sliding:
            sliding += layer * sliding_cells
        elif g.kind is not LayerKind.CROSS:
            full += layer * per_stream
    states = sum(
        state_bytes(g.state, rules, flags, geometry.dtype) * g.layers * slots * (1 + flags.state_rollbacks)
        for g in geometry.groups
        if g.state is not None
    )
    extra = flags.extra_row_bytes * per_stream * streams
    return CellCache(full, sliding, states, extra, per_stream, sliding_cells if not no_sliding else 0, streams)


#: Bytes per element in Ollama's own estimator, which rounds block types down (6 % and 11 % low).
OLLAMA_ELEMENT_BYTES = {"q8_0": 1.0, "q4_0": 0.5}


def ollama_estimate_bytes(geometry: Geometry, types: KvTypes, num_ctx: int, parallel: int = 1, batch: int = 512,
                          sliding: bool = True) -> float:  # fmt: skip
    """Ollama's own "memory.required.kv": context x parallel, rounded element sizes, window x parallel + batch.

    Source: ollama fs/ggml/ggml.go GraphSize, kvCacheBytesPerElement. Builds before sliding caches pass ``sliding`` False.
    """
    context = num_ctx * max(1, parallel)
    k = OLLAMA_ELEMENT_BYTES.get(types.k.name, types.k.bytes_per_element)
    v = OLLAMA_ELEMENT_BYTES.get(types.v.name, types.v.bytes_per_element)
    total = 0.0
    for g in geometry.groups:
        if g.kind in (LayerKind.STATE, LayerKind.CROSS):
            continue
        cells = context
        if g.kind in _WINDOWED and sliding:
            cells = min(context, g.window * max(1, parallel) + batch)
        total += g.layers * cells * g.kv_heads * (g.k_dim * k + g.v_dim * v)
    return total


def compute_buffer_bytes(hidden: int, heads: int, vocab: int, n_ctx: int, *, n_ubatch: int = 512, flash: bool = False,
                         hidden_copies: int | None = None, output_copies: int = 1) -> int:  # fmt: skip
    """llama.cpp's compute buffer (f32 graph): the larger of the logits and the attention or mask bound.

    Without flash attention ``4u(1 + 4e + c(1 + h))``; with it ``u(6c + 32e)`` (f32 mask and its f16 copy, 8 copies of the
    embedding); logits ``4u(e + vocab)``. ``hidden_copies`` replaces the 4 (6 for a fused QKV graph) or the 8.
    """
    logits = 4 * n_ubatch * (output_copies * hidden + vocab)
    if flash:
        copies = 8 if hidden_copies is None else hidden_copies
        return max(logits, n_ubatch * (6 * n_ctx + 4 * copies * hidden))
    copies = 4 if hidden_copies is None else hidden_copies
    return max(logits, 4 * n_ubatch * (1 + copies * hidden + n_ctx * (1 + heads)))


# --- SGLang ------------------------------------------------------------------------------------------------


def sglang_pool_bytes(kv: KvModel, tokens: int) -> int:
    """The log's "KV Cache is allocated ... K size + V size" of one rank, in bytes (SGLang prints GiB as "GB").

    ``tokens`` is ``max_total_num_tokens``; a sliding pool beside it has its ratio of them.
    """
    main = kv.pools[0].groups[0]
    blocks = tokens / main.block_tokens * kv.dcp
    ranks = (sum(p.shard_block_bytes[s] * (p.ratio or 0) for p in kv.pools) for s in range(kv.shards))
    return int(blocks * max(ranks))


def sglang_static_fraction(total_bytes: int, tp: int = 1, pp: int = 1, chunked_prefill: int = 8192,
                           decode_graph_max_bs: int = 256) -> float:  # fmt: skip
    """SGLang's default ``mem_fraction_static``: 1 - reserved / total, at least 10 GiB reserved above 60 GiB cards.

    Source: sglang 0.5.23 arg_groups/memory_hook.py.
    """
    reserved = (512 + 1.5 * max(chunked_prefill, 2048) + 128 * tp * pp + 2 * decode_graph_max_bs) * MIB
    if total_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return max(0.0, 1 - reserved / total_bytes)
