"""``kvgate plan``: which model x format x context fits on a device, or what still fits on the fleet now."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from extproc.config import Config, Target, load
from extproc.errors import ConfigError, UsageError
from extproc.ledger.base import LedgerSnapshot, ReplicaView
from extproc.local.reach import reached
from extproc.memory import Geometry, catalogue_names, engine_rules, kv_types, load_geometry
from extproc.memory.engines import ENGINES, PoolStyle
from extproc.memory.overheads import DeviceBudget
from extproc.memory.planner import PlanRequest, PlanRow, ReplicaRoom, plan_row, replica_row
from extproc.memory.sizes import MOST_TOKENS, lacks_unit, parse_devices, parse_size, refuse_empty, within
from extproc.memory.weights import WeightFormat, geometry_weights, own_format, weight_format
from extproc.modelset import ModelSet
from extproc.telemetry.state import load_state
from extproc.telemetry.tables import size, table

HELP = "which model x quantisation x context fits on a device or a fleet"
#: Models shown where none is named: a small, a middle and a large one of the families that coding and chat teams run.
DEFAULT_MODELS = (
    "Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-14B-Instruct", "Qwen/Qwen2.5-Coder-32B-Instruct",
    "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-27B",
    "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.3-70B-Instruct",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "google/gemma-3-27b-it", "openai/gpt-oss-20b", "openai/gpt-oss-120b",
    "zai-org/GLM-4.5-Air", "deepseek-ai/DeepSeek-V2-Lite",
)  # fmt: skip
DEFAULT_CONTEXTS = (8192, 32768)
_FORMATS = {PoolStyle.CELLS: ("q8_0", "q4_k_m")}
_OTHER_FORMATS = ("bf16", "fp8", "awq")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.usage = "kvgate plan --device 24GiB [options]   (kvgate plan --help lists them)"
    add = parser.add_argument
    add("--device", metavar="SIZE", help="a card or several: 24GiB, 80GiBx2")
    add("-c", "--config", metavar="FILE", help="plan for this configuration's targets, on --device or on the fleet")
    add("--state", metavar="FILE", help="the fleet as `status --json` prints it (default with -c: the live fleet)")
    add(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help="directory, config.json, GGUF or catalogue name (repeatable)",
    )
    add(
        "--engine",
        action="append",
        default=[],
        metavar="E",
        help=f"one of {', '.join(ENGINES)} (repeatable; default vllm)",
    )
    add(
        "--quantization",
        action="append",
        default=[],
        metavar="Q",
        help="weight format (repeatable; default: usual ones)",
    )
    add("--context", action="append", type=int, default=[], metavar="N", help="tokens of a full sequence (repeatable)")
    add(
        "--mean-tokens",
        type=int,
        metavar="N",
        help="mean tokens of a request for the safe concurrency (default: the context)",
    )
    add("--kv-dtype", metavar="T", help="KV type (default auto)")
    add(
        "--utilization",
        type=float,
        metavar="F",
        help="share of the card the engine may use (default: the engine's own)",
    )
    add("--reserve", metavar="SIZE", help="memory kept for others on each card, such as 2GiB")
    add("--mps-limit", metavar="SIZE", help="CUDA MPS pinned memory limit of the engine")
    add("--all", action="store_true", help="show every format and context")
    add("--json", action="store_true", help="print JSON")
    add("-v", "--verbose", action="store_true", help="name the formulas")


def run(args: argparse.Namespace) -> int:
    """0 the plan was made, whatever fits; 1 bad input; 2 neither a device nor a configuration, or a size without a unit."""
    refuse_empty(vars(args))
    if not args.device and not args.config:
        print("plan: name a card (--device 24GiB) or a configuration (-c kvgate.yaml)", file=sys.stderr)
        return 2
    for option, text in (("device", args.device), ("reserve", args.reserve), ("mps-limit", args.mps_limit)):
        if text and (bare := lacks_unit(text)):
            print(f"plan: --{option}: {bare}", file=sys.stderr)
            return 2
    if args.state and (args.device or not args.config):
        print("plan: --state is a fleet: give it with -c and without --device", file=sys.stderr)
        return 2
    for context in args.context:
        within("--context", context, 1, MOST_TOKENS)
    within("--mean-tokens", args.mean_tokens, 1, MOST_TOKENS)
    if args.utilization is not None and not 0 < args.utilization <= 1:
        raise UsageError(f"--utilization is {args.utilization:g}; give a share above 0 and up to 1, such as 0.9")
    kv_types(args.kv_dtype)
    config = load(args.config) if args.config else None
    devices: list[dict[str, Any]]
    if config is not None and not args.device:
        snapshot = load_state(args.state)[0] if args.state else asyncio.run(_live(config))
        rows = _fleet_rows(config, args.config, snapshot, args)
        devices = [_device_json(d.total_bytes, max(0, (d.free_bytes or 0) - config.devices.guard_mb * 2**20))
                   for d in snapshot.devices.values() if d.total_bytes]  # fmt: skip
    else:
        budgets = _budgets(args, config)
        rows = [("", plan_row(r)) for r in _requests(args, config, budgets)]
        if not (args.model or args.quantization or args.config or args.all):
            rows = _largest_format(rows)
        devices = [_device_json(b.total_bytes, b.usable_bytes) for b in budgets]
    if args.json:
        print(json.dumps({"devices": devices, "rows": [_row_json(name, row) for name, row in rows]}, indent=2))
    else:
        print(_text(args, devices, rows))
    return 0


def _device_json(total: int, usable: int) -> dict[str, Any]:
    return {"total_bytes": total, "usable_bytes": usable}


# --- a card ------------------------------------------------------------------------------------------------


def _budgets(args: argparse.Namespace, config: Config | None) -> tuple[DeviceBudget, ...]:
    guard = config.devices.guard_mb if config is not None else 256
    reserve = parse_size(args.reserve) if args.reserve else 0
    limit = parse_size(args.mps_limit) if args.mps_limit else None
    return tuple(
        DeviceBudget(total, guard_bytes=guard * 2**20, dynamic_bytes=reserve, mps_limit_bytes=limit)
        for total in parse_devices(args.device)
    )


def _requests(args: argparse.Namespace, config: Config | None, budgets: tuple[DeviceBudget, ...]) -> list[PlanRequest]:
    if config is not None and not args.model:
        return _config_requests(args, config, budgets)
    common = PlanRequest(
        geometry=load_geometry((args.model or DEFAULT_MODELS)[0]), rules=engine_rules("vllm", None), quantization="",
        context_tokens=1, devices=budgets, kv_dtype=args.kv_dtype, mean_tokens=args.mean_tokens, utilization=args.utilization,
    )  # fmt: skip
    return [
        replace(common, geometry=geometry, rules=rules, quantization=form.name, form=form, context_tokens=context)
        for geometry in map(load_geometry, args.model or DEFAULT_MODELS)
        for rules in (engine_rules(engine, None) for engine in args.engine or ["vllm"])
        for form in [weight_format(name) for name in args.quantization or ()] or _usual_formats(geometry, rules.style)
        for context in args.context or _contexts(geometry)
    ]


def _usual_formats(geometry: Geometry, style: PoolStyle) -> Sequence[WeightFormat]:
    """The format the model was published in where that is a quantised one, else the usual ones of the engine."""
    native = geometry.quantization
    # gpt-oss is MXFP4 in every container; llama.cpp runs no other GPU quantisation.
    if geometry.weights_bytes is not None or native == "mxfp4" or (native and style is not PoolStyle.CELLS):
        return (own_format(geometry),)
    return [weight_format(name) for name in _FORMATS.get(style, _OTHER_FORMATS)]


def _contexts(geometry: Geometry) -> Sequence[int]:
    longest = geometry.context_tokens or max(DEFAULT_CONTEXTS)
    return [c for c in DEFAULT_CONTEXTS if c <= longest] or [longest]


def _largest_format(rows: list[tuple[str, PlanRow]]) -> list[tuple[str, PlanRow]]:
    """Of each model the rows of the largest format that fits anywhere, else those of the smallest: a table to read."""
    chosen: dict[tuple[str, str], str] = {}
    for _, row in rows:
        key = (row.model, row.engine)
        if key not in chosen or not any(
            r.fits for _, r in rows if (r.model, r.engine, r.quantization) == (*key, chosen[key])
        ):
            chosen[key] = row.quantization
    return [(name, row) for name, row in rows if chosen[row.model, row.engine] == row.quantization]


def _config_requests(args: argparse.Namespace, config: Config, budgets: tuple[DeviceBudget, ...]) -> list[PlanRequest]:
    found: list[PlanRequest] = []
    models = ModelSet.load(config, where=args.config)
    for name, target in _local(config):
        model, geometry = config.models.get(target.model or ""), models.geometry(name)
        if model is None or geometry is None:
            raise ConfigError([f"{args.config}: targets.{name}: its model has no geometry; set models.<name>.geometry"])
        named, measured = model.weights.quantization, model.weights.size_bytes
        form = weight_format(named) if named else own_format(geometry, measured)
        common = PlanRequest(
            geometry, engine_rules(target.engine, None), form.name, 1, budgets, form=form,
            weights_size=model.weights.size_bytes, kv_dtype=args.kv_dtype or model.kv_dtype,
            mean_tokens=args.mean_tokens, utilization=args.utilization,
        )  # fmt: skip
        contexts = args.context or [model.context_tokens or _contexts(geometry)[-1]]
        found += [replace(common, context_tokens=context) for context in contexts]
    return found


def _local(config: Config) -> list[tuple[str, Target]]:
    return [(name, target) for name, target in config.targets.items() if not target.remote]


# --- a fleet -----------------------------------------------------------------------------------------------


async def _live(config: Config) -> LedgerSnapshot:
    async with reached(config) as ledger:
        return await ledger.snapshot()


def _fleet_rows(
    config: Config, where: str, snapshot: LedgerSnapshot, args: argparse.Namespace
) -> list[tuple[str, PlanRow]]:
    models = ModelSet.load(config, where=where)
    rows: list[tuple[str, PlanRow]] = []
    for view in sorted(snapshot.replicas.values(), key=lambda view: (view.target, view.replica)):
        target = config.targets.get(view.target)
        if target is not None and not target.remote:
            rows += [(view.replica, row) for row in _replica_rows(config, models, view, target, args)]
    return rows


def _replica_rows(
    config: Config, models: ModelSet, view: ReplicaView, target: Target, args: argparse.Namespace
) -> list[PlanRow]:
    report, model = view.report, config.models.get(target.model or "")
    kv = models.kv(view.target, report.block_tokens if report else None)
    room = ReplicaRoom(
        capacity_blocks=report.capacity_blocks if report else None,
        committed_blocks=view.committed_blocks,
        max_sequences=report.max_sequences if report else None,
        sequences=view.sequences,
        watermark_blocks=target.watermark_blocks(report.capacity_blocks) if report else 0,
    )
    longest = (report.max_model_tokens if report else None) or (model.context_tokens if model else None)
    label = (model.weights.quantization if model else None) or "-"
    weights = _weights(config, models, view.target)
    return [
        replica_row(view.target, label, target.engine, context, kv, room, weights, args.mean_tokens)
        for context in args.context or [longest or DEFAULT_CONTEXTS[0]]
    ]


def _weights(config: Config, models: ModelSet, target: str) -> int:
    """Weight bytes of a target's model; 0 where nothing tells them."""
    model = config.models.get(config.targets[target].model or "")
    geometry = models.geometry(target)
    if model is not None and model.weights.size_bytes is not None:
        return model.weights.size_bytes
    if geometry is None or (geometry.params is None and geometry.weights_bytes is None):
        return 0
    form = weight_format(model.weights.quantization) if model and model.weights.quantization else None
    return geometry_weights(geometry, form)[0]


