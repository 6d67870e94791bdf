"""How an engine cuts a model's cache into pools of equal blocks.

Owns the engines' allocation rules (docs/memory.md) as functions from geometry to ``Pool``; knows no
request. Everything here runs once per model, never per request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from extproc.errors import GeometryError
from extproc.memory.dtypes import KvTypes
from extproc.memory.engines import EngineRules, PoolStyle
from extproc.memory.flags import Flags, default_batched_tokens
from extproc.memory.geometry import Geometry, LayerGroup, LayerKind
from extproc.memory.rows import pipeline_stages, row_bytes, shard_heads, state_bytes

_TOKENS = frozenset({LayerKind.FULL, LayerKind.MLA, LayerKind.SLIDING, LayerKind.CHUNKED})
#: Smallest block of vLLM's attention kernels, in tokens.
_KERNEL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """Layers that take blocks together: ``count`` such groups, each ``ceil(tokens / block_tokens)`` blocks a sequence.

    ``cap_tokens`` (0: none) bounds the tokens held, ``slack_blocks`` come on top of a capped sequence,
    ``fixed_blocks`` are taken whatever the length; ``block_tokens`` 0 means that nothing but them is taken.
    """

    kind: LayerKind
    count: int
    block_tokens: int
    cap_tokens: int = 0
    slack_blocks: int = 0
    fixed_blocks: int = 0

    @property
    def cap_blocks(self) -> int:
        """Most blocks one sequence holds in one of the groups; 0 where it grows without end."""
        return -(-self.cap_tokens // self.block_tokens) + self.slack_blocks if self.cap_tokens else 0

    def grown(self, tokens: int) -> int:
        """Blocks of ``tokens`` tokens in one of the groups, without cap and fixed part."""
        return -(-tokens // self.block_tokens) if self.block_tokens else 0

    def used(self, tokens: int) -> int:
        """Blocks a sequence of ``tokens`` really holds, at most."""
        grown = self.grown(tokens)
        cap = self.cap_blocks
        return self.count * (self.fixed_blocks + (min(grown, cap) if cap else grown))

    def charged(self, tokens: int) -> int:
        """Blocks the engine's own start-up arithmetic charges for ``tokens`` (the slack is always added)."""
        held = min(tokens, self.cap_tokens) if self.cap_tokens else tokens
        return self.count * (self.fixed_blocks + self.grown(held) + self.slack_blocks)


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of one size. ``shard_block_bytes``: bytes of one block on each shard of the replica.

    ``ratio`` is this pool's size against the main pool's in blocks; None for a cache that is sized so that it cannot
    run out before the main one.
    """

    groups: tuple[PoolGroup, ...]
    shard_block_bytes: tuple[int, ...]
    ratio: float | None = 1.0

    @property
    def block_bytes(self) -> int:
        """One block over all shards."""
        return sum(self.shard_block_bytes)


@dataclass(frozen=True, slots=True)
class Layout:
    """The pools of one replica (main pool first) and the recurrent state beside them, per sequence and shard."""

    pools: tuple[Pool, ...]
    state_shard_bytes: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything a layout depends on."""

    geometry: Geometry
    rules: EngineRules
    types: KvTypes
    tp: int
    pp: int
    dcp: int
    block_tokens: int
    flags: Flags

    @property
    def shards(self) -> int:
        """Devices that hold a part of one sequence."""
        return self.tp * self.pp

    def row(self, group: LayerGroup) -> int:
        """Bytes of one token in one layer on one shard."""
        return row_bytes(group, self.types, self.tp, self.flags.mla or self.rules.mla)

    def stages(self) -> tuple[range, ...]:
        """Layer indices of each pipeline stage."""
        return pipeline_stages(len(self.geometry.layer_map), self.pp)

    def layers_on(self, index: int, stage: range) -> int:
        """Layers of group ``index`` on a stage."""
        return sum(1 for i in stage if self.geometry.layer_map[i] == index)

    def per_shard(self, per_stage: tuple[int, ...]) -> tuple[int, ...]:
        """Figures per stage repeated for the stage's tensor-parallel shards."""
        return tuple(v for v in per_stage for _ in range(self.tp))


