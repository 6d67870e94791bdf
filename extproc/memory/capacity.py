"""Pool capacity as an engine reports it, and where that disagrees with the formula.

Owns the meaning of the engines' own capacity figures; they win over any formula here. Knows no HTTP: the agent
scraped the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from extproc.errors import GeometryError
from extproc.memory.kv import KvModel

#: Relative difference between report and formula from which drift is reported. Logs of healthy engines differ by
#: 0.3 to 1.1 % (another rank bound the pool); a wrong geometry or flag differs by far more.
DRIFT_BOUND = 0.02


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool's size: ``blocks`` of ``block_tokens`` tokens, and the tokens one can promise in total.

    ``unit`` is ``blocks`` where a block is one of the engine's (count requests with ``KvModel.blocks``) and ``tokens``
    where only tokens are known (count with ``KvModel.tokens_only(block_tokens)``). ``sequences`` None: unlimited.
    """

    blocks: int
    block_tokens: int
    tokens: int
    unit: str
    source: str
    sequences: int | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """Report against formula: ``ratio`` is reported / computed; ``beyond`` tells it is past the bound."""

    what: str
    reported: float
    computed: float
    ratio: float
    beyond: bool

    @property
    def message(self) -> str:
        """One line for the log."""
        state = "beyond" if self.beyond else "within"
        return (
            f"{self.what}: engine {self.reported:g}, formula {self.computed:g} (x{self.ratio:.3f}, {state} the bound)"
        )


def drift(what: str, reported: float, computed: float, bound: float = DRIFT_BOUND) -> Drift:
    """Compare one figure; a computed 0 against a non-zero report is beyond every bound."""
    ratio = reported / computed if computed else (1.0 if not reported else float("inf"))
    return Drift(what, reported, computed, ratio, abs(ratio - 1.0) > bound)


def vllm_capacity(labels: Mapping[str, str], max_model_tokens: int, kv: KvModel | None = None) -> Capacity:
    """Capacity from the labels of ``vllm:cache_config_info``.

    ``kv_cache_max_concurrency x max_model_len`` is right for every model. On hybrids ``block_size`` is the minimum over
    the groups (vllm#51163), so ``num_gpu_blocks x block_size`` is not the capacity: with a known geometry the engine's
    blocks are counted group by group, without one only tokens are.
    """
    blocks = _whole(labels, "num_gpu_blocks")
    block = _whole(labels, "block_size") or 16
    concurrency = _number(labels, "kv_cache_max_concurrency")
    tokens = (
        int(concurrency * max_model_tokens)
        if concurrency and max_model_tokens
        else _whole(labels, "kv_cache_size_tokens")
    )
    if blocks is None and not tokens:
        raise GeometryError(
            "vllm:cache_config_info: label 'num_gpu_blocks' is missing and no other capacity is reported"
        )
    if kv is not None and kv.is_hybrid and blocks is not None:
        usable = max(0, blocks - 1)
        per_request = kv.charged_blocks(max_model_tokens) if max_model_tokens else 0
        tokens = tokens or (int(blocks / per_request * max_model_tokens) if per_request else 0)
        return Capacity(usable, kv.block_tokens, tokens, "blocks", "num_gpu_blocks, counted per group")
    if kv is None and tokens and blocks is not None and tokens > 1.02 * blocks * block:
        # Layers that do not keep every token: the label's blocks are not comparable with a request's tokens.
        return Capacity(tokens // block, block, tokens, "tokens", "kv_cache_max_concurrency x max_model_len")
    if kv is None and tokens and blocks is not None and tokens < 0.98 * blocks * block:
        return Capacity(tokens // block, block, tokens, "tokens", "kv_cache_max_concurrency x max_model_len")
    if blocks is not None:
        # Block 0 is a null block that no request ever gets.
        return Capacity(max(0, blocks - 1), block, max(0, blocks - 1) * block, "blocks", "num_gpu_blocks")
    return Capacity((tokens or 0) // block, block, tokens or 0, "tokens", "kv_cache_size_tokens")


def sglang_capacity(max_total_num_tokens: int, page_size: int = 1, max_running: int | None = None) -> Capacity:
    """Capacity from ``sglang:max_total_num_tokens`` (the full layers' pool)."""
    page = max(1, page_size)
    return Capacity(
        max_total_num_tokens // page, page, max_total_num_tokens, "blocks", "max_total_num_tokens", max_running
    )


def llamacpp_capacity(slot_contexts: Sequence[int], total_context: int | None = None) -> Capacity:
    """Capacity from ``/slots`` (n_ctx of each slot) and, for a unified cache, the total context from ``/props``.

    With a unified cache each slot reports the whole context and they share it; otherwise the slots add up.
    """
    if not slot_contexts:
        raise GeometryError("/slots: no slot is reported; start llama-server with --slots")
    unified = total_context is not None and len(slot_contexts) > 1 and max(slot_contexts) >= total_context
    tokens = total_context if unified and total_context else sum(slot_contexts)
    return Capacity(
        tokens, 1, tokens, "blocks", "/slots" if not unified else "/props n_ctx (unified)", len(slot_contexts)
    )


def capacity_from_report(
    engine: str, report: Mapping[str, str], max_model_tokens: int = 0, kv: KvModel | None = None
) -> Capacity:
    """Capacity from an engine's own figures by the names the engine uses; GeometryError names what is missing.

    vLLM: labels of ``cache_config_info``. SGLang: ``max_total_num_tokens``, ``page_size``, ``max_running_requests``.
    llama.cpp and Ollama: ``n_ctx`` (total), ``n_ctx_slot`` and ``total_slots``.
    """
    if engine == "vllm":
        return vllm_capacity(report, max_model_tokens, kv)
    if engine == "sglang":
        total = _whole(report, "max_total_num_tokens")
        if total is None:
            raise GeometryError("sglang report: 'max_total_num_tokens' is missing")
        return sglang_capacity(total, _whole(report, "page_size") or 1, _whole(report, "max_running_requests"))
    slots = _whole(report, "total_slots") or 1
    total, per_slot = _whole(report, "n_ctx"), _whole(report, "n_ctx_slot")
    if per_slot is None and total is None:
        raise GeometryError(f"{engine} report: neither 'n_ctx' nor 'n_ctx_slot' is there")
    if per_slot is None:
        per_slot = (total or 0) // slots
    return llamacpp_capacity([per_slot] * slots, total)


def capacity_drift(capacity: Capacity, kv: KvModel, available_bytes_per_shard: int | None, max_model_tokens: int,
                   max_concurrency: float | None = None) -> tuple[Drift, ...]:  # fmt: skip
    """Disagreements between a report and the formula: pool size from bytes, and concurrency from blocks."""
    found = []
    if available_bytes_per_shard:
        found.append(drift("kv blocks", capacity.blocks, kv.pool_blocks(available_bytes_per_shard)))
    if max_concurrency and max_model_tokens:
        charged = kv.charged_blocks(max_model_tokens)
        found.append(drift("max concurrency", max_concurrency, (capacity.blocks + 1) / charged if charged else 0.0))
    return tuple(found)


def _number(report: Mapping[str, str], key: str) -> float | None:
    raw = report.get(key)
    if raw in (None, "", "None"):
        return None
    try:
        value = float(str(raw))
    except ValueError:
        return None
    return value if value == value and 0 <= value < float("inf") else None


def _whole(report: Mapping[str, str], key: str) -> int | None:
    value = _number(report, key)
    return None if value is None else int(value)
