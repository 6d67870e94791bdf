"""Figures that circulate and are wrong, tested as wrong, beside the right ones."""

from __future__ import annotations

import pytest

from extproc.memory import build_kv_model, engine_rules, load_geometry
from extproc.memory.weights import weight_format, weights_bytes

GIB = 1 << 30


def per_token(model: str, dtype: str) -> int:
    """Bytes of one token over all layers."""
    return build_kv_model(load_geometry(model), engine_rules("vllm"), kv_dtype=dtype).bytes_per_token


def test_llama_3_70b_is_not_1_2_mb_a_token_at_8_bit() -> None:
    """0.164 MB: the circulating 1.2 MB ignores grouped-query attention (64 heads instead of 8)."""
    assert per_token("Llama-3-70B", "fp8") == 163_840
    assert 1_200_000 / per_token("Llama-3-70B", "fp8") == pytest.approx(7.3, abs=0.05)
    assert per_token("Llama-3-70B", "f16") == 327_680


def test_llama_3_8b_at_0_1_mb_a_token_is_fp16_only() -> None:
    """0.131 MB in fp16 (the round figure is a quarter low), 0.066 MB at 8 bit."""
    assert (per_token("Llama-3-8B", "f16"), per_token("Llama-3-8B", "fp8")) == (131_072, 65_536)


def test_deepseek_coder_6_7b_at_8k_is_not_2_gb() -> None:
    """4.0 GiB: every query head has its KV head; 2 GiB needs 8-bit KV."""
    assert 8192 * per_token("deepseek-coder-6.7b", "f16") == 4 * GIB
    assert 8192 * per_token("deepseek-coder-6.7b", "fp8") == 2 * GIB


def test_codellama_13b_at_4k_is_not_1_gb() -> None:
    """3.125 GiB: 40 layers of 40 heads."""
    assert 4096 * per_token("CodeLlama-13b", "f16") == 3.125 * GIB


def test_codellama_34b_caches_less_than_13b() -> None:
    """The larger model has grouped queries."""
    assert per_token("CodeLlama-34b", "f16") < per_token("CodeLlama-13b", "f16")


def test_70b_in_fp16_is_140_gb() -> None:
    """The one article figure that is right: 141.1 GB, which is 131.4 GiB."""
    params = load_geometry("Llama-3-70B").params
    assert params is not None
    assert weights_bytes(params, weight_format("fp16")) == pytest.approx(141.1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("Qwen2.5-14B", 196_608), ("Qwen2.5-32B", 262_144), ("Qwen3-235B-A22B", 192_512), ("Qwen3-Coder-480B", 253_952),
     ("DeepSeek-V3", 70_272), ("DeepSeek-V2-Lite", 31_104), ("CodeLlama-7b", 524_288), ("deepseek-coder-33b", 253_952),
     ("devstral", 163_840), ("Phi-3-mini-4k-instruct", 393_216), ("phi-4", 204_800), ("starcoder2-15b", 81_920),
     ("gemma-2-27b", 376_832), ("GLM-4-32B", 62_464), ("GLM-4.5-Air", 188_416), ("Mixtral-8x7B", 131_072)],
)  # fmt: skip
def test_published_bytes_per_token(model: str, expected: int) -> None:
    """fp16 bytes a token of the whole model, below every window."""
    assert per_token(model, "f16") == expected
