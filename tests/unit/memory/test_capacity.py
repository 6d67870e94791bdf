"""Capacity as engines report it, and its drift from the formula."""

from __future__ import annotations

import pytest

from extproc.errors import GeometryError
from extproc.memory import (
    Flags,
    build_kv_model,
    capacity_drift,
    capacity_from_report,
    drift,
    engine_rules,
    load_geometry,
)
from extproc.memory.caches import GIB


def test_the_null_block_is_not_capacity() -> None:
    """vLLM's block 0 is never given to a request."""
    found = capacity_from_report("vllm", {"num_gpu_blocks": "4096", "block_size": "16"})
    assert (found.blocks, found.block_tokens, found.tokens, found.unit) == (4095, 16, 4095 * 16, "blocks")


def test_hybrid_blocks_are_counted_per_group() -> None:
    """vllm#51163: the block_size label is the minimum over groups, so with a geometry the engine's blocks are kept."""
    kv = build_kv_model(load_geometry("Qwen3.5-27B"), engine_rules("vllm", "0.19"), flags=Flags(mamba_mode="none"))
    report = {"num_gpu_blocks": "1487", "block_size": "784", "kv_cache_max_concurrency": "33.04"}
    found = capacity_from_report("vllm", report, 32768, kv)
    assert (found.blocks, found.block_tokens, found.unit, found.tokens) == (1486, 784, "blocks", int(33.04 * 32768))


def test_hybrid_without_a_geometry_counts_tokens() -> None:
    """Without a geometry max_concurrency x max_model_len is the capacity, whatever blocks x block_size says."""
    report = {"num_gpu_blocks": "1487", "block_size": "784", "kv_cache_max_concurrency": "33.04"}
    found = capacity_from_report("vllm", report, 32768)
    assert (found.unit, found.tokens, found.blocks) == ("tokens", 1_082_654, 1_082_654 // 784)


def test_fewer_tokens_than_the_blocks_suggest_win_too() -> None:
    """A hybrid whose state pages take blocks holds fewer tokens than blocks x block_size."""
    report = {"num_gpu_blocks": "100", "block_size": "544", "kv_cache_max_concurrency": "10"}
    assert capacity_from_report("vllm", report, 2048).tokens == 20480


@pytest.mark.parametrize("value", ["", "None", "nan", "-1", "inf", "abc"])
def test_unusable_labels_are_absent_not_zero(value: str) -> None:
    """A label that is no number leaves the capacity unknown, which is an error and never an empty pool."""
    with pytest.raises(GeometryError, match="num_gpu_blocks"):
        capacity_from_report("vllm", {"num_gpu_blocks": value, "block_size": "16"})


def test_sglang_reports_tokens() -> None:
    """max_total_num_tokens in pages, with the running limit."""
    report = {"max_total_num_tokens": "367404", "page_size": "4", "max_running_requests": "128"}
    found = capacity_from_report("sglang", report)
    assert (found.blocks, found.block_tokens, found.sequences) == (91851, 4, 128)


def test_llamacpp_slots_add_up_or_share() -> None:
    """Slots of their own add up; with a unified cache each shows the whole context."""
    own = capacity_from_report("llamacpp", {"n_ctx": "32768", "n_ctx_slot": "8192", "total_slots": "4"})
    unified = capacity_from_report("llamacpp", {"n_ctx": "32768", "n_ctx_slot": "32768", "total_slots": "4"})
    assert (own.tokens, unified.tokens, own.sequences) == (32768, 32768, 4)


@pytest.mark.parametrize(("engine", "field"), [("sglang", "max_total_num_tokens"), ("ollama", "n_ctx")])
def test_a_missing_figure_is_named(engine: str, field: str) -> None:
    """The error names what the engine did not report."""
    with pytest.raises(GeometryError, match=field):
        capacity_from_report(engine, {})


def test_drift_beyond_the_bound_is_reported() -> None:
    """A pool a quarter away from the formula is drift, one percent is not."""
    kv = build_kv_model(load_geometry("Qwen2.5-7B"), engine_rules("vllm", "0.10"))
    blocks = kv.pool_blocks(24 * GIB)
    near = capacity_from_report("vllm", {"num_gpu_blocks": str(int(blocks * 0.99)), "block_size": "16"})
    far = capacity_from_report("vllm", {"num_gpu_blocks": str(int(blocks * 0.75)), "block_size": "16"})
    assert [capacity_drift(c, kv, 24 * GIB, 0)[0].beyond for c in (near, far)] == [False, True]


def test_concurrency_drift_needs_no_bytes() -> None:
    """Where memory is not known the engine's own concurrency checks the blocks of a request."""
    kv = build_kv_model(load_geometry("Qwen2.5-7B"), engine_rules("vllm", "0.10"))
    capacity = capacity_from_report("vllm", {"num_gpu_blocks": "29053", "block_size": "16"})
    found = capacity_drift(capacity, kv, None, 16384, 28.37)
    assert [(d.what, d.beyond) for d in found] == [("max concurrency", False)]


def test_a_message_holds_both_figures() -> None:
    """The log line says what the engine and what the formula gave."""
    assert drift("kv blocks", 75, 100).message == "kv blocks: engine 75, formula 100 (x0.750, beyond the bound)"


def test_something_from_nothing_is_drift() -> None:
    """A report against a formula of 0 is beyond every bound; 0 against 0 is not."""
    assert (drift("x", 1, 0).beyond, drift("x", 0, 0).beyond) == (True, False)
