"""Every outcome through real Envoy, with the upstream that really answered, by its own log."""

from __future__ import annotations

import asyncio
import gzip
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.local.client import Reply, request
from tests.support.stack import ANSWERED_WITHIN_S, RELEASED_WITHIN_S, Stack, running

#: 129 blocks of 16 tokens, the null block among them: 2,048 tokens.
PRIMARY = ["--blocks", "129", "--served-model", "qwen-32b", "--decode-tokens-per-s", "2000"]
SMALL = ["--blocks", "65", "--served-model", "qwen-14b", "--decode-tokens-per-s", "2000"]
REMOTE = ["--blocks", "4097", "--served-model", "gpt-remote", "--decode-tokens-per-s", "2000"]

TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "qwen-32b", "watermark": 0.0, "replicas": [{"name": "primary-0"}]},
    "small": {"engine": "vllm", "servedModel": "qwen-14b", "watermark": 0.0, "replicas": [{"name": "small-0"}]},
    "remote": {"engine": "openai", "servedModel": "gpt-remote", "engineName": "remote-0"},
}
REST: dict[str, Any] = {
    "lanes": {
        "edit": {"maxInputTokens": 3000, "maxOutputTokens": 400},
        "house": {"maxInputTokens": 3000, "maxOutputTokens": 400, "remote": "never"},
        "tight": {"maxInputTokens": 100, "maxOutputTokens": 400, "fallback": "remote"},
        "narrow": {"maxInputTokens": 100, "maxOutputTokens": 100},
        "single": {"maxOutputTokens": 400, "concurrency": 1},
    },
    "aliases": {
        "coder": {"lane": "edit", "targets": ["primary", "small", "remote"]},
        "house-coder": {"lane": "house", "targets": ["primary", "small"]},
        "tight-coder": {"lane": "tight", "targets": ["primary"]},
        "narrow-coder": {"lane": "narrow", "targets": ["primary"]},
        "single-coder": {"lane": "single", "targets": ["primary"]},
    },
    "serve": {"maxBodyBytes": 200_000},
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """Two local engines and a remote for all tests."""
    engines = {"primary-0": PRIMARY, "small-0": SMALL}
    with running({**engines, "remote-0": REMOTE}, TARGETS, **REST) as made:
        yield made


def chat(model: str, text: str = "hello", **extra: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 20, **extra}


def served_by(stack: Stack, request_id: str) -> list[str]:
    """The engines whose own log shows this request."""
    return [name for name, engine in stack.engines.items() if any(r["id"] == request_id for r in engine.requests)]


async def ask(stack: Stack, body: Any, **options: Any) -> tuple[Reply, list[str]]:
    """Send one request under a fresh id; the reply and who served it."""
    request_id = str(uuid.uuid4())
    headers = {"x-request-id": request_id, **options.pop("headers", {})}
    reply = await stack.send(body, headers=headers, **options)
    return reply, served_by(stack, request_id)


class Held:
    """A streaming request that occupies an engine until it is let go."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        self._stack = stack
        self._body = json.dumps({**body, "stream": True}).encode()
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0

    async def __aenter__(self) -> Held:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._stack.envoy.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(self._body)}\r\n\r\n"
        self._writer.write(head.encode() + self._body)
        self.status = int((await asyncio.wait_for(reader.readuntil(b"\r\n"), ANSWERED_WITHIN_S)).split()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._writer is not None
        self._writer.close()


def filling(stack: Stack, model: str, output: int, *, text: str = "x") -> Held:
    """A stream that will write ``output`` tokens slowly."""
    return Held(stack, chat(model, text, max_tokens=output, min_tokens=output, ignore_eos=True))


async def test_admit(stack: Stack) -> None:
    """A request that fits goes to the primary, under the name the engine knows, with the decision in its headers."""
    reply, served = await ask(stack, chat("coder"))
    assert (reply.status, served) == (200, ["primary-0"])
    assert reply.headers["x-kvgate-decision"] == "admit"
    assert reply.headers["x-kvgate-target"] == "primary"
    assert reply.headers["x-kvgate-lane"] == "edit"
    assert reply.json()["model"] == "qwen-32b"  # type: ignore[index, call-overload]
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_fallback_to_the_smaller_quant_then_remote_then_refusal(stack: Stack) -> None:
    """As the pools fill, the same request is served by the next target; with nowhere left it is refused in time."""
    await stack.until_empty(RELEASED_WITHIN_S)
    # 41 blocks each by the bound: three fill the primary's 128, one more leaves 23 of the small one's 64.
    stack.engines["primary-0"].faults(rate=0.02)
    streams = [filling(stack, "house-coder", 350) for _ in range(3)]
    async with streams[0], streams[1], streams[2]:
        big = chat("coder", "y" * 300, max_tokens=380, min_tokens=1)
        reply, served = await ask(stack, big)
        assert (reply.status, served) == (200, ["small-0"]), (reply, stack.logs())
        assert reply.headers["x-kvgate-decision"] == "fallback"
        assert reply.headers["x-kvgate-reason"] == "insufficient_headroom"
        await stack.until_reserved(3)
        stack.engines["small-0"].faults(rate=0.02)
        async with filling(stack, "house-coder", 350):
            reply, served = await ask(stack, big)
            assert (reply.status, served) == (200, ["remote-0"])
            assert reply.headers["x-kvgate-target"] == "remote"
            refused, served = await ask(stack, {**big, "model": "house-coder"})
            assert (refused.status, served) == (429, [])
            assert refused.headers["x-kvgate-decision"] == "reject"
            assert refused.headers["x-kvgate-reason"] == "insufficient_headroom"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-should-retry"] == "true"
            assert refused.json()["error"]["code"]  # type: ignore[index, call-overload]
    for engine in stack.engines.values():
        engine.faults(clear=True)
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_lane_concurrency(stack: Stack) -> None:
    """A lane of one takes one."""
    stack.engines["primary-0"].faults(rate=0.05)
    async with filling(stack, "single-coder", 300) as held:
        assert held.status == 200
        reply, served = await ask(stack, chat("single-coder"))
        assert (reply.status, served) == (429, [])
        assert reply.headers["x-kvgate-reason"] == "lane_full"
    stack.engines["primary-0"].faults(clear=True)
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_over_the_lanes_budget_goes_to_its_fallback(stack: Stack) -> None:
    """Input over the lane's budget takes the lane's fallback, even with room at the primary."""
    reply, served = await ask(stack, chat("tight-coder", "word " * 200))
    assert (reply.status, served) == (200, ["remote-0"])
    assert reply.headers["x-kvgate-reason"] == "prompt_budget_exceeded"


async def test_over_the_lanes_budget_without_a_fallback_is_400(stack: Stack) -> None:
    """No fallback: a refusal that agents understand as "compact", not to be retried."""
    reply, served = await ask(stack, chat("narrow-coder", "word " * 200))
    assert (reply.status, served) == (400, [])
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["code"] == "context_length_exceeded"  # type: ignore[index, call-overload]


async def test_unknown_model_is_404(stack: Stack) -> None:
    """No alias, no default lane: never the first pool."""
    reply, served = await ask(stack, chat("gpt-9"))
    assert (reply.status, served) == (404, [])
    assert reply.headers["x-kvgate-reason"] == "unknown_model"
    assert reply.headers["x-kvgate-decision"] == "reject"


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"\xff\xfe", b'{"model": "coder"', b'{"model":"coder","model":"b","messages":[]}', b"nan"]
)
async def test_malformed_bodies_are_400(stack: Stack, body: bytes) -> None:
    """A client's mistake is never a 5xx and never reaches an engine."""
    reply, served = await ask(stack, body)
    assert (reply.status, served) == (400, [])
    assert reply.headers["content-type"] == "application/json"


async def test_body_over_the_limit_is_413(stack: Stack) -> None:
    """Declared too long: refused as JSON with our headers, before it is read."""
    reply, served = await ask(stack, chat("coder", "x" * 300_000))
    assert (reply.status, served) == (413, [])
    assert reply.headers["x-kvgate-reason"] == "body_too_large"


async def test_compressed_body(stack: Stack) -> None:
    """gzip is decoded, counted and forwarded as plain bytes of the exact length."""
    body = gzip.compress(json.dumps(chat("coder")).encode())
    reply, served = await ask(stack, body, headers={"content-encoding": "gzip"})
    assert (reply.status, served) == (200, ["primary-0"])


async def test_unsupported_encoding_is_415(stack: Stack) -> None:
    """brotli is not decoded here, and is not guessed at."""
    reply, served = await ask(stack, b"xxxxxx", headers={"content-encoding": "br"})
    assert (reply.status, served) == (415, [])


@pytest.mark.parametrize(
    "headers",
    [
        {"x-kvgate-rid": "evil"},
        {"x-kvgate-target": "remote", "x-kvgate-plan": "remote"},
        {"x-kvgate-model-at": "0-1"},
        {"x-gateway-destination-endpoint": "127.0.0.1:1"},
        {"X-KVGATE-Decision": "admit"},
    ],
)
async def test_spoofed_headers_steer_nothing(stack: Stack, headers: dict[str, str]) -> None:
    """Whatever a client sends with our prefix is gone before the route is chosen."""
    reply, served = await ask(stack, chat("coder"), headers=headers)
    assert (reply.status, served) == (200, ["primary-0"])
    assert reply.headers["x-kvgate-decision"] == "admit"


async def test_models_lists_the_aliases(stack: Stack) -> None:
    """GET /v1/models answers with what clients may ask for."""
    reply = await request(stack.envoy.port, "GET", "/v1/models", timeout_s=ANSWERED_WITHIN_S)
    assert reply.status == 200
    assert {model["id"] for model in reply.json()["data"]} == set(REST["aliases"])  # type: ignore[index, call-overload]


async def test_client_gone_before_the_first_byte_releases(stack: Stack) -> None:
    """The client leaves while the engine has not answered yet; the reservation goes when the engine is free."""
    stack.engines["primary-0"].faults(first_byte_delay_s=30.0)
    try:
        reply = await stack.send(chat("coder"), timeout_s=1.5)
        assert reply.status == 0
    finally:
        stack.engines["primary-0"].faults(clear=True)
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_client_gone_in_mid_stream_releases(stack: Stack) -> None:
    """Half of all streams end this way."""
    stack.engines["primary-0"].faults(rate=0.05)
    async with filling(stack, "coder", 350) as held:
        assert held.status == 200
        # What a test before this one left is cooling for a moment.
        await stack.until_reserved(1)
        await asyncio.sleep(0.3)
    stack.engines["primary-0"].faults(clear=True)
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_upstream_reset_in_mid_stream_releases(stack: Stack) -> None:
    """An engine that breaks off leaves nothing reserved."""
    stack.engines["primary-0"].faults(reset=1, reset_after_chunks=2)
    reply, _ = await ask(stack, chat("coder", stream=True, max_tokens=300, min_tokens=300))
    assert "[DONE]" not in reply.events
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_primary_503_is_retried_at_the_remote(stack: Stack) -> None:
    """An engine that refuses by itself: the plan's next target answers, and the local blocks are freed."""
    stack.engines["primary-0"].faults(status=503, count=1)
    reply, served = await ask(stack, chat("coder"))
    assert (reply.status, served[-1:]) == (200, ["remote-0"])
    await stack.until_empty(RELEASED_WITHIN_S)
