"""Geometry of a Hugging Face ``config.json``.

Owns the rules that turn published fields into layer groups: per-layer lists win over intervals, intervals over
what a model family is known to do, and a field that changes the cache in a way not understood is an error, never
a guess. Pure: the caller read the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from extproc.memory.geometry import Geometry, LayerGroup, LayerKind, StateShape, check_geometry, grouped
from extproc.memory.hf_fields import Fields, text_fields
from extproc.memory.params import count_parameters

#: Spellings of per-layer kinds in layer_types, layers_block_type and the like.
_KIND_NAMES: Mapping[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "nope_full_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "hybrid": "both",
    "deepseek_sparse_attention": "full",
    "mlp": "none",
    "moe": "none",
}

#: Families whose ``sliding_window`` applies to every layer that no list or interval says otherwise of.
_SLIDING_ALL = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "phimoe", "ministral", "ministral3", "mistral4"})
#: Families that carry ``sliding_window`` and switch it on with ``use_sliding_window`` only.
_SLIDING_SWITCHED = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
                               "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_next", "dots1"})  # fmt: skip
#: One full layer in every N, the last of the N; N from ``sliding_window_pattern`` where the file has it.
_FULL_EVERY: Mapping[str, int] = {
    "gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4,
}  # fmt: skip
#: Families whose latent attention engines unpack into ordinary heads.
_UNPACKED_LATENT = frozenset({"minicpm3"})
#: Families with nothing that the rules here do not read. Others must show no field that smells of a cache rule.
_KNOWN = _SLIDING_ALL | _SLIDING_SWITCHED | frozenset(_FULL_EVERY) | frozenset("""
    llama llama4 llama4_text mllama_text_model gemma qwen qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text
    deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 kimi_k2 kimi_k25 kimi_linear kimi_vl glm glm4
    glm4_moe glm4_moe_lite glm_moe_dsa glm4v_text glm4v_moe_text chatglm granite granitemoe granitemoehybrid
    granitemoeshared nemotron nemotron_h nemotron-nas jamba bamba falcon falcon_h1 starcoder gpt_bigcode phi phi4mm
    gemma4_text gemma4 minimax minimax_m2 minimax_text_01 lfm2 lfm2_moe internlm2 internlm3 baichuan cohere command-r
    olmo olmo2 olmoe stablelm exaone smollm3 dbrx mpt gpt2 gptj gpt_neox seed_oss ernie4_5 ernie4_5_moe hunyuan_v1_dense
    hunyuan_v1_moe arcee apertus minicpm minicpm3 yi orion mimo bailing_moe opt
    """.split())  # fmt: skip
_SMELLS = re.compile(r"sliding|window|chunk|kv_|_kv|mamba|ssm|linear_att|linear_attn|conv_|compress|cross_att|recurrent|"
                     r"layer_types|attn_type|attention_type|indexer|index_|share|sparse|global_att|retention")  # fmt: skip
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
    count = _layer_count(fields)
    kinds = _layer_kinds(fields, count)
    rows: list[LayerGroup | None] = []
    sharing = fields.integer("num_kv_shared_layers", 0)
    for index, kind in enumerate(kinds):
        if index >= count - sharing:
            rows.append(None)
            continue
        rows.extend(_layer(fields, kind, index))
    groups, layer_map = grouped(rows)
    mtp = max(fields.integer("num_nextn_predict_layers", 0), fields.integer("mtp_num_hidden_layers", 0))
    outer_type = str(config.get("model_type") or "")
    quant = config.get("quantization_config") or fields.raw("quantization_config")
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
            params=count_parameters(fields, kinds),
            mtp_layers=mtp,
            mtp_group=full,
            quantization=quantization_of(quant),
            vision_family=VISION_FAMILIES.get(outer_type),
            where=where,
            model_type=fields.model_type,
        )
    )


def quantization_of(config: object) -> str | None:
    """Name of the weight format in a ``quantization_config``, or None for plain weights."""
    if not isinstance(config, Mapping):
        return None
    method = str(config.get("quant_method") or config.get("quantization") or config.get("quant_algo") or "").lower()
    bits = config.get("bits") or config.get("w_bit")
    if method in ("awq", "gptq", "auto-round", "autoround") and bits in (8, 3, 2):
        return f"{'gptq' if method != 'awq' else 'awq'}-int{bits}"
    if method in ("compressed-tensors", "modelopt"):
        text = str(config).lower()
        for mark, label in (("nvfp4", "nvfp4"), ("float-quantized", "fp8"), ("'num_bits': 4", "w4a16"), ("fp8", "fp8"),
                            ("'num_bits': 8", "w8a8")):  # fmt: skip
            if mark in text:
                return label
    if method == "bitsandbytes":
        return "bnb-4bit" if config.get("load_in_4bit") else "w8a8"
    return method or None


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", "bfloat16").removeprefix("torch.")
    return {"float16": "f16", "half": "f16", "bfloat16": "bf16", "float32": "f32", "float": "f32"}.get(name, "bf16")


def _refuse_unknown(fields: Fields) -> None:
    """A family not known here may not carry a field that changes the cache in a way no rule reads."""
    if fields.model_type in _KNOWN and fields.model_type:
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


def _layer_count(fields: Fields) -> int:
    for listed in ("layers_block_type", "hybrid_override_pattern"):
        value = fields.raw(listed)
        if not fields.has("num_hidden_layers") and isinstance(value, (list, str)) and value:
            return len(value)
    return fields.integer("num_hidden_layers", minimum=1)


# --- which kind each layer is ------------------------------------------------------------------------------


def _layer_kinds(fields: Fields, count: int) -> list[str]:
    """One of full, sliding, chunked, state, both, none, cross for each layer, by the first rule whose field is there."""
    for present, rule in _KIND_RULES:
        if present(fields):
            return rule(fields, count)
    return ["full"] * count


def _named_list(field: str) -> Callable[[Fields, int], list[str]]:
    def rule(fields: Fields, count: int) -> list[str]:
        names = [str(n) for n in fields.items(field)]
        if len(names) < count:
            raise fields.fault(field, f"has {len(names)} entries for {count} layers")
        for i, n in enumerate(names[:count]):
            if n not in _KIND_NAMES:
                raise fields.fault(f"{field}[{i}]", f"is {n!r}; known kinds: {', '.join(sorted(_KIND_NAMES))}")
        return [_KIND_NAMES[n] for n in names[:count]]

    return rule


def _override_pattern(fields: Fields, count: int) -> list[str]:
    letters = {"M": "state", "*": "full", "-": "none", "E": "none"}
    pattern = fields.text("hybrid_override_pattern")
    bad = next((c for c in pattern if c not in letters), None)
    if bad or len(pattern) != count:
        raise fields.fault(
            "hybrid_override_pattern", f"has {len(pattern)} letters for {count} layers, or a letter {bad!r}"
        )
    return [letters[c] for c in pattern]


def _kda(fields: Fields, count: int) -> list[str]:
    # Kimi-Linear counts layers from 1.
    full = {int(str(i)) for i in fields.mapping("linear_attn_config").items("full_attn_layers")}
    return ["full" if i + 1 in full else "state" for i in range(count)]


def _jamba(fields: Fields, count: int) -> list[str]:
    period, offset = fields.integer("attn_layer_period", minimum=1), fields.integer("attn_layer_offset", 0)
    return ["full" if i % period == offset else "state" for i in range(count)]


def _interval(fields: Fields, count: int) -> list[str]:
    every = fields.integer("full_attention_interval", minimum=1)
    return ["full" if (i + 1) % every == 0 else "state" for i in range(count)]


def _llama4(fields: Fields, count: int) -> list[str]:
    # no_rope_layers: 1 = rope (chunked), 0 = none (full); an empty or missing list means every 4th layer is full.
    raw = fields.raw("no_rope_layers")
    flags = list(raw) if isinstance(raw, Sequence) and raw else [(i + 1) % 4 != 0 for i in range(count)]
    if len(flags) != count:
        raise fields.fault("no_rope_layers", f"has {len(flags)} entries for {count} layers")
    return ["chunked" if f else "full" for f in flags]


def _every(fields: Fields, count: int) -> list[str]:
    every = fields.integer("sliding_window_pattern", _FULL_EVERY.get(fields.model_type, 6), minimum=1)
    return ["full" if (i + 1) % every == 0 else "sliding" for i in range(count)]


def _switched(fields: Fields, count: int) -> list[str]:
    # Layers from max_window_layers on slide (transformers Qwen2Config); the ones below are full.
    first = fields.integer("max_window_layers", 0)
    return ["full" if i < first else "sliding" for i in range(count)]


def _block_configs(fields: Fields, count: int) -> list[str]:
    blocks = fields.items("block_configs")
    if len(blocks) != count:
        raise fields.fault("block_configs", f"has {len(blocks)} entries for {count} layers")
    return ["full" if _heads_in_group(b) else "none" for b in blocks]


def _heads_in_group(block: object) -> int:
    """``attention.n_heads_in_group`` of one DeciLM block; 0 where the block has no attention."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    value = attention.get("n_heads_in_group") if isinstance(attention, Mapping) else None
    return int(value) if isinstance(value, int) else 0