def layout(shape: Shape) -> Layout:
    """The engine's pools for this model; GeometryError where the combination cannot run."""
    geometry = shape.geometry
    if shape.pp > len(geometry.layer_map):
        raise GeometryError(f"{geometry.name}: pp {shape.pp} exceeds the model's {len(geometry.layer_map)} layers")
    return _STYLES[shape.rules.style](shape)


def _flattened(shape: Shape) -> Shape:
    """The same shape with windows ignored: every attention layer keeps every token."""
    groups = tuple(
        replace(g, kind=LayerKind.FULL, window=0) if g.kind in (LayerKind.SLIDING, LayerKind.CHUNKED) else g
        for g in shape.geometry.groups
    )
    return replace(shape, geometry=replace(shape.geometry, groups=groups))


def _outside_state(shape: Shape, copies: int = 1) -> tuple[int, ...]:
    """State bytes per sequence on each shard where the engine keeps states beside the pool."""
    per_group = [
        state_bytes(g.state, shape.rules, shape.flags, shape.geometry.dtype, shape.tp) * copies if g.state else 0
        for g in shape.geometry.groups
    ]
    per_stage = tuple(sum(n * shape.layers_on(i, stage) for i, n in enumerate(per_group)) for stage in shape.stages())
    return shape.per_shard(per_stage)


def _token_rows(shape: Shape, kinds: frozenset[LayerKind], tokens: int, extra: int = 0) -> tuple[int, ...]:
    """Bytes of ``tokens`` tokens in the layers of these kinds, on each shard; ``extra`` bytes per token on stage 0."""
    rows = [shape.row(g) if g.kind in kinds else 0 for g in shape.geometry.groups]
    per_stage = tuple(
        tokens * (sum(r * shape.layers_on(i, stage) for i, r in enumerate(rows)) + (extra if s == 0 else 0))
        for s, stage in enumerate(shape.stages())
    )
    return shape.per_shard(per_stage)


# --- one pool, every layer keeps every token ---------------------------------------------------------------


def _pages(shape: Shape) -> Layout:
    shape = _flattened(shape)
    block = shape.block_tokens
    span = block * shape.dcp
    groups = [PoolGroup(LayerKind.FULL, 1, span)] if shape.geometry.has_full else []
    groups += _cross_groups(shape, block)
    per_block = _token_rows(shape, _TOKENS | {LayerKind.CROSS}, block, shape.flags.extra_row_bytes)
    return Layout((Pool(tuple(groups), per_block),), _outside_state(shape), span)


