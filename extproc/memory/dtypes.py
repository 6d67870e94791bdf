"""Sizes of stored elements: KV cache types and weight formats.

Owns how many bytes a row of n elements takes; knows no model and no engine. Block quantised types store
32 (or 256) elements together, so their size is a ratio and never a rounded number of bytes per element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from extproc.errors import GeometryError


@dataclass(frozen=True, slots=True)
class ElementType:
    """A KV element type: ``block_bytes`` hold ``block_elements`` elements; ``head_bytes`` come on top of each head."""

    name: str
    block_elements: int
    block_bytes: int
    head_bytes: int = 0

    def row_bytes(self, elements: int, heads: int = 1) -> int:
        """Bytes of one row of ``elements`` elements that holds ``heads`` heads; a partial block counts whole."""
        return -(-elements // self.block_elements) * self.block_bytes + heads * self.head_bytes

    @property
    def bytes_per_element(self) -> float:
        """The ratio, for display only."""
        return self.block_bytes / self.block_elements


# gguf 0.19.0 constants.py GGML_QUANT_SIZES; vllm 0.33.0 v1/kv_cache_interface.py for the per-token-head and
# nvfp4 types (4 B scale per head for each of K and V; nvfp4: half a byte plus one fp8 scale per 16 elements).
_ELEMENT_TYPES = (
    ElementType("f32", 1, 4),
    ElementType("f16", 1, 2),
    ElementType("bf16", 1, 2),
    ElementType("fp8", 1, 1),
    ElementType("int8", 1, 1),
    ElementType("fp8_per_token_head", 1, 1, 4),
    ElementType("int8_per_token_head", 1, 1, 4),
    ElementType("nvfp4", 16, 9),
    ElementType("fp4", 2, 1),
    ElementType("q8_0", 32, 34),
    ElementType("q5_1", 32, 24),
    ElementType("q5_0", 32, 22),
    ElementType("q4_1", 32, 20),
    ElementType("q4_0", 32, 18),
    ElementType("iq4_nl", 32, 18),
)
_ALIASES = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_e4m3fn": "fp8",
    "fp8_inc": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    # The sparse-MLA page of DeepSeek V3.2: only MLA rows differ from fp8 (see ``MLA_ROW_BYTES``).
    "fp8_ds_mla": "fp8_ds_mla",
}
ELEMENT_TYPES: Mapping[str, ElementType] = MappingProxyType(
    {e.name: e for e in _ELEMENT_TYPES} | {"fp8_ds_mla": ElementType("fp8_ds_mla", 1, 1)}
)

#: Bytes of a whole MLA row where the engine packs it specially: 512 fp8 + 4 x f32 scales + 64 bf16 rope.
#: Source: sglang 0.5.23 model_executor/pool_configurator.py.
MLA_ROW_BYTES: Mapping[str, int] = MappingProxyType({"fp8_ds_mla": 656})


@dataclass(frozen=True, slots=True)
class KvTypes:
    """Element types of K and V, which may differ (llama.cpp ``-ctk q8_0 -ctv q4_0``)."""

    k: ElementType
    v: ElementType

    @property
    def label(self) -> str:
        """``bf16``, or ``q8_0/q4_0`` where K and V differ."""
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"


def element_type(name: str) -> ElementType:
    """The element type of that name or alias; GeometryError names the value and what is known."""
    key = name.strip().lower().removeprefix("torch.")
    found = ELEMENT_TYPES.get(_ALIASES.get(key, key))
    if found is None:
        raise GeometryError(f"KV type {name!r} is not known; known: {', '.join(sorted(ELEMENT_TYPES))}")
    return found


def kv_types(spec: str | Mapping[str, str] | KvTypes | None, default: str = "bf16") -> KvTypes:
    """K and V types of ``bf16``, ``q8_0/q4_0``, ``{"k": .., "v": ..}``, or of the model's own type for auto/None."""
    if isinstance(spec, KvTypes):
        return spec
    if isinstance(spec, Mapping):
        return KvTypes(element_type(spec.get("k", default)), element_type(spec.get("v", default)))
    if spec is None or spec.strip().lower() in ("auto", ""):
        spec = default
    k_name, slash, v_name = spec.partition("/")
    k_type = element_type(k_name)
    return KvTypes(k_type, element_type(v_name) if slash else k_type)


def dtype_bytes(name: str) -> int:
    """Bytes of one plain element (f32, f16, bf16, fp8); GeometryError for block types."""
    found = element_type(name)
    if found.block_elements != 1:
        raise GeometryError(f"{name!r} is a block type and has no whole bytes per element")
    return found.block_bytes
