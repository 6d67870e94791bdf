"""Bytes of a model's weights by format.

Owns the bits that each format really spends and on which parts; file sizes, where seen, are better than any of it.
Sources: docs/memory.md; block sizes from gguf 0.19.0 GGML_QUANT_SIZES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from extproc.errors import GeometryError
from extproc.memory.geometry import Geometry, ParamCounts
from extproc.memory.hf_fields import short


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits per parameter: ``linear`` of attention and feed-forward, ``experts``, ``embedding`` (with lm_head).

    ``overall`` is the figure for a model of which only the total count is known.
    """

    name: str
    linear: float
    experts: float
    embedding: float
    overall: float
    note: str


def _uniform(name: str, bits: float, note: str) -> WeightFormat:
    return WeightFormat(name, bits, bits, bits, bits, note)


_FORMATS = (
    _uniform("f32", 32, "4 B a parameter"),
    _uniform("bf16", 16, "2 B a parameter"),
    _uniform("f16", 16, "2 B a parameter"),
    # FP8 checkpoints keep embeddings and lm_head in bf16 (Llama-70B-FP8: 67.7 GiB, not 65.7).
    WeightFormat("fp8", 8, 8, 16, 8, "8 bit linears, 16 bit embeddings"),
    WeightFormat("w8a8", 8, 8, 16, 8, "8 bit linears, 16 bit embeddings"),
    WeightFormat("awq", 4.25, 4.25, 16, 4.25, "4 bit + scales per 128 on linears, 16 bit embeddings"),
    WeightFormat("gptq", 4.25, 4.25, 16, 4.25, "4 bit + scales per 128 on linears, 16 bit embeddings"),
    WeightFormat("awq-int8", 8.25, 8.25, 16, 8.25, "8 bit + scales on linears, 16 bit embeddings"),
    WeightFormat("gptq-int8", 8.25, 8.25, 16, 8.25, "8 bit + scales on linears, 16 bit embeddings"),
    WeightFormat("gptq-int3", 3.25, 3.25, 16, 3.25, "3 bit + scales on linears, 16 bit embeddings"),
    WeightFormat("w4a16", 4.25, 4.25, 16, 4.25, "4 bit + scales on linears, 16 bit embeddings"),
    WeightFormat("bnb-4bit", 4.5, 4.5, 16, 4.5, "4 bit + f32 scale per 64 on linears, 16 bit embeddings"),
    # MXFP4 is on the experts only: gpt-oss-20b 5.5 bits over all, 120b 4.73.
    WeightFormat("mxfp4", 16, 4.25, 16, 4.25, "17 B per 32 on experts, 16 bit elsewhere"),
    WeightFormat("nvfp4", 4.5, 4.5, 16, 4.5, "9 B per 16 on linears, 16 bit embeddings"),
    # llama.cpp mixes: the figures are bits over all of the file as llama.cpp logs them, for 8B to 235B models.
    _uniform("q8_0", 8.5, "34 B per 32"),
    _uniform("q6_k", 6.5625, "210 B per 256"),
    _uniform("q5_k_m", 5.69, "mix of q5_k and q6_k"),
    _uniform("q5_k_s", 5.54, "q5_k"),
    _uniform("q5_0", 5.5, "22 B per 32"),
    _uniform("q5_1", 6.0, "24 B per 32"),
    _uniform("q4_k_m", 4.85, "mix of q4_k and q6_k; logs say 4.58 to 5.28"),
    _uniform("q4_k_s", 4.58, "mostly q4_k"),
    _uniform("q4_0", 4.55, "18 B per 32, output q6_k"),
    _uniform("q4_1", 5.0, "20 B per 32"),
    _uniform("iq4_xs", 4.32, "136 B per 256"),
    _uniform("iq4_nl", 4.55, "18 B per 32"),
    _uniform("q3_k_l", 4.27, "mix of q3_k and q5_k"),
    _uniform("q3_k_m", 3.91, "mix of q3_k and q4_k"),
    _uniform("q3_k_s", 3.5, "110 B per 256"),
    _uniform("q2_k", 2.96, "mix of q2_k and q3_k"),
    _uniform("iq3_xxs", 3.21, "98 B per 256"),
    _uniform("iq2_xxs", 2.2, "66 B per 256"),
    _uniform("iq1_s", 1.67, "dynamic mix: attention at 4 to 6 bit"),
)
FORMATS: Mapping[str, WeightFormat] = {f.name: f for f in _FORMATS}
_ALIASES = {
    "bfloat16": "bf16", "float16": "f16", "fp16": "f16", "none": "bf16", "float32": "f32", "fp32": "f32", "int4": "w4a16",
    "int8": "w8a8", "gptq_marlin": "gptq", "awq_marlin": "awq", "gptq-int4": "gptq", "awq-int4": "awq", "fp4": "nvfp4",
    "auto-round": "gptq", "autoround": "gptq", "fbgemm_fp8": "fp8", "modelopt": "fp8", "modelopt_fp4": "nvfp4", "q4_k": "q4_k_m",
    "q5_k": "q5_k_m", "q3_k": "q3_k_m", "bitsandbytes": "bnb-4bit", "nf4": "bnb-4bit", "q4km": "q4_k_m", "q8": "q8_0", "q4": "q4_k_m",
}  # fmt: skip


