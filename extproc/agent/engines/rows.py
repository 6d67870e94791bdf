"""The rows of engines that ``table`` reads: nothing but names and where they come from.

Sources: SGLang python/sglang/srt/metrics/collector.py (sgl-project/sglang 00ae9c1590d2); TensorRT-LLM and Triton
names as listed in the Gateway API inference extension's engine specs and Triton's tensorrtllm_backend README;
TGI docs/source/reference/metrics.md and router/src/lib.rs (huggingface/text-generation-inference).
"""

from __future__ import annotations

from extproc.agent.engines.base import Endpoint, Signal
from extproc.agent.engines.table import Row


def _s(*names: str, **where: str) -> Signal:
    return Signal(names, where)


SGLANG = Row(
    name="sglang",
    endpoints=(
        Endpoint("/health"),
        Endpoint("/metrics", metrics=True),
        Endpoint("/get_server_info", every=10, required=False),
        Endpoint("/server_info", every=10, required=False),
        Endpoint("/v1/models", every=10, required=False),
    ),
    metrics_hint="start SGLang with --enable-metrics",
    running=_s("sglang:num_running_reqs"),
    waiting=_s("sglang:num_queue_reqs"),
    usage=_s("sglang:token_usage"),
    used_tokens=_s("sglang:num_used_tokens"),
    capacity_tokens=_s("sglang:max_total_num_tokens"),
    capacity_label=("sglang:cache_config_info", "num_pages", "page_size"),
    block_tokens=_s("sglang:page_size"),
    capacity_tokens_at=(
        ("/get_server_info", "max_total_num_tokens"),
        ("/server_info", "max_total_num_tokens"),
        ("/get_server_info", "internal_states", 0, "max_total_num_tokens"),
    ),
    block_tokens_at=(("/get_server_info", "page_size"), ("/server_info", "page_size")),
    max_sequences_at=(
        ("/get_server_info", "max_running_requests"),
        ("/server_info", "max_running_requests"),
        ("/get_server_info", "internal_states", 0, "max_running_requests"),
    ),
    max_model_tokens_at=(
        ("/v1/models", "data", 0, "max_model_len"),
        ("/get_server_info", "context_length"),
        ("/server_info", "context_length"),
    ),
    counters={
        "prompt_tokens": _s("sglang:prompt_tokens_total"),
        "cached_tokens": _s("sglang:cached_tokens_total"),
        "looked_up_tokens": _s("sglang:prompt_tokens_total"),
        "computed_tokens": _s("sglang:realtime_tokens_total", mode="prefill_compute"),
        "output_tokens": _s("sglang:generation_tokens_total"),
        "decode_steps": _s("sglang:inter_token_latency_seconds_count", "sglang:time_per_output_token_seconds_count"),
        "decode_s": _s("sglang:inter_token_latency_seconds_sum", "sglang:time_per_output_token_seconds_sum"),
        "ttft_s": _s("sglang:time_to_first_token_seconds_sum"),
        "ttft_count": _s("sglang:time_to_first_token_seconds_count"),
        "queue_s": _s("sglang:queue_time_seconds_sum"),
        "queue_count": _s("sglang:queue_time_seconds_count"),
        "preemptions": _s("sglang:num_retracted_requests_total"),
        "finished": _s("sglang:num_requests_total"),
    },
    # Token totals move when a request ends; the others while it runs.
    progress=("prompt_tokens", "computed_tokens", "decode_steps", "passes"),
    progress_signals={"passes": _s("sglang:cuda_graph_passes_total", "sglang:gpu_execution_seconds_total")},
)

