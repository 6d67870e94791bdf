"""The queue at the gate through real Envoy: held, served in order, timed out in time, left by clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.stack import RELEASED_WITHIN_S, Stack, running

#: 128 usable blocks of 16 tokens; without a tokenizer a short chat with 300 output tokens takes about 38 of them.
ENGINE = ["--blocks", "129", "--served-model", "m", "--decode-tokens-per-s", "2000", "--step-base-ms", "2"]
TARGETS: dict[str, Any] = {"t": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "e0"}]}}
#: Far below Envoy's own limit of 30 s, and long enough for a second request to find the first in line.
HASTY_MS = 5000
REST: dict[str, Any] = {
    "lanes": {
        "batch": {"maxOutputTokens": 900, "queue": {"maxDepth": 4, "maxWaitMs": 25_000}},
        "hasty": {"maxOutputTokens": 900, "queue": {"maxDepth": 1, "maxWaitMs": HASTY_MS}},
    },
    "aliases": {"batch": {"lane": "batch", "targets": ["t"]}, "hasty": {"lane": "hasty", "targets": ["t"]}},
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """One engine for all tests."""
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
    await stack.until_empty(RELEASED_WITHIN_S)


@asynccontextmanager
async def held(stack: Stack) -> AsyncIterator[None]:
    """Three requests that fill the engine and do not end; their clients leave afterwards."""
    stack.engines["e0"].faults(rate=0.005)
    holders = [asyncio.create_task(stack.send(chat("batch", 300), timeout_s=300.0)) for _ in range(3)]
    await stack.until_reserved(3)
    yield
    stack.engines["e0"].faults(clear=True)
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    await stack.until_empty()


async def test_time_out_and_full_line_are_refusals_in_time(stack: Stack) -> None:
    """Of two at once one waits its time and is refused with queue_timeout; the other finds the line full at once."""
    async with held(stack):
        both = await asyncio.gather(*(stack.send(chat("hasty", 600)) for _ in range(2)))
    full, late = sorted(both, key=lambda reply: reply.took_s)
    assert (full.status, full.headers["x-kvgate-reason"]) == (429, "queue_full")
    assert (late.status, late.headers["x-kvgate-reason"]) == (429, "queue_timeout")
    assert late.took_s >= HASTY_MS / 1000


async def test_a_client_that_leaves_the_line_leaves_nothing(stack: Stack) -> None:
    """Held requests whose clients go away are never sent to the engine."""
    async with held(stack):
        gone = await stack.send(chat("batch", 600), timeout_s=1.5)
        assert gone.status == 0
    # The line is empty: who comes now is served, and was not behind anybody.
    assert (await stack.send(chat("batch", 10))).status == 200
    await stack.until_empty()
    assert not [r for r in stack.engines["e0"].requests if r["output_tokens"] == 600]
