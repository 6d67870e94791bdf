"""Which kind each layer of a ``config.json`` is: full, sliding, chunked, state, both, cross or none.

Owns the order of the rules: per-layer lists win over intervals, intervals over what a family is known to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from extproc.memory.hf_fields import MOST_LAYERS, Fields, short

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
SLIDING_ALL = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "phimoe", "ministral", "ministral3", "mistral4"})
#: Families that carry ``sliding_window`` and switch it on with ``use_sliding_window`` only.
SLIDING_SWITCHED = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
                               "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_next", "dots1"})  # fmt: skip
#: One full layer in every N, the last of the N; N from ``sliding_window_pattern`` where the file has it.
FULL_EVERY: Mapping[str, int] = {
    "gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4,
}  # fmt: skip

#: Families whose every file lists which layers slide.
_LISTED = frozenset({"gemma4", "gemma4_text", "afmoe"})

#: Families whose ``num_layers`` counts pairs of attention layers with a mixture of experts beside both.
PAIRED = frozenset({"longcat_flash"})

#: Families with nothing that the rules here do not read. Others must show no field that smells of a cache rule.
KNOWN = SLIDING_ALL | SLIDING_SWITCHED | frozenset(FULL_EVERY) | frozenset("""
    llama llama4 llama4_text mllama_text_model gemma qwen qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text
    deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 kimi_k2 kimi_k25 kimi_linear kimi_vl glm glm4
    glm4_moe glm4_moe_lite glm_moe_dsa glm4v_text glm4v_moe_text chatglm granite granitemoe granitemoehybrid
    granitemoeshared nemotron nemotron_h nemotron-nas jamba bamba falcon falcon_h1 starcoder gpt_bigcode phi phi4mm
    gemma4_text gemma4 minimax minimax_m2 minimax_text_01 lfm2 lfm2_moe internlm2 internlm3 baichuan cohere command-r
    olmo olmo2 olmoe stablelm exaone smollm3 dbrx mpt gpt2 gptj gpt_neox seed_oss ernie4_5 ernie4_5_moe hunyuan_v1_dense
    hunyuan_v1_moe arcee apertus minicpm minicpm3 yi orion mimo bailing_moe opt afmoe
    longcat_flash mimo_v2_flash
    """.split())  # fmt: skip


#: Families without a KV cache that grows: encoders and models of recurrent layers alone.
CACHELESS = frozenset("""
    bert roberta xlm-roberta distilbert albert electra camembert mpnet deberta deberta-v2 modernbert nomic_bert new
    mamba mamba2 falcon_mamba rwkv rwkv5 rwkv6 rwkv7
    """.split())  # fmt: skip


def layer_count(fields: Fields) -> int:
    """Layers of the model: num_hidden_layers, or the length of the list that stands for it."""
    for listed in ("layers_block_type", "hybrid_override_pattern"):
        value = fields.raw(listed)
        if not fields.has("num_hidden_layers") and isinstance(value, (list, str)) and value:
            return len(value)
    count = fields.integer("num_hidden_layers", minimum=1)
    if fields.model_type in PAIRED:
        count = 2 * fields.integer("num_layers", minimum=1)
    if count > MOST_LAYERS:
        raise fields.fault("num_hidden_layers", f"is {count}; no model has more than {MOST_LAYERS}")
    return count


def prediction_layers(fields: Fields) -> int:
    """Multi-token-prediction layers behind the model's own."""
    count = 0
    for field in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        count = max(count, fields.integer(field, 0))
        if count > MOST_LAYERS:
            raise fields.fault(field, f"is {count}; no model has more than {MOST_LAYERS}")
    return count


def layer_kinds(fields: Fields, count: int) -> list[str]:
    """One of full, sliding, chunked, state, both, none, cross for each layer, by the first rule whose field is there."""
    for present, rule in _KIND_RULES:
        if present(fields):
            return rule(fields, count)
    return ["full"] * count


def _named_list(field: str) -> Callable[[Fields, int], list[str]]:
    def rule(fields: Fields, count: int) -> list[str]:
        names = [str(n) for n in fields.items(field)]
        # Some files go on with the prediction layers behind the model's own.
        if len(names) not in (count, count + prediction_layers(fields)):
            raise fields.fault(field, f"has {len(names)} entries for {count} layers")
        for i, n in enumerate(names[:count]):
            if n not in _KIND_NAMES:
                raise fields.fault(f"{field}[{i}]", f"is {short(n)}; known kinds: {', '.join(sorted(_KIND_NAMES))}")
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
    full = fields.mapping("linear_attn_config").indices("full_attn_layers", count, first=1)
    return ["full" if i + 1 in full else "state" for i in range(count)]


def _jamba(fields: Fields, count: int) -> list[str]:
    period, offset = fields.integer("attn_layer_period", minimum=1), fields.integer("attn_layer_offset", 0)
    if offset >= period:
        raise fields.fault("attn_layer_offset", f"is {offset}; it must be below attn_layer_period {period}")
    return ["full" if i % period == offset else "state" for i in range(count)]


