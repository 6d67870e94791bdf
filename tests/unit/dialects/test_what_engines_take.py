"""Bodies that an engine takes and that are easy to read as less, or as none: each kind by an example or two."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zstandard

from extproc.dialects import ChatPrompt, InferenceRequest, TextPrompt, TokenPrompt, edit
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.tokens.counter import HIDDEN_TOKENS, UNKNOWN_PART_TOKENS
from tests.payloads.tokenizers import chatml_counter
from tests.unit.dialects.asking import chat_prompt, parsed, refusal, request
from tests.unit.dialects.test_content import PNG

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GENERATE = "/generate"
HI = [{"role": "user", "content": "hi"}]


def bound(found: InferenceRequest) -> int:
    """The bound without a tokenizer."""
    return PromptCounter().bound(found).input_tokens


def source(found: InferenceRequest) -> str:
    """Whether a count with the model's own tokenizer and template may call itself the engine's."""
    return chatml_counter().count(found).source


def said(blocks: Any) -> dict[str, Any]:
    """An Anthropic body with one user message."""
    return {"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}


@pytest.mark.parametrize(
    "content",
    ["sunny", ["sunny"], {"type": "text", "text": "sunny"}, [{"type": "text", "text": "sunny"}], [["sunny"]]],
)
def test_a_tool_result_counts_in_every_shape(content: Any) -> None:
    """Text, a list of texts, one block in place of a list: the words are there."""
    prompt = chat_prompt(MESSAGES, said([{"type": "tool_result", "tool_use_id": "t", "content": content}]))
    assert prompt.messages == [{"role": "tool", "tool_call_id": "t", "content": "sunny"}]


@pytest.mark.parametrize("content", ["the text", ["the text"], [{"type": "text", "text": "the text"}]])
def test_a_document_of_content_counts(content: Any) -> None:
    """Its source may hold a string as well as blocks; engines differ, so it is never exact."""
    found = request(MESSAGES, said([{"type": "document", "source": {"type": "content", "content": content}}]))
    assert "the text" in json.dumps([prompt.messages for prompt in found.prompts if isinstance(prompt, ChatPrompt)])
    assert (found.unknown_parts, source(found)) == (0, "bound")


def test_a_pdf_in_a_tool_result_is_an_unknown_part() -> None:
    """It is a file there as it is beside it: no picture, no text."""
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x" * 200}}
    found = request(MESSAGES, said([{"type": "tool_result", "tool_use_id": "t", "content": [pdf]}]))
    assert (found.images, found.unknown_parts) == ((), 1)
    assert bound(found) < UNKNOWN_PART_TOKENS + 400


def test_a_compaction_is_an_unknown_part() -> None:
    """Encrypted turns are no picture and no text."""
    found = request(RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "gAAAAAB" + "Q3k1" * 5000}]})
    assert (found.images, found.unknown_parts) == ((), 1)
    assert bound(found) < UNKNOWN_PART_TOKENS + 400


@pytest.mark.parametrize(
    "extra",
    [{"previous_response_id": "r"}, {"conversation": "c"}, {"conversation": {"id": "c"}}, {"prompt": {"id": "p"}}],
)
def test_what_the_engine_keeps_is_charged_and_never_exact(extra: dict[str, Any]) -> None:
    """Earlier turns and stored prompts are unknown, not empty."""
    plain, found = request(RESPONSES, {"input": "x"}), request(RESPONSES, {"input": "x", **extra})
    assert (plain.hidden, found.hidden, source(plain), source(found)) == (0, 1, "exact", "bound")
    counted = chatml_counter().count(found)
    assert counted.hidden_tokens == HIDDEN_TOKENS
    assert counted.input_tokens >= HIDDEN_TOKENS
    assert bound(found) == bound(plain) + HIDDEN_TOKENS
    assert len(found.warnings) == 1


def test_messages_of_an_earlier_response_count() -> None:
    """vLLM's previous_input_messages are part of the prompt."""
    found = request(RESPONSES, {"input": "x", "previous_input_messages": [{"role": "user", "content": "word " * 500}]})
    assert bound(found) > 2500
    assert source(found) == "bound"


@pytest.mark.parametrize("where", ["chat_template", "chat_template_kwargs"])
def test_a_clients_template_counts(where: str) -> None:
    """Its words are in the prompt; where it may repeat them the rest is unknown."""
    for text, hidden in (("X" * 5000, 0), ("{% for m in messages %}X{% endfor %}", 1)):
        template: Any = text if where == "chat_template" else {"chat_template": text}
        found = request(CHAT, {"messages": HI, where: template})
        assert (found.hidden, source(found)) == (hidden, "bound")
        assert bound(found) >= len(text) + hidden * HIDDEN_TOKENS


