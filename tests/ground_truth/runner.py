"""Runs ground-truth rows and judges them.

Owns what a check means, the line printed for a row, and the verdict on a whole file:

- a row passes within its own tolerance;
- the file passes when at least 95 % of the counted rows pass and no unflagged row under-counts memory by more than
  1 % (or by more than the row's own tolerance, where that is wider: such rows state a spread between builds);
- circular rows, known mismatches and checks without a formula run and print, and are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from extproc.errors import GeometryError
from extproc.memory import build_kv_model, caches, catalogue_row, kv_types
from extproc.memory.catalogue import catalogue_geometry
from extproc.memory.kv import KvModel
from extproc.memory.weights import WeightFormat, format_in_name, weights_bytes
from tests.ground_truth.rows import GIB, KNOWN_INPUTS, MIB, Row

SHIPPED = Path(__file__).with_name("memory_ground_truth.json")
PASS_SHARE = 0.95
UNDER_COUNT_PCT = 1.0
#: Metrics that fall when memory need is under-counted the other way: a capacity that is too large.
_CAPACITY_METRICS = frozenset({"gpu_kv_tokens", "max_concurrency", "available_kv_gib", "num_gpu_blocks"})


@dataclass(frozen=True, slots=True)
class Result:
    """One row's outcome; ``error_pct`` is signed so that negative means memory was under-counted."""

    id: str
    check: str
    metric: str
    expected: float
    got: float | None
    error_pct: float | None
    tol_pct: float
    verdict: str  # pass | fail | mismatch | engine | error
    counted: bool
    circular: bool
    note: str = ""
    blind_error_pct: float | None = None

    @property
    def line(self) -> str:
        """id, expected, got, verdict."""
        got = "-" if self.got is None else f"{self.got:.9g}"
        error = "" if self.error_pct is None else f" ({self.error_pct:+.3f} %, tol {self.tol_pct:g} %)"
        flags = " circular" if self.circular else ""
        note = f" [{self.note}]" if self.note else ""
        return f"{self.id}: {self.metric} expected {self.expected:.9g} got {got}{error} {self.verdict}{flags}{note}"


def load_rows(path: Path | None = None) -> list[Row]:
    """Rows of ``path``, else of ``KVGATE_GROUND_TRUTH``, else the shipped ones."""
    chosen = path or Path(os.environ.get("KVGATE_GROUND_TRUTH") or SHIPPED)
    data = json.loads(chosen.read_text("utf-8"))
    rows = data["rows"] if isinstance(data, dict) else data
    return [Row(r) for r in rows]


# --- checks: each answers with every metric it can compute -------------------------------------------------


def _kv(row: Row) -> KvModel:
    i = row.inputs
    return build_kv_model(
        row.geometry(),
        row.rules(),
        kv_dtype=row.kv_dtype,
        tp=int(row.data.get("tp") or 1),
        pp=int(row.data.get("pp") or 1),
        dp=int(i.get("dp") or 1) if row.data["engine"] == "sglang" else 1,
        dcp=int(i.get("dcp") or 1),
        block_tokens=i.get("block_size"),
        flags=row.flags(),
    )


def _vllm_tokens(row: Row) -> Mapping[str, float]:
    kv, i = _kv(row), row.inputs
    blocks = int(i["num_blocks"]) if i.get("num_blocks") else kv.pool_blocks(int(i["available_gib"] * GIB))
    versioned = row.rules().size_line if row.data.get("engine_version") else "blocks"
    style = i.get("log_style") or versioned
    length = int(row.data["n_ctx"])
    return {
        "num_gpu_blocks": blocks,
        "block_size": kv.block_tokens,
        "gpu_kv_tokens": caches.vllm_size_line(kv, blocks, length, style),
        "max_concurrency": caches.vllm_max_concurrency(kv, blocks, length),
    }


def _vllm_needed(row: Row) -> Mapping[str, float]:
    return {"needed_gib": caches.vllm_needed_bytes(_kv(row), int(row.data["n_ctx"])) / GIB}


def _vllm_identity(row: Row) -> Mapping[str, float]:
    i = row.inputs
    taken = [g * GIB for g in i["non_kv_gib"]] + [i.get("cudagraph_gib", 0) * GIB]
    return {"available_kv_gib": caches.vllm_available_bytes(i["total_gib"] * GIB, i["util"], taken) / GIB}