def weight_format(name: str) -> WeightFormat:
    """The format of that name or alias; GeometryError lists the known ones."""
    key = name.strip().lower().replace("-gguf", "")
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise GeometryError(f"weight format {name!r} is not known; known: {', '.join(FORMATS)}")
    return found


def own_format(geometry: Geometry, size_bytes: int | None = None) -> WeightFormat:
    """The format that a model is in. One that has no row here stands under its own name, where a size was seen or is given.

    Raises:
        GeometryError: the format's bits are not known, and no size is.
    """
    native = geometry.quantization or geometry.dtype
    found = FORMATS.get(_ALIASES.get(native, native))
    if found is None and size_bytes is None and geometry.weights_bytes is None:
        raise GeometryError(
            f"{geometry.where or geometry.name}: field 'quantization_config' names {short(native)}, whose bits are not"
            " known; pass the weights' size (estimate --weights 18.6GiB, models.<name>.weights.sizeBytes) or a format"
            f" ({', '.join(FORMATS)})"
        )
    return found or _uniform(native, 16, "as measured")


def format_in_name(name: str) -> tuple[str, WeightFormat | None]:
    """A model name without the weight format in it, and that format: ``Qwen2.5-7B AWQ`` -> (``Qwen2.5-7B``, awq)."""
    for word in re.split(r"[\s]+|(?<=[A-Za-z0-9])-(?=[A-Za-z])", name):
        key = word.strip("()").lower()
        if key in FORMATS or key in _ALIASES:
            return re.sub(rf"[-\s]*{re.escape(word)}", "", name).strip(), weight_format(key)
    return name, None


def weights_bytes(params: ParamCounts | float, form: WeightFormat, shards: int = 1) -> float:
    """Weight bytes on one of ``shards`` devices: parameters x bits / 8, by part where the parts are known.

    Norms and biases stay 16 bit. Tensor parallelism does not split everything; +0.3 % stands for what it copies.
    """
    if isinstance(params, ParamCounts):
        bits = (
            params.embedding * form.embedding
            + (params.attention + params.mlp) * form.linear
            + params.experts * form.experts
            + params.other * max(16.0, form.linear)
        )
    else:
        bits = params * form.overall
    return bits / 8 / shards * (1.003 if shards > 1 else 1.0)


def geometry_weights(
    geometry: Geometry, form: WeightFormat | None = None, size_bytes: int | None = None
) -> tuple[int, str]:
    """Weight bytes of a model and how they were found: a given size, the files' size, or parameters x bits.

    A file's size wins only where no other format is asked for. GeometryError where nothing tells the size.
    """
    if size_bytes is not None:
        return size_bytes, "weights.sizeBytes as configured"
    native = geometry.quantization or geometry.dtype
    if geometry.weights_bytes is not None and (form is None or form.name == _ALIASES.get(native, native)):
        return geometry.weights_bytes, "sum of the weight files (or of the GGUF's tensors)"
    if geometry.params is None:
        raise GeometryError(
            f"{geometry.where or geometry.name}: weights are unknown: there are no weight files, and the parameters cannot"
            f" be counted ({geometry.uncounted or 'no counts are given'}); pass their size (estimate --weights 18.6GiB) or"
            " set models.<name>.weights.sizeBytes"
        )
    form = form or own_format(geometry)
    total = geometry.params.total / 1e9
    return round(weights_bytes(geometry.params, form)), f"{total:.2f} B parameters, {form.name}: {form.note}"
