"""Through a real Envoy: token usage out of the answers of every API family, and the entries that end a reservation."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from extproc.gateway import names
from tests.support.upstream import Answer, Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.gateway import Gateway

DOWNSTREAM_PERIODIC = 5
#: An engine that takes many periods for its answer; a busy Envoy reports in some of them.
SLOW_S, PERIODIC_S = 2.0, 0.1


def events(*values: object) -> Answer:
    """A server-sent-event answer; a string is sent as it is."""
    lines = [f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n" for value in values]
    return Answer(body="".join(lines).encode(), headers={"content-type": "text/event-stream"})


def whole(value: object, content_type: str = "application/json; charset=utf-8") -> Answer:
    """A JSON answer."""
    return Answer(body=json.dumps(value).encode(), headers={"content-type": content_type})


OPENAI = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 11, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 8}}
ANTHROPIC = {"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 2}
FULL = {"input_tokens": 11.0, "output_tokens": 5.0, "cached_tokens": 8.0}
CLAUDE = {"input_tokens": 3.0, "output_tokens": 5.0, "cache_read_input_tokens": 8.0, "cache_creation_input_tokens": 2.0}
CASES: Sequence[tuple[str, Answer, dict[str, float]]] = (
    ("openai", whole({"id": "x", "usage": OPENAI}), FULL),
    (
        "openai-null-details",
        whole({"usage": {**OPENAI, "prompt_tokens_details": None}}),
        FULL | {"cached_tokens": None},
    ),
    ("openai-stream", events({"choices": [{}], "usage": None}, {"choices": [], "usage": OPENAI}, "[DONE]"), FULL),
    ("responses", whole({"usage": RESPONSES}), FULL),
    (
        "responses-stream",
        events(
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.completed", "response": {"usage": RESPONSES}},
        ),
        FULL,
    ),
    ("anthropic", whole({"type": "message", "usage": {**ANTHROPIC, "output_tokens": 5}}), CLAUDE),
    (
        "anthropic-stream",
        events(
            {"type": "message_start", "message": {"usage": ANTHROPIC}},
            {"type": "content_block_delta"},
            {"type": "message_delta", "usage": {"output_tokens": 5}},
        ),
        CLAUDE,
    ),
    (
        "anthropic-stream-as-sent",
        Answer(
            body=(
                b'event: message_start\r\ndata: {"message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}\r\n\r\n'
                b': ping\r\n\r\nevent: message_delta\r\ndata: {"usage": {"output_tokens": 5}}\r\n\r\n'
            ),
            headers={"content-type": "text/event-stream; charset=utf-8"},
        ),
        {"input_tokens": 3.0, "output_tokens": 5.0},
    ),
    ("llamacpp", whole({"tokens_predicted": 5, "tokens_evaluated": 11, "timings": {"cache_n": 8}}), FULL),
    ("llamacpp-chat", whole({"usage": {"prompt_tokens": 11, "completion_tokens": 5}, "timings": {"cache_n": 8}}), FULL),
    (
        "ollama",
        whole({"model": "m", "done": True, "prompt_eval_count": 11, "eval_count": 5}),
        {"input_tokens": 11.0, "output_tokens": 5.0},
    ),
    ("ollama-stream", whole({"done": True, "prompt_eval_count": 11, "eval_count": 5}, "application/x-ndjson"), {}),
    ("without", whole({"ok": True}), {}),
)


@pytest.mark.parametrize(("name", "answer", "usage"), CASES, ids=[case[0] for case in CASES])
def test_usage_is_read_by_envoy(gateway: Gateway, name: str, answer: Answer, usage: dict[str, float | None]) -> None:
    """The end entry carries the counts under one set of names; the client's bytes are the engine's."""
    gateway.admit("gpu-a-0", rid=f"rid-{name}")
    gateway.upstreams["a"].answer = lambda _: answer
    reply = gateway.ask()
    entry = gateway.ends(f"rid-{name}")[0]
    read = dict(entry.common_properties.metadata.filter_metadata[names.USAGE_NAMESPACE])
    assert (read, reply.body) == ({k: v for k, v in usage.items() if v is not None}, answer.body)


def test_a_later_answer_counts_where_attempts_differ(gateway: Gateway) -> None:
    """The usage of a refused attempt is not mixed with that of the one that served."""
    gateway.admit("gpu-a-0", "remote-own-key", rid="rid-two")
    gateway.upstreams["a"].answer = lambda _: Answer(status=503, body=json.dumps({"usage": ANTHROPIC}).encode())
    gateway.upstreams["own"].answer = lambda _: whole({"usage": OPENAI})
    gateway.ask()
    entry = gateway.ends("rid-two")[0]
    assert dict(entry.common_properties.metadata.filter_metadata[names.USAGE_NAMESPACE]) == FULL


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/rerank", "/api/embed"])
def test_large_vectors_are_not_held_back(gateway: Gateway, path: str) -> None:
    """An answer larger than the buffer limit passes on the paths that give such answers."""
    gateway.admit("gpu-a-0")
    large = json.dumps({"data": "x" * 400_000}).encode()
    gateway.upstreams["a"].answer = lambda _: Answer(body=large)
    reply = gateway.ask(path)
    assert (reply.status, reply.body == large) == (200, True)


def test_a_running_answer_is_reported_periodically(gateway: Gateway) -> None:
    """Entries with the metadata of the decision come every periodicS while an answer is awaited, then one end."""

    def slow(_: Seen) -> Answer:
        time.sleep(SLOW_S)
        return Answer()

    gateway.admit("gpu-a-0", rid="rid-slow")
    gateway.upstreams["a"].answer = slow
    gateway.ask()
    ended = gateway.ends("rid-slow")
    periodic = gateway.ends("rid-slow", log_type=DOWNSTREAM_PERIODIC)
    lasted_s = ended[0].common_properties.duration.ToMilliseconds() / 1000
    assert len(ended) == 1
    assert lasted_s >= SLOW_S
    assert 3 <= len(periodic) <= lasted_s / PERIODIC_S + 1


def test_only_the_entries_that_count_are_sent(gateway: Gateway) -> None:
    """Per request one end and per attempt one end; no start, no pool-ready entry."""
    gateway.admit("gpu-a-0", "remote-own-key", rid="rid-kinds")
    gateway.upstreams["a"].answer = lambda _: Answer(status=503)
    gateway.ask()
    gateway.ends("rid-kinds")
    gateway.ends("rid-kinds", log=names.LOG_ATTEMPT, log_type=9, count=2)
    kinds = {(name, entry.common_properties.access_log_type) for name, entry in gateway.decider.entries}
    assert kinds <= {(names.LOG_REQUEST, 5), (names.LOG_REQUEST, 6), (names.LOG_ATTEMPT, 9)}