def _sglang(row: Row) -> Mapping[str, float]:
    tokens = int(row.inputs.get("tokens") or row.data["n_ctx"])
    per_layer = row.inputs.get("bytes_per_token_layer")
    size = tokens * per_layer * row.geometry().layers if per_layer else caches.sglang_pool_bytes(_kv(row), tokens)
    return {"kv_gib": size / GIB, "kv_mib": size / MIB}


def _llama_kv(row: Row) -> Mapping[str, float]:
    types = kv_types(row.kv_dtype, "f16")
    flags = row.flags()
    geometry = row.geometry()
    cache = caches.cell_cache(geometry, row.rules(), types, int(row.data["n_ctx"]), flags, row.inputs.get("swa_cells"))
    # Only rows that name the recurrent cache logged it; others print the attention cache alone.
    states = cache.state_bytes if row.inputs.get("rs") else 0
    total = cache.full_bytes + cache.sliding_bytes + cache.extra_bytes + states
    return {
        "kv_mib": total / MIB,
        "kv_gib": total / GIB,
        "full_mib": cache.full_bytes / MIB,
        "swa_mib": cache.sliding_bytes / MIB,
        "state_mib": states / MIB,
        "swa_cells": cache.sliding_cells,
    }


def _ollama(row: Row) -> Mapping[str, float]:
    i = row.inputs
    size = caches.ollama_estimate_bytes(
        row.geometry(),
        kv_types(row.kv_dtype, "f16"),
        int(row.data["n_ctx"]),
        int(i.get("num_parallel") or 1),
        int(i.get("n_batch") or 512),
        sliding=not i.get("no_iswa", False),
    )
    return {"kv_mib": size / MIB, "kv_gib": size / GIB}


def _compute_buffer(row: Row) -> Mapping[str, float]:
    c, i = row.config, row.inputs
    size = caches.compute_buffer_bytes(
        int(c["hidden_size"]),
        int(c["num_attention_heads"]),
        int(c["vocab_size"]),
        int(row.data["n_ctx"]),
        n_ubatch=int(i.get("n_ubatch") or 512),
        flash=bool(i.get("flash_attn", False)),
        hidden_copies=i.get("emb_factor"),
        output_copies=int(i.get("out_emb_factor") or 1),
    )
    return {"compute_mib": size / MIB}


def _weights(row: Row) -> Mapping[str, float]:
    bits = float(row.inputs["bpw"] if row.inputs.get("bpw") else row.inputs["nominal_bpw"])
    form = WeightFormat("given", bits, bits, bits, bits, "the row's own bits")
    size = weights_bytes(row.inputs["params_b"] * 1e9, form, int(row.data.get("tp") or 1))
    return {"weights_gib": size / GIB}


def _weights_blind(row: Row) -> float:
    """Weight GiB without the row's effective bits: by parts where the catalogue knows the model, else nominal."""
    name, form = format_in_name(str(row.data["model"]).split("(")[0].strip())
    nominal = float(row.inputs.get("nominal_bpw") or row.inputs["bpw"])
    shards = int(row.data.get("tp") or 1)
    if form is not None and len({form.linear, form.experts, form.embedding}) > 1 and catalogue_row(name):
        params = catalogue_geometry(name).params
        if params is not None:
            return weights_bytes(params, form, shards) / GIB
    bits = form.overall if form is not None else nominal
    plain = WeightFormat("nominal", bits, bits, bits, bits, "")
    return weights_bytes(row.inputs["params_b"] * 1e9, plain, shards) / GIB


def _per_token(row: Row) -> Mapping[str, float]:
    kv = _kv(row)
    return {"bytes_per_token": max(kv.bytes_per_token_per_shard)}


CHECKS: Mapping[str, Callable[[Row], Mapping[str, float]]] = {
    "vllm_tokens": _vllm_tokens,
    "vllm_needed": _vllm_needed,
    "vllm_identity": _vllm_identity,
    "sglang": _sglang,
    "llama_kv": _llama_kv,
    "ollama": _ollama,
    "compute_buffer": _compute_buffer,
    "weights": _weights,
    "per_token": _per_token,
}
KV_CHECKS = frozenset({"vllm_tokens", "vllm_needed", "sglang", "llama_kv", "ollama", "per_token"})


