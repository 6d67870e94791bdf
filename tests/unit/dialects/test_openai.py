"""OpenAI chat, completions and embeddings: limits, sequences, prompts, strictness and leniency."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects import BodyLimits, TextPrompt, TokenPrompt
from tests.unit.dialects.asking import chat_prompt, parsed, refusal, request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HI, **fields}


@pytest.mark.parametrize(
    ("fields", "cap"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 256.0}, 256),
        ({"max_tokens": 10, "max_completion_tokens": 80}, 80),
        ({"max_tokens": 80, "max_completion_tokens": 10}, 80),
        ({"max_output_tokens": 7}, 7),
        ({"num_predict": 9, "max_tokens": 3}, 9),
        ({"n_predict": -1}, None),
        ({"max_tokens": 5, "n_predict": -1}, None),
        ({"max_tokens": -1, "max_completion_tokens": 100}, None),
        ({"max_tokens": None, "max_completion_tokens": 100}, 100),
    ],
)
def test_the_largest_cap_named_counts(fields: dict[str, Any], cap: int | None) -> None:
    """Engines differ in precedence, so the largest of the names present is the cap; null says nothing, and -1 lifts the limit."""
    assert request(CHAT, chat(**fields)).max_output_tokens == cap


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": "256"}, "invalid_type", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"max_tokens": [1]}, "invalid_type", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": 2**70}, "invalid_value", "max_tokens"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": "2"}, "invalid_type", "n"),
        ({"n": 1_000_000}, "invalid_value", "n"),
        ({"best_of": -1}, "invalid_value", "best_of"),
        ({"stream": "true"}, "invalid_type", "stream"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"model": 7}, "invalid_type", "model"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": None}, "missing_field", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"tools": {}}, "invalid_type", "tools"),
        ({"stream_options": []}, "invalid_type", "stream_options"),
        ({"min_tokens": "1"}, "invalid_type", "min_tokens"),
    ],
)
def test_wrong_types_of_what_decides_are_400(fields: dict[str, Any], code: str, param: str) -> None:
    """Where a wrong guess would let us and the engine disagree, the request is refused with the field's name."""
    error = refusal(CHAT, chat(**fields))
    assert (error.status, error.code, error.param) == (400, code, param)


def test_a_cap_of_infinity_is_400() -> None:
    """1e999 is JSON, but no limit."""
    error = refusal(CHAT, b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1e999}')
    assert (error.status, error.param) == (400, "max_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"},
        {"seed": 2**70},
        {"unknown": {"deep": [1, 2, {"x": None}]}},
        {"model": None},
        {"tools": None},
        {"messages": [{"role": "robot", "content": 5}]},
        {"messages": [{"content": None}]},
        {"messages": []},
        {"stop": {"a": 1}},
    ],
)
def test_what_decides_nothing_is_left_to_the_engine(fields: dict[str, Any]) -> None:
    """Unknown fields, odd values and odd messages are forwarded; the engine decides."""
    assert request(CHAT, chat(**fields)).reserve


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 8}, 8), ({"n": 4, "use_beam_search": True}, 4), ({"n": None}, 1)],
)
def test_sequences_are_the_wider_of_n_and_best_of(fields: dict[str, Any], sequences: int) -> None:
    """best_of decides the KV; a beam of width n holds n sequences."""
    assert request(CHAT, chat(**fields)).sequences == sequences


def test_forced_output() -> None:
    """ignore_eos makes the whole cap certain, min_tokens a part of it."""
    forced = request(CHAT, chat(ignore_eos=True, max_tokens=100))
    assert (forced.min_output_tokens, forced.runs_to_cap) == (100, True)
    partly = request(CHAT, chat(min_tokens=10, max_tokens=100))
    assert (partly.min_output_tokens, partly.runs_to_cap) == (10, False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 0), ({"prompt_logprobs": 0}, 0), ({"prompt_logprobs": 5}, 5), ({"prompt_logprobs": -1}, -1)],
)
def test_prompt_logprobs_are_seen(fields: dict[str, Any], expected: int) -> None:
    """They cost prompt x vocabulary of host memory; a lane decides about them."""
    assert request(CHAT, chat(**fields)).prompt_logprobs == expected


