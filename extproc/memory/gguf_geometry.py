"""Geometry from GGUF metadata.

Owns what llama.cpp's metadata keys mean for the cache; knows no file. Keys: gguf 0.19.0 constants.py; defaults per
architecture: llama.cpp src/llama-model.cpp load_hparams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from extproc.errors import GeometryError
from extproc.memory.geometry import Geometry, LayerGroup, LayerKind, ParamCounts, StateShape, check_geometry, grouped
from extproc.memory.gguf_header import Tensor
from extproc.memory.hf_fields import MOST_LAYERS, short, whole

#: Full layer at the end of every N, where the file gives a window but no pattern. Architectures that are not here and
#: give a window without a pattern are not windowed by llama.cpp (phi3, llama, starcoder2).
_SWA_EVERY: Mapping[str, int] = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "gptoss": 2, "exaone4": 4, "olmo2": 4, "smallthinker": 4,
}  # fmt: skip
#: llama.cpp fixes Llama 4's chunk at 8192 and counts one full layer in four.
_CHUNK = 8192
#: Architectures whose recurrent layers come by interval, and the default interval.
_INTERVAL: Mapping[str, int] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen3_5": 4}

#: Architectures for which llama.cpp makes no KV cache that grows: encoders, diffusion and recurrent layers alone
#: (src/llama-model.cpp create_memory).
_CACHELESS = frozenset("""
    bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3 modern-bert neo-bert gemma-embedding t5encoder wavtokenizer-dec
    dream llada llada-moe rnd1 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7
    """.split())  # fmt: skip

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

    def integer(self, key: str, default: int | None = None, minimum: int = 0) -> int:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.fault(key, "is missing from the GGUF metadata")
            return default
        number = whole(value)
        if number is None or not minimum <= number <= _LARGEST:
            raise self.fault(key, f"is {short(value)}; expected a whole number of at least {minimum}")
        return number

    def per_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        value = self.raw(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) < layers:
                raise self.fault(key, f"has {len(value)} entries for {layers} layers")
            return self.numbers(key)[:layers]
        return [self.integer(key, default)] * layers

    def numbers(self, key: str) -> list[int]:
        """The figures of a list, or the one that stands for all layers; none where the key is absent."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list):
            return [self.integer(key)]
        numbers = [whole(v) for v in value]
        wrong = next((i for i, n in enumerate(numbers) if n is None or not 0 <= n <= _LARGEST), None)
        if wrong is not None:
            raise self.fault(key, f"holds {short(value[wrong])} for layer {wrong}; expected whole numbers")
        return [n for n in numbers if n is not None]


def geometry_from_gguf(
    fields: Mapping[str, object], where: str, tensors: Sequence[Tensor] = (), name: str | None = None
) -> Geometry:
    """Geometry of a GGUF file's metadata; GeometryError names ``where`` and the key at fault.

    ``tensors`` (shapes and types, no data) give parameter counts and exact weight bytes.
    """
    arch = _architecture(fields, where)
    meta = _Meta(fields, arch, where)
    blocks = meta.integer("block_count")
    if blocks > MOST_LAYERS:
        raise meta.fault("block_count", f"is {blocks}; no model has more than {MOST_LAYERS} layers")
    mtp = meta.integer("nextn_predict_layers", 0)
    if mtp >= blocks:
        raise meta.fault("nextn_predict_layers" if mtp else "block_count", f"leaves no layer of {blocks}")
    layers = blocks - mtp
    kv_heads = meta.per_layer("attention.head_count_kv", layers, _first(meta, "attention.head_count"))
    windows = _windows(meta, arch, layers)
    recurrent = _recurrent(meta, arch, layers, kv_heads)
    sharing = meta.integer("attention.shared_kv_layers", 0)
    if sharing >= layers:
        raise meta.fault(
            "attention.shared_kv_layers", f"is {sharing}; at least one of {layers} layers must keep its own"
        )
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


def _architecture(fields: Mapping[str, object], where: str) -> str:
    """The name that begins every key of the model."""
    arch = fields.get("general.architecture")
    if arch is None:
        raise GeometryError(f"{where}: field 'general.architecture' is missing from the GGUF metadata")
    if not isinstance(arch, str) or not re.fullmatch(r"[\w.-]{1,64}", arch):
        raise GeometryError(f"{where}: field 'general.architecture' is {short(arch)}; expected a name such as 'llama'")
    if arch in _CACHELESS:
        raise GeometryError(
            f"{where}: field 'general.architecture' is {arch!r}, which keeps no KV cache; admission by slots only"
        )
    if arch == "clip":
        raise GeometryError(
            f"{where}: field 'general.architecture' is 'clip', an image projector; name the model's file"
        )
    return arch


def _length(fields: Mapping[str, object]) -> int:
    tokens = fields.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _first(meta: _Meta, key: str) -> int | None:
    """The figure, or the largest of a list of figures, one per layer."""
    return max(meta.numbers(key), default=None)


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
        if not all(isinstance(p, (bool, int)) for p in pattern):
            raise meta.fault("attention.sliding_window_pattern", "holds something other than true and false")
        return [slide if p else keep for p in pattern[:layers]]
    every = meta.integer("attention.sliding_window_pattern", 0) or _SWA_EVERY.get(arch, 1)
    return [keep if (i + 1) % every == 0 else slide for i in range(layers)]


def _recurrent(meta: _Meta, arch: str, layers: int, kv_heads: Sequence[int]) -> list[bool]:
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
        width, kernel = (meta.integer(k, minimum=1) for k in ("embedding_length", "shortconv.l_cache"))
        return StateShape(width, 0, 0, kernel, 0)
    inner, width, kernel = (meta.integer(f"ssm.{k}", minimum=1) for k in ("inner_size", "state_size", "conv_kernel"))
    return StateShape(inner, meta.integer("ssm.group_count", 0), 2 * width, kernel, inner * width)


def _attention(meta: _Meta, arch: str, kv_heads: int, window: tuple[LayerKind, int], index: int) -> LayerGroup:
    kind, width = window
    heads = _first(meta, "attention.head_count") or 0
    default = meta.integer("embedding_length", 0) // heads if heads else 0
    suffix = "_swa" if kind is LayerKind.SLIDING and meta.raw("attention.key_length_swa") is not None else ""
    k_dim = meta.integer(f"attention.key_length{suffix}", default)
    v_dim = meta.integer(f"attention.value_length{suffix}", default)
    if not k_dim:
        raise meta.fault("attention.key_length", "is missing and embedding_length does not give it")
    if heads % kv_heads and not isinstance(meta.raw("attention.head_count"), list):
        raise meta.fault(
            "attention.head_count_kv", f"is {kv_heads} in layer {index}; {heads} attention heads do not divide by it"
        )
    if meta.raw("attention.kv_lora_rank") is None:
        return LayerGroup(kind, 1, kv_heads, k_dim, v_dim, window=width)
    rank, rope = (meta.integer(k, minimum=1) for k in ("attention.kv_lora_rank", "rope.dimension_count"))
    index_dim = meta.integer("attention.indexer.key_length", 0)
    if meta.raw("attention.key_length_mla") is not None:
        # Converted with latent attention: key_length is already latent + rope, one head.
        mha_k, mha_v = (meta.integer(f"attention.{k}_length_mla", minimum=1) for k in ("key", "value"))
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
