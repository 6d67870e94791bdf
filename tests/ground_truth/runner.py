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
from dataclasses import dataclass, replace
from pathlib import Path

from extproc.errors import GeometryError
from extproc.memory import build_kv_model, caches, catalogue_row, kv_types
from extproc.memory.catalogue import catalogue_geometry
from extproc.memory.kv import KvModel
from extproc.memory.weights import WeightFormat, format_in_name, weights_bytes
from tests.ground_truth.rows import GIB, KNOWN_INPUTS, MIB, Row, RowError

SHIPPED = tuple(Path(__file__).with_name(name) for name in ("memory_ground_truth.json", "public_logs.json"))
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
    expected: float | None
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
        expected, got = ("-" if v is None else f"{v:.9g}" for v in (self.expected, self.got))
        error = "" if self.error_pct is None else f" ({self.error_pct:+.3f} %, tol {self.tol_pct:g} %)"
        flags = " circular" if self.circular else ""
        note = f" [{self.note}]" if self.note else ""
        return f"{self.id}: {self.metric} expected {expected} got {got}{error} {self.verdict}{flags}{note}"


def load_rows(path: Path | None = None) -> list[Row]:
    """Rows of ``path``, else of ``KVGATE_GROUND_TRUTH``, else the shipped ones; RowError where the file holds none."""
    named = path or os.environ.get("KVGATE_GROUND_TRUTH")
    return [row for file in ([Path(named)] if named else SHIPPED) for row in _rows_of(file)]


def _rows_of(file: Path) -> list[Row]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise RowError(f"{file}: not readable as JSON ({e})") from e
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows:
        raise RowError(f"{file}: holds no rows; expected a list, or an object with a list 'rows'")
    return [Row(r) for r in rows]


# --- checks: each answers with every metric it can compute -------------------------------------------------


def _kv(row: Row) -> KvModel:
    i = row.inputs
    return build_kv_model(
        row.geometry(),
        row.rules(),
        kv_dtype=row.kv_dtype,
        tp=row.top.whole("tp", 1),
        pp=row.top.whole("pp", 1),
        dp=i.whole("dp", 1) if row.engine == "sglang" else 1,
        dcp=i.whole("dcp", 1),
        block_tokens=i.whole("block_size", 0, 0) or None,
        flags=row.flags(),
    )


def _vllm_tokens(row: Row) -> Mapping[str, float]:
    kv, i = _kv(row), row.inputs
    given = i.whole("num_blocks", 0, 0)
    blocks = given or kv.pool_blocks(int(i.number("available_gib") * GIB))
    metrics: dict[str, float] = {"num_gpu_blocks": blocks, "block_size": kv.block_tokens}
    style, length = row.log_style(), row.top.whole("n_ctx", 0, 0)
    if length or style == "blocks":
        metrics["gpu_kv_tokens"] = caches.vllm_size_line(kv, blocks, length, style)
    if length:
        metrics["max_concurrency"] = caches.vllm_max_concurrency(kv, blocks, length)
    return metrics


def _vllm_needed(row: Row) -> Mapping[str, float]:
    return {"needed_gib": caches.vllm_needed_bytes(_kv(row), row.context) / GIB}


def _vllm_identity(row: Row) -> Mapping[str, float]:
    i = row.inputs
    taken = [g * GIB for g in (*i.numbers("non_kv_gib"), i.number("cudagraph_gib", 0.0))]
    total = i.number("total_gib", minimum=0) * GIB
    return {"available_kv_gib": caches.vllm_available_bytes(total, i.number("util", minimum=0), taken) / GIB}


def _sglang(row: Row) -> Mapping[str, float]:
    tokens = row.inputs.whole("tokens", 0, 0) or row.context
    per_layer = row.inputs.number("bytes_per_token_layer", 0.0, 0.0)
    size = tokens * per_layer * row.geometry().layers if per_layer else caches.sglang_pool_bytes(_kv(row), tokens)
    return {"kv_gib": size / GIB, "kv_mib": size / MIB}


def _llama_kv(row: Row) -> Mapping[str, float]:
    types = kv_types(row.kv_dtype, "f16")
    cells = row.inputs.whole("swa_cells", 0, 0) or None
    cache = caches.cell_cache(row.geometry(), row.rules(), types, row.context, row.flags(), cells)
    # Only rows that name the recurrent cache logged it; others print the attention cache alone.
    states = cache.state_bytes if row.recurrent.data else 0
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
        row.context,
        i.whole("num_parallel", 1),
        i.whole("n_batch", 512),
        sliding=not i.data.get("no_iswa", False),
    )
    return {"kv_mib": size / MIB, "kv_gib": size / GIB}


