"""The queue at the gate through real Envoy: held, served in order, timed out in time, left by clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import Stack, running

#: 128 usable blocks of 16 tokens; without a tokenizer a short chat with 300 output tokens takes about 38 of them.
ENGINE = ["--blocks", "129", "--served-model", "m", "--decode-tokens-per-s", "2000", "--step-base-ms", "2"]
TARGETS: dict[str, Any] = {"t": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "e0"}]}}
REST: dict[str, Any] = {
    "lanes": {
        "batch": {"maxOutputTokens": 900, "queue": {"maxDepth": 4, "maxWaitMs": 4000}},
        "hasty": {"maxOutputTokens": 900, "queue": {"maxDepth": 1, "maxWaitMs": 1000}},
    },
    "aliases": {"batch": {"lane": "batch", "targets": ["t"]}, "hasty": {"lane": "hasty", "targets": ["t"]}},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One stack for the module."""
    with running({"e0": ENGINE}, TARGETS, **REST) as made:
        yield made


def chat(model: str, output: int) -> dict[str, Any]:
    """A chat that writes exactly ``output`` tokens."""
    return {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": output,
            "min_tokens": output, "ignore_eos": True}  # fmt: skip


async def test_a_held_request_is_served_when_room_comes_free(stack: Stack) -> None:
    """More than fits is held, not refused, and all of it is served."""
    replies = await asyncio.gather(*(stack.send(chat("batch", 300)) for _ in range(6)))
    assert [reply.status for reply in replies] == [200] * 6
    assert stack.engines["e0"].stats()["peak_used_blocks"] <= 128
    await stack.until_empty(8)


async def test_time_out_and_full_line_are_refusals_in_time(stack: Stack) -> None:
    """One waits a second and is refused with queue_timeout; the one behind it finds the line full."""
    stack.engines["e0"].faults(rate=0.02)
    holders = [asyncio.create_task(stack.send(chat("batch", 300), timeout_s=4)) for _ in range(3)]
    await stack.until_reserved(3)
    began = time.monotonic()
    waiting = asyncio.create_task(stack.send(chat("hasty", 600)))
    await asyncio.sleep(0.3)
    full = await stack.send(chat("hasty", 600))
    assert (full.status, full.headers["x-kvgate-reason"]) == (429, "queue_full")
    late = await waiting
    took = time.monotonic() - began
    assert (late.status, late.headers["x-kvgate-reason"]) == (429, "queue_timeout")
    assert 0.9 <= took < 3.0
    stack.engines["e0"].faults(clear=True)
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    await stack.until_empty(12)


async def test_a_client_that_leaves_the_line_leaves_nothing(stack: Stack) -> None:
    """Held requests whose clients go away are never sent to the engine."""
    stack.engines["e0"].faults(rate=0.02)
    holders = [asyncio.create_task(stack.send(chat("batch", 300), timeout_s=3)) for _ in range(3)]
    await stack.until_reserved(3)
    gone = await stack.send(chat("batch", 600), timeout_s=0.5)
    assert gone.status == 0
    stack.engines["e0"].faults(clear=True)
    await asyncio.gather(*holders)
    await stack.until_empty(12)
    assert not [r for r in stack.engines["e0"].requests if r["output_tokens"] == 600]