@pytest.mark.parametrize("extra", [{}, {"context": [1, 2]}, {"suffix": "s"}])
def test_ollamas_template_counts(extra: dict[str, Any]) -> None:
    """/api/generate takes a template of the client's."""
    found = request("/api/generate", {"prompt": "x", "template": "word " * 1000, **extra})
    assert bound(found) > 5000
    assert request("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}", **extra}).hidden == 1


def test_ollama_folds_the_keys_of_messages_and_tools() -> None:
    """Go's decoder compares keys without case below the top level too; in maps they keep their case."""
    call = {"Function": {"NAME": "f", "Arguments": {"City": "Paris"}}}
    tool = {"TYPE": "function", "Function": {"Name": "f", "PARAMETERS": {"Properties": {"City": {}}}}}
    body = {
        "messages": [
            {"ROLE": "user", "CONTENT": "many words", "Images": [PNG]},
            {"Role": "assistant", "Thinking": "hm", "Tool_Calls": [call]},
        ],
        "tools": [tool],
    }
    prompt = chat_prompt("/api/chat", body)
    assert prompt.messages[0] == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "many words"}],
    }
    assert prompt.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"City": "Paris"}}}]
    assert prompt.messages[1]["reasoning"] == "hm"
    assert prompt.tools == [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"City": {}}}}}]


def test_two_keys_that_fold_to_one_are_refused() -> None:
    """The engine takes the later one, whoever reads the body otherwise the other."""
    error = refusal("/api/chat", {"messages": [{"role": "user", "content": "a", "Content": "b"}]})
    assert (error.status, error.code, error.param) == (400, "duplicate_key", "messages[0].content")


@pytest.mark.parametrize(
    ("path", "body", "pictures"),
    [
        (GENERATE, {"text": "x", "image_data": PNG}, 1),
        (GENERATE, {"text": "x", "image_data": ["https://x/y.png", PNG]}, 2),
        (GENERATE, {"text": ["x", "y"], "image_data": [[PNG, PNG], [PNG]]}, 3),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": [PNG] * 5}}, 5),
        ("/completion", {"prompt": [{"prompt_string": "x", "multimodal_data": [PNG]}, "y"]}, 1),
        (COMPLETIONS, {"prompt": {"prompt_string": "x", "multimodal_data": [PNG]}}, 1),
        ("/inference/v1/generate", {"token_ids": [1], "content_parts": [{"type": "image_url", "image_url": PNG}]}, 1),
    ],
)
def test_pictures_beside_a_prompt_count(path: str, body: dict[str, Any], pictures: int) -> None:
    """Each is charged, and with an unknown picture rule none is exact."""
    found = request(path, body)
    assert (len(found.images), source(found)) == (pictures, "bound")


def test_sound_and_film_beside_a_prompt_are_unknown_parts() -> None:
    """SGLang's video_data and audio_data."""
    found = request(GENERATE, {"text": "x", "video_data": "v", "audio_data": ["a", "b"]})
    assert (found.unknown_parts, source(found)) == (3, "bound")


def test_prompts_given_as_embeddings() -> None:
    """vLLM takes them alone and beside a prompt, each a sequence of its own, of a length nobody here can read."""
    alone = request(COMPLETIONS, {"prompt_embeds": "A" * 400_000})
    beside = request(COMPLETIONS, {"prompt": ["x", "y"], "prompt_embeds": ["AAAA"] * 3, "n": 2})
    assert (alone.sequences, beside.sequences, beside.unknown_parts) == (1, 10, 3)
    assert (source(alone), source(beside)) == ("bound", "bound")
    assert bound(alone) >= 300_000 // 128


def test_embeddings_as_rows_have_a_length() -> None:
    """SGLang's input_embeds: one row per token."""
    assert request(GENERATE, {"input_embeds": [[0.5, 0.5]] * 7}).prompts == (TokenPrompt(7),)
    assert request(GENERATE, {"input_embeds": [[[0.5]] * 7, [[0.5]] * 2]}).prompts == (TokenPrompt(7), TokenPrompt(2))


