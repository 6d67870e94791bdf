"""Weight and KV formats in the ``quantization_config`` of a ``config.json``.

Owns what quantisers write there. Where a checkpoint mixes formats the dearest one stands for all, so that the weights
stay a bound; what is not understood keeps a name that no format has, and asking for its weights is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from extproc.memory.hf_fields import Fields, short, whole

_METHODS = ("quant_method", "quantization", "quant_algo")
_BITS = ("bits", "w_bit")
#: Methods whose format follows from their bits; AWQ is the only other one with bits that matter.
_BY_BITS = frozenset({"gptq", "auto-round", "autoround", "intel/auto-round"})
#: (number type, bits) of a group of compressed-tensors -> format.
_GROUP_FORMATS: Mapping[tuple[str, int], str] = {
    ("float", 8): "fp8", ("int", 8): "w8a8", ("float", 4): "nvfp4", ("int", 4): "w4a16", ("int", 3): "gptq-int3",
}  # fmt: skip
#: Marks in the name of a format or algorithm (compressed-tensors without groups, ModelOpt, Quark) -> format.
_MARKS = (
    ("nvfp4", "nvfp4"), ("mxfp4", "nvfp4"), ("w4a", "w4a16"), ("int4", "w4a16"), ("fp4", "nvfp4"), ("mxfp8", "fp8"),
    ("float-quantized", "fp8"), ("fp8", "fp8"), ("int-quantized", "w8a8"), ("int8", "w8a8"), ("w8a", "w8a8"),
)  # fmt: skip
#: Formats from the dearest on.
_DEAREST = ("fp8", "w8a8", "nvfp4", "w4a16", "gptq-int3")
#: Where each engine's quantiser says what it stores weights in, below the mapping as a whole.
_ALGORITHM_KEYS = frozenset({"quant_algo", "dtype", "quant_type"})


def weight_format_of(config: Mapping[str, object], fields: Fields) -> str | None:
    """Name of the weight format, None for plain weights.

    Raises:
        GeometryError: the field names no format, or names it in something other than a string or a number.
    """
    outer = Fields(config, fields.where)
    holder = outer if outer.has("quantization_config") else fields
    given = holder.mapping("quantization_config")
    for name in _METHODS:
        given.text(name)
    for name in _BITS:
        value = given.raw(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise given.fault(name, f"is {short(value)}; expected a number")
    found = named_format(holder.raw("quantization_config"))
    if found is None and given.names():
        raise holder.fault("quantization_config", "names no weight format (quant_method, or 4 or 8 bits)")
    return found


def named_format(config: object) -> str | None:
    """Name of the weight format in a ``quantization_config``, or None where it names none."""
    if not isinstance(config, Mapping):
        return None
    method = next((str(config[k]).lower() for k in _METHODS if config.get(k)), "")
    bits = next((config[k] for k in _BITS if config.get(k)), 0)
    if method in _BY_BITS:
        return "gptq" if bits in (0, 4) else f"gptq-int{bits}"
    if method == "awq":
        return "awq" if bits in (0, 4) else f"awq-int{bits}"
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method in ("modelopt", "quark"):
        return _dearest([_marked(name) for name in _algorithms(config)]) or f"{method} (mixed or unknown)"
    if method == "bitsandbytes":
        return "bnb-4bit" if config.get("load_in_4bit") else "w8a8"
    # A group size and bits alone, as MLX and early GPTQ repositories have them.
    return method or {4: "w4a16", 8: "w8a8"}.get(whole(bits) or 0)


def kv_format_of(config: Mapping[str, object], fields: Fields) -> str | None:
    """KV type that the checkpoint was calibrated for (compressed-tensors, ModelOpt); None where it says none."""
    outer = Fields(config, fields.where)
    given = (outer if outer.has("quantization_config") else fields).mapping("quantization_config")
    scheme = given.raw("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return {8: "fp8", 4: "nvfp4"}.get(whole(scheme.get("num_bits")) or 0) if scheme.get("type") == "float" else None
    named = str(given.raw("kv_cache_quant_algo") or "").lower()
    return named if named in ("fp8", "nvfp4") else None


def _compressed_tensors(config: Mapping[str, object]) -> str:
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [
            g["weights"] for g in groups.values() if isinstance(g, Mapping) and isinstance(g.get("weights"), Mapping)
        ]
        if not weights and config.get("kv_cache_scheme"):
            return "none"  # only the cache is quantised
        if weights:
            kinds = ((str(w.get("type") or "int"), whole(w.get("num_bits")) or 0) for w in weights)
            return _dearest([_GROUP_FORMATS.get(kind) for kind in kinds]) or "compressed-tensors"
    return _marked(str(config.get("format") or "")) or "compressed-tensors"


def _dearest(formats: list[str | None]) -> str | None:
    """The format with most bits; None where there is none or one of them is not known."""
    return next((name for name in _DEAREST if name in formats), None) if None not in formats else None


def _marked(name: str) -> str | None:
    lower = name.lower()
    return next((found for mark, found in _MARKS if mark in lower), None)


def _algorithms(root: Mapping[str, object]) -> Iterator[str]:
    """Algorithms of weights in a configuration of ModelOpt or Quark, those of single layers included."""
    stack: list[object] = [root]
    while stack:
        value = stack.pop()
        if not isinstance(value, Mapping):
            continue
        for key, inner in value.items():
            if key in _ALGORITHM_KEYS and isinstance(inner, str) and "mixed" not in inner.lower():
                yield inner
            elif not str(key).startswith(("kv_cache", "input", "output", "bias")):
                stack.append(inner)
