"""Geometry of a Hugging Face ``config.json``.

Owns the rules that turn published fields into layer groups: per-layer lists win over intervals, intervals over
what a model family is known to do, and a field that changes the cache in a way not understood is an error, never
a guess. Pure: the caller read the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from extproc.memory.geometry import Geometry, LayerGroup, LayerKind, check_geometry, grouped
from extproc.memory.hf_fields import Fields, head_dim, short, text_fields
from extproc.memory.hf_kinds import CACHELESS, KNOWN, heads_in_group, layer_count, layer_kinds, prediction_layers
from extproc.memory.hf_quant import kv_format_of, weight_format_of
from extproc.memory.hf_state import state_of
from extproc.memory.params import count_parameters

#: Families whose latent attention engines unpack into ordinary heads.
_UNPACKED_LATENT = frozenset({"minicpm3"})
_SMELLS = re.compile(r"sliding|window|chunk|kv_|_kv|mamba|ssm|linear_att|linear_attn|conv_|compress|cross_att|recurrent|"
                     r"layer_types|attn_type|attention_type|indexer|index_|share|sparse|global_att|retention|mixer")  # fmt: skip
_HARMLESS = frozenset(
    """
    num_key_value_heads num_kv_heads n_head_kv kv_channels use_sliding_window sliding_window max_window_layers qkv_bias
    sliding_window_pattern layer_types kv_lora_rank attn_type full_attention_interval num_kv_shared_layers shared_expert_intermediate_size
    n_shared_experts num_shared_experts use_shared_expert decoder_sparse_step attention_chunk_size share_embedding
    moe_shared_expert_intermediate_size shared_intermediate_size
    """.split()
)

#: Vision family (see ``vision.FAMILIES``) by the outer ``model_type``.
VISION_FAMILIES: Mapping[str, str] = {
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl", "qwen3_5_moe": "qwen3_vl", "llava": "llava", "llava_next": "llava_next", "gemma3": "gemma3",
    "gemma3n": "gemma3", "gemma4": "gemma3", "pixtral": "pixtral", "mistral3": "mistral3", "internvl_chat": "internvl",
    "internvl": "internvl", "mllama": "mllama", "llama4": "llama4",
}  # fmt: skip


def geometry_from_config(config: Mapping[str, object], *, where: str, name: str | None = None) -> Geometry:
    """Geometry of a parsed ``config.json``; GeometryError names ``where`` and the field that is not understood."""
    fields = text_fields(config, where)
    _refuse_unknown(fields)
    count = layer_count(fields)
    kinds = layer_kinds(fields, count)
    rows: list[LayerGroup | None] = []
    sharing = fields.integer("num_kv_shared_layers", 0)
    if sharing >= count:
        raise fields.fault("num_kv_shared_layers", f"is {sharing}; at least one of {count} layers must keep its own")
    for index, kind in enumerate(kinds):
        if index >= count - sharing:
            rows.append(None)
            continue
        rows.extend(_layer(fields, kind, index))
    groups, layer_map = grouped(rows)
    params, uncounted = count_parameters(fields, kinds)
    outer_type = str(config.get("model_type") or "")
    full = next((i for i, g in enumerate(groups) if g.kind in (LayerKind.FULL, LayerKind.MLA)), 0)
    return check_geometry(
        Geometry(
            name=name or str(config.get("_name_or_path") or fields.model_type or where),
            groups=groups,
            layer_map=layer_map,
            hidden=fields.integer("hidden_size", 0),
            heads=fields.integer("num_attention_heads", 0),
            vocab=fields.integer("vocab_size", 0),
            context_tokens=fields.integer("max_position_embeddings", 0),
            dtype=_dtype(fields),
            params=params,
            mtp_layers=prediction_layers(fields),
            mtp_group=full,
            quantization=weight_format_of(config, fields),
            kv_dtype=kv_format_of(config, fields),
            vision_family=VISION_FAMILIES.get(outer_type),
            where=where,
            model_type=fields.model_type,
            uncounted=uncounted,
        )
    )


_DTYPES = frozenset("bfloat16 bf16 float16 fp16 half float32 fp32 float float64 auto float8_e4m3fn float8_e5m2".split())


def _dtype(fields: Fields) -> str:
    """The type engines compute in: bf16 or f16; f32 checkpoints are served in f16 (vllm config/model.py)."""
    name = fields.text("dtype", "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.fault("dtype", f"(or torch_dtype) is {short(name)}; known: {', '.join(sorted(_DTYPES))}")
    return "f16" if name in ("float16", "half", "float32", "float") else "bf16"


def _refuse_unknown(fields: Fields) -> None:
    """A family not known here may not carry a field that changes the cache in a way no rule reads."""
    if fields.model_type in CACHELESS:
        raise fields.fault("model_type", f"is {fields.model_type!r}, which keeps no KV cache; admission by slots only")
    if fields.model_type in KNOWN and fields.model_type:
        return
    for key in fields.names():
        if _SMELLS.search(key) and key not in _HARMLESS and fields.raw(key) not in (None, False, 0, [], ""):
            if key in _STATE_FIELDS or key in _LIST_FIELDS:
                continue
            raise fields.fault(
                key, f"belongs to model_type {fields.model_type!r}, whose cache rule is not known; use the engine's own"
                " capacity figures (kvTokens) for this model"
            )  # fmt: skip


_LIST_FIELDS = frozenset({"layers_block_type", "hybrid_override_pattern", "attn_type_list", "linear_attn_config"})
_STATE_FIELDS = frozenset(
    """
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    mamba_ssm_dtype mamba_d_state mamba_d_conv mamba_expand mamba_n_heads mamba_d_head mamba_n_groups conv_kernel
    mamba_num_heads mamba_head_dim ssm_state_size mamba_chunk_size mamba_conv_bias mamba_proj_bias mamba_dt_rank
    mamba_d_ssm qk_rope_head_dim num_global_key_value_heads global_head_dim index_head_dim index_n_heads index_topk
    """.split()
)


# --- what a layer of a kind keeps --------------------------------------------------------------------------


def _layer(fields: Fields, kind: str, index: int) -> list[LayerGroup | None]:
    if kind == "none":
        return [None]
    if kind == "state":
        return [LayerGroup(LayerKind.STATE, 1, state=state_of(fields))]
    if kind == "both":
        return [_attention(fields, "full", index), LayerGroup(LayerKind.STATE, 1, state=state_of(fields))]
    return [_attention(fields, kind, index)]


def _attention(fields: Fields, kind: str, index: int) -> LayerGroup:
    if fields.has("kv_lora_rank") and fields.model_type not in _UNPACKED_LATENT:
        return _latent(fields)
    heads, k_dim, v_dim = _heads_and_dims(fields, kind, index)
    if kind == "sliding":
        return LayerGroup(LayerKind.SLIDING, 1, heads, k_dim, v_dim, window=fields.integer("sliding_window", minimum=1))
    if kind == "chunked":
        return LayerGroup(
            LayerKind.CHUNKED, 1, heads, k_dim, v_dim, window=fields.integer("attention_chunk_size", minimum=1)
        )
    if kind == "cross":
        # Llama 3.2 Vision: four tiles of 1601 positions (vllm model_executor/models/mllama.py).
        return LayerGroup(LayerKind.CROSS, 1, heads, k_dim, v_dim, fixed_tokens=4 * 1601)
    return LayerGroup(LayerKind.FULL, 1, heads, k_dim, v_dim)


def _latent(fields: Fields) -> LayerGroup:
    rope = fields.integer("qk_rope_head_dim", minimum=1)
    index_dim = fields.integer("index_head_dim", 0)
    return LayerGroup(
        LayerKind.MLA,
        1,
        kv_heads=1,
        k_dim=fields.integer("kv_lora_rank", minimum=1) + rope,
        # The indexer keeps one fp8 key and an f32 scale per 128 elements, whatever the KV type (sglang PR 11309).
        extra_row_bytes=index_dim + 4 * -(-index_dim // 128) if index_dim else 0,
        mha_heads=fields.integer("num_attention_heads", 0),
        mha_k_dim=fields.integer("qk_nope_head_dim", 0) + rope,
        mha_v_dim=fields.integer("v_head_dim", 0),
    )


def _heads_and_dims(fields: Fields, kind: str, index: int) -> tuple[int, int, int]:
    heads = _kv_heads(fields, index)
    queries = fields.integer("num_attention_heads", 0)
    if heads and queries % heads:
        raise fields.fault(
            "num_key_value_heads", f"is {heads} in layer {index}; {queries} attention heads do not divide by it"
        )
    k_dim = head_dim(fields)
    if fields.model_type in _UNPACKED_LATENT:
        k_dim = fields.integer("qk_nope_head_dim", minimum=1) + fields.integer("qk_rope_head_dim", minimum=1)
    v_dim = fields.integer("v_head_dim", k_dim, minimum=1) if not fields.has("kv_lora_rank") else k_dim
    if kind == "sliding" and fields.has("swa_num_key_value_heads"):
        heads = fields.integer("swa_num_key_value_heads", minimum=1)
        k_dim = fields.integer("swa_head_dim", k_dim, minimum=1)
        v_dim = fields.integer("swa_v_head_dim", v_dim, minimum=1)
    if kind == "full" and fields.has("global_head_dim"):
        k_dim = v_dim = fields.integer("global_head_dim", minimum=1)
    if kind == "full" and fields.has("num_global_key_value_heads"):
        heads = fields.integer("num_global_key_value_heads", minimum=1)
    return heads, k_dim, v_dim


def _kv_heads(fields: Fields, index: int) -> int:
    heads = fields.raw("num_key_value_heads")
    if isinstance(heads, list):
        counts = fields.integers("num_key_value_heads")
        if index >= len(counts):
            raise fields.fault("num_key_value_heads", f"has no figure for layer {index}")
        return counts[index]
    if fields.has("block_configs"):
        blocks = fields.items("block_configs")
        per_group = heads_in_group(blocks[index]) if index < len(blocks) else 0
        if not per_group:
            raise fields.fault(f"block_configs[{index}]", "has no attention.n_heads_in_group, but the layer attends")
        return fields.integer("num_attention_heads", minimum=1) // per_group
    if fields.boolean("multi_query_attention"):
        return fields.integer("multi_query_group_num", minimum=1)
    if fields.boolean("multi_query") and not fields.boolean("new_decoder_architecture"):
        return 1
    if fields.has("attn_config"):
        if fields.mapping("attn_config").text("attn_type") == "multiquery_attention":
            return 1
        return fields.mapping("attn_config").integer(
            "num_key_value_heads", fields.integer("num_attention_heads", minimum=1)
        )
    if not fields.has("num_key_value_heads"):
        # Absent means one KV head per query head, as in every transformers class.
        return fields.integer("num_attention_heads", minimum=1)
    return fields.integer("num_key_value_heads", minimum=1)