@pytest.mark.parametrize(("logprobs", "expected"), [(1, 1), (0, 0), (None, 0), (True, 1), (-1, -1)])
def test_echo_with_logprobs_is_prompt_logprobs(logprobs: Any, expected: int) -> None:
    """The completions API asks for the same thing by another name."""
    asked = {"prompt": "x", "echo": True, "logprobs": logprobs, "max_tokens": 0}
    assert request(COMPLETIONS, asked).prompt_logprobs == expected


def test_prefill_is_seen() -> None:
    """A trailing assistant message is continued; not every target can do that."""
    assert request(CHAT, chat(messages=[*HI, {"role": "assistant", "content": "Sure"}])).prefill
    assert not request(CHAT, chat()).prefill


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("text", [None]),
        (["a", "b", "c"], [None, None, None]),
        ([1, 2, 3], [3]),
        ([[1], [2, 3]], [1, 2]),
        (["a", [1, 2]], [None, 2]),
    ],
)
def test_the_prompt_shapes(prompt: Any, lengths: list[int | None]) -> None:
    """A flat list of numbers is one prompt, lists of texts or lists are many."""
    prompts = request(COMPLETIONS, {"prompt": prompt}).prompts
    assert [p.length if isinstance(p, TokenPrompt) else None for p in prompts] == lengths


@pytest.mark.parametrize("prompt", [None, 5, [], [1, [2]], [[1, None]], [1, True], [None], {"prompt_string": 5}])
def test_other_prompt_shapes_are_400(prompt: Any) -> None:
    """A prompt that cannot be counted is refused with its place."""
    error = refusal(COMPLETIONS, {"prompt": prompt})
    assert (error.code, (error.param or "").startswith("prompt")) == ("invalid_type", True)


def test_suffix_counts() -> None:
    """Fill-in-the-middle sends text after the gap too."""
    assert request(COMPLETIONS, {"prompt": "a", "suffix": "z"}).prompts == (TextPrompt(("a", "z")),)


def test_embeddings_generate_nothing() -> None:
    """One sequence per input, output zero and not unknown."""
    found = request("/v1/embeddings", {"model": "e", "input": ["a", "b"]})
    assert (found.sequences, found.max_output_tokens, found.generates) == (2, 0, False)


def test_schema_limits() -> None:
    """Grammar compilation has no time limit in engines, so size and union nesting have one here."""
    schema: Any = {"type": "string"}
    for _ in range(8):
        schema = {"oneOf": [schema, {"type": "null"}]}
    body = chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert refusal(CHAT, body).code == "schema_too_complex"
    small = chat(response_format={"type": "json_object"})
    assert refusal(CHAT, small, limits=BodyLimits(max_schema_bytes=5)).code == "schema_too_complex"
    assert request(CHAT, small).schema_bytes > 0


def test_template_kwargs_reach_the_prompt() -> None:
    """What the client says to the template changes the count."""
    kwargs = chat_prompt(CHAT, chat(reasoning_effort="none", chat_template_kwargs={"x": 1})).kwargs
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False, "x": 1}


def test_legacy_functions_are_tools() -> None:
    """The old name of tools is counted like the new one."""
    assert request(CHAT, chat(functions=[{"name": "f"}])).has_tools


def test_an_empty_body_is_invalid_json() -> None:
    """Nothing sent is the client's mistake, not an internal error."""
    assert refusal(CHAT, b"").code == "invalid_json"


def test_control_calls_are_never_refused() -> None:
    """A count_tokens call with a broken body goes on to the engine."""
    found = parsed("/v1/messages/count_tokens", b"{broken")
    assert (found.request, found.unknown) == (None, False)


def test_unknown_paths_are_not_read() -> None:
    """Their bodies are not ours to judge."""
    assert parsed("/v1/files", b"\x00\x01").unknown


def test_batch_conversations_are_prompts() -> None:
    """vLLM's batch route runs one sequence per conversation."""
    assert request("/v1/chat/completions/batch", {"messages": [HI, HI, HI]}).sequences == 3


def test_absurd_numbers_of_things_are_400() -> None:
    """A body of a million tiny pieces costs time for each; no engine takes that many."""
    many: dict[str, Any] = {str(n): 0 for n in range(2000)}
    assert refusal(CHAT, {"messages": HI, **many}).code == "too_many_members"
    assert refusal(COMPLETIONS, {"prompt": [""] * 20_000}).code == "invalid_value"
    assert refusal("/v1/rerank", {"query": "q", "documents": [""] * 20_000}).code == "invalid_value"
    assert refusal("/v1/chat/completions/batch", {"messages": [[]] * 20_000}).code == "invalid_value"
