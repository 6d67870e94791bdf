"""A remote API that is away or out of quota, behind real Envoy: seen in status, not chosen, and back by itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import READY_WITHIN_S, SEEN_AFTER_S, Stack, running

TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "qwen", "watermark": 0.0, "replicas": [{"name": "primary-0"}]},
    "far": {"engine": "openai", "servedModel": "gpt", "engineName": "far-0"},
    "other": {"engine": "openai", "servedModel": "gpt", "engineName": "other-0"},
}
REST: dict[str, Any] = {
    "lanes": {"l": {"maxInputTokens": 3000, "maxOutputTokens": 400}},
    "aliases": {
        "far-only": {"lane": "l", "targets": ["far"]},
        "far-first": {"lane": "l", "targets": ["far", "other"]},
        "local-first": {"lane": "l", "targets": ["primary", "far", "other"]},
    },
}

#: A remote that is out of quota says so; what is judged while it is closed takes a fraction of that.
CLOSED_S = 20


@pytest.fixture
def stack() -> Iterator[Stack]:
    """One local engine and two that play remote APIs."""
    remote = ["--served-model", "gpt"]
    engines = {"primary-0": ["--served-model", "qwen"], "far-0": remote, "other-0": remote}
    with running(engines, TARGETS, **REST) as made:
        yield made


def chat(model: str) -> dict[str, Any]:
    """A short request."""
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def shown(stack: Stack) -> dict[str, str]:
    """The states that ``kvgate status`` prints."""
    command = [sys.executable, "-m", "extproc.cli", "status", "-c", str(stack.config_path), "--json"]
    page = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return {row["replica"]: row["state"] for row in page["state"]["replicas"]}


async def until_shown(stack: Stack, remote: str, state: str) -> None:
    """Wait until the ledger shows the remote so, and until `serve` has read it too."""
    until = time.monotonic() + READY_WITHIN_S
    while (view := (await stack.snapshot()).replicas.get(remote)) is None or view.state != state:
        assert time.monotonic() < until, view
        await asyncio.sleep(0.1)
    await asyncio.sleep(SEEN_AFTER_S)


def counted(stack: Stack, name: str) -> int:
    """Requests that this engine logged."""
    return len(stack.engines[name].requests)


async def test_a_remote_out_of_quota_is_left_alone_until_it_may_be_asked_again(stack: Stack) -> None:
    """One 429 closes it for all: shown as draining, refused early or passed over; after its time it serves again."""
    await until_shown(stack, "far", "ready")
    stack.kill_agent()  # its next visit would find the API well
    stack.engines["far-0"].faults(status=429, count=1, retry_after_s=CLOSED_S)
    reply = await stack.send(chat("far-only"))
    assert reply.status == 429
    await until_shown(stack, "far", "draining")
    assert shown(stack)["far"] == "draining"
    before = counted(stack, "far-0")
    reply = await stack.send(chat("far-only"))
    assert (reply.status, reply.headers["x-kvgate-reason"]) == (503, "not_ready")
    assert "retry-after" in reply.headers
    reply = await stack.send(chat("far-first"))
    assert (reply.status, reply.headers["x-kvgate-target"]) == (200, "other")
    assert reply.headers["x-kvgate-reason"] == "not_ready"
    assert counted(stack, "far-0") == before
    await until_shown(stack, "far", "unknown")
    reply = await stack.send(chat("far-first"))
    assert (reply.status, reply.headers["x-kvgate-target"]) == (200, "far")


async def test_a_remote_that_is_away_is_not_chosen_and_no_retry_goes_there(stack: Stack) -> None:
    """Connection refused at one visit: lost in status, out of the plan, and unused while the other serves."""
    await until_shown(stack, "far", "ready")
    stack.kill_engine("far-0")
    await until_shown(stack, "far", "lost")
    assert shown(stack) == {"primary-0": "ready", "far": "lost", "other": "ready"}
    reply = await stack.send(chat("far-first"))
    assert (reply.status, reply.headers["x-kvgate-target"]) == (200, "other")
    stack.engines["primary-0"].faults(status=503, count=1)
    reply = await stack.send(chat("local-first"))
    assert (reply.status, reply.headers["x-kvgate-target"]) == (200, "primary")
    assert counted(stack, "other-0") == 2
    reply = await stack.send(chat("far-only"))
    assert (reply.status, reply.headers["x-kvgate-reason"]) == (503, "unknown_state")
    await stack.until_empty()
