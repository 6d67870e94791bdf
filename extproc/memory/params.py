"""Parameter counts from a ``config.json``, split by what quantisers keep in 16 bit.

Owns the arithmetic of the common decoder families (dense, MoE, MLA, Mamba and delta-net mixers); knows no weight
format. The split matters: a 4-bit checkpoint of a small model is dominated by its 16-bit embeddings
(Qwen2.5-7B AWQ: 5.97 bits per weight over all, 4.25 on the linear layers).
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.errors import GeometryError
from extproc.memory.geometry import ParamCounts
from extproc.memory.hf_fields import Fields
from extproc.memory.hf_kinds import PAIRED

#: Families whose feed-forward has two matrices (up, down) instead of three (gate, up, down).
_TWO_MATRIX_MLP = frozenset({"starcoder2", "gpt_bigcode", "starcoder", "phi", "gpt2", "gpt_neox", "falcon", "mpt",
                             "nemotron", "nemotron_h", "opt", "gptj"})  # fmt: skip
#: Families with experts beside two layers at once, or projections of another width in sliding layers.
_UNCOUNTED = PAIRED | {"mimo_v2_flash"}
#: Families whose lm_head is the embedding unless the file says otherwise (transformers class defaults).
_TIED = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere", "cohere2", "starcoder2",
                   "gpt_bigcode", "starcoder", "gpt2", "falcon", "mpt"})  # fmt: skip


def count_parameters(fields: Fields, kinds: Sequence[str]) -> tuple[ParamCounts | None, str]:
    """Counts by part, or None and the field that stands in the way (then only file sizes tell the weights)."""
    try:
        return _count(fields, kinds), ""
    except GeometryError as e:
        return None, str(e)


def _count(f: Fields, kinds: Sequence[str]) -> ParamCounts:
    if f.model_type in _UNCOUNTED:
        raise f.fault("model_type", f"is {f.model_type!r}, whose parameters no rule here counts")
    hidden, vocab = f.integer("hidden_size", minimum=1), f.integer("vocab_size", minimum=1)
    copies = 1 if f.boolean("tie_word_embeddings", default=f.model_type in _TIED) else 2
    embedding = vocab * hidden * copies
    if f.has("vocab_size_per_layer_input"):
        # Gemma 3n/4: one small embedding per layer beside the usual one.
        embedding += f.integer("vocab_size_per_layer_input") * f.integer("hidden_size_per_layer_input") * len(kinds)
    attention = sum(_mixer(f, kind, hidden) for kind in kinds)
    mlp = experts = 0
    for index, kind in enumerate(kinds):
        dense, routed = _feed_forward(f, index, kind, hidden)
        mlp, experts = mlp + dense, experts + routed
    norms = (2 * len(kinds) + 1) * hidden
    return ParamCounts(embedding, attention, mlp, experts, norms)


def _mixer(f: Fields, kind: str, hidden: int) -> int:
    if kind == "none":
        return 0
    if kind == "state":
        return _state_mixer(f, hidden)
    if kind == "both":
        return _state_mixer(f, hidden) + _attention_mixer(f, hidden, "full")
    return _attention_mixer(f, hidden, kind)


def _attention_mixer(f: Fields, hidden: int, kind: str) -> int:
    heads = f.integer("num_attention_heads", minimum=1)
    if f.has("kv_lora_rank"):
        nope, rope, v_dim = (f.integer(n, minimum=1) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        rank, q_rank = f.integer("kv_lora_rank", minimum=1), f.integer("q_lora_rank", 0)
        query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
        return query + hidden * (rank + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden
    dim = f.integer("head_dim", hidden // heads)
    kv_heads = _mean_kv_heads(f, heads)
    if kind == "full" and f.has("global_head_dim"):
        dim = f.integer("global_head_dim")
        kv_heads = f.integer("num_global_key_value_heads", kv_heads)
    gate = 2 if f.boolean("attn_output_gate") or f.model_type.startswith("qwen3_next") else 1
    bias = (heads + 2 * kv_heads) * dim if f.model_type.startswith("qwen2") else 0
    return hidden * dim * ((gate + 1) * heads + 2 * kv_heads) + bias


def _mean_kv_heads(f: Fields, heads: int) -> int:
    if not isinstance(f.raw("num_key_value_heads"), list):
        return f.integer("num_key_value_heads", heads)
    counts = f.integers("num_key_value_heads")
    return max(1, round(sum(counts) / len(counts))) if counts else heads


def _state_mixer(f: Fields, hidden: int) -> int:
    if f.has("linear_num_value_heads"):
        v_width = f.integer("linear_num_value_heads") * f.integer("linear_value_head_dim")
        k_width = f.integer("linear_num_key_heads") * f.integer("linear_key_head_dim")
        return hidden * (2 * k_width + 3 * v_width)
    if f.has("mamba_num_heads") or f.has("mamba_n_heads"):
        inner = (f.integer("mamba_num_heads", 0) or f.integer("mamba_n_heads")) * (
            f.integer("mamba_head_dim", 0) or f.integer("mamba_d_head")
        )
        groups = f.integer("n_groups", 0) or f.integer("mamba_n_groups", 1)
        state = f.integer("ssm_state_size", 0) or f.integer("mamba_d_state")
        return hidden * (2 * inner + 2 * groups * state) + inner * hidden
    if f.has("mamba_expand"):
        inner = f.integer("mamba_expand") * hidden
        rank = f.raw("mamba_dt_rank")
        rank = rank if isinstance(rank, int) else -(-hidden // 16)
        return 3 * hidden * inner + inner * (2 * rank + 3 * f.integer("mamba_d_state"))
    if f.has("conv_L_cache"):
        return 4 * hidden * hidden
    heads = f.integer("num_attention_heads", minimum=1)
    return 4 * hidden * heads * f.integer("head_dim", hidden // heads)


def _feed_forward(f: Fields, index: int, kind: str, hidden: int) -> tuple[int, int]:
    """Dense and routed-expert parameters of one layer's feed-forward."""
    matrices = 2 if f.model_type in _TWO_MATRIX_MLP else 3
    block = _lone_block(f, index)
    if block in ("-", "mlp"):
        return matrices * hidden * f.integer("intermediate_size"), 0
    if block not in (None, "E", "moe"):
        return 0, 0
    for nested in ("block_configs", "ffn_config"):
        if f.has(nested) and (nested == "block_configs" or f.mapping(nested).has("ffn_hidden_size")):
            raise f.fault(nested, "has feed-forward sizes of its own, which are not counted")
    experts = f.integer("num_experts", 0)
    wide = 2 if f.boolean("use_double_wide_mlp") and index >= f.integer("num_hidden_layers") - f.integer(
        "num_kv_shared_layers", 0) else 1  # fmt: skip
    if experts <= 1 or not _is_sparse(f, index):
        return matrices * hidden * _dense_width(f, index, hidden) * wide, 0
    width = f.integer("moe_intermediate_size", 0) or f.integer("intermediate_size", minimum=1)
    # Nemotron 3: experts work in a narrower latent space between two projections.
    latent = f.integer("moe_latent_size", 0)
    dense = matrices * hidden * _shared_width(f, width) + hidden * experts + 2 * hidden * latent
    if f.boolean("enable_moe_block"):
        # Gemma 4: the experts stand beside a dense feed-forward.
        dense += matrices * hidden * f.integer("intermediate_size", minimum=1)
    return dense, matrices * (latent or hidden) * width * experts