def _cross_groups(shape: Shape, block: int) -> list[PoolGroup]:
    fixed = max((g.fixed_tokens for g in shape.geometry.groups if g.kind is LayerKind.CROSS), default=0)
    if not fixed:
        return []
    return [PoolGroup(LayerKind.CROSS, 1, 0, fixed_blocks=-(-fixed // block))]


# --- vLLM: groups of layers share one pool -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spec:
    """Layers with one cache rule and one page size, before grouping."""

    group: LayerGroup
    layers: tuple[int, ...]
    block: int
    page: int


def _groups(shape: Shape) -> Layout:
    if not shape.flags.hybrid_manager and shape.geometry.has_full:
        # A model that slides everywhere keeps its windows (_promote_local_kv_cache_specs).
        shape = _flattened(shape)
    specs = _specs(shape)
    classes = {(_class_of(s.group), s.group.window) for s in specs}
    return _one_group(shape, specs) if len(classes) == 1 else _many_groups(shape, specs)


def _class_of(group: LayerGroup) -> LayerKind:
    return LayerKind.FULL if group.kind is LayerKind.MLA else group.kind


def _specs(shape: Shape) -> list[_Spec]:
    groups = shape.geometry.groups
    base = shape.block_tokens
    states = [_state_page(shape, g) for g in groups if g.kind is LayerKind.STATE]
    rows = [shape.row(g) for g in groups if g.kind in (LayerKind.FULL, LayerKind.MLA)]
    attention_block = base
    if states and rows:
        # The attention page grows until the state page fits (vllm platforms/interface.py), in granules that the
        # attention kernels take and that hold whole blocks of the configured size.
        latent = any(g.kind is LayerKind.MLA for g in groups)
        granule = max(base, shape.rules.mla_granule if latent else _KERNEL_TOKENS)
        attention_block = granule * max(1, -(-max(states) // (granule * max(rows))))
    found: dict[LayerGroup, _Spec] = {}
    for index, group in enumerate(groups):
        layers = tuple(i for i, g in enumerate(shape.geometry.layer_map) if g == index)
        state = group.kind is LayerKind.STATE
        page = _state_page(shape, group) if state else attention_block * shape.row(group)
        # Layers that differ in KV heads alone are alike on a shard that holds one head of each.
        alike = replace(group, layers=0, kv_heads=shard_heads(group.kv_heads, shape.tp))
        if alike in found:
            layers = tuple(sorted(found[alike].layers + layers))
        found[alike] = _Spec(group, layers, attention_block, page)
    return list(found.values())


def _state_page(shape: Shape, group: LayerGroup) -> int:
    if group.state is None:
        raise GeometryError(f"{shape.geometry.name}: a recurrent layer has no state sizes")
    return state_bytes(group.state, shape.rules, shape.flags, shape.geometry.dtype, shape.tp)


def _one_group(shape: Shape, specs: list[_Spec]) -> Layout:
    """All layers cache alike, though perhaps in rows of different size: one group, pages summed over the layers."""
    block = specs[0].block
    per_stage = tuple(
        sum(s.page * sum(1 for i in s.layers if i in stage) for s in specs)
        + (block * shape.flags.extra_row_bytes if n == 0 else 0)
        for n, stage in enumerate(shape.stages())
    )
    group = _pool_group(shape, specs[0].group, 1, block)
    return Layout((Pool((group,), shape.per_shard(per_stage)),), (0,) * shape.shards, group.block_tokens)


def _many_groups(shape: Shape, specs: list[_Spec]) -> Layout:
    page = max(s.page for s in specs)
    # Smaller attention pages take a larger block where it divides, and padding where it does not.
    specs = [
        replace(
            s,
            block=s.block * (page // s.page) if s.group.kind in _TOKENS and page % s.page == 0 else s.block,
            page=page,
        )
        for s in specs
    ]
    counts = [len(s.layers) for s in specs]
    # One padded group is better than many halves: vLLM takes the larger count while it is not much larger.
    size = max(counts) if max(counts) < shape.rules.group_slack * min(counts) else min(counts)
    groups, strides = [], []
    for spec in specs:
        number = -(-len(spec.layers) // size)
        groups.append(_pool_group(shape, spec.group, number, spec.block))
        strides += [spec.layers[i::number] for i in range(number)]
    per_stage = tuple(
        page * max(sum(1 for i in stride if i in stage) for stride in strides)
        + (groups[0].block_tokens * shape.flags.extra_row_bytes if n == 0 else 0)
        for n, stage in enumerate(shape.stages())
    )
    full = next((g for g in groups if g.kind in (LayerKind.FULL, LayerKind.MLA)), groups[0])
    return Layout((Pool(tuple(groups), shape.per_shard(per_stage)),), (0,) * shape.shards, full.block_tokens)


def _pool_group(shape: Shape, group: LayerGroup, number: int, block: int) -> PoolGroup:
    flags = shape.flags
    batched = flags.max_num_batched_tokens or default_batched_tokens(None)
    in_flight = batched * (flags.concurrent_batches or (shape.pp + 1 if shape.rules.steps_overlap else 1))
    if group.kind is LayerKind.SLIDING:
        return PoolGroup(group.kind, number, block, group.window - 1 + in_flight, slack_blocks=1)
    if group.kind is LayerKind.CHUNKED:
        return PoolGroup(group.kind, number, block, group.window + in_flight)
    if group.kind is LayerKind.CROSS:
        return PoolGroup(group.kind, number, 0, fixed_blocks=-(-group.fixed_tokens // block))
    mode = flags.mamba_mode or (shape.rules.mamba_mode if flags.prefix_caching else "none")
    if group.kind is LayerKind.STATE and mode != "all":
        kept = 2 if mode == "align" else 1
        return PoolGroup(group.kind, number, 0, fixed_blocks=kept + flags.lookahead_tokens)
    return PoolGroup(group.kind, number, block * (shape.dcp if group.kind is not LayerKind.STATE else 1))


# --- SGLang: a pool for full layers, one for sliding ones, states beside -----------------------------------


def _two_pools(shape: Shape) -> Layout:
    kinds = {g.kind for g in shape.geometry.groups}
    windowed = kinds & {LayerKind.SLIDING, LayerKind.CHUNKED}
    if not (windowed and shape.geometry.has_full):
        return _pages(shape)
    block = shape.block_tokens
    span = block * shape.dcp
    window = max(g.window for g in shape.geometry.groups if g.kind in windowed)
    full = Pool(
        (PoolGroup(LayerKind.FULL, 1, span),),
        _token_rows(shape, frozenset({LayerKind.FULL, LayerKind.MLA}), block, shape.flags.extra_row_bytes),
    )
    sliding = Pool(
        (PoolGroup(LayerKind.SLIDING, 1, block, cap_tokens=window, slack_blocks=1),),
        _token_rows(shape, frozenset(windowed), block),
        ratio=shape.flags.swa_ratio or shape.rules.swa_ratio,
    )
    return Layout((full, sliding), _outside_state(shape), span)


# --- llama.cpp: cells, allocated at load -------------------------------------------------------------------


def _cells(shape: Shape) -> Layout:
    # Layers are split over devices (split mode layer), so every device is a stage and heads stay whole.
    shape = replace(shape, tp=1, pp=min(shape.tp * shape.pp, len(shape.geometry.layer_map)))
    kinds = {g.kind for g in shape.geometry.groups}
    windowed = kinds & {LayerKind.SLIDING, LayerKind.CHUNKED}
    if not windowed or not shape.geometry.has_full or not shape.rules.has_sliding_cache or shape.flags.swa_full:
        # A model that slides everywhere (Mistral v0.1, StarCoder2) gets an ordinary cache from llama.cpp.
        shape = _flattened(shape)
        windowed = set()
    copies = 1 + shape.flags.state_rollbacks
    full = Pool(
        (PoolGroup(LayerKind.FULL, 1, shape.block_tokens),),
        _token_rows(shape, frozenset({LayerKind.FULL, LayerKind.MLA}), shape.block_tokens, shape.flags.extra_row_bytes),
    )
    pools = [full]
    if windowed:
        window = max(g.window for g in shape.geometry.groups if g.kind in windowed)
        cells = -(-(window + shape.flags.n_ubatch) // 256) * 256
        pools.append(
            Pool(
                (PoolGroup(LayerKind.SLIDING, 1, shape.block_tokens, cap_tokens=cells),),
                _token_rows(shape, frozenset(windowed), shape.block_tokens),
                ratio=None,
            )
        )
    return Layout(tuple(pools), _outside_state(shape, copies), shape.block_tokens)


_STYLES: Mapping[PoolStyle, Callable[[Shape], Layout]] = {
    PoolStyle.PAGES: _pages,
    PoolStyle.GROUPS: _groups,
    PoolStyle.TWO_POOLS: _two_pools,
    PoolStyle.CELLS: _cells,
}
