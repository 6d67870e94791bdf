"""The memory formulas against figures that engines logged; rows from elsewhere by ``KVGATE_GROUND_TRUTH``."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

import pytest

from tests.ground_truth.rows import RowError
from tests.ground_truth.runner import KV_CHECKS, SHIPPED, Row, Summary, load_rows, p90, run_row, run_rows


@pytest.fixture(scope="module")
def report() -> tuple[Summary, list[str]]:
    """All rows and the line of each."""
    lines: list[str] = []
    return run_rows(load_rows(), lines.append), lines


@pytest.fixture
def summary(report: tuple[Summary, list[str]]) -> Summary:
    """The verdict on the file."""
    return report[0]


def test_rows_pass_by_the_exit_rule(report: tuple[Summary, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """At least 95 % of the counted rows pass and none is under-counted beyond its bound; every row prints a line.

    A pytest-xdist worker's standard output is its channel to the controller; its standard error is the terminal.
    """
    summary, lines = report
    with capsys.disabled():
        print(*lines, sep="\n", file=sys.stderr if "PYTEST_XDIST_WORKER" in os.environ else sys.stdout, flush=True)
    failed = [r.line for r in summary.results if r.verdict in ("fail", "error")]
    assert summary.ok, "\n".join(failed)


def test_kv_error_is_within_a_thousandth_at_the_median(summary: Summary) -> None:
    """KV figures of all engines: median error at most 0.1 %."""
    errors = summary.errors(KV_CHECKS)
    assert not errors or statistics.median(errors) <= 0.1


def test_weight_error_without_effective_bits(summary: Summary) -> None:
    """Weights from the format alone: at most 3 % at the median and 12 % at the 90th percentile."""
    errors = summary.blind_weight_errors()
    assert not errors or (statistics.median(errors) <= 3.0 and p90(errors) <= 12.0)


def test_compute_buffers_are_within_nine_percent(summary: Summary) -> None:
    """llama.cpp compute buffers: every counted row within 9 %."""
    assert all(e <= 9.0 for e in summary.errors({"compute_buffer"}))


# --- the runner itself -------------------------------------------------------------------------------------


def _row(**changes: object) -> Row:
    base = {
        "id": "r", "engine": "llama.cpp", "engine_version": None, "model": "m", "kv_dtype": "f16", "n_ctx": 2048, "tp": 1,
        "config": {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}, "check": "llama_kv", "inputs": {},
        "expected": {"metric": "kv_mib", "value": 256, "tol_pct": 0.5},
    }  # fmt: skip
    return Row(base | changes)


def test_a_row_outside_its_tolerance_fails() -> None:
    """A wrong figure is reported as a failure, with both figures."""
    result = run_row(_row(expected={"metric": "kv_mib", "value": 300, "tol_pct": 0.5}))
    assert (result.verdict, result.counted, result.got) == ("fail", True, 256)


def test_a_known_mismatch_may_fail() -> None:
    """An unexplained row is marked and not counted."""
    result = run_row(_row(expected={"metric": "kv_mib", "value": 300, "tol_pct": 0.5}, known_mismatch="why"))
    assert (result.verdict, result.counted) == ("mismatch", False)


def test_a_circular_row_is_not_counted() -> None:
    """A row whose figure went into its inputs runs and proves nothing."""
    result = run_row(_row(circular="fitted"))
    assert (result.verdict, result.counted) == ("pass", False)


def test_a_row_that_cannot_be_computed_is_an_error_not_a_pass() -> None:
    """A configuration that is not understood counts against the file."""
    summary = Summary((run_row(_row(config={"num_hidden_layers": 32})),))
    assert (summary.results[0].verdict, summary.ok) == ("error", False)


def test_under_counting_fails_the_file_though_most_rows_pass() -> None:
    """One unflagged row that is 2 % under fails a file in which 99 % pass."""
    good = [run_row(_row(id=str(i))) for i in range(99)]
    bad = run_row(_row(expected={"metric": "kv_mib", "value": 262, "tol_pct": 0.5}))
    summary = Summary((*good, bad))
    assert (summary.pass_share, [r.id for r in summary.under_counted], summary.ok) == (0.99, ["r"], False)


def test_a_capacity_above_the_report_is_an_under_count() -> None:
    """Too many tokens in the pool is memory under-counted: the sign says so."""
    row = _row(engine="vllm", check="vllm_tokens", kv_dtype="bf16", inputs={"num_blocks": 110},
               expected={"metric": "gpu_kv_tokens", "value": 1600, "tol_pct": 0.5})  # fmt: skip
    error = run_row(row).error_pct
    assert error is not None
    assert error == pytest.approx(-10.0)


def test_a_negative_figure_keeps_its_sign() -> None:
    """An engine that had less than nothing left: more than the report is an under-count, less is not."""
    row = {
        "engine": "vllm", "check": "vllm_identity", "inputs": {"util": 0.9, "total_gib": 10, "non_kv_gib": [10.0]},
        "expected": {"metric": "available_kv_gib", "value": -1.1, "tol_pct": 10},
    }  # fmt: skip
    result = run_row(_row(**row))
    assert (result.verdict, round(result.error_pct or 0, 3)) == ("pass", -9.091)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("engine", "mlx", "engine 'mlx' has no memory rules"),
        ("engine", None, "field 'engine' is missing"),
        ("engine", 5, "field 'engine' is 5; expected a string"),
        ("engine_version", ["0.9"], "field 'engine_version'"),
        ("check", "magic", "field 'check' is 'magic'; known: none, vllm_tokens"),
        ("expected", None, "field 'expected.metric' is missing"),
        ("expected", {"metric": "kv_mib", "value": "many"}, "field 'expected.value' is 'many'; expected a number"),
        ("expected", {"metric": "kv_mib", "value": float("nan")}, "field 'expected.value' is nan"),
        ("expected", {"metric": "kv_tib", "value": 1}, "field 'expected.metric' is 'kv_tib'; check 'llama_kv' answers"),
        ("config", [], "num_hidden_layers"),
        ("config", "x", "field 'config' is str; expected an object"),
        ("config", {"attn_groups": [{"kind": "warp", "layers": 1}]}, "field 'config.attn_groups.0.kind' is 'warp'"),
        ("config", {"attn_groups": [{"kind": "full"}]}, "field 'config.attn_groups.0.layers' is missing"),
        ("inputs", "x", "field 'inputs' is str; expected an object"),
        ("inputs", {"mla": [1]}, "field 'inputs.mla'"),
        ("inputs", {"rs": 5}, "field 'inputs.rs' is int; expected an object"),
        ("inputs", {"ssm_bytes": 3}, "field 'inputs.ssm_bytes' is 3; known: 1, 2, 4"),
        ("kv_dtype", 8, "field 'kv_dtype' is 8"),
        ("kv_dtype", "q9_9", "KV type 'q9_9' is not known"),
        ("n_ctx", -5, "field 'n_ctx' is -5; expected a number of at least 1"),
        ("n_ctx", None, "field 'n_ctx' is missing"),
    ],
)
def test_a_row_that_cannot_be_read_names_the_field_and_counts(field: str, value: object, said: str) -> None:
    """Whatever stands in a field: one line that names it, counted as failed, never an exception."""
    result = run_row(_row(**{field: value}))
    assert (result.verdict, result.counted, said in result.note, "\n" in result.line) == ("error", True, True, False)


@pytest.mark.parametrize("data", [5, None, "x", [1], {}])
def test_a_row_that_is_no_object_counts_as_failed(data: object) -> None:
    """A list entry that is no row at all is an error like any other."""
    result = run_row(Row(data))  # type: ignore[arg-type]
    assert (result.verdict, result.counted, result.id) == ("error", True, "(no id)")


@pytest.mark.parametrize("text", ["nope", "5", "[]", '{"a": 1}', '{"rows": 5}'])
def test_a_file_without_rows_is_an_error(tmp_path: Path, text: str) -> None:
    """A file that holds nothing proves nothing: it is refused by name, not passed."""
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(RowError, match=r"rows\.json: (not readable as JSON|holds no rows)"):
        load_rows(file)


def test_rows_from_elsewhere_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVGATE_GROUND_TRUTH names another file of the same format."""
    other = tmp_path / "rows.json"
    other.write_text(json.dumps(json.loads(SHIPPED[0].read_text("utf-8"))[:3]))
    monkeypatch.setenv("KVGATE_GROUND_TRUTH", str(other))
    lines: list[str] = []
    assert len(run_rows(load_rows(), lines.append).results) == 3
    assert lines[0].startswith("vllm-qwen2-7b-tp1-50: gpu_kv_tokens expected 464848 got ")
