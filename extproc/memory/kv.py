"""A model on an engine, precomputed: tokens to blocks, blocks to bytes per shard.

Owns ``KvModel``, built once per target, and ``project``, the only function of this package on the request path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import Struct

from extproc.errors import GeometryError
from extproc.memory.dtypes import KvTypes, kv_types
from extproc.memory.engines import EngineRules, Overflow, PoolStyle
from extproc.memory.flags import DEFAULT_FLAGS, Flags
from extproc.memory.geometry import Geometry, LayerKind
from extproc.memory.pools import Layout, Pool, PoolGroup, Shape, layout

#: Largest block count ever projected: the last integer that a Lua number in Redis still holds exactly.
MAX_BLOCKS = 2**53 - 1


class Projection(Struct, frozen=True):
    """What one request takes from one replica.

    ``kv_blocks`` blocks of the main pool, of which ``input_blocks`` for the prompts alone; ``kv_bytes`` the bytes of
    all blocks over all shards; ``state_bytes`` the recurrent states (inside ``kv_bytes`` where the engine pages them,
    ``KvModel.state_in_pool``); ``bytes_per_shard`` everything, one figure per device.
    """

    kv_blocks: int
    input_blocks: int
    kv_bytes: int
    bytes_per_shard: tuple[int, ...]
    state_bytes: int


@dataclass(frozen=True, slots=True)
class KvModel:
    """One model on one engine with one KV type and one parallel layout.

    ``bytes_per_token`` counts every attention layer once over all shards of the replica (a token below every window);
    ``bytes_per_token_per_shard`` the same for each device; ``bytes_per_block`` one block of the main pool over all
    shards, padding included; ``state_bytes_per_sequence`` recurrent state of one sequence over all shards.
    """

    name: str
    engine: str
    kv_dtype: str
    tp: int
    pp: int
    dcp: int
    block_tokens: int
    bytes_per_block: int
    bytes_per_token: int
    bytes_per_token_per_shard: tuple[int, ...]
    state_bytes_per_sequence: int
    state_in_pool: bool
    overflow: Overflow
    lookahead_tokens: int
    shares_prompt: bool
    pools: tuple[Pool, ...]
    state_shard_bytes: tuple[int, ...]
    geometry: Geometry | None = field(default=None, repr=False)
    rules: EngineRules | None = field(default=None, repr=False)
    flags: Flags = field(default=DEFAULT_FLAGS, repr=False)
    plain: bool = True
    #: For each pool its groups as (count, block tokens, cap in blocks, fixed blocks): the request path reads tuples.
    steps: tuple[tuple[tuple[int, int, int, int], ...], ...] = ()
    #: Whether all shards pay the same for a block of every pool and for a state.
    even: bool = False

    @classmethod
    def tokens_only(cls, block_tokens: int, name: str = "", engine: str = "", shards: int = 1) -> KvModel:
        """Block counting without a geometry: bytes are 0 everywhere."""
        if block_tokens < 1:
            raise GeometryError(f"block of {block_tokens} tokens; expected at least 1")
        zeros = (0,) * shards
        pool = Pool((PoolGroup(LayerKind.FULL, 1, block_tokens),), zeros)
        return cls(
            name=name, engine=engine, kv_dtype="", tp=shards, pp=1, dcp=1, block_tokens=block_tokens, bytes_per_block=0,
            bytes_per_token=0, bytes_per_token_per_shard=zeros, state_bytes_per_sequence=0, state_in_pool=False,
            overflow=Overflow.PREEMPT, lookahead_tokens=0, shares_prompt=True, pools=(pool,), state_shard_bytes=zeros,
        )  # fmt: skip

    def measured(self, bytes_per_token: int) -> KvModel:
        """The same blocks at a cost per token over all shards that somebody measured, spread over them as computed."""

        def cost(amounts: tuple[int, ...], tokens: int) -> tuple[int, ...]:
            """What was computed, scaled; an even share of ``tokens`` where nothing was."""
            if not self.bytes_per_token:
                return tuple(-(-bytes_per_token * tokens // self.shards) for _ in amounts)
            return tuple(-(-amount * bytes_per_token // self.bytes_per_token) for amount in amounts)

        pools = tuple(replace(p, shard_block_bytes=cost(p.shard_block_bytes, self.block_tokens)) for p in self.pools)
        states = cost(self.state_shard_bytes, 0)
        return replace(
            self, bytes_per_block=pools[0].block_bytes, bytes_per_token=bytes_per_token, bytes_per_token_per_shard=cost(self.bytes_per_token_per_shard, 1),
            state_bytes_per_sequence=sum(states), pools=pools, state_shard_bytes=states,
        )  # fmt: skip

    @property
    def shards(self) -> int:
        """Devices that hold a part of one sequence."""
        return len(self.state_shard_bytes)

    @property
    def is_hybrid(self) -> bool:
        """Blocks are not all alike: fixed, capped or of several pools."""
        return not self.plain

    def blocks(self, tokens: int) -> int:
        """Blocks of the main pool that one sequence of ``tokens`` tokens holds at most."""
        if tokens < 0:
            raise ValueError(f"tokens {tokens} is negative")
        if self.plain:
            return min(-(-tokens // self.block_tokens), MAX_BLOCKS)
        return min(_combined(tuple(sum(g.used(tokens) for g in p.groups) for p in self.pools), self.pools), MAX_BLOCKS)

    def charged_blocks(self, tokens: int) -> int:
        """Blocks the engine's own start-up check charges for one sequence of ``tokens`` tokens."""
        return sum(g.charged(tokens) for g in self.pools[0].groups)

    def sequence_bytes(self, tokens: int) -> tuple[int, ...]:
        """Bytes of one sequence that holds ``tokens`` tokens on each shard, states included."""
        used = [sum(g.used(tokens) for g in p.groups) for p in self.pools]
        beside = (0,) * self.shards if self.state_in_pool else self.state_shard_bytes
        return tuple(
            sum(u * p.shard_block_bytes[s] for u, p in zip(used, self.pools, strict=True)) + beside[s]
            for s in range(self.shards)
        )

    def pool_blocks(self, available_bytes_per_shard: int | Sequence[int]) -> int:
        """Blocks of the main pool that fit into that memory: the minimum over the shards.

        Where the engine keeps several pools the memory is divided so that they keep their ratio.
        """
        n = self.shards
        room = (
            [available_bytes_per_shard] * n
            if isinstance(available_bytes_per_shard, int)
            else list(available_bytes_per_shard)
        )
        sized = [p for p in self.pools if p.ratio is not None]
        per_shard = [sum(p.shard_block_bytes[s] * (p.ratio or 0) for p in sized) for s in range(n)]
        exact = len(sized) == 1
        fits = [
            (int(r) // p.shard_block_bytes[s] if exact else int(r / c))
            for s, (r, c, p) in enumerate(zip(room, per_shard, [sized[0]] * n, strict=True))
            if c > 0
        ]
        return max(0, min(fits)) if fits else 0


def _combined(used: Sequence[int], pools: Sequence[Pool]) -> int:
    """Main-pool blocks that stand for the use of all pools: the tightest one decides."""
    need = used[0]
    for units, pool in zip(used[1:], pools[1:], strict=True):
        if pool.ratio is not None:
            need = max(need, int(-(-units // pool.ratio)))
    return need


def build_kv_model(
    geometry: Geometry,
    rules: EngineRules,
    *,
    kv_dtype: str | Mapping[str, str] | KvTypes | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    dcp: int = 1,
    block_tokens: int | None = None,
    flags: Flags = DEFAULT_FLAGS,
) -> KvModel:
    """Precompute a model on an engine; GeometryError where the combination cannot run.

    ``dp`` is attention data parallelism inside ``tp`` (SGLang's dp-attention): a request then lives on ``tp // dp``
    devices. ``block_tokens`` is the engine's reported block, else its default.
    """
    for label, value in (("tp", tp), ("pp", pp), ("dp", dp), ("dcp", dcp)):
        if value < 1:
            raise GeometryError(f"{label} is {value}; expected at least 1")
    if dp > 1 and rules.engine == "sglang":
        if tp % dp:
            raise GeometryError(f"dp {dp} does not divide tp {tp}")
        tp //= dp
    if tp % dcp:
        raise GeometryError(f"dcp {dcp} does not divide tp {tp}")
    geometry = _speculative(geometry, flags)
    # llama.cpp's cache is f16 whatever the model's own type.
    types = kv_types(kv_dtype, _own_type(geometry, rules))
    block = block_tokens or rules.block_tokens
    if block < 1:
        raise GeometryError(f"block_tokens is {block}; expected at least 1")
    shape = Shape(geometry, rules, types, tp, pp, dcp, block, flags)
    made = layout(shape)
    per_token = _rate(shape)
    state = _state_shards(shape, made)
    main = made.pools[0]
    return KvModel(
        name=geometry.name, engine=rules.engine, kv_dtype=types.label, tp=tp, pp=pp, dcp=dcp,
        block_tokens=made.block_tokens, bytes_per_block=main.block_bytes, bytes_per_token=sum(per_token),
        bytes_per_token_per_shard=per_token, state_bytes_per_sequence=sum(state), state_in_pool=rules.state_in_pool,
        overflow=rules.overflow, lookahead_tokens=flags.lookahead_tokens, shares_prompt=rules.shares_prompt and flags.prefix_caching,
        pools=made.pools, state_shard_bytes=state, geometry=geometry, rules=rules, flags=flags, plain=_is_plain(made), steps=_steps(made), even=_is_even(made, state),
    )  # fmt: skip


def _own_type(geometry: Geometry, rules: EngineRules) -> str:
    """KV type where none is asked for."""
    if rules.style is PoolStyle.CELLS:
        return "f16"
    return (geometry.kv_dtype if rules.reads_kv_format else None) or geometry.dtype


def _speculative(geometry: Geometry, flags: Flags) -> Geometry:
    if flags.mtp:
        geometry = geometry.with_mtp()
    if flags.draft_layers:
        geometry = replace(geometry, mtp_layers=flags.draft_layers).with_mtp()
    return geometry


def _rate(shape: Shape) -> tuple[int, ...]:
    """Bytes per token on each shard over every attention layer, below every window; DCP divides, rounded up."""
    geometry, flags = shape.geometry, shape.flags
    if shape.rules.style is PoolStyle.CELLS:
        shape = replace(shape, tp=1, pp=min(shape.tp * shape.pp, len(geometry.layer_map)))
    rows = [0 if g.kind is LayerKind.CROSS else shape.row(g) for g in geometry.groups]
    sharded = [1 if g.kind in (LayerKind.FULL, LayerKind.MLA) else 0 for g in geometry.groups]
    out = []
    for number, stage in enumerate(shape.stages()):
        split = sum(r * shape.layers_on(i, stage) for i, r in enumerate(rows) if sharded[i])
        whole = sum(r * shape.layers_on(i, stage) for i, r in enumerate(rows) if not sharded[i])
        out.append(-(-split // shape.dcp) + whole + (flags.extra_row_bytes if number == 0 else 0))
    return shape.per_shard(tuple(out))


def _state_shards(shape: Shape, made: Layout) -> tuple[int, ...]:
    """State of one sequence on each shard, whether it lies in the pool or beside it."""
    if not shape.rules.state_in_pool:
        return made.state_shard_bytes
    blocks = sum(g.count * g.fixed_blocks for g in made.pools[0].groups if g.kind is LayerKind.STATE)
    return tuple(blocks * b for b in made.pools[0].shard_block_bytes)


def _steps(made: Layout) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
    return tuple(
        tuple((g.count, g.block_tokens, g.cap_blocks or MAX_BLOCKS, g.fixed_blocks) for g in p.groups)
        for p in made.pools
    )


def _is_even(made: Layout, state: tuple[int, ...]) -> bool:
    return len(set(state)) == 1 and all(len(set(p.shard_block_bytes)) == 1 for p in made.pools)


def _is_plain(made: Layout) -> bool:
    if len(made.pools) != 1 or len(made.pools[0].groups) != 1:
        return False
    group = made.pools[0].groups[0]
    return group.count == 1 and not group.cap_tokens and not group.fixed_blocks and not any(made.state_shard_bytes)


def project(
    kv: KvModel, input_tokens_per_prompt: Sequence[int], expected_output_tokens: int, sequences: int
) -> Projection:
    """Blocks and bytes a request takes, an upper bound of what the engine takes for that many tokens.

    Sum over prompts of blocks(input) + sequences x blocks(expected output) + one partial block per extra sequence;
    windows cap it, states add a fixed part per sequence. ``sequences`` counts all of the request, at least one per
    prompt. Without prefix sharing every sequence pays its whole prompt.
    """
    prompts = len(input_tokens_per_prompt)
    if expected_output_tokens < 0 or sequences < 0 or (prompts and min(input_tokens_per_prompt) < 0):
        raise ValueError("token and sequence counts must not be negative")
    sequences = max(sequences, prompts)
    new_tokens = expected_output_tokens + kv.lookahead_tokens
    if not kv.plain or not kv.shares_prompt:
        return _project_pools(kv, input_tokens_per_prompt, new_tokens, sequences)
    block = kv.block_tokens
    input_blocks = 0
    for tokens in input_tokens_per_prompt:
        input_blocks += -(-tokens // block)
    total = input_blocks + sequences * -(-new_tokens // block) + sequences - prompts
    if total > MAX_BLOCKS:
        total, input_blocks = MAX_BLOCKS, min(input_blocks, MAX_BLOCKS)
    shard_bytes = kv.pools[0].shard_block_bytes
    per_shard = (total * shard_bytes[0],) if len(shard_bytes) == 1 else tuple([total * b for b in shard_bytes])
    return Projection(total, input_blocks, total * kv.bytes_per_block, per_shard, 0)


def shared_prefix_tokens(kv: KvModel, input_tokens: int, hit_tokens: int) -> int:
    """Tokens of a prompt that need no prefill for a prefix hit of ``hit_tokens``: whole blocks, never the last token.

    On hybrids the block is the large aligned one. A hit discounts prefill work only; the KV stock counts in full.
    """
    return max(0, min(hit_tokens, input_tokens - 1)) // kv.block_tokens * kv.block_tokens


def _project_pools(kv: KvModel, prompts: Sequence[int], new_tokens: int, sequences: int) -> Projection:
    count = len(prompts)
    extra = sequences - count
    shares = kv.shares_prompt
    used, inputs = [], []
    for steps in kv.steps:
        pool_total = pool_input = 0
        for groups, block, cap, fixed in steps:
            first = prompt_only = each = 0
            if block:
                out = -(-new_tokens // block)
                longest = 1
                for tokens in prompts:
                    held = -(-tokens // block)
                    prompt_only += held if held < cap else cap
                    first += held + out if held + out < cap else cap
                    if held > longest:
                        longest = held
                # A sequence that shares its prompt owns a copy of the partial block and its output.
                each = min((1 if shares else longest) + out, cap)
            pool_total += groups * (first + extra * each + sequences * fixed)
            pool_input += groups * (prompt_only + count * fixed)
        used.append(pool_total if pool_total < MAX_BLOCKS else MAX_BLOCKS)
        inputs.append(pool_input if pool_input < MAX_BLOCKS else MAX_BLOCKS)
    state = sequences * kv.state_bytes_per_sequence
    beside = 0 if kv.state_in_pool else state
    per_shard = _shard_bytes(kv, used, sequences, beside)
    single = len(used) == 1
    return Projection(
        used[0] if single else min(_combined(used, kv.pools), MAX_BLOCKS),
        inputs[0] if single else min(_combined(inputs, kv.pools), MAX_BLOCKS),
        sum(per_shard) - beside,
        per_shard,
        state,
    )


def _shard_bytes(kv: KvModel, used: Sequence[int], sequences: int, beside: int) -> tuple[int, ...]:
    """Bytes on each shard; one sum where all shards are alike."""
    if kv.even:
        total = sequences * kv.state_shard_bytes[0] if beside else 0
        for units, pool in zip(used, kv.pools, strict=True):
            total += units * pool.shard_block_bytes[0]
        return (total,) * len(kv.state_shard_bytes)
    return tuple(
        sum(u * p.shard_block_bytes[s] for u, p in zip(used, kv.pools, strict=True))
        + (sequences * kv.state_shard_bytes[s] if beside else 0)
        for s in range(kv.shards)
    )
