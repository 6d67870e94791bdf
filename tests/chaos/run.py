"""The chaos run: load through real Envoy while parts are killed, stopped and cut off at random; then the account.

A run has three phases, each with a stack of its own: the ledger on one server, on a cluster, behind Sentinels.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from extproc.local.client import Reply
from tests.chaos.failovers import CLUSTER_DECK, SENTINELS_DECK
from tests.chaos.faults import SINGLE_DECK, Fault, Scene
from tests.chaos.proxy import Proxy
from tests.support.deployments import ValkeyCluster, ValkeySentinels
from tests.support.load import chat, malformed, over_capacity, whole
from tests.support.stack import PROMPT, Stack, running

#: Envoy's message timeout is 1 s, and parts stand still for up to 9 and 12 s; the rest is a loaded machine's.
REFUSED_WITHIN_S = 6.0
#: Faults of a run, however long a busy machine takes for each of them.
FEWEST_FAULTS = 2
ENGINES = {
    "primary-0": ["--blocks", "321", "--served-model", "m", "--decode-tokens-per-s", "4000"],
    "small-0": ["--blocks", "161", "--served-model", "s", "--decode-tokens-per-s", "4000"],
    "remote-0": ["--blocks", "16385", "--served-model", "r", "--decode-tokens-per-s", "40000"],
}
TARGETS: dict[str, Any] = {
    "primary": {"engine": "vllm", "servedModel": "m", "watermark": 0.0, "replicas": [{"name": "primary-0"}]},
    "small": {"engine": "vllm", "servedModel": "s", "watermark": 0.0, "replicas": [{"name": "small-0"}]},
    "remote": {"engine": "openai", "servedModel": "r", "engineName": "remote-0"},
}
REST: dict[str, Any] = {
    "lanes": {"strict": {}, "away": {"whenDown": "remote"}},
    "aliases": {
        "house": {"lane": "strict", "targets": ["primary", "small"]},
        "coder": {"lane": "away", "targets": ["primary", "small", "remote"]},
    },
    **PROMPT,
}
ENGINE_OF = {"primary": "primary-0", "small": "small-0", "remote": "remote-0"}


@dataclass
class Client:
    """One request: when it came, when its client meant to leave (None: never), and what it got."""

    began_s: float
    leaves: bool
    reply: Reply
    ended_s: float


@dataclass
class Account:
    """What a run has to answer for; ``problems`` is empty where everything held."""

    clients: list[Client]
    faults: Counter[str]
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


@contextmanager
def single(seed: int) -> Iterator[Scene]:
    """One server; the way to it leads through the proxy."""
    proxies: list[Proxy] = []

    def through(valkey: Any) -> str:
        proxies.append(Proxy(valkey.port).start())
        return f"redis://127.0.0.1:{proxies[0].port}/0"

    try:
        with running(ENGINES, TARGETS, ledger_url=through, durable=True, **REST) as stack:
            yield Scene(stack, random.Random(seed), proxies[0])
    finally:
        for proxy in proxies:
            proxy.stop()


@contextmanager
def cluster(seed: int) -> Iterator[Scene]:
    """Three masters, each with a replica."""
    with (
        ValkeyCluster(replicas=1, durable=True) as server,
        running(ENGINES, TARGETS, server=server, **REST) as stack,
    ):
        yield Scene(stack, random.Random(seed))


@contextmanager
def sentinels(seed: int) -> Iterator[Scene]:
    """A master and a replica under three Sentinels."""
    with (
        ValkeySentinels(durable=True) as server,
        running(ENGINES, TARGETS, server=server, **REST) as stack,
    ):
        yield Scene(stack, random.Random(seed))


@dataclass(frozen=True, slots=True)
class Phase:
    """A deployment of the ledger, its faults, and its share of a whole run."""

    name: str
    scene: Callable[[int], AbstractContextManager[Scene]]
    deck: Sequence[Fault]
    share: float


PHASES = (
    Phase("one server", single, SINGLE_DECK, 0.4),
    Phase("cluster", cluster, CLUSTER_DECK, 0.3),
    Phase("Sentinels", sentinels, SENTINELS_DECK, 0.3),
)


async def chaos(
    at: Scene, deck: Sequence[Fault], seconds: float, *, per_s: float = 6.0, say: Any = lambda _: None
) -> Account:
    """Load and faults for ``seconds``, then quiet, then the account."""
    for name in ENGINES:
        at.stack.engines[name].faults(abort_lag_s=0.3)
    clients: list[asyncio.Task[Client]] = []
    load = asyncio.create_task(_load(at, clients, per_s))
    faults = await _faults(at, deck, seconds, say)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    done = list(await asyncio.gather(*clients))
    account = Account(done, faults)
    await _close(at, account, max(client.ended_s for client in done))
    return account


async def _load(at: Scene, clients: list[asyncio.Task[Client]], per_s: float) -> None:
    rng = random.Random(at.rng.random())
    while True:
        clients.append(asyncio.create_task(_client(at.stack, rng, len(clients))))
        await asyncio.sleep(rng.expovariate(per_s))


async def _client(stack: Stack, rng: random.Random, number: int) -> Client:
    leaves = rng.random() < 0.5
    stays_s = rng.choice([rng.uniform(0.01, 0.3), rng.uniform(0.3, 6.0)]) if leaves else 120.0
    output = rng.choice([5, 40, 120, 300])
    body = chat(rng.choice(["house", "coder"]), output, f"request {number} " * rng.randint(1, 8), stream=True)
    # A tenth of the clients send one id with everything.
    request_id = "the-same" if rng.random() < 0.1 else str(uuid.uuid4())
    began = time.monotonic()
    reply = await stack.send(body, headers={"x-request-id": request_id}, timeout_s=stays_s)
    return Client(began, leaves, reply, time.monotonic())


async def _faults(at: Scene, cards: Sequence[Fault], seconds: float, say: Any) -> Counter[str]:
    """Faults in a shuffled order, so that each comes before any comes again; now and then two at once."""
    until = time.monotonic() + seconds
    counted: Counter[str] = Counter()
    deck: list[Fault] = []
    while time.monotonic() < until or counted.total() < FEWEST_FAULTS:
        await asyncio.sleep(at.rng.uniform(0.5, 2.5))
        if not deck:
            deck = at.rng.sample(cards, len(cards))
        chosen = [deck.pop()]
        if deck and at.rng.random() < 0.3 and _part(deck[-1]) != _part(chosen[0]):
            chosen.append(deck.pop())
        names = [fault.__name__ for fault in chosen]
        say(f"{max(0.0, until - time.monotonic()):5.0f} s to go: {' and '.join(names)}")
        counted.update(names)
        await asyncio.gather(*(fault(at) for fault in chosen))
    return counted


def _part(fault: Fault) -> str:
    """What a fault breaks; two at once break different parts."""
    part = fault.__name__.split("_")[0]
    return "ledger" if part in ("owner", "slot", "master", "sentinel") else part


async def _close(at: Scene, account: Account, last_s: float) -> None:
    """The ledger is empty in time, every sum equals its parts, and no engine was promised too much."""
    figures, problems = account.figures, account.problems
    figures["requests"] = len(account.clients)
    figures["answers"] = dict(Counter(_kind(client) for client in account.clients))
    try:
        await at.stack.until_empty()
        figures["ledger empty after the last client, s"] = round(time.monotonic() - last_s, 2)
    except AssertionError as left:
        problems.append(str(left))
    ledger = await at.stack.ledger()
    try:
        problems += [f"sum {line}" for line in await ledger.audit() if line.stored != line.recomputed]
    finally:
        await ledger.close()
    signs = at.signs + over_capacity(at.stack, "primary-0", "small-0")
    figures["signs of over capacity, by the engines' own counts"] = len(signs)
    problems += signs
    _judge(at, account)


def _kind(client: Client) -> str:
    reply = client.reply
    if reply.status == 0:
        return "left" if client.leaves and reply.error and reply.error.startswith("no complete") else "broken"
    return (
        f"{reply.status} {reply.headers.get('x-kvgate-decision')} {reply.headers.get('x-kvgate-reason') or ''}".strip()
    )


def _judge(at: Scene, account: Account) -> None:
    refused = [c for c in account.clients if c.reply.status not in (0, 200)]
    harmed = [c for c in account.clients if _harmed(at, c)]
    slow = max((c.reply.took_s for c in refused), default=0.0)
    account.figures["refused"] = len(refused)
    account.figures["slowest refusal, s"] = round(slow, 3)
    account.figures["whole answers"] = sum(whole(c.reply) for c in account.clients)
    account.figures["streams harmed by kvgate or the ledger"] = len(harmed)
    account.figures["streams that died with their engine"] = sum(
        not whole(c.reply) and _engine_died(at, c) and _kind(c) == "broken" for c in account.clients
    )
    account.problems += [f"harmed: {c.reply.headers} {c.reply.error}" for c in harmed]
    account.problems += [text for c in refused if (text := malformed(c.reply))]
    if slow > REFUSED_WITHIN_S:
        account.problems.append(f"a refusal took {slow:.3f} s")


def _harmed(at: Scene, client: Client) -> bool:
    """A stream that broke, though its client stayed and its engine lived."""
    reply = client.reply
    broke = reply.status == 0 and _kind(client) == "broken"
    cut_short = reply.status == 200 and not whole(reply)
    return (broke or cut_short) and not _engine_died(at, client)


def _engine_died(at: Scene, client: Client) -> bool:
    engine = ENGINE_OF.get(client.reply.headers.get("x-kvgate-target", ""), "")
    deaths = at.killed.get(engine, []) if engine else [t for times in at.killed.values() for t in times]
    return any(client.began_s - 0.5 <= death <= client.ended_s + 0.5 for death in deaths)


def play(phase: Phase, seconds: float, seed: int, say: Any = lambda _: None) -> Account:
    """One phase, from the first process to the account."""
    with phase.scene(seed) as at:
        account = asyncio.run(chaos(at, phase.deck, seconds, say=say))
        if account.problems:
            with suppress(OSError):
                account.figures["logs"] = at.stack.logs()
        return account
