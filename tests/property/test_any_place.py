"""Any JSON value in any place of each dialect's body: a request with a bound, or a 400; never an error of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects import BodyLimits, edit, parse
from extproc.dialects.parsing import READERS
from extproc.dialects.routes import ROUTES
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.types import RequestHead

URI = "data:image/png;base64,iVBORw0KGgo="
PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "thinking", "thinking": "hm"},
    {"image_url": URI},
    "b",
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "strict": True, "parameters": {"type": "object"}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [TOOL],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "max_tokens": 5,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"anyOf": []}}},
    "structured_outputs": {"json": {}},
    "chat_template": "t",
    "chat_template_kwargs": {"a": 1},
    "documents": [{"text": "d"}],
    "mm_processor_kwargs": {"max_pixels": 5},
    "reasoning_effort": "low",
    "prompt_logprobs": 1,
}
OPTIONS = {"max_new_tokens": 4, "n": 2, "min_new_tokens": 1, "ignore_eos": True, "json_schema": "{}"}

#: dialect -> bodies that use all that its reader reads.
BODIES: dict[str, list[dict[str, Any]]] = {
    "openai.chat": [CHAT],
    "openai.chat_batch": [{"messages": [CHAT["messages"]], "max_tokens": 3}],
    "openai.completions": [
        {"prompt": ["a", [1], [1, "b"], {"prompt_string": "c", "multimodal_data": ["d"]}], "suffix": "s", "echo": True,
         "logprobs": 1, "max_tokens": 1, "best_of": 2, "min_tokens": 1, "use_beam_search": True},
        {"prompt_embeds": ["AAAA"]},
    ],
    "openai.embeddings": [{"input": ["a", [1], {"content": PARTS}]}, {"messages": [CHAT["messages"]]}],
    "openai.responses": [
        {
            "instructions": [{"role": "system", "content": "s"}],
            "previous_response_id": "p",
            "conversation": {"id": "c"},
            "prompt": {"id": "p"},
            "previous_input_messages": [{"role": "user", "content": "h"}],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_file", "file_data": "x"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": "e"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "i"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URI}]},
                {"type": "compaction", "encrypted_content": "e"},
                {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"type": "output_text", "text": "o"}]},
            ],
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]}],
            "text": {"format": {"type": "json_schema", "schema": {}}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 5,
        }
    ],
    "anthropic.messages": [
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [*PARTS, {"type": "image", "source": {"type": "base64", "data": "x"}}]},
                        {"type": "document", "title": "t", "source": {"type": "content", "content": PARTS}},
                        {"type": "document", "source": {"type": "text", "data": "d"}},
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {}}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "output_format": {"schema": {}},
            "max_tokens": 9,
        }
    ],
    "ollama.chat": [
        {
            "messages": [{"role": "user", "content": "c", "images": ["x"], "thinking": "t", "TOOL_CALLS": [CALL]}],
            "tools": [TOOL],
            "options": {"num_predict": 4, "num_ctx": 8},
            "format": {"type": "object"},
            "think": "low",
            "stream": False,
        }
    ],
    "ollama.generate": [
        {"prompt": "p", "system": "s", "template": "{{ .Prompt }}", "images": ["x"], "options": {"num_predict": 4}},
        {"prompt": "p", "suffix": "s", "context": [1, 2], "raw": True},
    ],
    "ollama.embed": [{"input": ["a"]}, {"prompt": "a"}],
    "vllm.rerank": [{"query": "q", "documents": ["a", {"text": "b"}, {"content": PARTS}]}],
    "vllm.score": [{"data_1": "a", "data_2": {"content": PARTS}}, {"query": [1, 2], "items": [[3], [4]]}],
    "vllm.generative_scoring": [{"query": "q", "items": ["a", [1]], "label_token_ids": [1]}],
    "vllm.pooling": [{"data": {"a": ["b"]}}],
    "vllm.classify": [{"input": "a"}],
    "llamacpp.completion": [{"prompt": [1, "a"], "n_predict": 4, "n_cmpl": 2, "json_schema": {}, "grammar": "g"}],
    "llamacpp.infill": [{"input_prefix": "a", "input_suffix": "b", "prompt": [1], "input_extra": [{"filename": "f", "text": "t"}]}],
    "llamacpp.embedding": [{"content": [{"prompt_string": "a", "multimodal_data": ["x"]}]}],
    "engine.generate": [
        {"inputs": "i", "parameters": OPTIONS},
        {"text": ["a"], "image_data": [["x"], {"type": "image", "image": "x"}], "video_data": "v", "sampling_params": [OPTIONS]},
        {"input_ids": [[1]], "sampling_params": OPTIONS},
        {"input_embeds": [[0.5]]},
        {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "content_parts": PARTS},
        {"text_input": "t", "max_tokens": 4},
    ],
    "sglang.vertex": [{"instances": [{"text": "a", "image_data": "x"}, {"input_embeds": [[0.5]]}], "parameters": {"sampling_params": OPTIONS}}],
    "cohere.chat": [CHAT],
    "cohere.embed": [{"texts": ["a"], "images": [URI], "inputs": [{"content": PARTS}]}],
}  # fmt: skip
PATHS = {route.dialect: "/" + "/".join(segments) for segments, route in ROUTES.items()} | {
    "sglang.vertex": "/vertex_generate"
}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    "",
    "w",
    URI,
    [],
    [[]],
    [None],
    ["x"],
    [1],
    {},
    {"type": []},
    {"type": {}},
    {"a": {}},
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside, the outermost one too."""
    yield at
    for key, inner in value.items() if type(value) is dict else enumerate(value) if type(value) is list else ():
        yield from places(inner, (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy with ``new`` at a place."""
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = put(value[at[0]], at[1:], new)
    return copy


def judge(path: str, body: Any) -> None:
    """Understood, counted and edited, or refused with a 400 that names a code."""
    data = json.dumps(body).encode()
    try:
        request = parse(RequestHead("POST", path, {}), data, BodyLimits()).request
    except BadRequest as error:
        refusal = error
    else:
        assert request is not None
        assert PromptCounter().count(request).input_tokens >= 0
        edited = edit(data, request, cap=3, include_usage=True, model="x").body
        again = parse(RequestHead("POST", path, {}), edited, BodyLimits()).request
        assert again is not None
        assert again.model == "x"
        if request.edit.cap_path and request.reserve:
            assert again.max_output_tokens is not None, edited
            assert again.max_output_tokens <= 3, edited
        return
    assert (refusal.status, bool(refusal.code)) == (400, True), body


def test_every_dialect_has_a_body() -> None:
    """A new reader gets its sample here."""
    assert set(BODIES) == set(READERS) - {"openai.count_tokens", "anthropic.count_tokens"}


@pytest.mark.parametrize("dialect", BODIES)
def test_the_samples_are_understood(dialect: str) -> None:
    """Each body is legal as it stands, so that what is put into it reaches its reader."""
    for body in BODIES[dialect]:
        found = parse(RequestHead("POST", PATHS[dialect], {}), json.dumps(body).encode(), BodyLimits())
        assert found.request is not None
        assert found.request.dialect == dialect


@pytest.mark.parametrize("dialect", BODIES)
def test_every_kind_of_value_in_every_place(dialect: str) -> None:
    """A type that is a list, a block that is a number, options that are text: 200 or 400, for all of them."""
    for body in BODIES[dialect]:
        for at in places(body):
            for value in VALUES:
                judge(PATHS[dialect], put(body, at, value))


@given(st.data())
def test_any_value_in_any_place(data: st.DataObject) -> None:
    """The same with values that nobody thought of."""
    dialect = data.draw(st.sampled_from(sorted(BODIES)))
    body = data.draw(st.sampled_from(BODIES[dialect]))
    at = data.draw(st.sampled_from(list(places(body))))
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.text(max_size=8)
        | st.floats(allow_nan=False, allow_infinity=False)
    )
    names = st.sampled_from(["type", "text", "content", "role", "function", "source", "data"]) | st.text(max_size=3)
    value = data.draw(
        st.recursive(
            leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
        )
    )
    judge(PATHS[dialect], put(body, at, value))
