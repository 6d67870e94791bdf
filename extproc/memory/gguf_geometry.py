"""Geometry from GGUF metadata.

Owns what llama.cpp's metadata keys mean for the cache; knows no file. Keys: gguf 0.19.0 constants.py; defaults per
architecture: llama.cpp src/llama-model.cpp load_hparams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.errors import GeometryError
from extproc.memory.geometry import Geometry, LayerGroup, LayerKind, ParamCounts, StateShape, check_geometry, grouped
from extproc.memory.gguf_header import Tensor
from extproc.memory.hf_fields import MOST_LAYERS, whole

#: Full layer at the end of every N, where the file gives a window but no pattern. Architectures that are not here and
#: give a window without a pattern are not windowed by llama.cpp (phi3, llama, starcoder2).
_SWA_EVERY: Mapping[str, int] = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "gptoss": 2, "exaone4": 4, "olmo2": 4, "smallthinker": 4,
}  # fmt: skip
#: llama.cpp fixes Llama 4's chunk at 8192 and counts one full layer in four.
_CHUNK = 8192
#: Architectures whose recurrent layers come by interval, and the default interval.
_INTERVAL: Mapping[str, int] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen3_5": 4}


#: Larger figures are damage, not models.
_LARGEST = 1 << 48


class _Meta:
    """Metadata of one architecture prefix with errors that name the key."""

    def __init__(self, fields: Mapping[str, object], arch: str, where: str) -> None:
        self._fields, self._arch, self.where = fields, arch, where

    def raw(self, key: str) -> object:
        return self._fields.get(f"{self._arch}.{key}")

    def fault(self, key: str, problem: str) -> GeometryError:
        return GeometryError(f"{self.where}: field '{self._arch}.{key}' {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.fault(key, "is missing from the GGUF metadata")
            return default
        number = whole(value)
        if number is None or not 0 <= number <= _LARGEST:
            raise self.fault(key, f"is {value!r}; expected a whole number")
        return number

    def per_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        value = self.raw(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) < layers:
                raise self.fault(key, f"has {len(value)} entries for {layers} layers")
            numbers = [whole(v) for v in value[:layers]]
            if any(n is None or n < 0 for n in numbers):
                raise self.fault(key, "holds something other than whole numbers")
            return [n for n in numbers if n is not None]
        return [self.integer(key, default)] * layers


def geometry_from_gguf(
    fields: Mapping[str, object], where: str, tensors: Sequence[Tensor] = (), name: str | None = None
) -> Geometry:
    """Geometry of a GGUF file's metadata; GeometryError names ``where`` and the key at fault.

    ``tensors`` (shapes and types, no data) give parameter counts and exact weight bytes.
    """
    arch = fields.get("general.architecture")
    if not isinstance(arch, str):
        raise GeometryError(f"{where}: field 'general.architecture' is missing from the GGUF metadata")
    meta = _Meta(fields, arch, where)
    blocks = meta.integer("block_count")
    if blocks > MOST_LAYERS:
        raise meta.fault("block_count", f"is {blocks}; no model has more than {MOST_LAYERS} layers")
    mtp = meta.integer("nextn_predict_layers", 0)
    layers = blocks - mtp
    kv_heads = meta.per_layer("attention.head_count_kv", layers, _first(meta, "attention.head_count"))
    windows = _windows(meta, arch, layers)
    recurrent = _recurrent(meta, arch, layers, kv_heads)
    sharing = meta.integer("attention.shared_kv_layers", 0)
    rows: list[LayerGroup | None] = []
    for i in range(layers):
        if i >= layers - sharing:
            rows.append(None)
        elif recurrent[i]:
            rows.append(LayerGroup(LayerKind.STATE, 1, state=_state(meta)))
        elif kv_heads[i] == 0:
            rows.append(None)
        else:
            rows.append(_attention(meta, arch, kv_heads[i], windows[i], i))
    groups, layer_map = grouped(rows)
    label = fields.get("general.name")
    vocab = fields.get(f"{arch}.vocab_size") or fields.get("tokenizer.ggml.tokens.#len") or _length(fields)
    full = next((i for i, g in enumerate(groups) if g.kind in (LayerKind.FULL, LayerKind.MLA)), 0)
    return check_geometry(
        Geometry(
            name=name or (label if isinstance(label, str) else arch),
            groups=groups,
            layer_map=layer_map,
            hidden=meta.integer("embedding_length", 0),
            heads=_first(meta, "attention.head_count") or 0,
            vocab=int(vocab) if isinstance(vocab, int) else 0,
            context_tokens=meta.integer("context_length", 0),
            dtype="f16",
            params=_params(tensors),
            mtp_layers=mtp,
            mtp_group=full,
            quantization=_main_type(tensors),
            weights_bytes=sum(t.nbytes for t in tensors) or None,
            where=where,
            model_type=arch,
        )
    )


def _length(fields: Mapping[str, object]) -> int:
    tokens = fields.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _first(meta: _Meta, key: str) -> int | None:
    """The figure, or the largest of a list of figures, one per layer."""
    value = meta.raw(key)
    numbers = [whole(v) for v in (value if isinstance(value, list) else [value])]
    return max((n for n in numbers if n is not None and 0 <= n <= _LARGEST), default=None)


def _windows(meta: _Meta, arch: str, layers: int) -> list[tuple[LayerKind, int]]:
    """Kind and window of each attention layer."""
    if arch == "llama4":
        return [(LayerKind.CHUNKED, _CHUNK) if (i + 1) % 4 else (LayerKind.FULL, 0) for i in range(layers)]
    window = meta.integer("attention.sliding_window", 0)
    pattern = meta.raw("attention.sliding_window_pattern")
    if not window:
        return [(LayerKind.FULL, 0)] * layers
    slide, keep = (LayerKind.SLIDING, window), (LayerKind.FULL, 0)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise meta.fault("attention.sliding_window_pattern", f"has {len(pattern)} entries for {layers} layers")
        return [slide if p else keep for p in pattern[:layers]]
    every = whole(pattern) or _SWA_EVERY.get(arch, 1)
    return [keep if (i + 1) % every == 0 else slide for i in range(layers)]


def _recurrent(meta: _Meta, arch: str, layers: int, kv_heads: Sequence[int]) -> list[bool]:
    if arch in ("mamba", "mamba2", "rwkv6", "rwkv7"):
        raise meta.fault("attention.head_count_kv", f"architecture {arch!r} keeps no KV cache; admission by slots only")
    has_state = meta.raw("ssm.conv_kernel") is not None or meta.raw("shortconv.l_cache") is not None
    if not has_state:
        return [False] * layers
    every = meta.integer("full_attention_interval", _INTERVAL.get(arch, 0))
    if every:
        return [(i + 1) % every != 0 for i in range(layers)]
    # A layer without KV heads is recurrent, unless it has a feed-forward of its own (Nemotron-H's MLP layers).
    ffn = meta.per_layer("feed_forward_length", layers, 0)
    lone_mlp = "nemotron_h" in arch
    return [kv_heads[i] == 0 and not (lone_mlp and ffn[i] > 0) for i in range(layers)]


def _state(meta: _Meta) -> StateShape:
    if meta.raw("shortconv.l_cache") is not None:
        return StateShape(meta.integer("embedding_length"), 0, 0, meta.integer("shortconv.l_cache"), 0)
    inner, width = meta.integer("ssm.inner_size"), meta.integer("ssm.state_size")
    return StateShape(
        inner, meta.integer("ssm.group_count", 0), 2 * width, meta.integer("ssm.conv_kernel"), inner * width
    )


def _attention(meta: _Meta, arch: str, kv_heads: int, window: tuple[LayerKind, int], index: int) -> LayerGroup:
    kind, width = window
    heads = _first(meta, "attention.head_count") or 0
    default = meta.integer("embedding_length", 0) // heads if heads else 0
    suffix = "_swa" if kind is LayerKind.SLIDING and meta.raw("attention.key_length_swa") is not None else ""
    k_dim = meta.integer(f"attention.key_length{suffix}", default)
    v_dim = meta.integer(f"attention.value_length{suffix}", default)
    if not k_dim:
        raise meta.fault("attention.key_length", "is missing and embedding_length does not give it")
    if meta.raw("attention.kv_lora_rank") is None:
        return LayerGroup(kind, 1, kv_heads, k_dim, v_dim, window=width)
    rank, rope = meta.integer("attention.kv_lora_rank"), meta.integer("rope.dimension_count")
    index_dim = meta.integer("attention.indexer.key_length", 0)
    if meta.raw("attention.key_length_mla") is not None:
        # Converted with latent attention: key_length is already latent + rope, one head.
        mha_k, mha_v = meta.integer("attention.key_length_mla"), meta.integer("attention.value_length_mla")
        return LayerGroup(LayerKind.MLA, 1, 1, rank + rope, 0, extra_row_bytes=2 * index_dim, mha_heads=heads,
                          mha_k_dim=mha_k, mha_v_dim=mha_v)  # fmt: skip
    # An older file: llama.cpp keeps the unpacked heads (71x for DeepSeek-R1).
    return LayerGroup(LayerKind.FULL, 1, heads, k_dim, v_dim)


def _params(tensors: Sequence[Tensor]) -> ParamCounts | None:
    if not tensors:
        return None
    parts = {"embedding": 0, "attention": 0, "mlp": 0, "experts": 0, "other": 0}
    for t in tensors:
        parts[_part(t.name)] += t.elements
    return ParamCounts(**parts)


def _part(name: str) -> str:
    if name.startswith(("token_embd", "output.", "per_layer_token_embd")):
        return "embedding"
    for mark, part in (("_exps", "experts"), ("ffn_", "mlp"), ("attn_", "attention"), ("ssm_", "attention")):
        if mark in name and "norm" not in name:
            return part
    return "other"


def _main_type(tensors: Sequence[Tensor]) -> str | None:
    """The type that holds most of the weights."""
    sizes: dict[str, int] = {}
    for t in tensors:
        sizes[t.type_name] = sizes.get(t.type_name, 0) + t.elements
    return max(sizes, key=lambda k: sizes[k]) if sizes else None
