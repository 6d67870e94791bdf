"""Weight bytes by format, and the other terms of device memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc.errors import GeometryError
from extproc.memory import engine_rules, load_geometry
from extproc.memory.caches import GIB, MIB, compute_buffer_bytes, sglang_static_fraction
from extproc.memory.overheads import (
    DeviceBudget,
    activation_term,
    default_max_sequences,
    engine_terms,
    lora_bytes,
    vision_encoder_term,
)
from extproc.memory.weights import FORMATS, format_in_name, geometry_weights, weight_format, weights_bytes

LOGGED = [
    # model, format, devices, GiB a device (vLLM's "Model loading took" lines)
    ("Llama-3.1-8B", "bf16", 1, 14.99),
    ("Qwen3-0.6B", "bf16", 1, 1.12),
    ("Qwen3-32B", "bf16", 1, 61.03),
    ("Qwen3-32B", "bf16", 2, 30.59),
    ("Llama-3.3-70B-Instruct", "fp8", 1, 67.72),
    ("Llama-3.3-70B-Instruct", "fp8", 2, 33.88),
    ("gpt-oss-20b", "mxfp4", 1, 13.47),
    ("gpt-oss-120b", "mxfp4", 1, 64.38),
    ("Qwen2.5-7B", "awq", 1, 5.29),
    ("Qwen3-Next-80B", "bf16", 2, 74.28),
]


@pytest.mark.parametrize(("model", "form", "devices", "logged"), LOGGED)
def test_weights_agree_with_start_up_logs(model: str, form: str, devices: int, logged: float) -> None:
    """By parts and bits, within 6 % of what engines logged (MXFP4 pads its experts), else within 1 %."""
    params = load_geometry(model).params
    assert params is not None
    got = weights_bytes(params, weight_format(form), devices) / GIB
    assert got == pytest.approx(logged, rel=0.06 if form == "mxfp4" else 0.01)


def test_small_quantised_models_are_dominated_by_their_embeddings() -> None:
    """Qwen2.5-7B AWQ is 5.97 bits a weight over all, not 4.25."""
    params = load_geometry("Qwen2.5-7B").params
    assert params is not None
    assert weights_bytes(params, weight_format("awq")) * 8 / params.total == pytest.approx(5.97, abs=0.05)


def test_a_file_size_wins_over_the_formula() -> None:
    """What lies on disk is what is loaded, unless another format is asked for."""
    geometry = replace(load_geometry("Qwen2.5-7B"), weights_bytes=123)
    assert geometry_weights(geometry)[0] == 123
    assert geometry_weights(geometry, weight_format("awq"))[0] > 10**9
    assert geometry_weights(geometry, size_bytes=7)[0] == 7


def test_unknown_weights_are_an_error() -> None:
    """Without files and counts the mend is named."""
    with pytest.raises(GeometryError, match="--weights"):
        geometry_weights(replace(load_geometry("Qwen2.5-7B"), params=None))


def test_an_unknown_format_lists_the_known_ones() -> None:
    """The error says what is known."""
    with pytest.raises(GeometryError, match="known: f32, bf16"):
        weight_format("q17")


@pytest.mark.parametrize(
    ("text", "name", "form"),
    [("Qwen2.5-7B AWQ", "Qwen2.5-7B", "awq"), ("gpt-oss-20b MXFP4", "gpt-oss-20b", "mxfp4"), ("v2lite Q4_K_M", "v2lite", "q4_k_m"),
     ("Qwen3-32B-FP8", "Qwen3-32B", "fp8"), ("Qwen3-32B", "Qwen3-32B", None)],
)  # fmt: skip
def test_a_format_in_a_name_is_found(text: str, name: str, form: str | None) -> None:
    """Model names carry formats as words."""
    found, known = format_in_name(text)
    assert (found, known.name if known else None) == (name, form)


def test_formats_are_ordered_by_their_bits() -> None:
    """No format claims fewer bits than its blocks hold."""
    assert all(f.overall >= 1.5 and f.embedding >= f.overall - 0.01 for f in FORMATS.values())


ACTIVATIONS = [("Llama-3.1-8B", 1024, 8192, 4.76), ("Qwen3-0.6B", 1024, 8192, 5.56), ("Qwen3-32B", 1024, 8192, 5.64),
               ("gpt-oss-20b", 1024, 8192, 7.38), ("Qwen3-235B-A22B", 256, 2048, 1.4)]  # fmt: skip


@pytest.mark.parametrize(("model", "sequences", "batched", "logged"), ACTIVATIONS)
def test_activation_peaks_agree_with_logs(model: str, sequences: int, batched: int, logged: float) -> None:
    """One rule explains the logged peaks within 4 %, never below."""
    got = activation_term(load_geometry(model), batched, sequences).bytes / GIB
    assert logged <= got <= 1.04 * logged


def test_sequence_limit_follows_the_card() -> None:
    """1024 sequences on large cards except A100, 256 elsewhere."""
    assert [
        default_max_sequences(80 * GIB),
        default_max_sequences(80 * GIB, "A100-80GB"),
        default_max_sequences(24 * GIB),
    ] == [1024, 256, 256]


def test_terms_follow_the_engine() -> None:
    """vLLM has graphs and, over several devices, NCCL; llama.cpp a compute buffer."""
    geometry = load_geometry("Llama-3.1-8B")
    one = engine_terms(geometry, engine_rules("vllm"), tp=1, batched_tokens=2048, max_sequences=256)
    two = engine_terms(geometry, engine_rules("vllm"), tp=2, batched_tokens=2048, max_sequences=256)
    cpp = engine_terms(geometry, engine_rules("llamacpp"), tp=1, batched_tokens=0, max_sequences=0, n_ctx=8192)
    assert [t.name for t in one] == ["activation", "non_torch", "cuda_graphs"]
    assert [t.name for t in two] == ["activation", "non_torch", "nccl", "cuda_graphs"]
    assert [t.name for t in cpp] == ["compute_buffer", "cuda_context"]
    assert all(t.bytes > 0 and t.formula and t.source for t in (*one, *two, *cpp))


def test_compute_buffers_are_exact_where_logged() -> None:
    """164 MiB at 2K and 2144 MiB at 32K for a 7B without flash attention; 3584 MiB at 131K with ubatch 4096 and flash."""
    assert compute_buffer_bytes(4096, 32, 32000, 2048) == 164.0 * MIB + 4 * 512
    assert compute_buffer_bytes(4096, 32, 32000, 32768) == 2144.0 * MIB + 4 * 512
    assert compute_buffer_bytes(4096, 96, 151552, 131072, n_ubatch=4096, flash=True) == 3584 * MIB


def test_lora_slots_are_static() -> None:
    """max_loras x rank x (in + out) x 2 B per target and layer."""
    assert lora_bytes([(4096, 4096)], 32, 16, 4) == 4 * 16 * 8192 * 2 * 32


def test_encoder_cache_grows_with_the_images() -> None:
    """Tokens x hidden x 2 B each."""
    assert vision_encoder_term(1369, 3584, 2).bytes == 2 * 1369 * 3584 * 2


def test_device_terms_are_named_and_add_up() -> None:
    """Static floor, reserve, guard, fragmentation and MPS limit are terms of their own."""
    budget = DeviceBudget(
        24 * GIB,
        guard_bytes=256 * MIB,
        static_bytes=GIB,
        dynamic_bytes=GIB,
        slack_fraction=0.1,
        mps_limit_bytes=20 * GIB,
    )
    assert [t.name for t in budget.terms()] == [
        "mps_limit",
        "static_floor",
        "dynamic_reserve",
        "guard",
        "fragmentation",
    ]
    assert budget.usable_bytes == 24 * GIB - sum(t.bytes for t in budget.terms())
    assert budget.usable_bytes == pytest.approx((20 - 2.25) * GIB * 0.9, abs=2)


def test_a_full_device_has_nothing_usable() -> None:
    """Never negative."""
    assert DeviceBudget(GIB, static_bytes=2 * GIB).usable_bytes == 0


@pytest.mark.parametrize(
    ("total", "chunk", "fraction"),
    [(80 * GIB, 2048, 0.875), (24 * GIB, 8192, 1 - (512 + 1.5 * 8192 + 128 + 512) / 24576)],
)
def test_sglang_keeps_ten_gib_on_large_cards(total: int, chunk: int, fraction: float) -> None:
    """mem_fraction_static by the default rule."""
    assert sglang_static_fraction(total, chunked_prefill=chunk) == pytest.approx(fraction)
