"""Shadow mode: everything is decided, reserved and shown, nothing is enforced, and the engine gets the client's bytes."""

from __future__ import annotations

import asyncio
import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.load import Streams, chat, whole
from tests.support.rest import put_to_rest
from tests.support.stack import RELEASED_WITHIN_S, Stack, running
from tests.support.upstream import Answer, Seen, Upstream, serving

#: 64 usable blocks; a request of 300 output tokens takes 38 by the bound.
PRIMARY = ["--blocks", "65", "--served-model", "coder", "--served-model", "alone", "--decode-tokens-per-s", "4000"]
SMALL = ["--blocks", "65", "--served-model", "coder"]


@dataclass
class Shadowed:
    """A stack whose recorded primary is an emulated engine behind a recorder."""

    stack: Stack
    recorder: Upstream


@pytest.fixture(scope="module")
def shared() -> Iterator[Shadowed]:
    """``recorded`` is the alias whose primary is behind the recorder, ``coder`` the one whose primary is plain."""
    with ExitStack() as contexts:
        recorder = contexts.enter_context(serving("primary"))
        ports: dict[str, int] = {}
        recorder.answer = lambda seen: forward(ports["recorded-0"], seen)
        targets: dict[str, Any] = {
            "primary": {"engine": "vllm", "watermark": 0.0, "replicas": [{"name": "primary-0"}]},
            "small": {"engine": "vllm", "watermark": 0.0, "replicas": [{"name": "small-0"}]},
            "recorded": {"engine": "vllm", "watermark": 0.0, "replicas": [{"name": "seen-0", "url": recorder.url}]},
        }
        rest: dict[str, Any] = {
            "mode": "shadow",
            "lanes": {"edit": {"includeUsage": True}, "narrow": {"maxInputTokens": 10, "fallback": "small"}},
            "aliases": {
                "coder": {"lane": "edit", "targets": ["primary", "small"]},
                "alone": {"lane": "edit", "targets": ["primary"]},
                "recorded": {"lane": "edit", "targets": ["recorded"]},
            },
        }
        engines = {"primary-0": PRIMARY, "small-0": SMALL, "recorded-0": [*PRIMARY, "--served-model", "recorded"]}
        stack = contexts.enter_context(running(engines, targets, on_engines=ports.update, **rest))
        yield Shadowed(stack, recorder)


@pytest.fixture
async def shadowed(shared: Shadowed) -> Shadowed:
    """It at rest; see ``conftest.stack``."""
    await put_to_rest(shared.stack)
    return shared


def forward(port: int, seen: Seen) -> Answer:
    """The engine's answer to a recorded request."""
    body = gzip.decompress(seen.body) if seen.headers.get("content-encoding") == "gzip" else seen.body
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{seen.path}", data=body or None, method=seen.method,
        headers={"content-type": "application/json"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return Answer(answer.status, answer.read(), {"content-type": answer.headers["content-type"]})
    except urllib.error.HTTPError as refusal:
        return Answer(refusal.code, refusal.read())


def posts(recorder: Upstream) -> list[Seen]:
    return [seen for seen in recorder.seen if seen.method == "POST"]


ODD = b'{ "messages" : [ {"role":"user","content":"h\\u00e9 \\ud83d\\ude00"} ],\n\t"model":"recorded" , "x_new":[1.0,1e2], "max_tokens": 5, "stream": true}'


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (ODD, {}),
        (gzip.compress(ODD), {"content-encoding": "gzip"}),
        (json.dumps(chat("recorded", 3), indent=3).encode(), {"authorization": "Bearer mine", "x-kvgate-rid": "evil"}),
    ],
)
async def test_byte_for_byte(shadowed: Shadowed, body: bytes, headers: dict[str, str]) -> None:
    """Neither a usage option nor a decoded body nor a clamped cap: the engine gets what the client sent."""
    before = len(posts(shadowed.recorder))
    reply = await shadowed.stack.send(body, headers=headers)
    assert reply.status == 200, (reply, shadowed.stack.logs())
    assert reply.headers["x-kvgate-decision"] == "shadow-admit"
    (seen,) = posts(shadowed.recorder)[before:]
    assert seen.body == body
    assert seen.headers.get("content-encoding") == headers.get("content-encoding")
    assert seen.headers["content-length"] == str(len(body))
    assert seen.headers["x-kvgate-rid"] != "evil"
    await shadowed.stack.until_empty(RELEASED_WITHIN_S)


async def test_reserves_what_does_not_fit(shadowed: Shadowed) -> None:
    """Past the pool's end requests still go to the primary and still count: the decision shows the true load."""
    stack = shadowed.stack
    stack.engines["primary-0"].faults(rate=0.05)
    before = stack.engines["primary-0"].stats()["submitted"]
    streams = Streams(stack)
    streams.start(1, chat("alone", 300))
    await stack.until_reserved(1)
    streams.start(3, chat("alone", 300))
    await stack.until_reserved(4)
    view = (await stack.snapshot()).replicas["primary-0"]
    assert view.headroom_blocks is not None
    assert view.headroom_blocks < 0
    fallback = await stack.send(chat("coder", 1))
    assert (fallback.status, fallback.headers["x-kvgate-decision"]) == (200, "shadow-fallback")
    assert stack.engines["primary-0"].stats()["submitted"] - before == 5
    stack.engines["primary-0"].faults(clear=True)
    replies = await streams.all()
    assert [reply for reply in replies if not whole(reply)] == []
    decisions = sorted(reply.headers["x-kvgate-decision"] for reply in replies)
    assert decisions == ["shadow-admit", "shadow-reject", "shadow-reject", "shadow-reject"]
    assert {reply.headers.get("x-kvgate-reason") for reply in replies} == {None, "insufficient_headroom"}
    await stack.until_empty(RELEASED_WITHIN_S)


async def test_a_ledger_that_hangs_changes_nothing_for_clients(shadowed: Shadowed) -> None:
    """No posture is enforced either."""
    stack = shadowed.stack
    stack.valkey.pause()
    try:
        reply = await stack.send(chat("alone", 2))
        assert (reply.status, reply.headers["x-kvgate-target"]) == (200, "primary")
        assert reply.headers["x-kvgate-decision"].startswith("shadow-")
    finally:
        stack.valkey.resume()
    await asyncio.sleep(0.5)
    await stack.until_empty()