# --- output ------------------------------------------------------------------------------------------------


def _row_json(replica: str, row: PlanRow) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": row.model,
        "quantization": row.quantization,
        "engine": row.engine,
        "context_tokens": row.context_tokens,
        "fits": row.fits,
        "weights_bytes": row.weights_bytes,
        "kv_bytes_per_sequence": row.kv_bytes_per_sequence,
        "max_sequences": row.max_sequences,
        "safe_sequences_70": row.safe_sequences_70,
        "binding_term": row.binding_term,
        "headroom_bytes": row.headroom_bytes,
        "overhead_bytes": row.overhead_bytes,
        "devices": row.devices,
        "why": row.why,
        "would": list(row.would),
    }
    return found | ({"replica": replica} if replica else {})


_HEAD = (
    "WEIGHTS AS",
    "ENGINE",
    "CONTEXT",
    "WEIGHTS",
    "KV PER SEQUENCE",
    "SEQUENCES",
    "SAFE AT 70 %",
    "BINDS",
    "HEADROOM",
)


def _text(args: argparse.Namespace, devices: list[dict[str, Any]], rows: list[tuple[str, PlanRow]]) -> str:
    parts = [_devices_line(devices)]
    fitting = [(name, row) for name, row in rows if row.fits]
    rest = [(name, row) for name, row in rows if not row.fits]
    if fitting:
        parts.append(
            table(("REPLICA" if fitting[0][0] else "MODEL", *_HEAD), [_cells(name, row) for name, row in fitting])
        )
    elif rows:
        parts.append("Nothing of this fits.")
    if rest:
        parts.append("Does not fit:")
        parts.append("\n".join(_refusal(name, row) for name, row in (rest if args.all else _shortest(rest))))
    if not rows:
        parts.append(f"No models to plan; name one (--model), known: {', '.join(catalogue_names()[:6])}, ...")
    parts.append(
        "SEQUENCES: sequences of full context at once. SAFE AT 70 %: 0.7 x KV / (KV per token x mean tokens); the mean is"
        + (f" {args.mean_tokens} tokens." if args.mean_tokens else " the context, set --mean-tokens for your traffic.")
    )
    if args.verbose:
        parts.append(_FORMULAS)
    return "\n\n".join(parts)


