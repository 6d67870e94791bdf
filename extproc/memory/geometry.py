"""What of a model decides its cache: layer groups, states, and the sizes that weights and buffers need.

Owns the shapes every estimate starts from; knows no file format and no engine. One ``LayerGroup`` holds the
layers that cache alike; ``layer_map`` says for each layer of the model, in order, which group it is in
(-1: the layer caches nothing of its own), because pipeline stages need the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from extproc.errors import GeometryError


class LayerKind(StrEnum):
    """How a layer remembers the tokens before."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    STATE = "state"
    CROSS = "cross"  # attends to an encoder's tokens: a fixed number per sequence


@dataclass(frozen=True, slots=True)
class StateShape:
    """Recurrent state of one layer and one sequence (Mamba 1/2, GDN, KDA, short convolution), in elements.

    The convolution keeps ``conv_kernel - 1`` columns of ``inner_channels + groups * group_channels``; the state
    proper has ``state_elements``. ``mamba`` states default to other element types than delta-net ones. Sources: llama.cpp src/llama-hparams.cpp n_embd_r / n_embd_s; vLLM MambaSpec.
    """

    inner_channels: int
    groups: int
    group_channels: int
    conv_kernel: int
    state_elements: int
    ssm_dtype: str | None = None
    mamba: bool = False

    def conv_channels(self, tp: int = 1) -> int:
        """Convolution channels on one of ``tp`` shards; groups that do not divide are replicated, never split."""
        groups = max(1, -(-self.groups // tp)) if self.groups else 0
        return -(-self.inner_channels // tp) + groups * self.group_channels

    def shard_bytes(self, conv_bytes: int, ssm_bytes: int, tp: int = 1, extra_columns: int = 0) -> int:
        """Bytes on one of ``tp`` shards; ``extra_columns`` are the columns that speculative tokens add."""
        columns = max(0, self.conv_kernel - 1) + (extra_columns if self.conv_kernel > 1 else 0)
        return self.conv_channels(tp) * columns * conv_bytes + -(-self.state_elements // tp) * ssm_bytes


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cache alike.

    ``k_dim`` and ``v_dim`` are elements per KV head; for MLA ``kv_heads`` is 1, ``k_dim`` the latent plus the
    rope part and ``v_dim`` 0. ``window`` is in tokens (sliding, chunked). ``extra_row_bytes`` are bytes per token
    and layer beside K and V that no KV type changes (the sparse-attention indexer). ``fixed_tokens`` are the
    encoder tokens of a cross-attention layer. ``mha_heads, mha_k_dim, mha_v_dim`` describe an MLA layer unpacked.
    """

    kind: LayerKind
    layers: int
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int = 0
    extra_row_bytes: int = 0
    fixed_tokens: int = 0
    mha_heads: int = 0
    mha_k_dim: int = 0
    mha_v_dim: int = 0
    state: StateShape | None = None


@dataclass(frozen=True, slots=True)
class ParamCounts:
    """Parameters by what quantisers do with them: ``embedding`` (with lm_head) and ``other`` stay 16 bit as a rule."""

    embedding: int
    attention: int
    mlp: int
    experts: int
    other: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.mlp + self.experts + self.other


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model as the memory estimate sees it; ``where`` names the file or row it came from.

    ``context_tokens`` is the longest sequence the model was made for (0 unknown); ``weights_bytes`` the size of the
    weight files where they were seen; ``mtp_layers`` the prediction layers that cache only under speculation;
    ``kv_dtype`` is the KV type that the checkpoint asks for, None where that is the model's own; ``uncounted`` says why ``params`` is None.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    layer_map: tuple[int, ...]
    hidden: int = 0
    heads: int = 0
    vocab: int = 0
    context_tokens: int = 0
    dtype: str = "bf16"
    kv_dtype: str | None = None
    params: ParamCounts | None = None
    mtp_layers: int = 0
    mtp_group: int = 0
    quantization: str | None = None
    weights_bytes: int | None = None
    vision_family: str | None = None
    where: str = ""
    source: str = ""
    model_type: str = ""
    uncounted: str = ""

    @property
    def layers(self) -> int:
        """Layers of the model, those without a cache included."""
        return len(self.layer_map)

    @property
    def is_hybrid(self) -> bool:
        """More than one kind of cache (or window) in one model."""
        return len({(g.kind, g.window) for g in self.groups}) > 1

    @property
    def has_full(self) -> bool:
        """Some layer keeps every token."""
        return any(g.kind in (LayerKind.FULL, LayerKind.MLA) for g in self.groups)

    def with_mtp(self) -> Geometry:
        """The same model with its multi-token-prediction layers counted, as under speculative decoding."""
        if not self.mtp_layers:
            return self
        grown = tuple(
            replace(g, layers=g.layers + self.mtp_layers) if i == self.mtp_group else g
            for i, g in enumerate(self.groups)
        )
        return replace(self, groups=grown, layer_map=self.layer_map + (self.mtp_group,) * self.mtp_layers, mtp_layers=0)


def grouped(layers: Sequence[LayerGroup | None]) -> tuple[tuple[LayerGroup, ...], tuple[int, ...]]:
    """Groups and layer map of a list with one entry per layer (None: caches nothing; each entry's ``layers`` is 1)."""
    order: dict[LayerGroup, int] = {}
    layer_map = [-1 if layer is None else order.setdefault(layer, len(order)) for layer in layers]
    counts = [layer_map.count(i) for i in range(len(order))]
    return tuple(replace(g, layers=n) for g, n in zip(order, counts, strict=True)), tuple(layer_map)


def spread(groups: Sequence[LayerGroup], total_layers: int | None = None) -> tuple[int, ...]:
    """A layer map for groups whose order is not known: each group's layers spread evenly over the model's depth."""
    owned = sum(g.layers for g in groups)
    total = max(owned, total_layers or 0)
    ranked = [((j + 0.5) / g.layers, i) for i, g in enumerate(groups) for j in range(g.layers)]
    ranked += [((j + 0.5) / (total - owned), -1) for j in range(total - owned)]
    return tuple(i for _, i in sorted(ranked))


#: Wider heads, or more of them, than any model has.
_WIDEST = 1 << 16


def check_geometry(geometry: Geometry) -> Geometry:
    """The same geometry, or GeometryError naming file and field of a figure that cannot be."""
    where = geometry.where or geometry.name
    if not geometry.groups:
        raise GeometryError(
            f"{where}: no layer of this model caches anything; num_hidden_layers or the layer list is off"
        )
    for group in geometry.groups:
        if group.kind is LayerKind.STATE:
            continue
        v_dim = group.v_dim if group.kind is not LayerKind.MLA else 1  # the latent row holds both
        if min(group.kv_heads, group.k_dim, v_dim, group.layers) <= 0:
            raise GeometryError(
                f"{where}: {group.kind} layers have kv heads {group.kv_heads}, k dim {group.k_dim}, v dim {group.v_dim},"
                f" count {group.layers}; each must be positive"
            )
        if max(group.kv_heads, group.k_dim, group.v_dim) > _WIDEST:
            raise GeometryError(
                f"{where}: {group.kind} layers have kv heads {group.kv_heads}, k dim {group.k_dim}, v dim {group.v_dim};"
                f" none of them is above {_WIDEST} in any model (num_key_value_heads, head_dim, hidden_size, kv_lora_rank)"
            )
        if group.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) and group.window <= 0:
            raise GeometryError(f"{where}: {group.kind} layers need a positive window (sliding_window)")
    return geometry
