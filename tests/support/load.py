"""Clients for fault tests: streams that say whether they were whole, a background trickle, and what a refusal must be.

A stream is *whole* when its status was 200 and its last event was ``[DONE]``; whatever else happened to it counts as
harm. Figures of the engines come from ``GET /emulator/stats``, never from the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.local.client import Reply
from tests.support.stack import ANSWERED_WITHIN_S, READY_WITHIN_S, Stack

#: Reasons that a client may meet while something of ours is broken.
TRANSIENT = frozenset(
    {"ledger_down", "unknown_state", "not_ready", "upstream_unavailable", "upstream_timeout", "internal"}
)

#: Reasons of requests that were never admitted because something was not up yet, or not in time.
NOT_YET = frozenset({"ledger_down", "unknown_state", "not_ready"})
#: A stream that meets one of them is sent again for this long.
STARTED_WITHIN_S = 60.0


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

    def start(self, count: int, body: Mapping[str, Any], timeout_s: float = 300.0) -> None:
        """``count`` more streams of ``body``."""
        self.tasks += [asyncio.create_task(self._one(body, timeout_s)) for _ in range(count)]

    async def _one(self, body: Mapping[str, Any], timeout_s: float) -> Reply:
        until_s = time.monotonic() + STARTED_WITHIN_S
        while True:
            reply = await self.stack.send({**body, "stream": True}, timeout_s=timeout_s)
            self.ended_s = time.monotonic()
            if reply.status == 200 or not self.again:
                return reply
            print(f"a stream ended with {reply.status} {reply.headers.get('x-kvgate-reason')}: {reply.body[:400]!r}")
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


async def until(true: Callable[[], Any], what: str, within_s: float = READY_WITHIN_S) -> None:
    """Wait for something that other tasks and processes bring about; fails with ``what`` where it does not come."""
    until_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a ``Trickle``, with the moments it was sent and answered (monotonic)."""

    at_s: float
    over_s: float
    reply: Reply


@dataclass
class Trickle:
    """New short requests at a steady pace until stopped: who came when, and what they got when."""

    stack: Stack
    body: Mapping[str, Any]
    every_s: float = 0.25
    timeout_s: float = ANSWERED_WITHIN_S
    sent: list[asyncio.Task[Sent]] = field(default_factory=list)
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

    async def _one(self) -> Sent:
        at_s = time.monotonic()
        reply = await self.stack.send(self.body, timeout_s=self.timeout_s)
        return Sent(at_s, time.monotonic(), reply)

    async def until_served(self, since_s: float, within_s: float = READY_WITHIN_S) -> None:
        """Wait until a request sent after ``since_s`` was answered 200."""
        await until(
            lambda: any(reply.status == 200 for reply in self.answered(since_s)), "a request is served", within_s
        )

    async def until_answered(self, count: int, since_s: float, within_s: float = READY_WITHIN_S) -> None:
        """Wait until so many requests sent after ``since_s`` were answered."""
        await until(lambda: len(self.answered(since_s)) >= count, f"{count} requests are answered", within_s)

    def answered(self, since_s: float = 0.0, before_s: float = float("inf")) -> list[Reply]:
        """The answers, given before ``before_s``, to requests sent after ``since_s``; who left got none."""
        done = [task.result() for task in self.sent if task.done()]
        return [one.reply for one in done if one.at_s > since_s and one.over_s < before_s and one.reply.status]

    def replies(self) -> list[Reply]:
        """What became of all requests; all of them must be over."""
        return [task.result().reply for task in self.sent]

    def waiting(self, since_s: float, until_s: float, at_s: float) -> int:
        """How many of the requests sent between two moments had no answer at a third."""
        done = [task.result() for task in self.sent if task.done()]
        mine = [one for one in done if since_s < one.at_s < until_s]
        return sum(one.over_s > at_s for one in mine)
