"""Bodies made to be costly, through real Envoy: each is refused, and small requests beside it are answered."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import Stack, running

PRIMARY = ["--blocks", "4097", "--served-model", "qwen-32b", "--decode-tokens-per-s", "2000"]
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "qwen-32b", "watermark": 0.0, "replicas": [{"name": "primary-0"}]},
}
REST: dict[str, Any] = {
    "lanes": {"edit": {"maxInputTokens": 3000, "maxOutputTokens": 40}},
    "aliases": {"coder": {"lane": "edit", "targets": ["primary"]}},
}

CHAT = "/v1/chat/completions"
#: Small requests that go beside each costly one, a tenth of a second between them.
SMALL = 10
#: What ``serve`` itself, all its threads, may spend on one costly body and the small requests: whatever it does, parsing
#: included, holds up its event loop for no longer, and Envoy waits a second for an answer by default. Processor time, so
#: that it says the same on a busy machine; what was measured is 0.2 s, the helper's work on giants apart.
SPENT_S = 1.5


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """One engine for all tests."""
    with running({"primary-0": PRIMARY}, TARGETS, **REST) as made:
        yield made


def chat(content: Any = "hello", **extra: Any) -> bytes:
    """A chat request, its characters as they are."""
    body = {"model": "coder", "messages": [{"role": "user", "content": content}], "max_tokens": 5, **extra}
    return json.dumps(body, ensure_ascii=False).encode()


def calling(arguments: str) -> bytes:
    """A conversation that ends with a tool call."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return json.dumps({"model": "coder", "max_tokens": 5, "messages": turns}).encode()


def with_member(member: bytes) -> bytes:
    """A small request with one more member, which nobody reads."""
    return b'{"model":"coder","max_tokens":5,' + member + b',"messages":[{"role":"user","content":"x"}]}'


COSTLY: dict[str, tuple[str, bytes]] = {
    "marks": (CHAT, chat("a" + "\u0301" * 20_000 + "\u0323" * 20_000)),
    "marks_giant": (CHAT, chat("a" + "\u0301\u0323" * 2_000_000)),
    "arguments": (CHAT, calling("[" * 300 + "1," * 490_000 + "1" + "]" * 300)),
    "tools": (CHAT, with_member(b'"tools":' + b"[" * 90 + b"1," * 490_000 + b"1" + b"]" * 90)),
    "parts": (CHAT, b'{"model":"coder","max_tokens":5,"messages":[{"role":"user","content":[' + b"{}," * 9_000_000 + b"1]}]}"),
    "parts_at_the_limit": (CHAT, b'{"model":"coder","max_tokens":5,"messages":[{"role":"user","content":[' + b"{}," * 700_000 + b"1]}]}"),
    "surrogate": (CHAT, with_member(b'"x":"\\ud83d","y":[' + b"[]," * 330_000 + b'1],"z":' + b"[" * 99 + b"]" * 99)),
    "duplicates": (CHAT, with_member(b'"x":1,"x":2,"y":[' + b"[]," * 9_000_000 + b"1]")),
    "deep": (CHAT, with_member(b'"metadata":' + b"[" * 900 + b"]" * 900)),
    "pairs": ("/v1/rerank", json.dumps({"model": "coder", "query": "é漢" * 40_000, "documents": ["a"] * 2000}, ensure_ascii=False).encode()),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
async def test_small_requests_are_answered_beside(stack: Stack, name: str) -> None:
    """The costly body is refused, small requests beside it are served, and ``serve`` works on all of it for a moment."""
    path, body = COSTLY[name]
    pid = stack.serves[0].pid
    before_s = cpu_s(pid)

    async def beside() -> list[int]:
        statuses = []
        for _ in range(SMALL):
            await asyncio.sleep(0.1)
            statuses.append((await stack.send(chat())).status)
        return statuses

    costly, statuses = await asyncio.gather(stack.send(body, path=path), beside())
    spent_s = cpu_s(pid) - before_s
    print(f"{name}: {spent_s:.2f} s of the processor")
    assert spent_s < SPENT_S
    assert statuses == [200] * SMALL
    assert costly.status in (400, 413, 503), costly.body[:300]
    await stack.until_empty()
