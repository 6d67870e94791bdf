"""Counting beside the event loop: short texts at once, long ones in threads, with a deadline and the bound behind it.

Owns the threads and the clock of counting; what a token is, ``tokens`` knows. The native tokenizers release the
GIL, so a thread that counts does not stop the loop; medium and giant bodies have threads of their own, so that
no giant delays an agent's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from extproc.config.models import Config
from extproc.dialects import BodyLimits, InferenceRequest, Parsed, parse
from extproc.tokens import CountingStopped, PromptCounter, load_tokenizer
from extproc.types import RequestHead, TokenCount

#: Bodies up to this are counted on the loop: below 100 us for text already seen, about 0.5 ms for new text.
INLINE_BYTES = 32 * 1024

#: Bodies over this are giants.
GIANT_BYTES = 1024 * 1024

#: Body bytes that may wait or be counted at one time; beyond it the bound answers at once.
MAX_PENDING_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class CountingStats:
    """What counting did since the start; read by metrics."""

    inline: int = 0
    threaded: int = 0
    deadlines: int = 0
    refused_for_memory: int = 0
    pending_bytes: int = 0


class Counting:
    """Counts requests for targets; one counter per model, shared by its targets."""

    def __init__(
        self,
        counters: Mapping[str, PromptCounter],
        *,
        deadline_ms: int = 300,
        threads: int = 2,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counters = counters
        self._deadline_ms = deadline_ms
        self._clock_s = clock_s
        self._medium = ThreadPoolExecutor(threads, "kvgate-count")
        self._giants = ThreadPoolExecutor(1, "kvgate-count-giant")
        self._bounds = ThreadPoolExecutor(1, "kvgate-bound")
        self.stats = CountingStats()

    @classmethod
    def from_config(cls, config: Config) -> Counting:
        """Counters of every target, each model's files loaded once. Raises ConfigError."""
        models = {
            name: load_tokenizer(
                Path(model.tokenizer) if model.tokenizer else None,
                Path(model.chat_template) if model.chat_template else None,
                now=datetime.now,
                image_tokens_each=model.image_tokens,
            )
            for name, model in config.models.items()
        }
        nothing = PromptCounter()
        counters = {name: models.get(target.model or "", nothing) for name, target in config.targets.items()}
        return cls(counters, deadline_ms=config.serve.count_deadline_ms)

    def notes(self) -> list[str]:
        """One line per model whose tokenizer is not counted the fastest way, for the log."""
        return sorted({counter.note for counter in self._counters.values() if counter.note})

    async def parse(self, head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
        """``dialects.parse``, on the loop for ordinary bodies and in the giants' thread for giants. Raises BadRequest."""
        if len(body) <= GIANT_BYTES:
            return parse(head, body, limits)
        return await asyncio.get_running_loop().run_in_executor(self._giants, parse, head, body, limits)

    async def per_target(
        self, targets: Iterable[str], request: InferenceRequest, *, budget_tokens: int | None = None
    ) -> dict[str, TokenCount]:
        """Counts of one request for each target; targets of one model are counted once."""
        done: dict[int, TokenCount] = {}
        result: dict[str, TokenCount] = {}
        for target in targets:
            counter = self._counters.get(target, _NO_COUNTER)
            if id(counter) not in done:
                done[id(counter)] = await self.count(counter, request, budget_tokens=budget_tokens)
            result[target] = done[id(counter)]
        return result

    async def count(
        self,
        counter: PromptCounter,
        request: InferenceRequest,
        *,
        deadline_ms: int | None = None,
        budget_tokens: int | None = None,
    ) -> TokenCount:
        """One count. Exact within the deadline and budget, else the bound; never raises for what a client sent."""
        started = self._clock_s()
        stop_at = started + (self._deadline_ms if deadline_ms is None else deadline_ms) / 1000.0
        work = _Work(counter, request, budget_tokens, stop_at, self._clock_s)
        if request.body_bytes <= INLINE_BYTES or (counter.vocabulary is None and request.body_bytes <= GIANT_BYTES):
            self.stats.inline += 1
            counted = work.exact()
        else:
            counted = await self._threaded(work, request.body_bytes, stop_at - started)
        return replace(counted, elapsed_ms=(self._clock_s() - started) * 1000.0)

    async def _threaded(self, work: _Work, size: int, wait_s: float) -> TokenCount:
        loop = asyncio.get_running_loop()
        if self.stats.pending_bytes + size > MAX_PENDING_BYTES:
            self.stats.refused_for_memory += 1
            return await loop.run_in_executor(self._bounds, work.bound)
        self.stats.threaded += 1
        self.stats.pending_bytes += size
        pool = self._giants if size > GIANT_BYTES else self._medium
        future = loop.run_in_executor(pool, work.exact)
        future.add_done_callback(lambda _: self._forget(size))
        try:
            # Shielded: a thread cannot be cancelled, and its bytes stay counted as pending until it is done.
            return await asyncio.wait_for(asyncio.shield(future), wait_s)
        except TimeoutError:
            self.stats.deadlines += 1
            return await loop.run_in_executor(self._bounds, work.bound)

    def _forget(self, size: int) -> None:
        self.stats.pending_bytes -= size

    def close(self) -> None:
        """Stop the threads; counts that still run end by their deadline."""
        for pool in (self._medium, self._giants, self._bounds):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Work:
    """One count as a thread runs it."""

    counter: PromptCounter
    request: InferenceRequest
    budget_tokens: int | None
    stop_at_s: float
    clock_s: Callable[[], float]

    def exact(self) -> TokenCount:
        return self.counter.count(self.request, budget_tokens=self.budget_tokens, tick=self._tick)

    def bound(self) -> TokenCount:
        return self.counter.bound(self.request)

    def _tick(self) -> None:
        if self.clock_s() > self.stop_at_s:
            raise CountingStopped


_NO_COUNTER = PromptCounter()
