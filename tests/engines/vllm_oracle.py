"""Ask a real vLLM how many tokens each conversation has, one tiny random model per tokenizer family.

    python tests/engines/vllm_oracle.py VLLM_VENV TOKENIZER_DIR OUT.json

Starts ``vllm serve`` (CPU, dummy weights) on a loopback port, sends every conversation with one output token and
writes ``usage`` of each answer (null where the engine refuses). Slow: about 20 s to start and 20 s to ask.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from conversations import all_requests

START_S = 240


def model_dir(tokenizer: Path, out: Path) -> Path:
    """A model directory around a tokenizer: Phi-3 in miniature, weights made up by the engine.

    The model type matters: transformers 5 picks the tokenizer class by it, and for qwen2 or llama replaces a foreign
    tokenizer's pre-tokenizer by its own. For phi3 it takes tokenizer.json as it is, as it does for the families' own.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    data = json.loads((tokenizer / "tokenizer.json").read_text("utf-8"))
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]
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
        "vocab_size": (max(ids) + 64) // 64 * 64,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": max(ids),
        "bos_token_id": None,
        "pad_token_id": 0,
        "original_max_position_embeddings": 32768,
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int | None, str]:
    """Prompt tokens by the engine's own usage, or None and the reason."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            usage = json.load(answer)["usage"]
        return usage.get("prompt_tokens", usage.get("input_tokens")), ""
    except urllib.error.HTTPError as error:
        return None, f"{error.code} {error.read()[:200]!r}"


def serve(venv: Path, model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """The engine as a child in its own session."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [
        str(venv / "bin/python"),
        str(venv / "bin/vllm"),
        "serve",
        str(model),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "32768",
        "--block-size",
        "32",
        "--load-format",
        "dummy",
        "--num-gpu-blocks-override",
        "1100",
        "--max-num-seqs",
        "16",
        "--enforce-eager",
        "--distributed-executor-backend",
        "uni",
        "--disable-uvicorn-access-log",
    ]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until /health answers 200."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("vLLM did not start in time")


def free_port() -> int:
    """A loopback port nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def oracle(venv: Path, tokenizer: Path, work: Path) -> dict[str, Any]:
    """The engine's figures for every conversation."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", work / f"{tokenizer.name}.log"
    process = serve(venv, model_dir(tokenizer, work / tokenizer.name), port, log)
    try:
        wait_ready(process, url, log)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda request: ask(url, *request), all_requests()))
    finally:
        process.terminate()
        process.wait(30)
    digest = hashlib.sha256((tokenizer / "tokenizer.json").read_bytes()).hexdigest()[:16]
    refused = sorted({reason for count, reason in answers if count is None})
    return {
        "engine": "vllm-cpu 0.32.0",
        "tokenizer_sha256": digest,
        "counts": [count for count, _ in answers],
        "refused": refused,
    }


if __name__ == "__main__":
    venv, tokenizer, out = map(Path, sys.argv[1:4])
    result = oracle(venv, tokenizer, out.parent)
    out.write_text(json.dumps(result))
    print(tokenizer.name, sum(c is not None for c in result["counts"]), "answered;", result["refused"][:5])