def _cross(fields: Fields, count: int) -> list[str]:
    cross = {int(str(i)) for i in fields.items("cross_attention_layers")}
    return ["cross" if i in cross else "full" for i in range(count)]


def _attention_types(fields: Fields, count: int) -> list[str]:
    flags = fields.items("attn_type_list")
    if len(flags) != count:
        raise fields.fault("attn_type_list", f"has {len(flags)} entries for {count} layers")
    return ["full" if f else "state" for f in flags]


def _indices(fields: Fields, count: int) -> list[str]:
    full = {int(str(i)) for i in fields.items("attn_layer_indices")}
    return ["full" if i in full else "state" for i in range(count)]


def _slides_everywhere(fields: Fields) -> bool:
    if not fields.has("sliding_window") or fields.raw("use_sliding_window") is False:
        return False
    if fields.integer("sliding_window", minimum=1) >= fields.integer("max_position_embeddings", 1 << 62):
        return False  # a window that no sequence outgrows
    if fields.model_type in _SLIDING_ALL:
        return True
    if fields.model_type in _KNOWN:
        return False
    raise fields.fault(
        "sliding_window", f"is set, but which layers of model_type {fields.model_type!r} slide is not known"
    )


_KIND_RULES: tuple[tuple[Callable[[Fields], bool], Callable[[Fields, int], list[str]]], ...] = (
    (lambda f: isinstance(f.raw("layer_types"), list), _named_list("layer_types")),
    (lambda f: f.has("layers_block_type"), _named_list("layers_block_type")),
    (lambda f: f.has("hybrid_override_pattern"), _override_pattern),
    (lambda f: f.has("attn_type_list"), _attention_types),
    (lambda f: f.has("linear_attn_config"), _kda),
    (lambda f: f.has("block_configs"), _block_configs),
    (lambda f: f.has("attn_layer_indices"), _indices),
    (lambda f: f.has("attn_layer_period"), _jamba),
    (lambda f: f.has("full_attention_interval"), _interval),
    (lambda f: f.has("cross_attention_layers"), _cross),
    (lambda f: f.model_type in ("llama4_text", "llama4") or (f.has("no_rope_layers") and f.has("attention_chunk_size")), _llama4),
    (lambda f: f.model_type == "falcon_h1", lambda f, n: ["both"] * n),
    (lambda f: f.model_type in _FULL_EVERY and f.has("sliding_window"), _every),
    (lambda f: f.model_type in _SLIDING_SWITCHED and f.raw("use_sliding_window") is True and f.has("sliding_window"), _switched),
    (lambda f: f.model_type not in _SLIDING_SWITCHED and _slides_everywhere(f), lambda f, n: ["sliding"] * n),
)  # fmt: skip