def _compute_buffer(row: Row) -> Mapping[str, float]:
    c, i = row.config, row.inputs
    size = caches.compute_buffer_bytes(
        c.whole("hidden_size"),
        c.whole("num_attention_heads"),
        c.whole("vocab_size"),
        row.context,
        n_ubatch=i.whole("n_ubatch", 512),
        flash=bool(i.data.get("flash_attn", False)),
        hidden_copies=i.whole("emb_factor", 0, 0) or None,
        output_copies=i.whole("out_emb_factor", 1),
    )
    return {"compute_mib": size / MIB}


def _weights(row: Row) -> Mapping[str, float]:
    i = row.inputs
    bits = i.number("bpw", 0.0, 0.0) or i.number("nominal_bpw", minimum=0)
    form = WeightFormat("given", bits, bits, bits, bits, "the row's own bits")
    size = weights_bytes(i.number("params_b", minimum=0) * 1e9, form, row.top.whole("tp", 1))
    return {"weights_gib": size / GIB}


def _weights_blind(row: Row) -> float:
    """Weight GiB without the row's effective bits: by parts where the catalogue knows the model, else nominal."""
    i = row.inputs
    name, form = format_in_name(row.top.text("model", " ").split("(")[0].strip())
    nominal = i.number("nominal_bpw", 0.0, 0.0) or i.number("bpw", minimum=0)
    shards = row.top.whole("tp", 1)
    if form is not None and len({form.linear, form.experts, form.embedding}) > 1 and catalogue_row(name):
        params = catalogue_geometry(name).params
        if params is not None:
            return weights_bytes(params, form, shards) / GIB
    bits = form.overall if form is not None else nominal
    plain = WeightFormat("nominal", bits, bits, bits, bits, "")
    return weights_bytes(i.number("params_b", minimum=0) * 1e9, plain, shards) / GIB


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
    """Outcome of one row; a row that cannot be read or computed is an error that counts, never an exception."""
    data = row.data if isinstance(row.data, Mapping) else {}
    circular, flagged = bool(data.get("circular")), bool(data.get("known_mismatch"))
    blank = Result(str(data.get("id", "(no id)")), "-", "-", None, None, None, 0.0, "error",
                   counted=not circular and not flagged, circular=circular)  # fmt: skip
    try:
        target = row.top.table("expected")
        blank = replace(
            blank, check=row.top.text("check"), metric=target.text("metric"), expected=target.number("value"),
            tol_pct=target.number("tol_pct", 0.5, 0.0),
        )  # fmt: skip
        if blank.check == "none":
            note = "no formula is claimed; the engine's own figure is used"
            return replace(blank, got=blank.expected, verdict="engine", counted=False, note=note)
        got = _computed(row, blank.check, blank.metric)
        blind = 100.0 * _relative(_weights_blind(row), blank.expected) if blank.check == "weights" else None
    except (GeometryError, RowError) as e:
        return replace(blank, note=str(e))
    return _judged(row, blank, got, blind, flagged)


def _computed(row: Row, check: str, metric: str) -> float:
    if check not in CHECKS:
        raise row.top.fault("check", f"is {check!r}; known: none, {', '.join(CHECKS)}")
    metrics = CHECKS[check](row)
    if metric not in metrics:
        raise row.top.fault("expected.metric", f"is {metric!r}; check {check!r} answers {', '.join(metrics)}")
    return float(metrics[metric])


def _relative(got: float, expected: float | None) -> float:
    """Distance as a share of what is expected; 1 where nothing was expected and something came."""
    if not expected:
        return 0.0 if got == expected else 1.0
    return abs(got - expected) / abs(expected)


def _judged(row: Row, blank: Result, got: float, blind: float | None, flagged: bool) -> Result:
    unknown = sorted(set(row.inputs.data) - KNOWN_INPUTS)
    off = 100.0 * _relative(got, blank.expected)
    # Memory is under-counted by a figure that is too small, or by a capacity that is too large.
    less = got < (blank.expected or 0.0)
    under = not less if blank.metric in _CAPACITY_METRICS else less
    verdict = "pass" if off <= blank.tol_pct else ("mismatch" if flagged else "fail")
    return replace(
        blank, got=got, error_pct=-off if under else off, verdict=verdict, blind_error_pct=blind,
        note=f"inputs not understood: {', '.join(unknown)}" if unknown else "",
    )  # fmt: skip


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
        """Share of the counted rows that pass; 1 where every row is flagged, 0 where there is none."""
        counted = self.counted
        return sum(r.verdict == "pass" for r in counted) / len(counted) if counted else float(bool(self.results))

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
