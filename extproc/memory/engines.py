"""One rule table per engine: how it cuts its KV memory, by version where versions differ.

Owns what distinguishes engines as data; the arithmetic is in ``pools``. A rule row holds from its ``since``
version on; an unknown version gets the newest row. ``openai`` (a remote API) has no rules: it costs no memory here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from extproc.errors import GeometryError


class PoolStyle(StrEnum):
    """How an engine divides its cache."""

    GROUPS = "groups"  # one pool of equal pages shared by groups of layers (vLLM V1)
    PAGES = "pages"  # one pool, every layer keeps every token (vLLM V0, TGI, TensorRT-LLM)
    TWO_POOLS = "two_pools"  # full and sliding layers have pools of their own, states a third (SGLang)
    CELLS = "cells"  # cells allocated at load, per slot or unified (llama.cpp)


class Overflow(StrEnum):
    """What happens when running requests outgrow the pool."""

    PREEMPT = "preempt"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class EngineRules:
    """Rules of one engine from one version on.

    ``block_tokens`` is the engine's default block; ``null_blocks`` are never usable; ``steps_overlap`` tells that
    sliding layers must hold the tokens of pp + 1 steps in flight and not of one; ``mla_granule`` is what the block of a
    hybrid with latent attention is a multiple of; ``size_line`` says what the logged KV size in tokens means;
    ``state_dtype_ssm`` (delta-net), ``state_dtype_mamba`` and ``state_dtype_conv`` are element types of recurrent
    states (``model``: the model's own); ``mamba_mode`` is how states are cached where prefix caching is on (align keeps
    one more page); ``group_slack`` the ratio of layer counts below which groups are padded to the larger;
    ``shares_prompt`` tells that sequences of one prompt share its whole blocks; ``swa_ratio`` is the sliding pool's
    size against the full one and ``state_ratio`` the state pool's against the KV pools; ``graphs_in_budget`` tells that
    CUDA graphs come out of the utilisation share and not on top of it; ``context_times_parallel`` that the configured
    context is one slot's (Ollama); ``reads_kv_format`` that a KV type which the checkpoint asks for is used.
    """

    engine: str
    since: tuple[int, ...]
    style: PoolStyle
    block_tokens: int
    overflow: Overflow
    source: str
    null_blocks: int = 0
    steps_overlap: bool = False
    mla_granule: int = 16
    size_line: str = "blocks"  # "blocks" | "max_concurrency"
    state_dtype_conv: str = "model"
    state_dtype_ssm: str = "f32"
    state_dtype_mamba: str = "f32"
    state_in_pool: bool = False
    mamba_mode: str = "none"
    group_slack: float = 1.25
    shares_prompt: bool = True
    swa_ratio: float = 0.8
    state_ratio: float = 0.9
    utilization: float = 0.90
    graphs_in_budget: bool = True
    has_sliding_cache: bool = True
    context_times_parallel: bool = False
    reads_kv_format: bool = False
    mla: str = "latent"  # "latent" | "latent_kv" | "heads"


_VLLM_V0 = EngineRules(
    engine="vllm", since=(0,), style=PoolStyle.PAGES, block_tokens=16, overflow=Overflow.PREEMPT,
    source="vllm 0.6.6 worker/worker.py determine_num_available_blocks", graphs_in_budget=False,
)  # fmt: skip
_VLLM_V1 = replace(
    _VLLM_V0, since=(0, 9), style=PoolStyle.GROUPS, null_blocks=1, state_in_pool=True, state_dtype_mamba="model", state_dtype_ssm="model",
    source="vllm 0.10.2 v1/core/kv_cache_utils.py, v1/kv_cache_interface.py",
)  # fmt: skip
# Delta-net states are f32 from here on (0.10.2 logged a 544-token block that only bf16 explains), and MLA kernels set
# the granule of a hybrid's block: 960 tokens for Kimi-Linear at TP2 (vllm#28228).
_VLLM_11 = replace(_VLLM_V1, since=(0, 11), state_dtype_ssm="f32", mla_granule=64)
# States cached with their prefixes: 0.11.1 logged one page a group (vllm#28228), 0.17 two. The first version is not
# known; the dearer rule holds in between.
_VLLM_12 = replace(_VLLM_11, since=(0, 12), mamba_mode="align")
# CUDA graphs come out of the budget (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS; start-up logs of 0.20.0). A checkpoint's
# KV type is used where none is asked for (vllm#30141 of early 2026; the dearer rule holds for the versions around it).
_VLLM_20 = replace(_VLLM_12, since=(0, 20), group_slack=1.5, graphs_in_budget=True, reads_kv_format=True)
# The logged token figure becomes max_concurrency x max_model_len (0.20.0 still printed blocks; vllm#43308).
_VLLM_21 = replace(_VLLM_20, since=(0, 21), size_line="max_concurrency")
# Blocks behind a window are freed when a step has settled, and steps overlap (vllm#47728, vllm#49878).
_VLLM_26 = replace(_VLLM_21, since=(0, 26), steps_overlap=True)
# MLA decode kernels want 128 / kernel block whole (vllm 0.32.0 platforms/interface.py _align_hybrid_block_size).
_VLLM_27 = replace(_VLLM_26, since=(0, 27), mla_granule=128)
_VLLM_30 = replace(
    _VLLM_27, since=(0, 30), utilization=0.92, source="vllm 0.33.0 v1/core/kv_cache_utils.py, v1/worker/gpu_worker.py"
)
_VLLM = (_VLLM_V0, _VLLM_V1, _VLLM_11, _VLLM_12, _VLLM_20, _VLLM_21, _VLLM_26, _VLLM_27, _VLLM_30)
_SGLANG = (
    EngineRules(
        engine="sglang", since=(0,), style=PoolStyle.TWO_POOLS, block_tokens=1, overflow=Overflow.PREEMPT,
        source="sglang 0.5.23 mem_cache/kv_cache_configurator.py, model_executor/pool_configurator.py",
    ),
)  # fmt: skip
_LLAMACPP = (
    EngineRules(
        engine="llamacpp", since=(0,), style=PoolStyle.CELLS, block_tokens=1, overflow=Overflow.FATAL,
        source="llama.cpp src/llama-kv-cache-iswa.cpp, src/llama-hparams.cpp", state_dtype_conv="f32", utilization=1.0,
    ),
)  # fmt: skip
_TABLES: Mapping[str, tuple[EngineRules, ...]] = {
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "llamacpp": _LLAMACPP,
    "ik_llamacpp": (
        replace(_LLAMACPP[0], engine="ik_llamacpp", has_sliding_cache=False, source="ik_llama.cpp: no iSWA cache"),
    ),
    "ollama": (
        replace(_LLAMACPP[0], engine="ollama", context_times_parallel=True,
                source="ollama fb307609: runs llama-server; context x OLLAMA_NUM_PARALLEL"),
    ),
    "tgi": (
        EngineRules(engine="tgi", since=(0,), style=PoolStyle.PAGES, block_tokens=16, overflow=Overflow.PREEMPT,
                    source="text-generation-inference paged blocks of 16 (1 with FlashInfer)"),
    ),
    "trtllm": (
        EngineRules(engine="trtllm", since=(0,), style=PoolStyle.PAGES, block_tokens=32, overflow=Overflow.PREEMPT,
                    source="TensorRT-LLM KvCacheConfig tokens_per_block"),
    ),
}  # fmt: skip
_NAMES = {
    "llama.cpp": "llamacpp",
    "llama-server": "llamacpp",
    "llama_cpp": "llamacpp",
    "ik_llama.cpp": "ik_llamacpp",
    "tensorrt-llm": "trtllm",
    "tensorrt_llm": "trtllm",
}
ENGINES: tuple[str, ...] = tuple(_TABLES)


def parse_version(version: str | None) -> tuple[int, ...] | None:
    """Numbers of ``0.10.1.1``, ``v0.21rc1`` or ``b4321``; ``V0`` is vLLM's old core; None where there are none."""
    if version is None:
        return None
    if version.strip().upper() == "V0":
        return (0, 6)
    match = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(int(p) for p in match.group().split(".")) if match else None


def canonical_engine(engine: str) -> str:
    """The table's name of an engine; GeometryError lists the known ones."""
    name = engine.strip().lower()
    name = _NAMES.get(name, name)
    if name not in _TABLES:
        raise GeometryError(
            f"engine {engine!r} has no memory rules; known: {', '.join(_TABLES)} (a remote API needs none)"
        )
    return name


def engine_rules(engine: str, version: str | None = None) -> EngineRules:
    """Rules of an engine at a version; the newest where the version is unknown."""
    rows = _TABLES[canonical_engine(engine)]
    numbers = parse_version(version)
    if numbers is None:
        return rows[-1]
    return next((r for r in reversed(rows) if r.since <= numbers), rows[0])