def _interval(fields: Fields, count: int) -> list[str]:
    every = fields.integer("full_attention_interval", minimum=1)
    return ["full" if (i + 1) % every == 0 else "state" for i in range(count)]


def _llama4(fields: Fields, count: int) -> list[str]:
    # no_rope_layers: 1 = rope (chunked), 0 = none (full); an empty or missing list means every 4th layer is full.
    listed = fields.integers("no_rope_layers") if fields.has("no_rope_layers") else []
    flags: list[int] = listed or [int((i + 1) % 4 != 0) for i in range(count)]
    if len(flags) != count:
        raise fields.fault("no_rope_layers", f"has {len(flags)} entries for {count} layers")
    return ["chunked" if f else "full" for f in flags]


def _every(fields: Fields, count: int) -> list[str]:
    letters = fields.raw("sliding_window_pattern")
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:  # EXAONE 4: LLLG
        return ["full" if letters[i % len(letters)] == "G" else "sliding" for i in range(count)]
    every = fields.integer("sliding_window_pattern", FULL_EVERY.get(fields.model_type, 6), minimum=1)
    return ["full" if (i + 1) % every == 0 else "sliding" for i in range(count)]


def _switched(fields: Fields, count: int) -> list[str]:
    # Layers from max_window_layers on slide (transformers Qwen2Config); the ones below are full.
    first = fields.integer("max_window_layers", 0)
    return ["full" if i < first else "sliding" for i in range(count)]


def _block_configs(fields: Fields, count: int) -> list[str]:
    blocks = fields.items("block_configs")
    if len(blocks) != count:
        raise fields.fault("block_configs", f"has {len(blocks)} entries for {count} layers")
    return ["full" if heads_in_group(b) else "none" for b in blocks]


def heads_in_group(block: object) -> int:
    """``attention.n_heads_in_group`` of one DeciLM block; 0 where the block has no attention."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    value = attention.get("n_heads_in_group") if isinstance(attention, Mapping) else None
    return int(value) if isinstance(value, int) and value > 0 else 0


def _cross(fields: Fields, count: int) -> list[str]:
    cross = fields.indices("cross_attention_layers", count)
    return ["cross" if i in cross else "full" for i in range(count)]


def _flags(field: str, flagged: str, other: str) -> Callable[[Fields, int], list[str]]:
    def rule(fields: Fields, count: int) -> list[str]:
        flags = fields.integers(field)
        if len(flags) != count:
            raise fields.fault(field, f"has {len(flags)} entries for {count} layers")
        return [flagged if f else other for f in flags]

    return rule


def _indices(fields: Fields, count: int) -> list[str]:
    full = fields.indices("attn_layer_indices", count)
    return ["full" if i in full else "state" for i in range(count)]


def _slides_everywhere(fields: Fields) -> bool:
    if not fields.has("sliding_window") or not fields.boolean("use_sliding_window", default=True):
        return False
    if fields.integer("sliding_window", minimum=1) >= fields.integer("max_position_embeddings", 1 << 62):
        return False  # a window that no sequence outgrows
    if fields.model_type in SLIDING_ALL:
        return True
    if fields.model_type in _LISTED:
        raise fields.fault("layer_types", f"is missing; model_type {fields.model_type!r} slides by that list")
    if fields.model_type in KNOWN:
        return False
    raise fields.fault(
        "sliding_window", f"is set, but which layers of model_type {fields.model_type!r} slide is not known"
    )


_KIND_RULES: tuple[tuple[Callable[[Fields], bool], Callable[[Fields, int], list[str]]], ...] = (
    (lambda f: f.has("layer_types"), _named_list("layer_types")),
    (lambda f: f.has("layers_block_type"), _named_list("layers_block_type")),
    (lambda f: f.has("hybrid_override_pattern"), _override_pattern),
    (lambda f: f.has("attn_type_list"), _flags("attn_type_list", "full", "state")),
    (lambda f: f.has("hybrid_layer_pattern"), _flags("hybrid_layer_pattern", "sliding", "full")),
    (lambda f: f.has("linear_attn_config"), _kda),
    (lambda f: f.has("block_configs"), _block_configs),
    (lambda f: f.has("attn_layer_indices"), _indices),
    (lambda f: f.has("attn_layer_period"), _jamba),
    (lambda f: f.has("full_attention_interval"), _interval),
    (lambda f: f.has("cross_attention_layers"), _cross),
    (lambda f: f.model_type in ("llama4_text", "llama4") or (f.has("no_rope_layers") and f.has("attention_chunk_size")), _llama4),
    (lambda f: f.model_type == "falcon_h1", lambda f, n: ["both"] * n),
    (lambda f: f.model_type in FULL_EVERY and f.has("sliding_window"), _every),
    (lambda f: f.model_type in SLIDING_SWITCHED and f.boolean("use_sliding_window") and f.has("sliding_window"), _switched),
    (lambda f: f.model_type not in SLIDING_SWITCHED and _slides_everywhere(f), lambda f, n: ["sliding"] * n),
)  # fmt: skip
