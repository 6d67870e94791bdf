"""``kvgate estimate``: the memory of a model for a number of tokens, every term named."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from extproc.errors import UsageError
from extproc.memory import (
    Flags,
    Geometry,
    KvModel,
    build_kv_model,
    catalogue_names,
    engine_rules,
    image_tokens,
    load_geometry,
)
from extproc.memory.engines import ENGINES, EngineRules, PoolStyle, canonical_engine, parse_version
from extproc.memory.estimate import Estimate, Load, estimate
from extproc.memory.flags import default_batched_tokens
from extproc.memory.hf_fields import short
from extproc.memory.overheads import default_max_sequences
from extproc.memory.sizes import MOST_TOKENS, lacks_unit, parse_devices, parse_size, refuse_empty, within
from extproc.memory.vision import measured
from extproc.memory.weights import weight_format
from extproc.telemetry.tables import size, table

HELP = "memory of a model for a number of tokens"
#: Tokens of a sequence where none are asked for: what most chat and edit requests stay under.
DEFAULT_TOKENS = 8192


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.usage = "kvgate estimate MODEL [options]   (kvgate estimate --help lists them)"
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a model directory, config.json, GGUF file or catalogue name")
    add("--list", action="store_true", help="print the catalogue's names and stop")
    add("--engine", default="vllm", help=f"one of {', '.join(ENGINES)} (default vllm)")
    add("--engine-version", metavar="V", help="rules of that version (default: the newest known)")
    add("--tokens", type=int, metavar="N", help=f"tokens of one sequence, input and output (default {DEFAULT_TOKENS})")
    add("--sequences", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    add(
        "--image",
        action="append",
        default=[],
        metavar="WxH",
        help="add an image of this size to every sequence (repeatable)",
    )
    add("--kv-dtype", metavar="T", help="auto, bf16, fp8, q8_0, q8_0/q4_0 (K/V), ... (default auto)")
    add("--quantization", metavar="Q", help="weight format: bf16, fp8, awq, q4_k_m, ... (default: as the model says)")
    add("--weights", metavar="SIZE", help="weights as measured, such as 18.6GiB (wins over every formula)")
    add("--tp", type=int, default=1, help="tensor parallel devices (llama.cpp: devices the layers are split over)")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp", type=int, default=1, help="attention data parallelism inside tp (SGLang)")
    add("--dcp", type=int, default=1, help="decode context parallelism inside tp")
    add("--block-tokens", type=int, metavar="N", help="the engine's block or page size (default: the engine's own)")
    add("--batched-tokens", type=int, metavar="N", help="max_num_batched_tokens (default: the engine's for the card)")
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="the engine's limit on sequences (default: the engine's for the card)",
    )
    add(
        "--mamba-mode",
        choices=("none", "align", "all"),
        default="none",
        help="vLLM's state cache mode on hybrid models",
    )
    add("--no-hybrid-manager", action="store_true", help="vLLM with --disable-hybrid-kv-cache-manager")
    add("--lookahead", type=int, default=0, metavar="K", help="speculative tokens a step")
    add("--mtp", action="store_true", help="the model's own prediction layers speculate and hold KV")
    add("--draft-layers", type=int, default=0, metavar="N", help="layers of a draft head such as EAGLE (1)")
    add("--draft", metavar="MODEL", help="a draft model with its own weights and cache")
    add("--lora-rank", type=int, default=16, metavar="R", help="rank of the LoRA slots (default 16)")
    add("--max-loras", type=int, default=0, metavar="N", help="LoRA slots (default 0)")
    add("--ubatch", type=int, default=512, metavar="N", help="llama.cpp's physical batch (default 512)")
    add("--no-flash", action="store_true", help="llama.cpp without flash attention")
    add("--swa-full", action="store_true", help="llama.cpp with full-size sliding caches")
    add(
        "--mla",
        choices=("latent", "latent_kv", "heads"),
        help="how the engine caches latent attention (llama.cpp builds differ)",
    )
    add("--device", metavar="SIZE", help="a card such as 24GiB or 80GiBx2: say whether it holds this")
    add("--json", action="store_true", help="print JSON")
    add("-v", "--verbose", action="store_true", help="name every term's formula and source")


def run(args: argparse.Namespace) -> int:
    """0 the estimate was made; 2 wrong usage (UsageError); GeometryError (exit status 1) where it cannot be."""
    if args.list:
        print("\n".join(catalogue_names()))
        return 0
    refuse_empty(vars(args))
    if args.model is None:
        print("estimate: name a model, or see the catalogue: kvgate estimate --list", file=sys.stderr)
        return 2
    for option, text in (("device", args.device), ("weights", args.weights)):
        if text and (bare := lacks_unit(text)):
            print(f"estimate: --{option}: {bare}", file=sys.stderr)
            return 2
    _check(args)
    geometry = load_geometry(args.model)
    rules = engine_rules(args.engine, args.engine_version)
    load = _load(args, geometry)
    kv = _kv(args, geometry, rules)
    form = weight_format(args.quantization) if args.quantization else None
    weights_size = parse_size(args.weights) if args.weights else None
    draft = _draft(args, rules)
    result = estimate(geometry, rules, kv, load, form=form, weights_size=weights_size, draft=draft)
    if args.json:
        print(json.dumps(_json(geometry, kv, load, result), indent=2))
    else:
        print(_text(args, geometry, rules, kv, load, result))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Figures that no load has are asked back, never computed with."""
    within("--tokens", args.tokens, 1, MOST_TOKENS)
    for name in ("sequences", "ubatch", "batched_tokens", "max_num_seqs", "block_tokens"):
        within(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    for name in ("tp", "pp", "dp", "dcp"):
        within(f"--{name}", getattr(args, name), 1, 1024)
    for name in ("lookahead", "draft_layers", "max_loras"):
        within(f"--{name.replace('_', '-')}", getattr(args, name), 0, 4096)
    within("--lora-rank", args.lora_rank, 1, 65536)
    if args.dp > 1 and canonical_engine(args.engine) != "sglang":
        raise UsageError(
            f"--dp is SGLang's attention data parallelism; with {args.engine} every data-parallel rank is a replica of its"
            " own: leave it out"
        )
    if args.engine_version and parse_version(args.engine_version) is None:
        raise UsageError(f"--engine-version {short(args.engine_version)} holds no number; write 0.21.0 or b4321")


def _load(args: argparse.Namespace, geometry: Geometry) -> Load:
    images = sum(_image(geometry, text) for text in args.image)
    tokens = (DEFAULT_TOKENS if args.tokens is None else args.tokens) + images
    cards = parse_devices(args.device) if args.device else ()
    card = cards[0] if cards else None
    return Load(
        tokens=tokens,
        sequences=args.sequences,
        batched_tokens=args.batched_tokens or default_batched_tokens(card),
        max_sequences=args.max_num_seqs or default_max_sequences(card or 0),
        n_ubatch=args.ubatch,
        flash=not args.no_flash,
        lora_rank=args.lora_rank,
        max_loras=args.max_loras,
        image_tokens=images,
        devices=args.tp * args.pp,
    )


def _image(geometry: Geometry, text: str) -> int:
    sides = re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", text.strip())
    width, height = (int(s) for s in sides.groups()) if sides else (0, 0)
    if not measured(width, height):
        raise UsageError(f"--image {short(text)} is not a size in pixels; write 1024x768")
    return image_tokens(geometry.vision_family, width, height)


def _kv(args: argparse.Namespace, geometry: Geometry, rules: EngineRules) -> KvModel:
    flags = Flags(
        max_num_batched_tokens=args.batched_tokens,
        mamba_mode=args.mamba_mode,
        hybrid_manager=not args.no_hybrid_manager,
        lookahead_tokens=args.lookahead,
        draft_layers=args.draft_layers,
        mtp=args.mtp,
        n_parallel=args.sequences,
        n_ubatch=args.ubatch,
        swa_full=args.swa_full,
        mla=args.mla,
    )
    return build_kv_model(
        geometry, rules, kv_dtype=args.kv_dtype, tp=args.tp, pp=args.pp, dp=args.dp, dcp=args.dcp,
        block_tokens=args.block_tokens, flags=flags,
    )  # fmt: skip


def _draft(args: argparse.Namespace, rules: EngineRules) -> tuple[Geometry, KvModel] | None:
    if not args.draft:
        return None
    geometry = load_geometry(args.draft)
    return geometry, build_kv_model(geometry, rules, kv_dtype=args.kv_dtype)


def _json(geometry: Geometry, kv: KvModel, load: Load, result: Estimate) -> dict[str, Any]:
    return {
        "model": geometry.name,
        "source": geometry.source or geometry.where,
        "engine": kv.engine,
        "kv_dtype": kv.kv_dtype,
        "tp": kv.tp,
        "pp": kv.pp,
        "dcp": kv.dcp,
        "tokens": load.tokens,
        "sequences": load.sequences,
        "bytes_per_token": kv.bytes_per_token,
        "block_tokens": kv.block_tokens,
        "blocks": result.blocks,
        "kv_bytes": result.kv_bytes,
        "kv_bytes_per_shard": list(result.kv_bytes_per_shard),
        "state_bytes": result.state_bytes,
        "state_in_kv_bytes": result.state_in_pool,
        "weights_bytes": result.weights_bytes,
        "total_bytes": result.total_bytes,
        "bytes_per_device": list(result.shard_bytes),
        "terms": [{"name": t.name, "bytes": t.bytes, "formula": t.formula, "source": t.source} for t in result.terms],
    }


_TERM_WORDS = {
    "weights": "weights",
    "kv": "KV cache",
    "kv_sliding": "KV cache, sliding-window layers",
    "kv_chunked": "KV cache, chunked layers",
    "kv_cross": "KV cache, cross-attention layers",
    "state": "recurrent state",
    "activation": "activations (peak)",
    "non_torch": "CUDA and libraries",
    "nccl": "NCCL",
    "cuda_graphs": "CUDA graphs",
    "compute_buffer": "compute buffer",
    "cuda_context": "CUDA context",
    "lora": "LoRA slots",
    "draft_weights": "draft model's weights",
    "draft_kv": "draft model's KV cache",
    "vision_encoder": "image encoder cache",
}


def _text(
    args: argparse.Namespace, geometry: Geometry, rules: EngineRules, kv: KvModel, load: Load, result: Estimate
) -> str:
    n = len(result.shard_bytes)
    where = f"{n} devices" if n > 1 else "1 device"
    lines = [
        f"{geometry.name} on {kv.engine}, KV {kv.kv_dtype}, {where}: {load.sequences} x {result.tokens} tokens",
        "",
        table(
            ("TERM", "ALL DEVICES" if n > 1 else "BYTES"),
            [
                *((_TERM_WORDS.get(t.name, t.name), size(t.bytes)) for t in result.terms),
                ("total", size(result.total_bytes)),
            ],
        ),
        "",
    ]
    each = max(result.shard_bytes)
    lines.append(f"One device holds {size(each)} of it." if n > 1 else f"The device holds {size(each)}.")
    if n > kv.shards:
        lines.append(f"A request lives on {kv.shards} of the {n} devices (attention data parallelism).")
    if kv.bytes_per_token:
        blocks = (
            f"{result.blocks} blocks of {kv.block_tokens} tokens" if kv.block_tokens > 1 else f"{result.blocks} cells"
        )
        lines.append(f"A token costs {size(kv.bytes_per_token)} of KV{_beyond(kv)}; this load takes {blocks}.")
    if rules.style is PoolStyle.CELLS:
        lines.append("llama.cpp allocates this at load; a request then adds nothing, it only needs a free slot.")
    else:
        lines.append(
            f"{kv.engine} gives everything beside weights and overheads to its KV pool; a request takes blocks of it."
        )
    lines += _cautions(args, geometry, rules, kv, load)
    if args.device:
        lines += _verdict(parse_devices(args.device), result)
    if args.verbose:
        lines += ["", *(f"{t.name}: {t.bytes} B = {t.formula}  [{t.source}]" for t in result.terms)]
        lines.append(f"geometry from {geometry.source or geometry.where}")
    else:
        lines.append("Formulas and sources: --verbose. What fits on a card: kvgate plan --device 24GiB --model MODEL.")
    return "\n".join(lines)


#: KV types that every engine has; block types (q8_0, iq4_nl, ...) are llama.cpp's, the rest the others'.
_PLAIN_TYPES = frozenset({"bf16", "f16", "f32"})


def _cautions(args: argparse.Namespace, geometry: Geometry, rules: EngineRules, kv: KvModel, load: Load) -> list[str]:
    """What the engine would say to this load before memory matters."""
    found: list[str] = []
    if 0 < geometry.context_tokens < load.tokens:
        found.append(
            f"The model was made for {geometry.context_tokens} tokens; {load.tokens} need an extended context."
        )
    split = args.tp // args.dp if rules.engine == "sglang" else args.tp
    if rules.style is not PoolStyle.CELLS and geometry.heads and geometry.heads % split:
        found.append(f"{rules.engine} does not start this: {geometry.heads} attention heads do not divide by {split}.")
    cells = rules.style is PoolStyle.CELLS
    foreign = [t for t in kv.kv_dtype.split("/") if t not in _PLAIN_TYPES and t.startswith(("q", "iq")) is not cells]
    if foreign:
        found.append(
            f"{rules.engine} has no KV type {foreign[0]}, which is {'a GPU engine' if cells else 'llama.cpp'}'s."
        )
    if args.image and geometry.vision_family is None:
        found.append(
            f"No image rule is known for this model; {len(args.image)} x the largest image of any family is charged"
            f" ({load.image_tokens} tokens)."
        )
    return found


def _beyond(kv: KvModel) -> str:
    """What a token costs once it is past every window, where windows exist."""
    geometry = kv.geometry
    if geometry is None or not any(g.window for g in geometry.groups):
        return ""
    longest = max(g.window for g in geometry.groups)
    kept = sum(
        p.block_bytes * g.count // (g.block_tokens or 1)
        for p in kv.pools
        for g in p.groups
        if g.block_tokens and not g.cap_tokens
    )
    return f" ({size(kept)} past the window of {longest})"


def _verdict(cards: tuple[int, ...], result: Estimate) -> list[str]:
    """Whether the cards hold the load; a mismatch of counts is said, never guessed around."""
    n = len(result.shard_bytes)
    if len(cards) != n:
        cards_named = f"{len(cards)} card{'s' if len(cards) > 1 else ''}"
        return [f"--device names {cards_named}, the load is spread over {n}; set --tp {len(cards)} or name {n} cards."]
    need, has = max(result.shard_bytes), min(cards)
    if need <= has:
        return [f"It fits: {size(has - need)} of a {size(has)} card stay free."]
    return [f"It does not fit: a {size(has)} card lacks {size(need - has)}. Try kvgate plan for what would help."]
