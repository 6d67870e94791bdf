"""Cost of the memory model: ``python -m tests.bench.bench_memory`` prints microseconds and exits 1 beyond the bound.

The projection is on the request path and must stay within 20 us for a known geometry, of any kind of cache. Each
figure is the best of five rounds, so that another process on the machine does not decide.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from extproc.memory import build_kv_model, engine_rules, image_size, image_tokens, load_geometry, project

BOUND_US = 20.0
ROUNDS, CALLS = 5, 20_000
MODELS = (
    ("Qwen2.5-Coder-32B", "vllm", 2),  # one group
    ("gpt-oss-120b", "vllm", 1),  # full and sliding groups
    ("Qwen3.5-27B", "vllm", 1),  # full and delta-net groups
    ("Qwen3.5-397B-A17B", "vllm", 8),  # the same over eight devices
    ("Llama-4-Scout-17B-16E-Instruct", "vllm", 4),  # chunked
    ("gpt-oss-20b", "sglang", 1),  # two pools
    ("gemma-3-27b", "llamacpp", 1),  # cells
    ("DeepSeek-V3", "sglang", 8),  # latent, eight devices
)


def best_us(call: Callable[[], object]) -> float:
    """Microseconds of one call, the best round."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return min(rounds)


def main() -> int:
    """Print a line a figure; 1 where a projection is beyond the bound."""
    slow = False
    for name, engine, tp in MODELS:
        kv = build_kv_model(load_geometry(name), engine_rules(engine), tp=tp)
        for label, prompts, sequences in (("1 prompt", [6000], 1), ("8 prompts x 4", [1000] * 8, 32)):
            cost = best_us(lambda kv=kv, prompts=prompts, sequences=sequences: project(kv, prompts, 700, sequences))  # type: ignore[misc]
            slow |= cost > BOUND_US
            print(f"project {name} on {engine}, tp {tp}, {label}: {cost:.2f} us")
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1024).to_bytes(4, "big") + (768).to_bytes(4, "big") + bytes(9)
    print(f"image_size of a PNG: {best_us(lambda: image_size(header)):.2f} us")
    for family in ("qwen2_5_vl", "llava_next", "internvl"):
        print(f"image_tokens {family}: {best_us(lambda family=family: image_tokens(family, 1024, 768)):.2f} us")  # type: ignore[misc]
    print(f"bound for a projection: {BOUND_US} us: {'exceeded' if slow else 'kept'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