# --- what a layer of a kind keeps --------------------------------------------------------------------------


def _layer(fields: Fields, kind: str, index: int) -> list[LayerGroup | None]:
    if kind == "none":
        return [None]
    if kind == "state":
        return [LayerGroup(LayerKind.STATE, 1, state=_state(fields))]
    if kind == "both":
        return [_attention(fields, "full", index), LayerGroup(LayerKind.STATE, 1, state=_state(fields))]
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
    k_dim = _head_dim(fields)
    if fields.model_type in _UNPACKED_LATENT:
        k_dim = fields.integer("qk_nope_head_dim", minimum=1) + fields.integer("qk_rope_head_dim", minimum=1)
    v_dim = fields.integer("v_head_dim", k_dim, minimum=1) if not fields.has("kv_lora_rank") else k_dim
    if kind == "full" and fields.has("global_head_dim"):
        k_dim = v_dim = fields.integer("global_head_dim", minimum=1)
    if kind == "full" and fields.has("num_global_key_value_heads"):
        heads = fields.integer("num_global_key_value_heads", minimum=1)
    return heads, k_dim, v_dim


def _kv_heads(fields: Fields, index: int) -> int:
    heads = fields.raw("num_key_value_heads")
    if isinstance(heads, list):
        if index >= len(heads) or not isinstance(heads[index], int):
            raise fields.fault("num_key_value_heads", f"has no figure for layer {index}")
        return int(heads[index])
    if fields.has("block_configs"):
        per_group = _heads_in_group(fields.items("block_configs")[index])
        return fields.integer("num_attention_heads", minimum=1) // per_group
    if fields.raw("multi_query_attention") is True:
        return fields.integer("multi_query_group_num", minimum=1)
    if fields.raw("multi_query") is True and fields.raw("new_decoder_architecture") is not True:
        return 1
    if fields.has("attn_config"):
        return fields.mapping("attn_config").integer(
            "num_key_value_heads", fields.integer("num_attention_heads", minimum=1)
        )
    if not fields.has("num_key_value_heads"):
        # Absent means one KV head per query head, as in every transformers class.
        return fields.integer("num_attention_heads", minimum=1)
    return fields.integer("num_key_value_heads", minimum=1)


