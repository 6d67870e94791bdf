"""Anthropic, responses, Ollama and the engines' own routes, each turned into what engines make of them."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects import ChatPrompt, TextPrompt, TokenPrompt
from tests.unit.dialects.asking import chat_prompt, parsed, refusal, request

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
CHAT = "/api/chat"
GENERATE = "/api/generate"


def test_anthropic_blocks_become_fields_and_messages() -> None:
    """Thinking, tool calls and tool results go where the template expects them."""
    body = {
        "model": "m",
        "max_tokens": 10,
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "done"}]},
        ],
    }
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat_prompt(MESSAGES, body).messages == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call], "content": "ok"},
        {"role": "tool", "tool_call_id": "t1", "content": "done"},
    ]


def test_anthropic_thinking_lies_inside_the_cap() -> None:
    """budget_tokens adds nothing to max_tokens."""
    body = {"max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 31999}, "messages": []}
    assert request(MESSAGES, body).max_output_tokens == 32000


def changed(*blocks: dict[str, Any]) -> list[str | None]:
    """Names of the tools in effect after these blocks of a system message, where two are declared."""
    tools = [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}, "defer_loading": True}]
    message = {"role": "system", "content": [*blocks, {"type": "text", "text": "now"}]}
    prompt = chat_prompt(MESSAGES, {"max_tokens": 1, "tools": tools, "messages": [message]})
    assert prompt.messages == [{"role": "system", "content": [{"type": "text", "text": "now"}]}]
    return [f"{t['function']['name']}{'-' * ('defer_loading' in t['function'])}" for t in prompt.tools or []]


def test_anthropic_tools_change_within_the_conversation() -> None:
    """By value, by reference, and away again; the template sees those in effect at the end."""
    by_value = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": {"name": "h", "input_schema": {}}},
    }
    by_name = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}}
    away = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    odd = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": ["g"]}}
    assert changed() == ["f", "g-"]
    assert changed(by_value) == ["f", "g-", "h"]
    assert changed(by_name, odd) == ["f", "g"]
    assert changed(away, by_value) == ["g-", "h"]
    assert changed(away, {**away, "type": "tool_addition"}) == ["f", "g-"]


def test_anthropic_tool_references_are_a_message_of_their_own() -> None:
    """What a search for tools found goes to the template, which may write the definitions."""
    found = [{"type": "tool_reference", "tool_name": "g"}, {"type": "text", "text": "one"}, {"type": "tool_reference"}]
    block = {"type": "tool_result", "tool_use_id": "t", "content": found}
    prompt = chat_prompt(MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]})
    assert prompt.messages == [
        {"role": "tool", "tool_call_id": "t", "content": "one"},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "tool_reference", "name": "g"}]},
    ]


def test_anthropic_tools_take_the_openai_form() -> None:
    """A schema without a type is an object's, as vLLM completes it."""
    body = {"messages": [], "max_tokens": 1, "tools": [{"name": "f", "description": "d", "input_schema": {}}]}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat_prompt(MESSAGES, body).tools == [{"type": "function", "function": function}]


def test_anthropic_documents() -> None:
    """Plain text counts, an encoded file is an unknown part."""
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the text"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"}}
    body = {"messages": [{"role": "user", "content": [text, pdf]}], "max_tokens": 1}
    assert chat_prompt(MESSAGES, body).messages[0]["content"] == "the text"
    assert request(MESSAGES, body).unknown_parts == 1


def test_count_tokens_takes_nothing() -> None:
    """Agents call it often; it runs no model."""
    found = parsed("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert found.request is not None
    assert (found.request.reserve, found.model, found.request.generates) == (False, "m", False)


def test_responses_items_join_the_assistants_message() -> None:
    """Text, calls and reasoning of one turn are one message; what follows is the tool's."""
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
    }
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert chat_prompt(RESPONSES, body).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "reasoning": "hm", "content": "ok", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    ]


def test_responses_unknown_items_are_charged_not_refused() -> None:
    """New item types appear with every client release."""
    found = request(RESPONSES, {"input": [{"type": "web_search_call", "status": "completed", "query": "x"}]})
    assert (found.unknown_parts, found.warnings) == (1, ("unknown_input_item",))


def test_responses_unfinished_message_is_continued() -> None:
    """A partial assistant message is a prefill."""
    item = {
        "type": "message",
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "a"}],
    }
    prompt = chat_prompt(RESPONSES, {"input": [{"role": "user", "content": "x"}, item]})
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_responses_cap_has_its_own_name() -> None:
    """max_output_tokens is the third name of the cap."""
    assert request(RESPONSES, {"input": "x", "max_output_tokens": 9}).max_output_tokens == 9


@pytest.mark.parametrize("body", [{"input": 5}, {"input": ["x"]}, {"input": {}}])
def test_responses_wrong_input_is_400(body: dict[str, Any]) -> None:
    """An input of no known shape is refused with its place."""
    assert refusal(RESPONSES, body).code == "invalid_type"


@pytest.mark.parametrize(
    ("options", "cap"),
    [({}, None), ({"num_predict": 5}, 5), ({"num_predict": -1}, None), ({"num_predict": -2}, None), (None, None)],
)
def test_ollama_options_hold_the_cap(options: Any, cap: int | None) -> None:
    """num_predict below zero means no limit."""
    assert request(CHAT, {"messages": [{"role": "user", "content": "x"}], "options": options}).max_output_tokens == cap


