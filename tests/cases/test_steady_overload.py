"""Retry-After under steady overload, in virtual time: who comes back exactly when told is admitted.

More clients than fit ask again as soon as they are answered, and come back when told where they are refused. The real
admission, completion and ledger decide; only Envoy, the engines and time are played, so a run is the same every time.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle

import pytest

from extproc.ledger.base import Ended
from extproc.ledger.inmemory import InMemoryLedger
from extproc.types import Decision
from tests.cases.sidecar import Sidecar, ended, report, tokens
from tests.load.work import BLOCK_TOKENS, Job, blocks, looping
from tests.support.ledgers import Clock

BLOCKS, STEP_S = 192, 0.04
#: A mean request: 230 tokens in, 105 out, each rounded up to blocks.
OUTPUT, MEAN_BLOCKS = (60, 150), 15 + 7
#: An end is heard of so much later; agents look, and sidecars read the ledger, once in so many seconds.
HEARD_S, SCRAPE_S = 0.03, 0.5
WARM_S, STEADY_S = 60.0, 300.0

#: Every answer runs to its cap; or caps are four times the answers, whose lengths are learned; or nobody says how long.
KNOWN, LEARNED, UNTOLD = "known", "learned", "never told"

#: When clients come back: exactly when told; at the whole second of the standard header; some in half the time at first.
EXACT, WHOLE_SECONDS, HASTY = "exact", "whole seconds", "hasty"
HASTY_SHARE = 0.2

Action = Callable[[], Awaitable[None]]


def configuration(engines: int) -> str:
    """KV blocks are the only limit."""
    replicas = ", ".join(f"{{name: gpu-{number}, url: 'http://127.0.0.1:1'}}" for number in range(engines))
    return (
        f"targets: {{primary: {{engine: vllm, maxWaiting: null, ttftBudgetMs: 3600000, replicas: [{replicas}]}}}}\n"
        "lanes: {edit: {}}\naliases: {coder: {lane: edit, targets: [primary]}}\nledger: {url: memory}\n"
    )


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a job, its ``tries``-th return; ``early``: before the time that it was told."""

    at_s: float
    tries: int
    refused: bool
    early: bool


@dataclass(frozen=True, slots=True)
class Running:
    """A request that an engine works on since ``since_s``."""

    job: Job
    replica: str
    since_s: float

    def used_blocks(self, now_s: float) -> int:
        """What it holds by now."""
        return blocks(self.job.input + int((now_s - self.since_s) / STEP_S))