_FORMULAS = """\
usable = min(utilisation x total, total - guard - reserves)            vLLM v1/worker/gpu_worker.py determine_available_memory
KV     = usable - weights / devices - activation - CUDA - graphs       per device; llama.cpp: - compute buffer - CUDA context
sequences = blocks(KV) // blocks(context), null blocks left out        per engine and model, see kvgate estimate --verbose
binds: the term that runs out first (weights, overhead, kv, sequences, unsupported)"""


def _devices_line(devices: list[dict[str, Any]]) -> str:
    sizes = [(d["total_bytes"], d["usable_bytes"]) for d in devices]
    if not sizes:
        return "No devices are reported."
    if len(set(sizes)) == 1:
        total, usable = sizes[0]
        return f"{len(sizes)} x {size(total)} ({size(usable)} usable each)"
    return ", ".join(f"{size(total)} ({size(usable)} usable)" for total, usable in sizes)


def _cells(replica: str, row: PlanRow) -> tuple[object, ...]:
    return (
        replica or row.model.rpartition("/")[2], row.quantization, row.engine, row.context_tokens, size(row.weights_bytes or None),
        size(row.kv_bytes_per_sequence or None), row.max_sequences, row.safe_sequences_70, row.binding_term, size(row.headroom_bytes),
    )  # fmt: skip


def _shortest(rows: list[tuple[str, PlanRow]]) -> list[tuple[str, PlanRow]]:
    """Of each model and format the row of the shortest context: a longer one fits even less."""
    best: dict[tuple[str, str, str, str], tuple[str, PlanRow]] = {}
    for name, row in rows:
        key = (name, row.model, row.quantization, row.engine)
        if key not in best or row.context_tokens < best[key][1].context_tokens:
            best[key] = (name, row)
    return list(best.values())


def _refusal(replica: str, row: PlanRow) -> str:
    name = replica or row.model.rpartition("/")[2]
    would = f" Would fit: {', or '.join(row.would)}." if row.would else ""
    return f"  {name} {row.quantization} on {row.engine} at {row.context_tokens} tokens: {row.why}.{would}"
