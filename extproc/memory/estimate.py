"""One model, one engine, one load: every byte as a named term.

Owns the composition of KV, weights and overheads into the answer of ``kvgate estimate``; pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.memory.caches import pad_up
from extproc.memory.engines import EngineRules, PoolStyle
from extproc.memory.geometry import Geometry, LayerGroup, LayerKind
from extproc.memory.kv import KvModel
from extproc.memory.overheads import Term, engine_terms, lora_term, vision_encoder_term
from extproc.memory.weights import WeightFormat, geometry_weights


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the model: ``sequences`` sequences of ``tokens`` tokens each, and the engine's step sizes.

    ``devices`` hold the weights; more than the KV's shards under attention data parallelism (None: as many).
    """

    tokens: int
    sequences: int = 1
    batched_tokens: int = 8192
    max_sequences: int = 256
    n_ubatch: int = 512
    flash: bool = True
    lora_rank: int = 0
    max_loras: int = 0
    image_tokens: int = 0
    devices: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer. ``terms`` are totals over all devices; ``shard_bytes`` everything on each device.

    ``kv_bytes`` are the blocks of the sequences, states included where the engine pages them; ``state_bytes`` the
    recurrent states (a part of ``kv_bytes`` then, beside it otherwise).
    """

    tokens: int
    blocks: int
    kv_bytes: int
    kv_bytes_per_shard: tuple[int, ...]
    state_bytes: int
    weights_bytes: int
    terms: tuple[Term, ...]
    shard_bytes: tuple[int, ...]
    state_in_pool: bool

    @property
    def total_bytes(self) -> int:
        """All terms over all devices."""
        return sum(t.bytes for t in self.terms)


def estimate(geometry: Geometry, rules: EngineRules, kv: KvModel, load: Load, *, form: WeightFormat | None = None,
             weights_size: int | None = None, draft: tuple[Geometry, KvModel] | None = None) -> Estimate:  # fmt: skip
    """Memory of the load; GeometryError where nothing tells the weights.

    ``draft`` is a speculative draft model with its own cache on the same devices. llama.cpp allocates whole slots at
    load, so its tokens are rounded up to 256.
    """
    cells = rules.style is PoolStyle.CELLS
    tokens = pad_up(load.tokens, 256) if cells else load.tokens
    weights, weights_how = geometry_weights(geometry, form, weights_size)
    devices = max(kv.shards, load.devices or 0)
    kv_shards = _kv_shards(kv, tokens, load.sequences)
    beside = 0 if kv.state_in_pool else load.sequences * kv.state_bytes_per_sequence
    terms = [
        Term("weights", weights, weights_how, "docs/memory.md"),
        *_kv_terms(kv, geometry, tokens, load.sequences),
    ]
    if draft is not None:
        draft_geometry, draft_kv = draft
        draft_weights, how = geometry_weights(draft_geometry)
        terms.append(Term("draft_weights", draft_weights, f"{draft_geometry.name}: {how}", "docs/memory.md"))
        amount = load.sequences * sum(_kv_shards(draft_kv, tokens, 1))
        terms.append(Term("draft_kv", amount, f"{load.sequences} x {tokens} tokens x {draft_kv.bytes_per_token} B",
                          "docs/memory.md"))  # fmt: skip
    if load.max_loras:
        terms.append(lora_term(geometry, load.lora_rank, load.max_loras))
    if load.image_tokens:
        terms.append(vision_encoder_term(load.image_tokens, geometry.hidden))
    each = engine_terms(
        geometry, rules, tp=kv.tp, batched_tokens=load.batched_tokens, max_sequences=load.max_sequences,
        n_ctx=tokens * load.sequences, n_ubatch=load.n_ubatch, flash=load.flash,
    )  # fmt: skip
    suffix = f", on each of {devices} devices" if devices > 1 else ""
    terms += [Term(t.name, t.bytes * devices, t.formula + suffix, t.source) for t in each]
    spread = (sum(t.bytes for t in terms) - sum(kv_shards) - beside) // devices
    state_each = tuple(load.sequences * b for b in kv.state_shard_bytes) if beside else (0,) * kv.shards
    return Estimate(
        tokens=tokens,
        blocks=load.sequences * kv.blocks(tokens),
        kv_bytes=sum(kv_shards),
        kv_bytes_per_shard=kv_shards,
        state_bytes=load.sequences * kv.state_bytes_per_sequence,
        weights_bytes=weights,
        terms=tuple(terms),
        shard_bytes=tuple(k + s + spread for k, s in zip(kv_shards, state_each, strict=True))
        + (spread,) * (devices - kv.shards),
        state_in_pool=kv.state_in_pool,
    )


def _kv_shards(kv: KvModel, tokens: int, sequences: int) -> tuple[int, ...]:
    """Bytes of the pools (states beside them left out) on each shard."""
    used = [sum(g.used(tokens) for g in p.groups) * sequences for p in kv.pools]
    return tuple(sum(u * p.shard_block_bytes[s] for u, p in zip(used, kv.pools, strict=True)) for s in range(kv.shards))


_KIND_TERMS = {
    LayerKind.FULL: "kv",
    LayerKind.MLA: "kv",
    LayerKind.SLIDING: "kv_sliding",
    LayerKind.CHUNKED: "kv_chunked",
    LayerKind.CROSS: "kv_cross",
    LayerKind.STATE: "state",
}


def _kv_terms(kv: KvModel, geometry: Geometry, tokens: int, sequences: int) -> list[Term]:
    """One term per pool group, and the states beside the pools."""
    source = kv.rules.source if kv.rules else ""
    terms = []
    for pool in kv.pools:
        for g in pool.groups:
            blocks = g.used(tokens) * sequences
            unit = "cells" if g.block_tokens == 1 else "blocks"
            what = f"{sequences} x {g.used(tokens)} {unit} x {pool.block_bytes} B"
            terms.append(Term(_KIND_TERMS[g.kind], blocks * pool.block_bytes, f"{what} ({_why(kv, geometry, g.kind, g.block_tokens, g.cap_tokens)})",
                              source))  # fmt: skip
    if kv.state_bytes_per_sequence and not kv.state_in_pool:
        terms.append(Term("state", sequences * kv.state_bytes_per_sequence,
                          f"{sequences} sequences x {kv.state_bytes_per_sequence} B of recurrent state", source))  # fmt: skip
    return terms


def _why(kv: KvModel, geometry: Geometry, kind: LayerKind, block: int, cap: int) -> str:
    """The formula of a block in the model's own figures."""
    if kind is LayerKind.STATE:
        return "fixed state pages, whatever the length"
    layers = [g for g in geometry.groups if _KIND_TERMS[g.kind] == _KIND_TERMS[kind]] or list(geometry.groups)
    shape = ", ".join(_shape(g) for g in layers)
    window = f", at most {cap} tokens a sequence" if cap else ""
    unit = "a token a cell" if block == 1 else f"{block} tokens a block"
    return f"{unit}{window}; {shape}; KV {kv.kv_dtype}"


def _shape(g: LayerGroup) -> str:
    if g.kind is LayerKind.MLA:
        return f"{g.layers} layers x latent {g.k_dim}, one copy a device"
    return f"{g.layers} layers x {g.kv_heads} KV heads x ({g.k_dim} + {g.v_dim})"
