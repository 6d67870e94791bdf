"""Start options of an engine that change what a sequence costs.

Owns the names and defaults; None means the engine's own default from its rule table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flags:
    """Options beside KV type and parallelism.

    ``max_num_batched_tokens``: tokens one step may hold (vLLM). ``mamba_mode``: none | align | all. ``lookahead_tokens``:
    speculative slots per sequence. ``draft_layers``: further layers shaped like the target's (EAGLE head 1).
    ``n_parallel`` slots, ``unified`` one cell array for all of them, ``n_ubatch``, ``swa_full``: llama.cpp. ``mla``: latent |
    latent_kv | heads. ``extra_row_bytes``: bytes per token beside the table, all layers together (third caches).
    """

    max_num_batched_tokens: int | None = None
    concurrent_batches: int | None = None
    mamba_mode: str | None = None
    hybrid_manager: bool = True
    prefix_caching: bool = True
    lookahead_tokens: int = 0
    draft_layers: int = 0
    mtp: bool = False
    n_parallel: int = 1
    unified: bool = True
    n_ubatch: int = 512
    swa_full: bool = False
    swa_ratio: float | None = None
    mla: str | None = None
    ssm_dtype: str | None = None
    conv_dtype: str | None = None
    extra_row_bytes: int = 0
    state_rollbacks: int = 0


DEFAULT_FLAGS = Flags()

_MIB = 1 << 20


def default_batched_tokens(total_bytes: int | None, gpu_name: str = "") -> int:
    """vLLM's default ``max_num_batched_tokens`` of an API server on a card of that size and name.

    Source: vllm engine/arg_utils.py get_batch_defaults. Unknown card: 8192, the larger of the common two.
    """
    if "a100" in gpu_name.lower():
        return 2048
    if total_bytes is None:
        return 8192
    if total_bytes >= 160_000 * _MIB:
        return 16384
    return 8192 if total_bytes >= 70_000 * _MIB else 2048