def _head_dim(fields: Fields) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim", minimum=1)
    hidden, heads = fields.integer("hidden_size", minimum=1), fields.integer("num_attention_heads", minimum=1)
    if hidden % heads:
        raise fields.fault("head_dim", f"is missing and hidden_size {hidden} does not divide by {heads} heads")
    return hidden // heads


def state_shape(config: Mapping[str, object], where: str) -> StateShape:
    """Recurrent state of one layer from the state fields alone (models given by groups instead of a layer list)."""
    return _state(text_fields(config, where))


def _state(fields: Fields) -> StateShape:
    for present, shape in _STATE_RULES:
        if present(fields):
            return shape(fields)
    raise fields.fault(
        "layer_types", f"has recurrent layers, but model_type {fields.model_type!r} names no state sizes"
    )


def _delta_state(f: Fields) -> StateShape:
    v_heads, v_dim, k_dim = (f.integer(n, minimum=1) for n in
                             ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"))  # fmt: skip
    return StateShape(v_heads * v_dim, f.integer("linear_num_key_heads", minimum=1), 2 * k_dim,
                      f.integer("linear_conv_kernel_dim", minimum=1), v_heads * v_dim * k_dim,
                      f.text("mamba_ssm_dtype") or None)  # fmt: skip


def _kda_state(f: Fields) -> StateShape:
    c = f.mapping("linear_attn_config")
    heads, dim = c.integer("num_heads", minimum=1), c.integer("head_dim", minimum=1)
    return StateShape(heads * dim, heads, 2 * dim, c.integer("short_conv_kernel_size", minimum=1), heads * dim * dim)


def _mamba2_state(heads: str, dim: str, groups: str, state: str, kernel: str) -> Callable[[Fields], StateShape]:
    def shape(f: Fields) -> StateShape:
        inner = f.integer(heads, minimum=1) * f.integer(dim, minimum=1)
        d_state = f.integer(state, minimum=1)
        return StateShape(inner, f.integer(groups, minimum=1), 2 * d_state, f.integer(kernel, minimum=1), inner * d_state,
                          f.text("mamba_ssm_cache_dtype") or f.text("mamba_ssm_dtype") or None)  # fmt: skip

    return shape


def _mamba1_state(f: Fields) -> StateShape:
    inner = f.integer("mamba_expand", minimum=1) * f.integer("hidden_size", minimum=1)
    return StateShape(inner, 0, 0, f.integer("mamba_d_conv", minimum=1), inner * f.integer("mamba_d_state", minimum=1))


def _conv_state(f: Fields) -> StateShape:
    return StateShape(
        f.integer("conv_dim", f.integer("hidden_size", minimum=1)), 0, 0, f.integer("conv_L_cache", minimum=1), 0
    )


def _lightning_state(f: Fields) -> StateShape:
    dim = _head_dim(f)
    return StateShape(0, 0, 0, 1, f.integer("num_attention_heads", minimum=1) * dim * dim)


_STATE_RULES: tuple[tuple[Callable[[Fields], bool], Callable[[Fields], StateShape]], ...] = (
    (lambda f: f.has("linear_num_value_heads"), _delta_state),
    (lambda f: f.has("linear_attn_config"), _kda_state),
    (lambda f: f.has("mamba_n_heads"),
     _mamba2_state("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")),
    (lambda f: f.has("mamba_num_heads"),
     _mamba2_state("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")),
    (lambda f: f.has("mamba_expand"), _mamba1_state),
    (lambda f: f.has("conv_L_cache"), _conv_state),
    (lambda f: f.has("attn_type_list"), _lightning_state),
)  # fmt: skip
