"""The memory and scheduling model of the emulated engine: paged KV pool, FIFO queue, chunked prefill, preemption.

Owns what an engine step does to blocks and sequences; knows no HTTP, no clock, no randomness (time is an argument),
so that the same model runs in real time behind HTTP and in virtual time in tests. It imitates two engines:

- ``preempt`` (vLLM): a prompt is admitted when its blocks fit, nothing is kept for its output; when the pool is full
  the newest running request gives up all its blocks and is recomputed later, prompt and output so far.
- ``fatal`` (llama.cpp with a unified cache): a slot is all that admission asks for; when the cells are full every
  running request ends with an error.

A step of P prefill and D decode tokens lasts ``step_base_s + P / prefill_tokens_per_s + D / decode_tokens_per_s``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Size, limits and rates of one emulated engine.

    ``blocks`` includes the null block where ``null_block`` is set (vLLM keeps block 0 for padding), so the pool
    holds ``usable_blocks``. ``step_tokens`` bounds the tokens computed in one step (chunked prefill).
    """

    blocks: int = 512
    block_tokens: int = 16
    max_sequences: int = 256
    max_model_tokens: int = 8176
    step_tokens: int = 2048
    step_base_s: float = 0.02
    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 2_000.0
    overflow: str = "preempt"  # preempt | fatal
    prefix_cache: bool = False
    null_block: bool = True

    def __post_init__(self) -> None:
        """Refuse a shape that no engine would start with; ``ValueError`` names the field."""
        for name in ("blocks", "block_tokens", "max_sequences", "max_model_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0")
        if self.step_base_s < 0:
            raise ValueError("step_base_s must not be negative")
        if self.overflow not in ("preempt", "fatal"):
            raise ValueError("overflow must be preempt or fatal")
        if self.max_model_tokens > self.pool_tokens:
            raise ValueError(f"max_model_tokens {self.max_model_tokens} does not fit the pool of {self.pool_tokens}")

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.blocks - int(self.null_block)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.usable_blocks * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)


class Phase(StrEnum):
    """Where a sequence stands; the last four are ends."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence in the engine: ``output_tokens`` is how many it will produce, which only the emulator knows.

    ``prompt_keys`` name the prompt's full blocks; equal keys share a block. ``shared_blocks`` is how many of them an
    earlier sequence of the same request already holds (parallel samples), left out of the demand figures.
    """

    rid: str
    input_tokens: int
    output_tokens: int
    prompt_keys: Sequence[Hashable] = ()
    shared_blocks: int = 0
    tag: object = None
    phase: Phase = Phase.WAITING
    computed: int = 0
    generated: int = 0
    cached: int = 0
    preemptions: int = 0
    private_blocks: int = 0
    shared_keys: list[Hashable] = field(default_factory=list)
    submitted_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.input_tokens + self.generated

    @property
    def held_blocks(self) -> int:
        """Blocks it refers to now, shared ones included."""
        return self.private_blocks + len(self.shared_keys)


