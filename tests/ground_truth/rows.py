"""From a ground-truth row to the objects of ``extproc.memory``.

Owns the row format; no row id and no model name is ever looked at to choose a rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True)
class Row:
    """One row with its inputs at hand."""

    data: Mapping[str, Any]

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The row's inputs."""
        return self.data.get("inputs") or {}

    @property
    def config(self) -> Mapping[str, Any]:
        """The row's model configuration."""
        return self.data.get("config") or {}

    def rules(self) -> EngineRules:
        """Rules of the row's engine; an article's figure is engine-free and takes plain paging."""
        engine = self.data["engine"]
        return engine_rules("vllm" if engine.startswith("(") else engine, self.data.get("engine_version"))

    @property
    def kv_dtype(self) -> Any:
        """KV type: a name, or names for K and V."""
        return self.data.get("kv_dtype") or "auto"

    def geometry(self) -> Geometry:
        """Geometry of the configuration: explicit groups win, else the fields are read as a ``config.json``."""
        where = f"row {self.data['id']}"
        groups = self.config.get("attn_groups")
        if groups:
            made = tuple(self._group(g, where) for g in groups)
            return Geometry(
                name=str(self.data.get("model")),
                groups=made,
                layer_map=spread(made, int(self.config.get("num_hidden_layers") or 0)),
                hidden=int(self.config.get("hidden_size") or 0),
                heads=int(self.config.get("num_attention_heads") or 0),
                vocab=int(self.config.get("vocab_size") or 0),
                where=where,
            )
        config = dict(self.config)
        if not isinstance(config.get("layer_types"), list):
            config.pop("layer_types", None)
            if "model_type" not in config:
                # Without groups and family nothing says which layers slide; the rows then mean all layers in full.
                config.pop("sliding_window", None)
        return geometry_from_config(config, where=where)

    def _group(self, group: Mapping[str, Any], where: str) -> LayerGroup:
        kind = _KINDS[group["kind"]]
        layers = int(group["layers"])
        if kind is LayerKind.STATE:
            return LayerGroup(kind, layers, state=self._state(where))
        if kind is LayerKind.MLA:
            latent = group.get("kv_lora_rank") or self.config["kv_lora_rank"]
            rope = group.get("qk_rope_head_dim") or self.config["qk_rope_head_dim"]
            return LayerGroup(kind, layers, 1, int(latent) + int(rope))
        dim = int(group["head_dim"])
        window = int(group.get("window") or group.get("chunk") or 0)
        return LayerGroup(kind, layers, int(group["kv_heads"]), dim, int(group.get("v_head_dim") or dim), window=window)

    def _state(self, where: str) -> StateShape | None:
        rs = self.inputs.get("rs")
        if rs:
            inner = int(rs["d_inner"])
            width = int(rs["d_state"])
            return StateShape(inner, int(rs.get("n_group") or 0), 2 * width, int(rs["d_conv"]), inner * width)
        if self.data["check"] in ("per_token", "llama_kv"):
            # Neither counts states unless the row names the recurrent cache.
            return StateShape(0, 0, 0, 1, 0)
        return state_shape(self.config, where)

    def flags(self) -> Flags:
        """Start options the row names, else the engine's defaults at the row's version."""
        i = self.inputs
        known_version = self.data.get("engine_version") is not None
        batches = i.get("concurrent_batches") or (2 if i.get("async_scheduling") else None)
        return Flags(
            max_num_batched_tokens=i.get("max_num_batched_tokens") or self._batched(),
            # Logs of unknown version predate asynchronous scheduling by default.
            concurrent_batches=batches if batches or known_version else 1,
            mamba_mode=i.get("mamba_mode", "none"),
            hybrid_manager=not i.get("disable_hybrid", False),
            lookahead_tokens=int(i.get("spec_tokens") or i.get("num_speculative_tokens") or 0),
            draft_layers=int(i.get("draft_layers") or 0),
            mtp=bool(i.get("mtp", False)),
            n_parallel=self.slots,
            unified=bool(i.get("unified", self.slots == 1)),
            n_ubatch=int(i.get("n_ubatch") or 512),
            swa_full=bool(i.get("swa_full") or i.get("no_iswa")),
            swa_ratio=i.get("swa_ratio") or i.get("swa_full_tokens_ratio"),
            mla=_MLA.get(i["mla"], i["mla"]) if "mla" in i else None,
            ssm_dtype=_DTYPES.get(i.get("ssm_bytes")),
            conv_dtype=_DTYPES.get(i.get("conv_bytes")),
            extra_row_bytes=int(i.get("extra_bytes_per_token") or 0),
            state_rollbacks=int((i.get("rs") or {}).get("rs_seq") or 0),
        )

    @property
    def slots(self) -> int:
        """Sequences the cache is made for."""
        return int(
            (self.inputs.get("rs") or {}).get("seqs")
            or self.inputs.get("n_seq_max")
            or self.inputs.get("num_parallel")
            or 1
        )

    def _batched(self) -> int:
        gpu = self.data.get("gpu") or ""
        size = re.search(r"(\d+)\s*G[Bi]", gpu)
        large = any(card in gpu for card in ("H100", "H200", "H20", "B200", "MI300"))
        return default_batched_tokens(
            int(size.group(1)) * GIB if size else (80 * GIB if large or not gpu else 24 * GIB), gpu
        )