@pytest.mark.parametrize(
    ("body", "sequences", "cap"),
    [
        ({"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 16, "n": 64}] * 2}, 128, 16),
        ({"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 16}, {"max_new_tokens": 90}]}, 2, 90),
        ({"text": "x", "sampling_params": [{"max_new_tokens": 16}, {}]}, 1, None),
        ({"text": "x", "sampling_params": [{"max_new_tokens": -1}]}, 1, None),
        ({"text": "x", "sampling_params": {"max_new_tokens": 16, "beam_width": 5}}, 5, 16),
        ({"text": "x", "sampling_params": [{"max_new_tokens": 16, "beam_width": 5}]}, 5, 16),
        ({"prompt": "x", "max_tokens": 3, "use_beam_search": True, "beam_width": 4}, 4, 3),
        ({"text": None, "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 16}}, 1, 16),
    ],
)
def test_sampling_parameters(body: dict[str, Any], sequences: int, cap: int | None) -> None:
    """One object or a list of them, n and the beam's width in either."""
    found = request(GENERATE, body)
    assert (found.sequences, found.max_output_tokens) == (sequences, cap)


@pytest.mark.parametrize(
    ("path", "body", "after"),
    [
        (GENERATE, '{"text":"x","sampling_params":null}', '{"text":"x","sampling_params":{"max_new_tokens":3}}'),
        (GENERATE, '{"inputs":"x","parameters": null }', '{"inputs":"x","parameters": {"max_new_tokens":3} }'),
        (GENERATE, '{"inputs":"x","options":{}}', '{"parameters":{"max_new_tokens":3},"inputs":"x","options":{}}'),
        (GENERATE, '{"text":"x","sampling_params":{"n":2}}', '{"text":"x","sampling_params":{"max_new_tokens":3,"n":2}}'),
        (
            "/inference/v1/generate",
            '{"token_ids":[1],"sampling_params":{"max_tokens":9}}',
            '{"token_ids":[1],"sampling_params":{"max_tokens":3}}',
        ),
        (
            GENERATE,
            '{"text":["x","y","z"],"sampling_params":[ {"max_new_tokens":9} , {"stop":["a"],"n":1},{}]}',
            '{"text":["x","y","z"],"sampling_params":[ {"max_new_tokens":3} , {"max_new_tokens":3,"stop":["a"],"n":1},{"max_new_tokens":3}]}',
        ),
        (
            "/vertex_generate",
            '{"instances":[{"text":"x"}],"parameters":null}',
            '{"instances":[{"text":"x"}],"parameters":{"sampling_params":{"max_new_tokens":3}}}',
        ),
        (
            "/vertex_generate",
            '{"instances":[{"text":"x"}]}',
            '{"parameters":{"sampling_params":{"max_new_tokens":3}},"instances":[{"text":"x"}]}',
        ),
        ("/api/chat", '{"messages":[],"options":null}', '{"messages":[],"options":{"num_predict":3}}'),
    ],
)  # fmt: skip
def test_a_clamp_takes_the_place_of_null(path: str, body: str, after: str) -> None:
    """A second key of the same name would be read by some engines and passed over by others."""
    found = request(path, body.encode())
    assert edit(body.encode(), found, cap=3).body.decode() == after
    if found.reserve:
        assert request(path, after.encode()).max_output_tokens == 3


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/inference/v1/generate", {"token_ids": [1, 2]}, (TokenPrompt(2),)),
        ("/vertex_generate", {"instances": [{"text": "x"}, {"text": "y"}]}, (TextPrompt(("x",)), TextPrompt(("y",)))),
        ("/vertex_generate", {"instances": [{"input_ids": [1]}]}, (TokenPrompt(1),)),
        (GENERATE, {"text": None, "input_ids": [[1], [2, 3]]}, (TokenPrompt(1), TokenPrompt(2))),
        (GENERATE, {"text_input": "x", "max_tokens": 4}, (TextPrompt(("x",)),)),
        ("/score", {"data_1": "a", "data_2": ["b", "c"]}, (TextPrompt(("a", "b")), TextPrompt(("a", "c")))),
        ("/v1/score", {"query": [1, 2], "items": [[3], [4, 5]]}, (TokenPrompt(3), TokenPrompt(4))),
        ("/generative_scoring", {"query": "a", "items": ["b"]}, (TextPrompt(("a", "b")),)),
        ("/pooling", {"data": {"image": "words"}}, (TextPrompt(("words",)),)),
        ("/v2/embed", {"texts": ["a", "b"]}, (TextPrompt(("a",)), TextPrompt(("b",)))),
        ("/completion", {"prompt": ["a", [1, 2], [3, "b"]]}, (TextPrompt(("a",)), TokenPrompt(2), TokenPrompt(1, ("b",)))),
        (COMPLETIONS, {"prompt": [1, "a", 2]}, (TokenPrompt(2, ("a",)),)),
        ("/embedding", {"content": [1, "a"]}, (TokenPrompt(1, ("a",)),)),
        ("/infill", {"input_prefix": "a", "prompt": [1, "b"]}, (TokenPrompt(1, ("a", "b")),)),
    ],
)  # fmt: skip
def test_legal_bodies_are_not_refused(path: str, body: dict[str, Any], prompts: tuple[Any, ...]) -> None:
    """Forms of a prompt that one engine or another takes."""
    assert request(path, body).prompts == prompts


def test_cohere_chat_is_inference_and_never_exact() -> None:
    """vLLM makes messages of it by code of its own."""
    found = request("/cohere/v2/chat", {"messages": HI, "max_tokens": 5, "documents": ["d"]})
    assert (found.dialect, found.max_output_tokens, source(found)) == ("cohere.chat", 5, "bound")


def unions(depth: int) -> dict[str, Any]:
    """A schema whose unions nest."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [schema]}
    return schema


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI, "structured_outputs": {"json": unions(8)}}, "structured_outputs"),
        (CHAT, {"messages": HI, "structured_outputs": {"json": json.dumps(unions(8))}}, "structured_outputs"),
        (CHAT, {"messages": HI, "guided_json": unions(8)}, "guided_json"),
        (CHAT, {"messages": HI, "response_format": {"json_schema": {"schema": unions(8)}}}, "response_format"),
        (COMPLETIONS, {"prompt": "x", "response_format": {"json_schema": {"schema": unions(8)}}}, "response_format"),
        (MESSAGES, {"messages": [], "output_config": {"format": {"schema": unions(8)}}}, "output_config.format"),
        (MESSAGES, {"messages": [], "output_format": {"schema": unions(8)}}, "output_format"),
        (RESPONSES, {"input": "x", "text": {"format": {"schema": unions(8)}}}, "text.format"),
        (GENERATE, {"text": "x", "sampling_params": {"json_schema": json.dumps(unions(8))}}, "sampling_params.json_schema"),
        ("/completion", {"prompt": "x", "json_schema": unions(8)}, "json_schema"),
        ("/api/chat", {"messages": HI, "format": unions(8)}, "format"),
        (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"strict": True, "parameters": unions(8)}}]}, "tools"),
        (MESSAGES, {"messages": [], "tools": [{"name": "f", "strict": True, "input_schema": unions(8)}]}, "tools"),
        (CHAT, {"messages": HI, "tool_choice": "required", "tools": [{"function": {"parameters": unions(8)}}]}, "tools"),
        (CHAT, {"messages": HI, "structured_outputs": {"grammar": "x" * 300_000}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_grammars_are_guarded_wherever_they_stand(path: str, body: dict[str, Any], param: str) -> None:
    """Engines compile them without a time limit."""
    error = refusal(path, body)
    assert (error.status, error.code, error.param) == (400, "schema_too_complex", param)


def test_a_tool_that_is_no_grammar_may_be_what_it_likes() -> None:
    """Without strict and a forced choice its schema is only text."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": unions(8)}}]
    for choice in ("auto", "none", None, {"type": "auto"}):
        assert request(CHAT, {"messages": HI, "tools": tools, "tool_choice": choice}).has_tools


def test_a_checksum_file_is_text() -> None:
    """An infill's extra files are source code, whatever their letters look like."""
    sums = "\n".join(f"{number:064x}" for number in range(200))
    found = request("/infill", {"input_prefix": "a", "input_extra": [{"filename": "sums", "text": sums}]})
    assert found.images == ()
    assert bound(found) >= len(sums)


@pytest.mark.parametrize(
    "name",
    ["query", "documents", "text", "chat_template", "chat_template_kwargs", "functions", "thinking", "input_ids", "items"],
)  # fmt: skip
def test_names_that_decide_must_not_occur_twice(name: str) -> None:
    """The engine may take the other one."""
    error = refusal(CHAT, b'{"messages":[],"' + name.encode() + b'":null,"' + name.encode() + b'":null}')
    assert (error.status, error.code, error.param) == (400, "duplicate_key", name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, b'{"text":"a","sampling_params":{"max_new_tokens":1,"max_new_tokens":9000}}'),
        (GENERATE, b'{"inputs":"a","parameters":{"best_of":1,"best_of":9}}'),
        ("/vertex_generate", b'{"instances":[],"parameters":{"sampling_params":{"n":1,"n":9}}}'),
        ("/api/chat", b'{"messages":[],"options":{"num_predict":1,"num_predict":9000}}'),
        (CHAT, b'{"messages":[],"stream_options":{"include_usage":true,"include_usage":false}}'),
    ],
)
def test_options_must_not_say_a_thing_twice(path: str, body: bytes) -> None:
    """Nested limits contradict themselves as top-level ones do."""
    assert refusal(path, body).code == "duplicate_key"


def test_a_zstd_frame_must_end() -> None:
    """A stream cut after a flush decodes to its last byte and is cut all the same."""
    text = json.dumps({"messages": HI}).encode() + b" " * 300_000
    packer = zstandard.ZstdCompressor().compressobj()
    cut = packer.compress(text) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    whole = cut + packer.flush()
    headers = {"content-encoding": "zstd"}
    assert parsed(CHAT, whole, headers=headers).body == text
    assert parsed(CHAT, whole + zstandard.compress(b"  "), headers=headers).body == text + b"  "
    for body in (cut, *(whole[:-n] for n in range(1, 20)), whole + b"junk"):
        with pytest.raises(BadRequest) as caught:
            parsed(CHAT, body, headers=headers)
        assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")
