"""The demo's load: coding requests in bursts, made of Python's own source files, and what became of each.

Owns the requests (the same for both runs) and the sending, bounded in number and time; knows nothing of processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc.local.client import Reply, request

#: Characters of Python source per token of the demo's tokenizer; only sizes prompts, nothing is decided by it.
CHARS_PER_TOKEN = 2.9
#: Time one request may take, over which it counts as broken.
REQUEST_TIMEOUT_S = 60.0
#: A burst's requests start within this.
BURST_SPREAD_S = 1.0
LOST = "Context size has been exceeded"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of coding request: its alias, what it asks, its share of the load, and its sizes in tokens (from, to)."""

    alias: str
    task: str
    share: float
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


KINDS = (
    Kind("tiny-coder", "Rename the loop variables and return only the changed lines.", 0.6, (150, 800), (32, 112)),
    Kind("tiny-coder-review", "Review this module: list defects with line numbers.", 0.2, (800, 1900), (64, 160)),
    Kind("tiny-coder-index", "Summarise this file in one sentence for the index.", 0.2, (150, 500), (16, 48)),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send ``at_s`` seconds after the start; ``input_tokens`` is exact."""

    number: int
    at_s: float
    alias: str
    body: bytes
    input_tokens: int
    max_tokens: int

    @property
    def reserved_tokens(self) -> int:
        """KV cells it takes if it runs to its cap."""
        return self.input_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one job: ``fate`` is served, lost (full cache), refused or broken."""

    job: Job
    sent_s: float
    reply: Reply
    fate: str
    target: str | None
    reason: str | None
    output_tokens: int

    @property
    def ended_s(self) -> float:
        """When the answer was complete, on the run's clock."""
        return self.sent_s + self.reply.took_s


def jobs(number: int, burst: int, pause_s: float, count: Callable[[str], int], *, seed: int = 7) -> list[Job]:
    """``number`` jobs in bursts of ``burst``, one burst every ``pause_s``; the same for the same arguments.

    ``count`` gives the exact input tokens of a chat with one user message of that text.
    """
    draw = random.Random(seed)
    sources = _sources()
    made: list[Job] = []
    for at in range(number):
        kind = draw.choices(KINDS, [kind.share for kind in KINDS])[0]
        text = f"{kind.task}\n\n{_excerpt(draw, sources, draw.randint(*kind.input_tokens))}"
        cap = draw.randint(*kind.output_tokens)
        body: dict[str, object] = {
            "model": kind.alias,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": cap,
        }
        if draw.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        start_s = (at // burst) * pause_s + draw.uniform(0, BURST_SPREAD_S)
        made.append(Job(at, start_s, kind.alias, json.dumps(body).encode(), count(text), cap))
    return sorted(made, key=lambda job: job.at_s)


def _sources() -> list[str]:
    """Larger files of the standard library, as text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [text for file in files if len(text := file.read_text(encoding="utf-8", errors="replace")) > 12_000]


def _excerpt(draw: random.Random, sources: Sequence[str], tokens: int) -> str:
    text = draw.choice(sources)
    length = int(tokens * CHARS_PER_TOKEN)
    start = text.find("\n", draw.randint(0, max(0, len(text) - length)))
    return text[start + 1 : start + 1 + length]


async def send(work: Sequence[Job], port: int, *, model: str | None = None) -> list[Outcome]:
    """Send every job at its time to ``port`` and classify the answers; ``model`` replaces the alias in all bodies."""
    start_s = time.monotonic()

    async def one(job: Job) -> Outcome:
        await asyncio.sleep(job.at_s)
        sent_s = time.monotonic() - start_s
        body = job.body if model is None else json.dumps({**json.loads(job.body), "model": model}).encode()
        headers = {"content-type": "application/json", "x-request-id": f"demo-{job.number}"}
        reply = await request(
            port, "POST", "/v1/chat/completions", body=body, headers=headers, timeout_s=REQUEST_TIMEOUT_S
        )
        return classify(job, sent_s, reply)

    return list(await asyncio.gather(*(one(job) for job in work)))


def classify(job: Job, sent_s: float, reply: Reply) -> Outcome:
    """Served means a complete answer; refused means a well-formed error with kvgate's reason."""
    target = reply.headers.get("x-kvgate-target")
    reason = reply.headers.get("x-kvgate-reason")
    usage = _usage(reply)
    if reply.status == 200 and usage is not None:
        return Outcome(job, sent_s, reply, "served", target, reason, usage)
    if LOST.encode() in reply.body:
        return Outcome(job, sent_s, reply, "lost", target, reason, 0)
    refused = reply.headers.get("x-kvgate-decision") == "reject" and reason and isinstance(reply.json(), dict)
    return Outcome(job, sent_s, reply, "refused" if refused else "broken", target, reason, 0)


def _usage(reply: Reply) -> int | None:
    """Output tokens of a complete answer; None where it is not complete."""
    if "text/event-stream" in reply.headers.get("content-type", ""):
        events = reply.events
        if not events or events[-1] != "[DONE]" or len(events) < 2:
            return None
        answer = json.loads(events[-2])
    else:
        answer = reply.json()
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return int(usage["completion_tokens"]) if isinstance(usage, dict) else None
