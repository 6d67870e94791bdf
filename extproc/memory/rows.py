"""Bytes per token of one layer on one shard, and how layers fall on pipeline stages.

Owns the smallest piece of every estimate (docs/memory.md); knows no pool.
"""

from __future__ import annotations

from extproc.memory.dtypes import MLA_ROW_BYTES, KvTypes, dtype_bytes
from extproc.memory.engines import EngineRules
from extproc.memory.flags import Flags
from extproc.memory.geometry import Geometry, LayerGroup, LayerKind, StateShape


def shard_heads(kv_heads: int, tp: int) -> int:
    """KV heads on one of ``tp`` shards: split until each has one, then replicated."""
    return max(1, -(-kv_heads // tp))


def row_bytes(group: LayerGroup, types: KvTypes, tp: int = 1, mla: str = "latent") -> int:
    """Bytes one token takes in one layer of ``group`` on one of ``tp`` shards.

    Heads x (k_dim + v_dim) x element size for ordinary attention; the latent for MLA, one copy on every shard.
    0 for recurrent layers. Source: vllm v1/kv_cache_interface.py AttentionSpec and MLAAttentionSpec.
    """
    if group.kind is LayerKind.STATE:
        return 0
    if group.kind is LayerKind.MLA:
        return _latent_row(group, types, tp, mla) + group.extra_row_bytes
    heads = shard_heads(group.kv_heads, tp)
    k = types.k.row_bytes(heads * group.k_dim, heads)
    v = types.v.row_bytes(heads * group.v_dim, heads) if group.v_dim else 0
    return k + v + group.extra_row_bytes


def _latent_row(group: LayerGroup, types: KvTypes, tp: int, mla: str) -> int:
    if mla == "heads" and group.mha_heads:
        heads = shard_heads(group.mha_heads, tp)
        return types.k.row_bytes(heads * group.mha_k_dim) + types.v.row_bytes(heads * group.mha_v_dim)
    # Sparse MLA (a group with an indexer) has no plain fp8 page: engines pack it as fp8_ds_mla.
    packed = MLA_ROW_BYTES.get("fp8_ds_mla" if types.k.name == "fp8" and group.extra_row_bytes else types.k.name)
    latent = packed if packed is not None else types.k.row_bytes(group.k_dim, 1)
    if mla == "latent_kv":
        # Mid-2025 llama.cpp builds keep a V of the latent without its rope part.
        rope = group.mha_k_dim - group.mha_v_dim if group.mha_k_dim > group.mha_v_dim else 0
        latent += types.v.row_bytes(max(0, group.k_dim - (rope or 64)))
    return latent


def state_bytes(state: StateShape, rules: EngineRules, flags: Flags, model_dtype: str, tp: int = 1) -> int:
    """Bytes of one layer's recurrent state of one sequence on one shard."""
    conv = flags.conv_dtype or rules.state_dtype_conv
    configured = state.ssm_dtype if rules.state_dtype_conv == "model" else None
    ssm = flags.ssm_dtype or configured or (rules.state_dtype_mamba if state.mamba else rules.state_dtype_ssm)
    conv_bytes = dtype_bytes(model_dtype if conv == "model" else conv)
    ssm_bytes = dtype_bytes(model_dtype if ssm == "model" else ssm)
    extra = flags.lookahead_tokens if rules.state_in_pool else 0
    return state.shard_bytes(conv_bytes, ssm_bytes, tp, extra)


def pipeline_stages(layers: int, pp: int) -> tuple[range, ...]:
    """Layer indices of each stage; the remainder goes to stages from the second last backwards.

    Source: vllm distributed/utils.py get_pp_indices.
    """
    sizes = [layers // pp] * pp
    remainder = layers % pp
    for i in range(2, remainder + 2):
        sizes[-i if pp > 1 else -1] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return tuple(range(s, s + n) for s, n in zip(starts, sizes, strict=True))


def stage_counts(geometry: Geometry, pp: int) -> tuple[tuple[int, ...], ...]:
    """For each stage, how many layers of each group it holds."""
    return tuple(
        tuple(sum(1 for i in stage if geometry.layer_map[i] == g) for g in range(len(geometry.groups)))
        for stage in pipeline_stages(len(geometry.layer_map), pp)
    )
