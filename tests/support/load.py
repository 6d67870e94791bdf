"""Clients for fault tests: streams that say whether they were whole, a background trickle, and what a refusal must be.

A stream is *whole* when its status was 200 and its last event was ``[DONE]``; whatever else happened to it counts as
harm. Figures of the engines come from ``GET /emulator/stats``, never from the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.local.client import Reply
from tests.support.stack import Stack

#: Reasons that a client may meet while something of ours is broken.
TRANSIENT = frozenset(
    {"ledger_down", "unknown_state", "not_ready", "upstream_unavailable", "upstream_timeout", "internal"}
)

#: Reasons of requests that were never admitted because something was not up yet, or not in time.
NOT_YET = frozenset({"ledger_down", "unknown_state", "not_ready"})
#: A stream that meets one of them is sent again for this long.
STARTED_WITHIN_S = 6.0


def chat(model: str, output: int, text: str = "hello", **extra: Any) -> dict[str, Any]:
    """A chat request whose answer has exactly ``output`` tokens, so that the engine can hold what was reserved."""
    return {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": output, "min_tokens": output,
        "ignore_eos": True, **extra,
    }  # fmt: skip


def whole(reply: Reply) -> bool:
    """Whether a stream came to its own end."""
    return reply.status == 200 and reply.error is None and reply.events[-1:] == ["[DONE]"]


def malformed(reply: Reply) -> str | None:
    """What is wrong with a refusal, or None: JSON in a known dialect, kvgate's headers, a usable Retry-After."""
    body = reply.json()
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        return f"no error object: {reply}"
    if not reply.headers.get("content-type", "").startswith("application/json"):
        return f"not announced as JSON: {reply}"
    if reply.headers.get("x-kvgate-decision") not in ("reject", "unavailable") or not reply.headers.get(
        "x-kvgate-reason"
    ):
        return f"no decision or reason: {reply}"
    if not reply.headers.get("x-request-id"):
        return f"no request id: {reply}"
    if reply.status in (429, 503, 504):
        after, after_ms = reply.headers.get("retry-after", ""), reply.headers.get("retry-after-ms", "")
        if reply.headers.get("x-should-retry") != "true" or not after.isdigit() or not 1 <= int(after) <= 60:
            return f"no usable retry-after: {reply}"
        if not after_ms.isdigit() or not 0 < int(after_ms) <= 60_000:
            return f"no usable retry-after-ms: {reply}"
    return None


def over_capacity(stack: Stack, *engines: str) -> list[str]:
    """Every sign, by the engines' own counts, that one was promised more than it holds; empty where none was."""
    signs = []
    for name in engines or tuple(stack.engines):
        stats = stack.engines[name].stats()
        counts = ("preemptions", "over_capacity_events", "failed")
        signs += [f"{name}: {count} {stats[count]}" for count in counts if stats[count]]
        if stats["peak_final_blocks"] > stats["capacity_blocks"]:
            signs.append(f"{name}: {stats['peak_final_blocks']} of {stats['capacity_blocks']} blocks were promised")
    return signs


@dataclass
class Streams:
    """Long streams in the background; ``ended_s`` is when the last of them was over (monotonic).

    They are what a test needs running before its fault, so one that a busy machine's ledger or ``serve`` did not answer in
    time is sent again, unless refusals are the subject (``again`` false). One that was admitted is never sent again.
    """

    stack: Stack
    again: bool = True
    tasks: list[asyncio.Task[Reply]] = field(default_factory=list)
    ended_s: float = 0.0

    def start(self, count: int, body: Mapping[str, Any], timeout_s: float = 60.0) -> None:
        """``count`` more streams of ``body``."""
        self.tasks += [asyncio.create_task(self._one(body, timeout_s)) for _ in range(count)]

    async def _one(self, body: Mapping[str, Any], timeout_s: float) -> Reply:
        until_s = time.monotonic() + STARTED_WITHIN_S
        while True:
            reply = await self.stack.send({**body, "stream": True}, timeout_s=timeout_s)
            self.ended_s = time.monotonic()
            if reply.status == 200 or not self.again:
                return reply
            print(f"a stream ended with {reply.status} {reply.headers.get('x-kvgate-reason')}")
            if reply.headers.get("x-kvgate-reason") not in NOT_YET or self.ended_s > until_s:
                return reply
            await asyncio.sleep(0.1)

    @property
    def running(self) -> int:
        """How many are not over."""
        return sum(not task.done() for task in self.tasks)

    async def all(self) -> list[Reply]:
        """Wait for all of them."""
        return list(await asyncio.gather(*self.tasks))


@dataclass
class Trickle:
    """New short requests at a steady pace until stopped: who came when, and what they got."""

    stack: Stack
    body: Mapping[str, Any]
    every_s: float = 0.25
    timeout_s: float = 20.0
    sent: list[asyncio.Task[tuple[float, Reply]]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Trickle:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*self.sent)

    async def _run(self) -> None:
        while True:
            self.sent.append(asyncio.create_task(self._one()))
            await asyncio.sleep(self.every_s)

    async def _one(self) -> tuple[float, Reply]:
        at_s = time.monotonic()
        return at_s, await self.stack.send(self.body, timeout_s=self.timeout_s)

    async def until_served(self, since_s: float, within_s: float) -> None:
        """Wait until a request sent after ``since_s`` was answered 200; fails after ``within_s``."""
        until_s = time.monotonic() + within_s
        while not any(done.status == 200 for done in self._done(since_s)):
            if time.monotonic() > until_s:
                raise AssertionError(f"nothing was served; answered {[done.status for done in self._done(since_s)]}")
            await asyncio.sleep(0.1)

    def _done(self, since_s: float) -> list[Reply]:
        done = (task.result() for task in self.sent if task.done())
        return [reply for at_s, reply in done if at_s >= since_s]

    def replies(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[Reply]:
        """The answers to requests sent within this time; all of them must be over."""
        return [reply for at_s, reply in (task.result() for task in self.sent) if since_s <= at_s <= until_s]