class World:
    """Clients, engines and agents around two sidecars that decide in turn, one event after the other.

    As behind one Envoy, the first hears of every end and the other of none.
    """

    def __init__(self, engines: int, over: float, lengths: str, seed: int, habit: str = EXACT) -> None:
        self.clock = Clock()
        self.names = [f"gpu-{number}" for number in range(engines)]
        ledger = InMemoryLedger(self.clock, periodic_s=1.0)
        draw = random.Random(seed)
        self.sidecars = [
            Sidecar(configuration(engines), ledger, clock_s=self.clock, spread=draw.random) for _ in range(2)
        ]
        self._turns = cycle(self.sidecars)
        clients = round(over * engines * BLOCKS / MEAN_BLOCKS)
        self.attempts: list[Attempt] = []
        self.running: dict[str, Running] = {}
        self._events: list[tuple[float, int, Action]] = []
        self._number = count()
        self._lengths = lengths
        self._habit = habit
        self._moods = random.Random(seed)
        self._at(0.0, self._scrape)
        for jobs in looping(clients, 200, seed, OUTPUT):
            self._at(jobs[0].at_s, partial(self._next, iter(jobs)))

    async def run(self, seconds: float) -> None:
        """Let that much time pass."""
        until_s = self.clock.now_s + seconds
        while self._events[0][0] <= until_s:
            at_s, _, action = heapq.heappop(self._events)
            self.clock.tick(at_s - self.clock.now_s)
            await action()

    def _at(self, in_s: float, action: Action) -> None:
        heapq.heappush(self._events, (self.clock.now_s + in_s, next(self._number), action))

    async def _next(self, jobs: Iterator[Job]) -> None:
        await self._ask(jobs, next(jobs), 0, early=False)

    async def _ask(self, jobs: Iterator[Job], job: Job, tries: int, *, early: bool) -> None:
        known = self._lengths == KNOWN
        cap = job.cap if known else 4 * job.cap
        decision = await next(self._turns).decide(tokens(job.input, max_tokens=cap, ignore_eos=known))
        refusal = decision.refusal
        self.attempts.append(Attempt(self.clock.now_s, tries, refusal is not None, early))
        if refusal is not None:
            assert refusal.retry_after_ms is not None
            wait_s, early = self._patience(refusal.retry_after_ms / 1000, tries)
            self._at(wait_s, partial(self._ask, jobs, job, tries + 1, early=early))
            return
        assert decision.rid is not None
        assert decision.replica is not None
        self.running[decision.rid] = Running(job, decision.replica, self.clock.now_s)
        took_s = job.output * STEP_S
        self._at(took_s, partial(self._done, jobs, decision))
        self._at(took_s + HEARD_S, partial(self._heard, decision, job, took_s + HEARD_S))

    def _patience(self, told_s: float, tries: int) -> tuple[float, bool]:
        """How long a refused client waits, and whether that is less than it was told."""
        if self._habit == WHOLE_SECONDS:
            return math.ceil(told_s), False
        if self._habit == HASTY and not tries and self._moods.random() < HASTY_SHARE:
            return told_s / 2, True
        return told_s, False

    async def _done(self, jobs: Iterator[Job], decision: Decision) -> None:
        del self.running[str(decision.rid)]
        await self._next(jobs)

    async def _heard(self, decision: Decision, job: Job, ago_s: float) -> None:
        usage = {} if self._lengths == UNTOLD else {"input_tokens": job.input, "output_tokens": job.output}
        completion = self.sidecars[0].runtime.completion
        completion.record(
            ended(decision, Ended.COMPLETE, status=200, usage=usage, cluster=str(decision.replica), took_s=ago_s),
            "envoy-1",
        )
        await completion.flush()

    async def _scrape(self) -> None:
        now_s, held = (
            self.clock.now_s,
            {name: [r for r in self.running.values() if r.replica == name] for name in self.names},
        )
        reports = [
            report(
                name, tokens=BLOCKS * BLOCK_TOKENS, scrape_start_at_s=now_s - 0.02, scrape_end_at_s=now_s,
                used_blocks=sum(one.used_blocks(now_s) for one in held[name]), running=len(held[name]),
            )
            for name in self.names
        ]  # fmt: skip
        for sidecar in self.sidecars:
            await sidecar.see(*reports)
            await sidecar.runtime.share_lessons()
        self._at(SCRAPE_S, self._scrape)


@pytest.mark.parametrize(
    ("engines", "over", "lengths", "habit", "admitted", "served"),
    [
        (1, 1.3, KNOWN, EXACT, 0.95, 0.8),
        (3, 1.3, KNOWN, EXACT, 0.95, 0.8),
        (3, 1.6, KNOWN, EXACT, 0.95, 0.8),
        (3, 2.0, KNOWN, EXACT, 0.95, 0.8),
        (3, 1.3, LEARNED, EXACT, 0.8, 0.65),
        (3, 1.6, LEARNED, EXACT, 0.8, 0.6),
        (3, 2.0, LEARNED, EXACT, 0.8, 0.6),
        (6, 1.2, LEARNED, EXACT, 0.8, 0.6),
        (6, 0.7, UNTOLD, EXACT, 0.8, 0.3),
        (3, 1.3, LEARNED, WHOLE_SECONDS, 0.8, 0.6),
        (3, 1.6, LEARNED, HASTY, 0.8, 0.6),
    ],
)
async def test_who_comes_back_when_told_is_admitted(
    engines: int, over: float, lengths: str, habit: str, admitted: float, served: float
) -> None:
    """Of hundreds of returns at the given time most are admitted, while the engines stay in use.

    ``served`` is the least share of what would be served if all pools were full of mean requests without a pause: a
    request of unknown length takes more than it will need.
    """
    world = World(engines, over, lengths, seed=3, habit=habit)
    try:
        await world.run(WARM_S)
        since = len(world.attempts)
        await world.run(STEADY_S)
    finally:
        for sidecar in world.sidecars:
            sidecar.close()
    steady = world.attempts[since:]
    back = [attempt for attempt in steady if attempt.tries and not attempt.early]
    assert len(back) > 200 * engines
    assert sum(not attempt.refused for attempt in back) >= admitted * len(back)
    fit = engines * BLOCKS / MEAN_BLOCKS * STEADY_S / (STEP_S * sum(OUTPUT) / 2)
    assert sum(not attempt.refused for attempt in steady) >= served * fit
