"""The emulated engine's /metrics, under the names and labels of the engine it imitates.

Owns the text format, vLLM's and llama.cpp's metric names and bucket bounds (as vLLM 0.32 and llama-server b10434
show them); knows no HTTP. ``_created`` series are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from extproc.local.paged import Engine, Generation, Phase

_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
#: vLLM's histograms and their bucket bounds.
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "request_prompt_tokens": _SIZES,
    "request_generation_tokens": _SIZES,
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_max_num_generation_tokens": _SIZES,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_params_max_tokens": _SIZES,
    "time_to_first_token_seconds": _FIRST_S,
    "inter_token_latency_seconds": _TOKEN_S,
    "request_time_per_output_token_seconds": _TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_inference_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "request_prefill_kv_computed_tokens": _SIZES,
}
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket, their sum and their number."""

    __slots__ = ("bounds", "counts", "number", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.number = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        self.number += times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The series of this histogram."""
        below = 0
        for bound, count in zip((*map(float, self.bounds), None), self.counts, strict=True):
            below += count
            edge = "+Inf" if bound is None else str(bound)
            yield f'{name}_bucket{{{labels},le="{edge}"}} {float(below)}'
        yield f"{name}_count{{{labels}}} {float(self.number)}"
        yield f"{name}_sum{{{labels}}} {self.total}"


class Meter:
    """Everything that is observed per request and per step, and the text of a scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = f'engine="0",model_name="{model_name}"'
        self._model_name = model_name
        self.reset()

    def reset(self) -> None:
        """Start every series again, as a restarted engine does."""
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.prompt_seconds = 0.0
        self.decode_seconds = 0.0
        self.ended_output_tokens = 0

    def step(self, tokens: int) -> None:
        """One engine step that computed ``tokens`` tokens."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def request(self, generation: Generation, reason: str, max_tokens: int | None, samples: int) -> None:
        """The end of one sequence; like vLLM 0.32, an abort by the client raises no counter."""
        if generation.phase is Phase.ABORTED:
            return
        self.finished[reason] += 1
        observe = {name: histogram.observe for name, histogram in self.histograms.items()}
        start, end = generation.submitted_s, generation.ended_s or generation.submitted_s
        scheduled = generation.scheduled_s if generation.scheduled_s is not None else end
        first = generation.first_token_s if generation.first_token_s is not None else end
        observe["request_prompt_tokens"](generation.input_tokens)
        observe["request_generation_tokens"](generation.generated)
        observe["request_max_num_generation_tokens"](generation.generated)
        observe["request_params_n"](samples)
        if max_tokens is not None:
            observe["request_params_max_tokens"](max_tokens)
        observe["time_to_first_token_seconds"](first - start)
        if generation.generated > 1:
            per_token = (end - first) / (generation.generated - 1)
            observe["request_time_per_output_token_seconds"](per_token)
            # vLLM observes every gap between two tokens as it occurs; here they count, alike, when the request ends.
            observe["inter_token_latency_seconds"](per_token, generation.generated - 1)
        observe["e2e_request_latency_seconds"](end - start)
        observe["request_queue_time_seconds"](scheduled - start)
        observe["request_inference_time_seconds"](end - scheduled)
        observe["request_prefill_time_seconds"](first - scheduled)
        observe["request_decode_time_seconds"](end - first)
        observe["request_num_preemptions"](generation.preemptions)
        observe["request_prefill_kv_computed_tokens"](generation.input_tokens - generation.cached)
        self.prompt_seconds += first - scheduled
        self.decode_seconds += end - first
        self.ended_output_tokens += generation.generated

    def vllm_text(self) -> str:
        """A scrape in vLLM's names."""
        engine, labels = self._engine, self._labels
        tally, pool, shape = engine.tally, engine.pool, engine.shape
        waiting = float(len(engine.waiting))
        singles = [
            ("gauge", "num_requests_running", "", float(len(engine.running))),
            ("gauge", "num_requests_waiting", "", waiting),
            ("gauge", "num_requests_waiting_by_reason", ',reason="capacity"', waiting),
            ("gauge", "num_requests_waiting_by_reason", ',reason="deferred"', 0.0),
            ("gauge", "engine_sleep_state", ',sleep_state="awake"', 1.0),
            ("gauge", "engine_sleep_state", ',sleep_state="weights_offloaded"', 0.0),
            ("gauge", "engine_sleep_state", ',sleep_state="discard_all"', 0.0),
            ("gauge", "kv_cache_usage_perc", "", pool.used / pool.capacity),
            ("counter", "prefix_cache_queries_total", "", float(tally.input_tokens if shape.prefix_cache else 0)),
            ("counter", "prefix_cache_hits_total", "", float(tally.cached_tokens)),
            ("counter", "num_preemptions_total", "", float(tally.preemptions)),
            ("counter", "prompt_tokens_total", "", float(tally.input_tokens)),
            ("counter", "prompt_tokens_cached_total", "", float(tally.cached_tokens)),
            ("counter", "generation_tokens_total", "", float(tally.output_tokens)),
            *(("counter", "request_success_total", f',finished_reason="{reason}"', float(count)) for reason, count in self.finished.items()),
        ]  # fmt: skip
        lines: list[str] = []
        announced = ""
        for kind, name, extra, value in singles:
            if name != announced:
                lines.append(f"# TYPE vllm:{name} {kind}")
                announced = name
            lines.append(f"vllm:{name}{{{labels}{extra}}} {value}")
        for name, histogram in self.histograms.items():
            lines.append(f"# TYPE vllm:{name} histogram")
            lines.extend(histogram.lines(f"vllm:{name}", labels))
        lines.append("# TYPE vllm:cache_config_info gauge")
        lines.append(
            f'vllm:cache_config_info{{block_size="{shape.block_tokens}",cache_dtype="auto",enable_prefix_caching="{shape.prefix_cache}",'
            f'engine="0",gpu_memory_utilization="0.92",kv_cache_max_concurrency="{shape.pool_tokens / shape.max_model_tokens:.2f}",'
            f'kv_cache_size_tokens="{shape.blocks * shape.block_tokens}",num_cpu_blocks="None",num_gpu_blocks="{shape.blocks}",'
            f'num_gpu_blocks_override="None",sliding_window="None"}} 1.0'
        )
        return "\n".join(lines) + "\n"

    def llamacpp_text(self) -> str:
        """A scrape in llama.cpp's names, which show no KV use; predicted tokens count when a request ends."""
        engine, tally = self._engine, self._engine.tally
        rows = [
            ("counter", "prompt_tokens_total", tally.input_tokens),
            ("counter", "prompt_tokens_cached_total", tally.cached_tokens),
            ("counter", "prompt_seconds_total", round(self.prompt_seconds, 3)),
            ("counter", "tokens_predicted_total", self.ended_output_tokens),
            ("counter", "tokens_predicted_seconds_total", round(self.decode_seconds, 3)),
            ("counter", "n_decode_total", tally.steps),
            ("gauge", "prompt_tokens_seconds", round(tally.input_tokens / self.prompt_seconds, 3) if self.prompt_seconds else 0),
            ("gauge", "predicted_tokens_seconds", round(self.ended_output_tokens / self.decode_seconds, 3) if self.decode_seconds else 0),
            ("gauge", "requests_processing", len(engine.running)),
            ("gauge", "requests_deferred", len(engine.waiting)),
        ]  # fmt: skip
        return "".join(f"# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n" for kind, name, value in rows)
