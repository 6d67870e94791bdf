"""Typed reading of a Hugging Face ``config.json`` mapping, with errors that name file and field.

Owns the spelling of fields over model families and the class defaults that published files leave out; knows
nothing about caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.errors import GeometryError

#: Keys under which multimodal and nested models keep the language model, in the order tried.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")

#: One meaning, many spellings; the first that is present and not null wins.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "num_attention_groups"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "seq_length",
        "n_positions",
        "max_seq_len",
        "model_max_length",
    ),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "first_k_dense_replace": ("first_k_dense_replace", "moe_layer_start_index"),
    "dtype": ("dtype", "torch_dtype"),
}

#: Values the transformers configuration classes fill in where published files leave the field out.
#: Source: transformers 4.57 models/<type>/configuration_<type>.py, class defaults.
CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gemma3n_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "phi3": {"num_key_value_heads": None},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
}


#: Larger figures are damage, not models.
_LARGEST = 1 << 48
#: More layers than any model has; a file that claims more is damaged.
MOST_LAYERS = 4096


def short(value: object) -> str:
    """A value as an error shows it: one line, never a page of a damaged list."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(text: str) -> str:
    """A name as an error begins with it: as given where that is one readable line, else as ``short`` shows it."""
    return text if text.isprintable() and len(text) <= 200 else short(text)


def whole(value: object) -> int | None:
    """The whole number of a JSON number, None for anything else (booleans, fractions, NaN, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value)


class Fields:
    """A configuration mapping that answers in the types asked for and blames by file and field."""

    def __init__(self, data: Mapping[str, object], where: str, model_type: str = "") -> None:
        self._data = data
        self.where = where
        self.model_type = model_type
        self._defaults = CLASS_DEFAULTS.get(model_type, {})

    def fault(self, field: str, problem: str) -> GeometryError:
        """An error that names the file and the field; the caller raises it."""
        return GeometryError(f"{self.where}: field {field!r} {problem}")

    def raw(self, field: str) -> object:
        """The value under any spelling of the field, the class default, or None."""
        for name in ALIASES.get(field, (field,)):
            value = self._data.get(name)
            if value is not None:
                return value
        return self._defaults.get(field)

    def names(self) -> Sequence[str]:
        """Names present in the file."""
        return tuple(self._data)

    def has(self, field: str) -> bool:
        """Present and not null (class defaults included)."""
        return self.raw(field) is not None

    def integer(self, field: str, default: int | None = None, minimum: int = 0) -> int:
        """A whole number of at least ``minimum``; required where no default is given."""
        value = self.raw(field)
        if value is None:
            if default is None:
                raise self.fault(field, "is missing; add it or name the model by a catalogue row")
            return default
        number = whole(value)
        if number is None or not minimum <= number <= _LARGEST:
            raise self.fault(field, f"is {short(value)}; expected a whole number of at least {minimum}")
        return number

    def integers(self, field: str) -> list[int]:
        """A list of whole numbers that are not negative."""
        numbers = [whole(v) for v in self.items(field)]
        bad = next((i for i, n in enumerate(numbers) if n is None or not 0 <= n <= _LARGEST), None)
        if bad is not None:
            raise self.fault(f"{field}[{bad}]", f"is {short(self.items(field)[bad])}; expected a whole number")
        return [n for n in numbers if n is not None]

    def text(self, field: str, default: str = "") -> str:
        """A string, or the default."""
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(field, f"is {short(value)}; expected a string")
        return value

    def boolean(self, field: str, default: bool = False) -> bool:
        """True or false; the default where absent."""
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(field, f"is {short(value)}; expected true or false")
        return value

    def indices(self, field: str, count: int, first: int = 0) -> set[int]:
        """A list of layer numbers from ``first`` on, each one of the model's ``count`` layers."""
        numbers = self.integers(field)
        outside = next((n for n in numbers if not first <= n < count + first), None)
        if outside is not None:
            raise self.fault(field, f"names layer {outside}; the model has {count} layers, counted from {first}")
        return set(numbers)

    def items(self, field: str) -> Sequence[object]:
        """A list, or GeometryError."""
        value = self.raw(field)
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise self.fault(field, f"is {type(value).__name__}; expected a list")
        return value

    def mapping(self, field: str) -> Fields:
        """A nested mapping (empty where absent)."""
        value = self.raw(field)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fault(field, f"is {type(value).__name__}; expected an object")
        return Fields(value, f"{self.where}: {field}", self.model_type)


def text_fields(config: Mapping[str, object], where: str) -> Fields:
    """The language model's fields of a possibly multimodal configuration; top-level dtype and tying are kept."""
    outer = config
    inner: Mapping[str, object] = config
    for _ in range(3):
        wrong = next((k for k in _TEXT_KEYS if inner.get(k) is not None and not isinstance(inner[k], Mapping)), None)
        if wrong is not None:
            raise GeometryError(f"{where}: field {wrong!r} is {short(inner[wrong])}; expected an object")
        nested = next((inner[k] for k in _TEXT_KEYS if isinstance(inner.get(k), Mapping)), None)
        if not isinstance(nested, Mapping):
            break
        inner = nested
    if inner is not outer:
        carried = {k: outer[k] for k in ("torch_dtype", "dtype", "tie_word_embeddings") if outer.get(k) is not None}
        inner = carried | {k: v for k, v in inner.items() if v is not None or k not in carried}
    for level in (inner, outer):
        model_type = level.get("model_type")
        if model_type is not None and not isinstance(model_type, str):
            raise GeometryError(f"{where}: field 'model_type' is {short(model_type)}; expected a string")
    model_type = inner.get("model_type") or outer.get("model_type") or ""
    return Fields(inner, where, str(model_type))


def head_dim(fields: Fields) -> int:
    """``head_dim`` where it is given (it often differs from hidden / heads), else the exact quotient."""
    if fields.has("head_dim"):
        return fields.integer("head_dim", minimum=1)
    hidden, heads = fields.integer("hidden_size", minimum=1), fields.integer("num_attention_heads", minimum=1)
    if hidden % heads:
        raise fields.fault("head_dim", f"is missing and hidden_size {hidden} does not divide by {heads} heads")
    return hidden // heads
