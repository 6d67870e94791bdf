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

from extproc.config.models import Config
from extproc.counting.giants import CountCall, GiantHelper, HelperGone
from extproc.counting.specs import CounterSpec, load_all, specs_of
from extproc.dialects import BodyLimits, InferenceRequest, Parsed, parse
from extproc.tokens import CountingStopped, PromptCounter
from extproc.types import RequestHead, TokenCount

#: Bodies up to this are counted on the loop: below 100 us for text already seen, about 0.5 ms for new text.
INLINE_BYTES = 32 * 1024

#: Bodies over this are giants.
GIANT_BYTES = 1024 * 1024

#: Body bytes that may wait or be counted at one time; beyond it the bound answers at once.
MAX_PENDING_BYTES = 256 * 1024 * 1024

#: U+FDFA is 3 bytes in UTF-8, 6 characters as an escape, and 33 bytes after NFKC: no character grows more.
_LONGEST_FORM = 11


@dataclass(slots=True)
class CountingStats:
    """What counting did since the start; read by metrics."""

    inline: int = 0
    threaded: int = 0
    deadlines: int = 0
    refused_for_memory: int = 0
    pending_bytes: int = 0
    helped: int = 0
    helpers_lost: int = 0


class Counting:
    """Counts requests for targets; one counter per model, shared by its targets."""

    def __init__(
        self,
        counters: Mapping[str, PromptCounter],
        *,
        deadline_ms: int = 300,
        threads: int = 2,
        specs: Mapping[str, CounterSpec] | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counters = counters
        self._specs = dict(specs or {})
        self._helper: GiantHelper | None = None
        self._deadline_ms = deadline_ms
        self._clock_s = clock_s
        self._medium = ThreadPoolExecutor(threads, "kvgate-count")
        self._giants = ThreadPoolExecutor(1, "kvgate-count-giant")
        self._bounds = ThreadPoolExecutor(1, "kvgate-bound")
        self.stats = CountingStats()

    @classmethod
    def from_config(cls, config: Config) -> Counting:
        """Counters of every target, each model's files loaded once. Raises ConfigError."""
        specs = specs_of(config)
        loaded = load_all(config, specs.values())
        counters = {target: loaded[spec] for target, spec in specs.items()}
        return cls(counters, deadline_ms=config.serve.count_deadline_ms, specs=specs)

    def start_giant_helper(self) -> None:
        """Start the process that takes giants off this one; until it is ready, and without it, a thread does."""
        self._helper = GiantHelper(self._specs)

    def helper_ready(self) -> bool:
        """Whether giants go to the helper by now."""
        return self._helper is not None and self._helper.ready()

    def remembered_bytes(self) -> int:
        """Bytes that the tokenizers of this process remember of earlier prompts; bounded per tokenizer."""
        known = [counter.vocabulary.encoder for counter in self._counters.values() if counter.vocabulary is not None]
        return sum(encoder.remembered_bytes() for encoder in {id(encoder): encoder for encoder in known}.values())

    def notes(self) -> list[str]:
        """One line per model whose tokenizer is not counted the fastest way, for the log."""
        return sorted({counter.note for counter in self._counters.values() if counter.note})

    async def parse(self, head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
        """``dialects.parse``, on the loop for ordinary bodies, beside it for giants. Raises BadRequest.

        A giant's prompts may stay with the helper process; only ``per_target`` can count them then.
        """
        if len(body) <= GIANT_BYTES:
            return parse(head, body, limits)
        return await asyncio.get_running_loop().run_in_executor(self._giants, self._parse_giant, head, body, limits)

    def _parse_giant(self, head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
        helper = self._helper
        try:
            if helper is not None and helper.ready():
                return helper.parse(head, body, limits)
        except HelperGone:
            self._replace_helper()
        return parse(head, body, limits)

    def _replace_helper(self) -> None:
        self.stats.helpers_lost += 1
        self.start_giant_helper()

    async def per_target(
        self, targets: Iterable[str], request: InferenceRequest, *, budget_tokens: int | None = None
    ) -> dict[str, TokenCount]:
        """Counts of one request for each target; targets of one model are counted once, all within one deadline."""
        if request.handle:
            return await self._far(tuple(targets), request, budget_tokens)
        until = self._clock_s() + self._deadline_ms / 1000.0
        done: dict[int, TokenCount] = {}
        result: dict[str, TokenCount] = {}
        for target in targets:
            counter = self._counters.get(target, _NO_COUNTER)
            if id(counter) not in done:
                left_ms = max(1, round((until - self._clock_s()) * 1000.0))
                done[id(counter)] = await self.count(counter, request, deadline_ms=left_ms, budget_tokens=budget_tokens)
            result[target] = done[id(counter)]
        return result

    async def _far(
        self, targets: tuple[str, ...], request: InferenceRequest, budget_tokens: int | None
    ) -> dict[str, TokenCount]:
        """Counts of a giant that lies with the helper."""
        started = self._clock_s()
        specs = {target: self._specs.get(target, CounterSpec()) for target in targets}
        distinct = tuple(dict.fromkeys(specs.values()))
        call = CountCall(request.handle, distinct, budget_tokens, self._deadline_ms / 1000.0)
        counts = await asyncio.get_running_loop().run_in_executor(self._giants, self._count_far, call, request)
        elapsed_ms = (self._clock_s() - started) * 1000.0
        found = dict(zip(distinct, counts, strict=True))
        return {target: replace(found[spec], elapsed_ms=elapsed_ms) for target, spec in specs.items()}

    def _count_far(self, call: CountCall, request: InferenceRequest) -> tuple[TokenCount, ...]:
        helper = self._helper
        counts: tuple[TokenCount, ...] | None = None
        try:
            if helper is not None and helper.ready():
                self.stats.helped += 1
                counts = helper.count(call)
        except HelperGone:
            self._replace_helper()
        # A giant whose prompts were lost with the helper: every byte of the body a token, and what NFKC adds at most.
        return counts or (TokenCount((request.body_bytes * _LONGEST_FORM,), "bound"),) * len(call.counters)

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
        if self._helper is not None:
            self._helper.close()


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
