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
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from extproc.config.models import Config
from extproc.counting.giants import CountCall, GiantHelper, HelperGone
from extproc.counting.specs import CounterSpec, load_all, specs_of
from extproc.dialects import BodyLimits, InferenceRequest, Parsed, parse, recognise, too_complex, values_of
from extproc.tokens import CountingStopped, PromptCounter
from extproc.types import RequestHead, TokenCount

#: Bodies up to this are counted on the loop: below 100 us for text already seen, about 0.5 ms for new text.
INLINE_BYTES = 32 * 1024

#: Bodies up to this are bounded on the loop where there is no tokenizer: 10 ms for the costliest text or value.
INLINE_BOUND_BYTES = 128 * 1024

#: JSON values up to this are parsed on the loop: a content part of a type that nobody knows costs a microsecond.
INLINE_VALUES = 20_000

#: Bodies over this are giants.
GIANT_BYTES = 1024 * 1024

#: Body bytes that may wait or be counted at one time; beyond it the bound answers at once.
MAX_PENDING_BYTES = 256 * 1024 * 1024

#: What a byte of a body can become at most. U+FDFA is 3 bytes in UTF-8, 6 characters as an escape, and 33 bytes after
#: NFKC; an element of a list is 2 bytes and prints on a line of its own, indented by four blanks a level.
_LONGEST_FORM = max(33 // 3, 2 * BodyLimits().max_depth + 1)


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
        self._giant_bounds = ThreadPoolExecutor(1, "kvgate-bound-giant")
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
        """``dialects.parse``, on the loop for ordinary bodies, beside it for the others. Raises BadRequest.

        Giants, and bodies of as many values, go to the helper process where there is one. Their prompts may stay there;
        only ``per_target`` can count them then. What may unpack to a giant is parsed in a thread.
        """
        encoded = "content-encoding" in head.headers
        run = asyncio.get_running_loop().run_in_executor
        if len(body) > GIANT_BYTES or (not encoded and len(body) > INLINE_BYTES and _crowded(body)):
            return await run(self._giants, self._parse_giant, head, body, limits)
        if encoded and len(body) * limits.max_ratio > GIANT_BYTES:
            return await run(self._medium, parse, head, body, limits)
        return parse(head, body, limits)

    def _parse_giant(self, head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
        helper = self._ready_helper()
        if helper is None:
            return parse(head, body, limits)
        try:
            return helper.parse(head, body, limits)
        except HelperGone:
            # What took the helper too long, or its life, is not tried again in this process.
            self._replace_helper()
        route = recognise(head)
        if route.kind == "inference":
            raise too_complex("The body takes too long to read.")
        return Parsed(route, body, False, None)

    def _ready_helper(self) -> GiantHelper | None:
        """The helper, if it is there to be asked; one that ended by itself is replaced."""
        helper = self._helper
        if helper is None:
            return None
        try:
            if not helper.ended():
                return helper if helper.ready() else None
        except HelperGone:
            pass
        self._replace_helper()
        return None

    def _replace_helper(self) -> None:
        self.stats.helpers_lost += 1
        if self._helper is not None:
            self._helper.close()
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
        helper = self._ready_helper()
        counts: tuple[TokenCount, ...] | None = None
        if helper is not None:
            self.stats.helped += 1
            try:
                counts = helper.count(call)
            except HelperGone:
                self._replace_helper()
        return counts or (self._lost(request),) * len(call.counters)

    def _lost(self, request: InferenceRequest) -> TokenCount:
        """A giant whose prompts were lost with the helper: as much as its bytes can become, and what is no text."""
        beside = _NO_COUNTER.bound(request).input_tokens
        return TokenCount((request.body_bytes * _LONGEST_FORM + beside,), "bound")

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
        if request.body_bytes <= (INLINE_BYTES if counter.vocabulary is not None else INLINE_BOUND_BYTES):
            self.stats.inline += 1
            counted = work.exact()
        else:
            counted = await self._threaded(work, request.body_bytes, stop_at - started)
        return replace(counted, elapsed_ms=(self._clock_s() - started) * 1000.0)

    async def _threaded(self, work: _Work, size: int, wait_s: float) -> TokenCount:
        loop = asyncio.get_running_loop()
        bounds = self._giant_bounds if size > GIANT_BYTES else self._bounds
        if self.stats.pending_bytes + size > MAX_PENDING_BYTES:
            self.stats.refused_for_memory += 1
            return await loop.run_in_executor(bounds, work.bound)
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
            return await loop.run_in_executor(bounds, work.bound)

    def _forget(self, size: int) -> None:
        self.stats.pending_bytes -= size

    def close(self) -> None:
        """Stop the threads; counts that still run end by their deadline."""
        for pool in (self._medium, self._giants, self._bounds, self._giant_bounds):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._helper is not None:
            self._helper.close()


class _Work(Struct, frozen=True):
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


def _crowded(body: bytes) -> bool:
    """Whether a body has more values than the loop should parse."""
    return values_of(body, INLINE_VALUES) > INLINE_VALUES


_NO_COUNTER = PromptCounter()