TRTLLM = Row(
    name="trtllm",
    # trtllm-serve writes JSON statistics at /metrics and the exposition at /prometheus/metrics.
    endpoints=(
        Endpoint("/health", required=False),
        Endpoint("/v2/health/ready", required=False),
        Endpoint("/prometheus/metrics", required=False, metrics=True),
        Endpoint("/metrics", required=False, metrics=True),
        Endpoint("/v1/models", every=10, required=False),
    ),
    health=("/health", "/v2/health/ready"),
    metrics=("/prometheus/metrics", "/metrics"),
    metrics_hint="no TensorRT-LLM metrics under this URL (Triton serves them on its metrics port: set metricsUrl)",
    rank="rank",
    running=_s(
        "trtllm_num_requests_running",
        "trtllm:num_requests_running",
        "nv_trt_llm_request_metrics{request_type=scheduled}",
    ),
    waiting=_s("trtllm_num_requests_waiting", "nv_trt_llm_request_metrics{request_type=waiting}"),
    usage=_s("trtllm_kv_cache_utilization", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"),
    used_blocks=_s("trtllm_kv_cache_used_blocks", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=used}"),
    capacity_blocks=_s("trtllm_kv_cache_max_blocks", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"),
    block_tokens=_s(
        "trtllm_kv_cache_tokens_per_block", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"
    ),
    block_tokens_default=32,
    max_sequences=_s("trtllm_max_num_active_requests", "nv_trt_llm_request_metrics{request_type=max}"),
    max_model_tokens_at=(("/v1/models", "data", 0, "max_model_len"),),
    counters={
        "finished": _s("trtllm_request_success_total", "trtllm_num_requests_completed_total"),
        "ttft_s": _s("trtllm_time_to_first_token_seconds_sum"),
        "ttft_count": _s("trtllm_time_to_first_token_seconds_count"),
        "queue_s": _s("trtllm_request_queue_time_seconds_sum"),
        "queue_count": _s("trtllm_request_queue_time_seconds_count"),
        "decode_steps": _s("trtllm_time_per_output_token_seconds_count"),
        "decode_s": _s("trtllm_time_per_output_token_seconds_sum"),
    },
    # Triton counts iterations. trtllm-serve has nothing of the kind, but a running sequence takes a block every 32
    # tokens and gives all of them back at its end, so its blocks and counts move within a minute unless it is stuck.
    progress=("iterations",),
    progress_otherwise=("finished", "ttft_count", "decode_steps", "blocks"),
    progress_signals={
        "iterations": _s("nv_trt_llm_general_metrics{general_type=iteration_counter}"),
        "blocks": _s(
            "trtllm_kv_cache_used_blocks",
            "trtllm_kv_cache_utilization",
            "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=used}",
        ),
    },
    wedged_after_s=60.0,
    # Triton before 25.03 shows no waiting requests.
    required=("capacity", "used", "running"),
)

TGI = Row(
    name="tgi",
    endpoints=(Endpoint("/health"), Endpoint("/metrics", metrics=True), Endpoint("/info", every=10, required=False)),
    rank="",
    running=_s("tgi_batch_current_size"),
    waiting=_s("tgi_queue_size"),
    # The tokens the running batch may come to hold: TGI reserves prompt and max_new_tokens like we do.
    used_tokens=_s("tgi_batch_current_max_tokens"),
    capacity_tokens_at=(("/info", "max_batch_total_tokens"),),
    max_sequences_at=(("/info", "max_batch_size"), ("/info", "max_concurrent_requests")),
    max_model_tokens_at=(("/info", "max_total_tokens"),),
    counters={
        "prompt_tokens": _s("tgi_request_input_length_sum"),
        "output_tokens": _s("tgi_request_generated_tokens_sum"),
        "prefilled_tokens": _s("tgi_request_input_length_sum"),
        "prefill_s": _s("tgi_batch_forward_duration_sum", method="prefill"),
        "decode_steps": _s("tgi_request_generated_tokens_sum"),
        "decode_s": _s("tgi_request_inference_duration_sum"),
        "queue_s": _s("tgi_request_queue_duration_sum"),
        "queue_count": _s("tgi_request_queue_duration_count"),
        "finished": _s("tgi_request_success"),
    },
    # Counts every prefill and decode call, so it moves while requests run.
    progress=("calls",),
    progress_signals={"calls": _s("tgi_batch_inference_count")},
)