def _lone_block(f: Fields, index: int) -> str | None:
    """Nemotron-H: a layer is a mixer, a feed-forward or an expert block, never two of them; None elsewhere."""
    if f.has("hybrid_override_pattern"):
        return f.text("hybrid_override_pattern")[index : index + 1]
    listed = f.items("layers_block_type") if f.has("layers_block_type") else ()
    return str(listed[index]) if "mlp" in listed or "moe" in listed else None


def _dense_width(f: Fields, index: int, hidden: int) -> int:
    if isinstance(f.raw("intermediate_size"), list):
        widths = f.integers("intermediate_size")
        if index >= len(widths):
            raise f.fault("intermediate_size", f"has no figure for layer {index}")
        return widths[index]
    # Four times the hidden size is what the older families mean by none; the others always say.
    usual = 4 * hidden if f.model_type in _TWO_MATRIX_MLP else None
    return f.integer("intermediate_size_mlp", 0) or f.integer("intermediate_size", usual)


def _shared_width(f: Fields, width: int) -> int:
    """Width of the experts every token passes."""
    if f.has("moe_shared_expert_intermediate_size"):
        return f.integer("moe_shared_expert_intermediate_size")
    shared = f.integer("n_shared_experts", 0) * width
    shared += f.integer("shared_expert_intermediate_size", 0) + f.integer("shared_intermediate_size", 0)
    return shared + (width if f.model_type.startswith("llama4") else 0)


def _is_sparse(f: Fields, index: int) -> bool:
    dense_first = f.integer("first_k_dense_replace", 0)
    if isinstance(f.raw("moe_layer_freq"), list):
        flags = f.integers("moe_layer_freq")
        if index >= len(flags):
            raise f.fault("moe_layer_freq", f"has no figure for layer {index}")
        return flags[index] > 0
    if f.has("mlp_only_layers") and index in f.integers("mlp_only_layers"):
        return False
    step = (
        f.integer("decoder_sparse_step", 0)
        or f.integer("moe_layer_freq", 0)
        or f.integer("interleave_moe_layer_step", 0)
    )
    if index < dense_first:
        return False
    if f.has("expert_layer_period"):
        return index % f.integer("expert_layer_period", minimum=1) == f.integer("expert_layer_offset", 0)
    return step <= 1 or (index + 1) % step == 0