def test_ollama_context_length_is_seen() -> None:
    """num_ctx is what the engine will cut the prompt to."""
    assert (
        request(CHAT, {"messages": [{"role": "user", "content": "x"}], "options": {"num_ctx": 8192}}).context_tokens
        == 8192
    )


def test_ollama_streams_unless_told_otherwise() -> None:
    """Absent means on."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert (request(CHAT, body).stream, request(CHAT, body | {"stream": False}).stream) == (True, False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "m", "messages": []}),
        (CHAT, {"model": "m", "keep_alive": 0}),
        (GENERATE, {"model": "m"}),
        (GENERATE, {"model": "m", "prompt": "", "keep_alive": 0}),
        ("/api/embed", {"model": "m", "input": []}),
    ],
)
def test_ollama_load_and_unload_take_nothing(path: str, body: dict[str, Any]) -> None:
    """An empty prompt only loads or unloads the model."""
    assert not request(path, body).reserve


def test_ollama_generate_shapes() -> None:
    """With a template it is a conversation, raw or filled-in it is text; an old context counts by length."""
    assert isinstance(request(GENERATE, {"prompt": "x", "system": "s"}).prompts[0], ChatPrompt)
    assert request(GENERATE, {"prompt": "x", "raw": True}).prompts == (TextPrompt(("x",)),)
    assert request(GENERATE, {"prompt": "x", "suffix": "z"}).prompts == (TextPrompt(("x", "z")),)
    assert request(GENERATE, {"prompt": "x", "context": [1, 2, 3]}).context_ids == 3


def test_ollama_duplicates_in_any_case_are_400() -> None:
    """Go merges "Options" into "options"."""
    assert (
        refusal(CHAT, b'{"messages":[],"options":{"num_predict":1},"Options":{"num_predict":9}}').code
        == "duplicate_key"
    )
    assert refusal(CHAT, b'{"messages":[],"options":{"num_predict":1,"num_predict":9}}').code == "duplicate_key"


def test_rerank_is_one_sequence_per_document() -> None:
    """Each pair runs by itself."""
    found = request("/v1/rerank", {"model": "r", "query": "q", "documents": ["a", {"text": "b"}]})
    assert (found.prompts, found.sequences) == ((TextPrompt(("q", "a")), TextPrompt(("q", "b"))), 2)


@pytest.mark.parametrize(
    "extra",
    [{"instruct": "find it"}, {"instruction": "find it"}, {"chat_template_kwargs": {"instruction": "find it", "n": 1}}],
)
def test_the_instruction_of_a_ranking_stands_in_each_pair(extra: dict[str, Any]) -> None:
    """SGLang's and vLLM's name of it, and the template's arguments."""
    found = request("/v1/rerank", {"query": "q", "documents": ["a", "b"], **extra})
    assert found.prompts == (TextPrompt(("find it", "q", "a")), TextPrompt(("find it", "q", "b")))
    ids = request("/v1/score", {"query": [1, 2], "items": [[3]], **extra})
    assert ids.prompts == (TokenPrompt(3, ("find it",)),)


def test_score_broadcasts_the_single_side() -> None:
    """One text against many, or pairwise; anything else is refused."""
    assert request("/score", {"text_1": "q", "text_2": ["a", "b", "c"]}).sequences == 3
    assert refusal("/score", {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}).code == "invalid_value"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", (TextPrompt(("x",)),)),
        ([1, 2, "x", 3], (TokenPrompt(3, ("x",)),)),
        (["x", "y"], (TextPrompt(("x",)), TextPrompt(("y",)))),
        ({"prompt_string": "x"}, (TextPrompt(("x",)),)),
        ([[1, 2], "x"], (TokenPrompt(2), TextPrompt(("x",)))),
    ],
)
def test_llamacpp_prompts_may_be_mixed(prompt: Any, expected: tuple[Any, ...]) -> None:
    """Text and token ids in one list are one prompt."""
    assert request("/completion", {"prompt": prompt, "n_predict": 4}).prompts == expected


@pytest.mark.parametrize(
    ("body", "cap", "sequences"),
    [
        ({"inputs": "x", "parameters": {"max_new_tokens": 5, "best_of": 2}}, 5, 2),
        ({"text": ["x", "y"], "sampling_params": {"max_new_tokens": 7, "n": 3}}, 7, 6),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 7}}, 7, 1),
        ({"text": "x", "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 9}]}, 9, 1),
        ({"text": "x"}, None, 1),
        ({"prompt": "x", "max_tokens": 4}, 4, 1),
    ],
)
def test_generate_by_shape(body: dict[str, Any], cap: int | None, sequences: int) -> None:
    """TGI, SGLang and vLLM's demo server share a path and differ in shape."""
    found = request("/generate", body)
    assert (found.max_output_tokens, found.sequences) == (cap, sequences)


def test_ollama_reads_keys_in_any_case() -> None:
    """As Go does: a cap under another spelling is a cap."""
    found = request(
        CHAT, b'{"MODEL":"m","Messages":[{"role":"user","content":"x"}],"Options":{"num_predict":7},"STREAM":false}'
    )
    assert (found.model, found.max_output_tokens, found.stream, found.reserve) == ("m", 7, False, True)