class BlockPool:
    """Counts of used, shared and remembered blocks; never more than ``capacity`` in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.peak_used = 0
        self._references: dict[Hashable, int] = {}
        self._remembered: OrderedDict[Hashable, None] = OrderedDict()  # unreferenced, oldest first

    @property
    def free(self) -> int:
        """Blocks nobody refers to; remembered prefixes count as free, as in vLLM's usage figure."""
        return self.capacity - self.used

    def grow(self, generation: Generation, blocks: int) -> bool:
        """Let ``generation`` hold ``blocks`` blocks in all; False (and no change) where they are not free."""
        more = blocks - generation.held_blocks
        if more <= 0:
            return True
        if more > self.free:
            return False
        generation.private_blocks += more
        self._take(more)
        return True

    def match(self, generation: Generation) -> int:
        """Take references on the longest known prefix of its prompt and return how many blocks that is."""
        for key in generation.prompt_keys:
            if key in self._references:
                self._references[key] += 1
            elif key in self._remembered:
                del self._remembered[key]
                self._references[key] = 1
                self._take(1)
            else:
                break
            generation.shared_keys.append(key)
        return len(generation.shared_keys)

    def publish(self, generation: Generation, full_blocks: int) -> None:
        """Make its first ``full_blocks`` prompt blocks shareable under their keys."""
        keys = generation.prompt_keys
        while (at := len(generation.shared_keys)) < min(full_blocks, len(keys)):
            if keys[at] in self._references:
                return  # computed twice at the same time: the second copy stays private
            self._remembered.pop(keys[at], None)
            self._references[keys[at]] = 1
            generation.shared_keys.append(keys[at])
            generation.private_blocks -= 1

    def release(self, generation: Generation, *, remember: bool) -> None:
        """Give back everything it holds; unreferenced prefixes are remembered where ``remember``."""
        self.used -= generation.private_blocks
        generation.private_blocks = 0
        for key in reversed(generation.shared_keys):  # the tail of a prefix is forgotten first
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                self.used -= 1
                if remember:
                    self._remembered[key] = None
        generation.shared_keys.clear()

    def _take(self, blocks: int) -> None:
        self.used += blocks
        self.peak_used = max(self.peak_used, self.used)
        while self.used + len(self._remembered) > self.capacity:
            self._remembered.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step as planned: who computes how many tokens, how long it lasts, who was thrown out."""

    work: tuple[tuple[Generation, int], ...]
    duration_s: float
    tokens: int
    preempted: tuple[Generation, ...] = ()
    failed: tuple[Generation, ...] = ()


@dataclass(slots=True)
class Tally:
    """What the engine counted itself since its start; the truth that a ledger is compared with.

    ``peak_demand_blocks``: most blocks that all requests inside (running and waiting) asked for at one moment by
    their tokens so far. ``peak_final_blocks``: the same by their tokens at their end, that is, what a schedule without
    preemption would have to hold. ``over_capacity_events``: steps in which the running requests did not fit.
    """

    submitted: int = 0
    steps: int = 0
    preemptions: int = 0
    over_capacity_events: int = 0
    failed: int = 0
    finished: int = 0
    aborted: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    peak_demand_blocks: int = 0
    peak_final_blocks: int = 0
    peak_running: int = 0
    peak_waiting: int = 0


class Engine:
    """The scheduler: ``submit``/``abort`` at any time, ``plan`` at the start of a step, ``complete`` at its end."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.usable_blocks)
        self.tally = Tally()
        self.running: list[Generation] = []
        self.waiting: deque[Generation] = deque()
        self._demand = 0
        self._final = 0

    @property
    def busy(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.running or self.waiting)

    def submit(self, generation: Generation, now_s: float) -> None:
        """Queue a sequence; its prompt must be shorter than the context (the caller answers 400 otherwise)."""
        generation.submitted_s = now_s
        self.waiting.append(generation)
        self.tally.submitted += 1
        self._demand += self._blocks(generation, generation.tokens)
        self._final += self._blocks(generation, self._final_tokens(generation))
        self._note_peaks()

    def abort(self, generation: Generation, now_s: float) -> bool:
        """Drop a sequence; a running one keeps its blocks until the next step starts. False where it had ended."""
        if generation.phase is Phase.WAITING:
            self.waiting.remove(generation)
        elif generation.phase is not Phase.RUNNING:
            return False
        self._end(generation, Phase.ABORTED, now_s)
        self.tally.aborted += 1
        return True

    def plan(self, now_s: float) -> Step:
        """Decide the next step and take its blocks."""
        self._sweep()
        if self.shape.overflow == "fatal":
            self._fill_slots(now_s)
        work: list[tuple[Generation, int]] = []
        preempted: list[Generation] = []
        budget = self.shape.step_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            generation = self.running[index]
            new = min(generation.tokens - generation.computed, budget)
            if not self._fits(generation, new, preempted):
                if self.shape.overflow == "fatal":
                    return self._fail_all(now_s)
                break
            work.append((generation, new))
            budget -= new
            index += 1
        if preempted:
            self.tally.over_capacity_events += 1
        elif self.shape.overflow == "preempt":
            self._admit(work, budget, now_s)
        self.tally.steps += 1
        self._note_peaks()
        tokens = sum(new for _, new in work)
        decodes = sum(1 for generation, new in work if new == 1 and generation.generated)
        duration_s = (
            self.shape.step_base_s
            + (tokens - decodes) / self.shape.prefill_tokens_per_s
            + decodes / self.shape.decode_tokens_per_s
        )
        return Step(tuple(work), duration_s, tokens, tuple(preempted))

    def complete(self, step: Step, now_s: float) -> list[Generation]:
        """Apply a step; returns the sequences that produced a token or ended by it."""
        out: list[Generation] = []
        for generation, new in step.work:
            if generation.phase is not Phase.RUNNING:
                continue  # aborted while the step ran
            generation.computed += new
            if generation.computed < generation.tokens:
                continue
            if generation.first_token_s is None:
                generation.first_token_s = now_s
                self.tally.input_tokens += generation.input_tokens
                self.tally.cached_tokens += generation.cached
            if generation.generated < generation.output_tokens:
                self._demand += self._blocks(generation, generation.tokens + 1) - self._blocks(
                    generation, generation.tokens
                )
                generation.generated += 1
                self.tally.output_tokens += 1
            if generation.generated >= generation.output_tokens:
                self._end(generation, Phase.FINISHED, now_s)
                self.tally.finished += 1
            out.append(generation)
        self._sweep()
        self._note_peaks()
        return out

    def _fits(self, generation: Generation, new: int, preempted: list[Generation]) -> bool:
        """Take blocks for ``new`` more tokens, throwing out newer sequences where the engine preempts."""
        needed = self.shape.blocks_for(generation.computed + new)
        while not self.pool.grow(generation, needed):
            if self.shape.overflow == "fatal":
                return False
            victim = self.running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is generation:
                return False
        self.pool.publish(generation, (generation.computed + new) // self.shape.block_tokens)
        return True

    def _fill_slots(self, now_s: float) -> None:
        """Give every free slot to a waiting sequence; llama.cpp looks at no memory before it does."""
        while self.waiting and len(self.running) < self.shape.max_sequences:
            generation = self.waiting.popleft()
            self._start(generation, 0, now_s)

    def _admit(self, work: list[tuple[Generation, int]], budget: int, now_s: float) -> None:
        """Move waiting sequences into the batch in order, as long as the whole prompt of the first one fits."""
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_sequences:
            generation = self.waiting[0]
            matched = self.pool.match(generation)
            # At least one token must be computed to sample from, whatever the cache knows.
            cached = min(matched * self.shape.block_tokens, generation.tokens - 1)
            if self.shape.blocks_for(generation.tokens) - generation.held_blocks > self.pool.free:
                self.pool.release(generation, remember=self.shape.prefix_cache)
                return
            self.waiting.popleft()
            self._start(generation, cached, now_s)
            new = min(generation.tokens - cached, budget)
            self._fits(generation, new, [])
            work.append((generation, new))
            budget -= new

    def _start(self, generation: Generation, cached: int, now_s: float) -> None:
        generation.phase = Phase.RUNNING
        generation.computed = cached
        if generation.scheduled_s is None:
            generation.scheduled_s = now_s
            generation.cached = cached
        self.running.append(generation)

    def _preempt(self, victim: Generation) -> None:
        self.pool.release(victim, remember=self.shape.prefix_cache)
        victim.computed = 0
        victim.phase = Phase.WAITING
        victim.preemptions += 1
        self.tally.preemptions += 1
        self.waiting.appendleft(victim)

    def _fail_all(self, now_s: float) -> Step:
        """A full unified cache: every running request ends with an error, the waiting ones go on."""
        failed = tuple(self.running)
        for generation in failed:
            self._end(generation, Phase.FAILED, now_s)
        self.tally.over_capacity_events += 1
        self.tally.failed += len(failed)
        self._sweep()
        return Step((), self.shape.step_base_s, 0, failed=failed)

    def _end(self, generation: Generation, phase: Phase, now_s: float) -> None:
        generation.phase = phase
        generation.ended_s = now_s
        self._demand -= self._blocks(generation, generation.tokens)
        self._final -= self._blocks(generation, self._final_tokens(generation))

    def _sweep(self) -> None:
        """Free what ended since; an aborted request's blocks come back here, at a step's border."""
        if all(generation.phase is Phase.RUNNING for generation in self.running):
            return
        for generation in self.running:
            if generation.phase is not Phase.RUNNING:
                self.pool.release(generation, remember=self.shape.prefix_cache)
        self.running = [generation for generation in self.running if generation.phase is Phase.RUNNING]

    def _blocks(self, generation: Generation, tokens: int) -> int:
        return self.shape.blocks_for(tokens) - generation.shared_blocks

    @staticmethod
    def _final_tokens(generation: Generation) -> int:
        # The last token is sampled but never computed, so it needs no place.
        return generation.input_tokens + max(0, generation.output_tokens - 1)

    def _note_peaks(self) -> None:
        tally = self.tally
        tally.peak_demand_blocks = max(tally.peak_demand_blocks, self._demand)
        tally.peak_final_blocks = max(tally.peak_final_blocks, self._final)
        tally.peak_running = max(tally.peak_running, len(self.running))
        tally.peak_waiting = max(tally.peak_waiting, len(self.waiting))