def run_row(row: Row) -> Result:
    """Outcome of one row; never raises for a row that cannot be computed."""
    d = row.data
    expected = d["expected"]
    metric, value, tol = expected["metric"], float(expected["value"]), float(expected.get("tol_pct", 0.5))
    circular, flagged = bool(d.get("circular")), bool(d.get("known_mismatch"))
    check = d["check"]
    base = {"id": d["id"], "check": check, "metric": metric, "expected": value, "tol_pct": tol, "circular": circular}
    if check == "none":
        note = "no formula is claimed; the engine's own figure is used"
        return Result(**base, got=value, error_pct=None, verdict="engine", counted=False, note=note)
    unknown = sorted(set(row.inputs) - KNOWN_INPUTS)
    note = f"inputs not understood: {', '.join(unknown)}" if unknown else ""
    try:
        metrics = CHECKS[check](row)
        got = float(metrics[metric])
    except (GeometryError, KeyError, TypeError, ValueError) as e:
        return Result(
            **base, got=None, error_pct=None, verdict="error", counted=not circular, note=f"{type(e).__name__}: {e}"
        )
    difference = 100.0 * (got - value) / value if value else (0.0 if got == value else 100.0)
    signed = -difference if metric in _CAPACITY_METRICS else difference
    ok = abs(difference) <= tol
    blind = None
    if check == "weights":
        blind = 100.0 * abs(_weights_blind(row) - value) / value
    verdict = "pass" if ok else ("mismatch" if flagged else "fail")
    return Result(**base, got=got, error_pct=signed, verdict=verdict, counted=not circular and not flagged, note=note,
                  blind_error_pct=blind)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """The verdict on a file, and the errors per class."""

    results: tuple[Result, ...]

    @property
    def counted(self) -> tuple[Result, ...]:
        """Rows that prove something."""
        return tuple(r for r in self.results if r.counted)

    @property
    def pass_share(self) -> float:
        """Share of the counted rows that pass; 1 where none is counted."""
        counted = self.counted
        return sum(r.verdict == "pass" for r in counted) / len(counted) if counted else 1.0

    @property
    def under_counted(self) -> tuple[Result, ...]:
        """Counted rows whose memory is under-counted by more than allowed."""
        return tuple(
            r for r in self.counted if r.error_pct is not None and r.error_pct < -max(UNDER_COUNT_PCT, r.tol_pct)
        )

    @property
    def ok(self) -> bool:
        """The exit rule."""
        return self.pass_share >= PASS_SHARE and not self.under_counted

    def errors(self, checks: Iterable[str]) -> list[float]:
        """Absolute errors in % of the counted rows of these checks, ascending."""
        chosen = set(checks)
        return sorted(abs(r.error_pct) for r in self.counted if r.check in chosen and r.error_pct is not None)

    def blind_weight_errors(self) -> list[float]:
        """Errors of weights estimated without the effective bits, all rows with a nominal figure, ascending."""
        return sorted(r.blind_error_pct for r in self.results if r.blind_error_pct is not None)

    def lines(self) -> list[str]:
        """The closing lines."""
        classes = (
            ("KV", self.errors(KV_CHECKS)),
            ("weights, effective bits not given", self.blind_weight_errors()),
            ("compute buffers", self.errors({"compute_buffer"})),
            ("vLLM memory identity", self.errors({"vllm_identity"})),
        )
        out = [
            f"{n}: n {len(e)}, median {statistics.median(e):.3f} %, p90 {p90(e):.2f} %, max {e[-1]:.2f} %"
            for n, e in classes
            if e
        ]
        failed = [r.id for r in self.results if r.verdict in ("fail", "error")]
        strict = [r.id for r in self.counted if r.error_pct is not None and r.error_pct < -UNDER_COUNT_PCT]
        out.append(
            f"{len(self.results)} rows, {len(self.counted)} counted, {100 * self.pass_share:.1f} % of them pass;"
            f" failed: {', '.join(failed) or 'none'}; under-counted by > 1 %: {', '.join(strict) or 'none'}"
        )
        return out


def p90(values: list[float]) -> float:
    """Nearest-rank 90th percentile of ascending values."""
    return values[max(0, -(-len(values) * 9 // 10) - 1)]


def run_rows(rows: Iterable[Row], show: Callable[[str], object]) -> Summary:
    """Run every row, showing one line each and the closing lines."""
    results = []
    for row in rows:
        result = run_row(row)
        show(result.line)
        results.append(result)
    summary = Summary(tuple(results))
    for line in summary.lines():
        show(line)
    return summary
