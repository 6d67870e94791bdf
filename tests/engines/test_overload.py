"""The overload that kills or thrashes a real engine, without kvgate and with real Envoy and kvgate in front of it.

Figures are printed side by side and written to the file that $KVGATE_OVERLOAD_JSON names.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from extproc.agent.exposition import parse
from extproc.agent.http import Client
from extproc.local import tiny_model
from extproc.local.client import Reply, request
from tests.engines.vllm_server import vllm
from tests.integration.agent.engines import llama, tiny
from tests.support.stack import Stack, running

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

#: A client that is told to come back does so; longer than this and the test says that it starved.
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Work:
    """``count`` requests at once, each with ``tokens_in`` token ids and ``tokens_out`` tokens to write."""

    count: int
    tokens_in: int
    tokens_out: int

    def bodies(self, model: str) -> list[bytes]:
        """Request bodies, the same ones every time."""
        pick = random.Random(1)
        return [
            json.dumps(
                {
                    "model": model,
                    "prompt": [pick.randrange(10, 4000) for _ in range(self.tokens_in)],
                    "max_tokens": self.tokens_out,
                    "ignore_eos": True,
                }
            ).encode()
            for _ in range(self.count)
        ]


@dataclass(frozen=True)
class Outcome:
    """What the clients got: whole answers, failures by status, refusals they were told to retry."""

    whole: int
    failed: dict[int, int]
    refusals: int
    took_s: float
    slowest_served_s: float
    engine_preemptions: float | None = None


async def drive(port: int, work: Work, model: str) -> Outcome:
    """All requests at once; a 429 or 503 with retry-after-ms is retried as an SDK would."""
    refusals = 0
    began = time.monotonic()

    async def one(body: bytes) -> Reply:
        nonlocal refusals
        while True:
            reply = await request(
                port, "POST", "/v1/completions", body=body,
                headers={"content-type": "application/json"}, timeout_s=PATIENCE_S,
            )  # fmt: skip
            wait_ms = reply.headers.get("retry-after-ms")
            if wait_ms is None or time.monotonic() - began > PATIENCE_S:
                return reply
            refusals += 1
            await asyncio.sleep(float(wait_ms) / 1000)

    replies = await asyncio.gather(*(one(body) for body in work.bodies(model)))
    whole = [reply for reply in replies if reply.status == 200 and _tokens(reply) == work.tokens_out]
    failed: dict[int, int] = {}
    for reply in replies:
        if reply not in whole:
            failed[reply.status] = failed.get(reply.status, 0) + 1
    slowest = max((reply.took_s for reply in whole), default=0.0)
    return Outcome(len(whole), failed, refusals, round(time.monotonic() - began, 1), round(slowest, 1))


def _tokens(reply: Reply) -> int | None:
    answer = reply.json()
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return usage.get("completion_tokens") if isinstance(usage, dict) else None


def configuration(url: str, engine: str, **target: Any) -> dict[str, Any]:
    """One target, one lane; the prefill bucket is wide open, so that KV alone decides."""
    return {
        "targets": {
            "primary": {
                "engine": engine, "model": "tiny", "servedModel": "tiny", "ttftBudgetMs": 600_000, "maxWaiting": None,
                "replicas": [{"name": "primary-0", "url": url}], **target,
            }
        },
        "models": {"tiny": {"contextTokens": 8192}},
        # A place at the gate is taken as soon as one is free; a client that comes back later leaves a gap.
        "lanes": {
            "edit": {"maxInputTokens": 6000, "maxOutputTokens": 6000, "queue": {"maxDepth": 64, "maxWaitMs": 5000}}
        },
        "aliases": {"coder": {"lane": "edit", "targets": ["primary"]}},
    }  # fmt: skip


def through_kvgate(url: str, engine: str, work: Work) -> Outcome:
    """The same work through real Envoy, serve, agent and Valkey, with a check that the ledger is empty again."""
    parts = configuration(url, engine)
    with running({}, parts.pop("targets"), **parts) as stack:
        return asyncio.run(_through(stack, work))


async def _through(stack: Stack, work: Work) -> Outcome:
    outcome = await drive(stack.envoy.port, work, "coder")
    await stack.until_empty(30.0)
    assert outcome.whole == work.count, f"{outcome}\n{stack.logs()}"
    return outcome


def tell(name: str, without: Outcome, with_kvgate: Outcome) -> None:
    """Print both rows, and keep them where asked."""
    rows = {"without": asdict(without), "with": asdict(with_kvgate)}
    print(f"\n{name}\n  without kvgate: {rows['without']}\n  with kvgate:    {rows['with']}")
    path = os.environ.get("KVGATE_OVERLOAD_JSON")
    if path:
        file = Path(path)
        found = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(found | {name: rows}, indent=1) + "\n")


async def test_llamacpp_loses_requests_without_kvgate_and_none_with_it(tmp_path: Path) -> None:
    """16 x (1,500 + 1,000) on 8,192 unified cells: overflow fails running requests; reserved in front, all are whole."""
    work = Work(16, 1500, 1000)
    model = tiny(tmp_path / "model")
    async with llama(model, tmp_path / "bare.log", slots=16) as engine:
        without = await drive(engine.server.port, work, "tiny")
    async with llama(model, tmp_path / "log", slots=16) as engine:
        with_kvgate = await asyncio.to_thread(through_kvgate, engine.server.url, "llamacpp", work)
        overflows = engine.log.read_text().count("Context size has been exceeded")
    tell("llama.cpp, 16 x (1500 + 1000) on 8192 unified cells", without, with_kvgate)
    assert sum(without.failed.values()) > 0
    assert (with_kvgate.whole, with_kvgate.failed, overflows) == (16, {}, 0)


async def preemptions(url: str) -> float:
    """vLLM's own count."""
    client = Client(url)
    body = (await client.get("/metrics", 30.0)).body.decode()
    await client.close()
    return sum(sample.value for sample in parse(body).get("vllm_num_preemptions_total"))


async def test_vllm_preempts_without_kvgate_and_not_with_it(tmp_path: Path) -> None:
    """24 x (1,000 + 2,500) on a pool of 16,384 tokens: vLLM admits what it must preempt; reserved in front, nothing is."""
    work = Work(24, 1000, 2500)
    model = tiny_model.make(tmp_path / "model", quantizations=()).directory
    async with vllm(model, tmp_path / "log", "--no-enable-prefix-caching") as server:
        bare = await drive(server.port, work, "tiny")
        between = await preemptions(server.url)
        gated = await asyncio.to_thread(through_kvgate, server.url, "vllm", work)
        after = await preemptions(server.url)
    without = Outcome(**asdict(bare) | {"engine_preemptions": between})
    with_kvgate = Outcome(**asdict(gated) | {"engine_preemptions": after - between})
    tell("vLLM, 24 x (1000 + 2500) on 16384 tokens", without, with_kvgate)
    assert between > 0
    assert (with_kvgate.whole, with_kvgate.failed, with_kvgate.engine_preemptions) == (24, {}, 0)
