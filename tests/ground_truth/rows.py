"""From a ground-truth row to the objects of ``extproc.memory``.

Owns the row format; no row id and no model name is ever looked at to choose a rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.memory import Flags, Geometry, LayerGroup, LayerKind, geometry_from_config
from extproc.memory.engines import EngineRules, engine_rules
from extproc.memory.flags import default_batched_tokens
from extproc.memory.geometry import StateShape, spread
from extproc.memory.hf_state import state_shape

GIB = 1 << 30
MIB = 1 << 20

#: Inputs understood, whatever the check; a row with any other input is still run, and the line says which was ignored.
KNOWN_INPUTS = frozenset(
    """
    available_gib params_b bpw nominal_bpw mamba_mode n_seq_max unified max_num_batched_tokens util total_gib non_kv_gib rs
    log_style tokens flash_attn num_blocks extra_bytes_per_token emb_factor bytes_per_token_layer n_ubatch no_iswa ssm_bytes
    conv_bytes swa_full swa_cells num_parallel out_emb_factor dcp dp pp block_size spec_tokens num_speculative_tokens
    draft_layers mtp mla concurrent_batches async_scheduling disable_hybrid n_batch swa_ratio swa_full_tokens_ratio cudagraph_gib
    """.split()
)

_KINDS = {
    "full": LayerKind.FULL,
    "swa": LayerKind.SLIDING,
    "sliding": LayerKind.SLIDING,
    "chunked": LayerKind.CHUNKED,
    "mla": LayerKind.MLA,
    "mamba": LayerKind.STATE,
    "linear": LayerKind.STATE,
    "gdn": LayerKind.STATE,
    "state": LayerKind.STATE,
}
#: ik_llama.cpp's -mla N: 0 unpacked heads, 1 keeps a transposed copy of the latent, 2 and 3 the latent alone.
_MLA = {0: "heads", 1: "latent_kv", 2: "latent", 3: "latent"}
_DTYPES = {1: "fp8", 2: "bf16", 4: "f32"}
_MODES = frozenset({"none", "align", "all"})


class RowError(ValueError):
    """A row that cannot be read; the message names the field."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A mapping of a row that answers in the types asked for; RowError names ``where`` and the field."""

    data: Mapping[str, Any]
    where: str = ""

    def fault(self, field: str, problem: str) -> RowError:
        """An error that names the field; the caller raises it."""
        return RowError(f"field '{self.where}{field}' {problem}")

    def number(self, field: str, default: float | None = None, minimum: float | None = None) -> float:
        """A finite number, also where it is written as text; required where no default is given."""
        value = self.data.get(field)
        if value is None:
            if default is None:
                raise self.fault(field, "is missing")
            return float(default)
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (minimum is not None and number < minimum):
            bound = "" if minimum is None else f" of at least {minimum:g}"
            raise self.fault(field, f"is {value!r}; expected a number{bound}")
        return number

    def whole(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        number = self.number(field, default, minimum)
        if not number.is_integer():
            raise self.fault(field, f"is {self.data[field]!r}; expected a whole number")
        return int(number)

    def text(self, field: str, default: str | None = None) -> str:
        """A string that is not empty."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise self.fault(field, "is missing" if value is None else f"is {value!r}; expected a string")
        return value

    def table(self, field: str) -> Reader:
        """A nested mapping, empty where absent."""
        value = self.data.get(field) or {}
        if not isinstance(value, Mapping):
            raise self.fault(field, f"is {type(value).__name__}; expected an object")
        return Reader(value, f"{self.where}{field}.")

    def numbers(self, field: str) -> list[float]:
        """A list of finite numbers."""
        value = self.data.get(field)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.fault(field, "is missing" if value is None else f"is {value!r}; expected a list of numbers")
        each = Reader(dict(enumerate(value)), f"{self.where}{field}.")  # type: ignore[arg-type]
        return [each.number(i) for i in range(len(value))]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Row:
    """One row with its inputs at hand; reading a field of an odd type raises RowError."""

    data: Mapping[str, Any]

    @property
    def top(self) -> Reader:
        """The row's own fields."""
        if not isinstance(self.data, Mapping):
            raise RowError(f"the row is {type(self.data).__name__}; expected an object")
        return Reader(self.data)

    @property
    def inputs(self) -> Reader:
        """The row's inputs."""
        return self.top.table("inputs")

    @property
    def config(self) -> Reader:
        """The row's model configuration."""
        return self.top.table("config")

    @property
    def engine(self) -> str:
        """The engine's name as given."""
        return self.top.text("engine")

    @property
    def version(self) -> str | None:
        """The engine's version as text; None where the log did not say."""
        value = self.data.get("engine_version")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
            raise self.top.fault("engine_version", f"is {value!r}; expected a string")
        return None if value is None else str(value)

    def rules(self) -> EngineRules:
        """Rules of the row's engine; an article's figure is engine-free and takes plain paging."""
        return engine_rules("vllm" if self.engine.startswith("(") else self.engine, self.version)

    @property
    def kv_dtype(self) -> str | Mapping[str, str]:
        """KV type: a name, or names for K and V."""
        value = self.data.get("kv_dtype") or "auto"
        names = list(value.values()) if isinstance(value, Mapping) else [value]
        if not all(isinstance(n, str) for n in names):
            raise self.top.fault("kv_dtype", f"is {value!r}; expected a name, or names for k and v")
        return value  # type: ignore[no-any-return]

    @property
    def context(self) -> int:
        """The row's ``n_ctx``."""
        return self.top.whole("n_ctx")

    def geometry(self) -> Geometry:
        """Geometry of the configuration: explicit groups win, else the fields are read as a ``config.json``."""
        where = f"row {self.data.get('id')}"
        groups = self.config.data.get("attn_groups")
        if groups:
            if not isinstance(groups, list):
                raise self.config.fault("attn_groups", f"is {type(groups).__name__}; expected a list")
            each = Reader({str(i): g for i, g in enumerate(groups)}, "config.attn_groups.")
            made = tuple(self._group(each.table(i), where) for i in each.data)
            return Geometry(
                name=str(self.data.get("model")),
                groups=made,
                layer_map=spread(made, self.config.whole("num_hidden_layers", 0, 0)),
                hidden=self.config.whole("hidden_size", 0, 0),
                heads=self.config.whole("num_attention_heads", 0, 0),
                vocab=self.config.whole("vocab_size", 0, 0),
                where=where,
            )
        config = dict(self.config.data)
        if not isinstance(config.get("layer_types"), list):
            config.pop("layer_types", None)
            if "model_type" not in config:
                # Without groups and family nothing says which layers slide; the rows then mean all layers in full.
                config.pop("sliding_window", None)
        return geometry_from_config(config, where=where)

    def _group(self, group: Reader, where: str) -> LayerGroup:
        name = group.text("kind")
        if name not in _KINDS:
            raise group.fault("kind", f"is {name!r}; known: {', '.join(_KINDS)}")
        kind, layers = _KINDS[name], group.whole("layers")
        if kind is LayerKind.STATE:
            return LayerGroup(kind, layers, state=self._state(where))
        if kind is LayerKind.MLA:
            latent, rope = (group.whole(f, self.config.whole(f, 0, 0), 0) for f in ("kv_lora_rank", "qk_rope_head_dim"))
            if not latent:
                raise group.fault("kv_lora_rank", "is missing, and the configuration has none")
            return LayerGroup(kind, layers, 1, latent + rope)
        dim = group.whole("head_dim")
        window = group.whole("window", 0, 0) or group.whole("chunk", 0, 0)
        return LayerGroup(kind, layers, group.whole("kv_heads"), dim, group.whole("v_head_dim", dim), window=window)

    def _state(self, where: str) -> StateShape | None:
        rs = self.recurrent
        if rs.data:
            inner, width = rs.whole("d_inner"), rs.whole("d_state")
            return StateShape(inner, rs.whole("n_group", 0, 0), 2 * width, rs.whole("d_conv"), inner * width)
        if self.data.get("check") in ("per_token", "llama_kv"):
            # Neither counts states unless the row names the recurrent cache.
            return StateShape(0, 0, 0, 1, 0)
        return state_shape(self.config.data, where)

    @property
    def recurrent(self) -> Reader:
        """The recurrent cache the row names; empty where it names none."""
        return self.inputs.table("rs")

    def flags(self) -> Flags:
        """Start options the row names, else the engine's defaults at the row's version."""
        i = self.inputs
        batches = i.whole("concurrent_batches", 0, 0) or (2 if i.data.get("async_scheduling") else None)
        return Flags(
            max_num_batched_tokens=i.whole("max_num_batched_tokens", 0, 0) or self._batched(),
            # Logs of unknown version predate overlapping steps.
            concurrent_batches=batches if batches or self.version is not None else 1,
            mamba_mode=self._chosen("mamba_mode", _MODES, "none"),
            hybrid_manager=not i.data.get("disable_hybrid", False),
            lookahead_tokens=i.whole("spec_tokens", 0, 0) or i.whole("num_speculative_tokens", 0, 0),
            draft_layers=i.whole("draft_layers", 0, 0),
            mtp=bool(i.data.get("mtp", False)),
            n_parallel=self.slots,
            unified=bool(i.data.get("unified", self.slots == 1)),
            n_ubatch=i.whole("n_ubatch", 512),
            swa_full=bool(i.data.get("swa_full") or i.data.get("no_iswa")),
            swa_ratio=i.number("swa_ratio", 0.0, 0.0) or i.number("swa_full_tokens_ratio", 0.0, 0.0) or None,
            mla=self._mla(),
            ssm_dtype=self._element("ssm_bytes"),
            conv_dtype=self._element("conv_bytes"),
            extra_row_bytes=i.whole("extra_bytes_per_token", 0, 0),
            state_rollbacks=self.recurrent.whole("rs_seq", 0, 0),
        )

    @property
    def slots(self) -> int:
        """Sequences the cache is made for."""
        i = self.inputs
        return self.recurrent.whole("seqs", 0, 0) or i.whole("n_seq_max", 0, 0) or i.whole("num_parallel", 1)

    def _chosen(self, field: str, known: Collection[str], default: str) -> str:
        value = self.inputs.text(field, default)
        if value not in known:
            raise self.inputs.fault(field, f"is {value!r}; known: {', '.join(sorted(known))}")
        return value

    def _element(self, field: str) -> str | None:
        size = self.inputs.whole(field, 0, 0)
        if size and size not in _DTYPES:
            raise self.inputs.fault(field, f"is {size}; known: {', '.join(map(str, _DTYPES))}")
        return _DTYPES.get(size)

    def _mla(self) -> str | None:
        value = self.inputs.data.get("mla")
        if value is None or (isinstance(value, str) and value in _MLA.values()):
            return value
        number = self.inputs.whole("mla", minimum=0)
        if number not in _MLA:
            raise self.inputs.fault("mla", f"is {value!r}; known: {', '.join(map(str, _MLA))}")
        return _MLA[number]

    def _batched(self) -> int:
        gpu = self.top.text("gpu", " ")
        size = re.search(r"(\d+)\s*G[Bi]", gpu)
        large = any(card in gpu for card in ("H100", "H200", "H20", "B200", "MI300"))
        return default_batched_tokens(
            int(size.group(1)) * GIB if size else (80 * GIB if large or not gpu.strip() else 24 * GIB), gpu
        )

    def log_style(self) -> str:
        """What the logged size in tokens means: as the row says, else by version, else blocks."""
        versioned = self.rules().size_line if self.version is not None else "blocks"
        return self._chosen("log_style", ("blocks", "max_concurrency"), versioned)
