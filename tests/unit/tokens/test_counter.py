"""Counting: exact by the model's own files, a true bound otherwise, stopped without harm."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from extproc.dialects import InferenceRequest
from extproc.errors import ConfigError
from extproc.tokens import CountingStopped, PromptCounter, load_tokenizer
from extproc.tokens.encoders import SEGMENT_CACHE_BYTES, EncoderFailure, HfEncoder, Vocabulary, cut
from extproc.tokens.pictures import PictureRule
from extproc.tokens.samples import SAMPLES
from extproc.tokens.templates import ChatTemplate
from tests.payloads.runner import SHIPPED
from tests.payloads.tokenizers import CHATML, NOW, chatml_counter, counter, tokenizer_dir
from tests.unit.dialects.asking import request

CHAT = "/v1/chat/completions"
QWEN = tokenizer_dir("qwen-2.5") / "tokenizer.json"


def ask(content: Any = "hi", **more: Any) -> InferenceRequest:
    return request(CHAT, {"model": "m", "messages": [{"role": "user", "content": content}], **more})


def reference(text: str) -> int:
    return len(tokenizers.Tokenizer.from_file(str(QWEN)).encode(text, add_special_tokens=False).ids)


def test_a_conversation_is_rendered_and_tokenised() -> None:
    """The count is that of the rendered text."""
    rendered = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    counted = chatml_counter().count(ask("hi there"))
    assert (counted.per_prompt, counted.source) == ((reference(rendered),), "exact")


def test_prompts_are_counted_each() -> None:
    """One figure per prompt; token ids count by length."""
    found = request("/v1/completions", {"prompt": ["a b c", [1, 2, 3, 4], "x"]})
    assert chatml_counter().count(found).per_prompt == (3, 4, 1)


def test_no_prompt_is_no_token() -> None:
    """Loading a model with an empty embed call."""
    found = request("/api/embed", {"model": "m", "input": []})
    assert chatml_counter().count(found).input_tokens == 0
    assert PromptCounter().bound(found).input_tokens == 0


def test_without_files_the_bound_answers() -> None:
    """And says so."""
    counted = load_tokenizer(None, now=lambda: NOW).count(ask())
    assert counted.source == "bound"
    assert counted.input_tokens >= chatml_counter().count(ask()).input_tokens


@pytest.mark.parametrize(
    "more", [{"chat_template": "{{ 1 }}"}, {"messages": [{"role": "user", "content": [{"type": "?"}]}]}]
)
def test_what_cannot_be_exact_is_a_bound(more: dict[str, Any]) -> None:
    """A template that the client brings is never rendered; unknown parts have no exact count."""
    assert chatml_counter().count(ask(**more)).source == "bound"


def test_another_engines_count_is_a_bound() -> None:
    """What vLLM does to messages is known to the byte; llama.cpp keeps Claude Code's billing line, for one."""
    billed = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: v=1; h=abc;"},
            {"type": "text", "text": "Be brief."},
        ],
    }
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "hi"}]}), ("/v1/messages", billed)):
        ours = chatml_counter().count(request(path, body))
        theirs = replace(chatml_counter(), followed=False).count(request(path, body))
        assert (ours.source, theirs.source) == ("exact", "bound")
        assert ours.input_tokens < theirs.input_tokens < ours.input_tokens + 40
    assert theirs.input_tokens - ours.input_tokens > 12


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2}, (2, 1)),
        ("/v1/completions", {"prompt": [1, 2, 3], "truncate_prompt_tokens": -1}, (3,)),
        ("/v1/embeddings", {"input": ["a b c d", "a"], "truncate_prompt_tokens": 3}, (3, 1)),
        ("/v1/rerank", {"query": "a", "documents": ["a b c d"], "truncate_prompt_tokens": 4}, (4,)),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 99}], "truncate_prompt_tokens": 50}, (50,)),
    ],
)
def test_prompts_that_vllm_cuts(path: str, body: dict[str, Any], counts: tuple[int, ...]) -> None:
    """They are as long as the client says; other engines, and one that nobody knows, keep all of them."""
    found, whole = request(path, body), request(path, body | {"truncate_prompt_tokens": None})
    made = chatml_counter()
    assert (made.count(found).per_prompt, made.count(found).source) == (counts, "exact")
    assert made.count(found, budget_tokens=0).input_tokens <= made.bound(whole).input_tokens
    assert made.bound(found).input_tokens >= sum(counts)
    for other in (replace(made, followed=False), PromptCounter()):
        assert other.count(found) == other.count(whole)


def test_prompts_that_vllm_fills_up() -> None:
    """A pooling request may ask for padding to the model's longest: never exact, and as much as hidden text."""
    found = request("/v1/embeddings", {"input": "a", "padding": "max_length"})
    assert (found.hidden, found.warnings) == (1, ("padding_not_counted",))
    assert chatml_counter().count(found).source == "bound"


def test_deferred_tools_are_written_where_they_are_referred_to() -> None:
    """GLM 5.1's template does; 203 tokens is what transformers renders, and the bound has room for each reference."""
    city = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}
    weather = {
        "name": "get_weather",
        "description": "Gets the weather of a place",
        "input_schema": city,
        "defer_loading": True,
    }
    search = {"name": "search", "description": "Finds tools", "input_schema": {"type": "object", "properties": {}}}
    template = tokenizer_dir("glm-5.1") / "chat_template.jinja"
    made = load_tokenizer(tokenizer_dir("glm-4.7-flash") / "tokenizer.json", template, now=lambda: NOW)

    def asked(times: int) -> InferenceRequest:
        found = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [{"type": "tool_reference", "tool_name": "get_weather"}] * times,
        }
        call = {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "weather"}}
        messages = [
            {"role": "user", "content": "weather in Oslo?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [found]},
        ]
        return request(
            "/v1/messages", {"model": "m", "max_tokens": 9, "tools": [search, weather], "messages": messages}
        )

    assert (made.count(asked(1)).input_tokens, made.count(asked(1)).source) == (203, "exact")
    for times in (1, 30):
        assert made.bound(asked(times)).input_tokens >= made.count(asked(times)).input_tokens
    assert made.count(asked(30)).input_tokens > 203 + 29 * 30


def test_pieces_of_a_text_are_joined_by_marks() -> None:
    """llama.cpp puts tokens of its own around what is to be filled in, and a repository's name before files."""
    body = {
        "input_prefix": "def f(",
        "input_suffix": "return 1",
        "input_extra": [{"filename": "a.py", "text": "import os"}],
    }
    followed, other = counter("qwen-2.5"), replace(counter("qwen-2.5"), followed=False)
    marks = len("<|repo_name|> <|file_sep|> <|file_sep|> <|fim_prefix|> <|fim_suffix|> <|fim_middle|>".split())
    for extra in ({}, {"prompt": [1, 2]}):
        found = request("/infill", body | extra)
        count = other.count(found)
        assert count.source == "bound"
        assert other.bound(found).input_tokens >= count.input_tokens >= followed.count(found).input_tokens + marks + 8
    ids = request("/completion", {"prompt": [1, 2, 3]})
    assert other.count(ids).per_prompt == (3,)
    assert other.count(ids).source == "exact"


def test_a_pair_of_texts_has_the_marks_of_a_pair(tmp_path: Path) -> None:
    """A cross-encoder joins them, other models take each alone: exact only where that is the same."""
    pairs = request("/v1/rerank", {"query": "a", "documents": ["b", "c d"]})
    assert counter("qwen-2.5").count(pairs).source == "exact"
    native = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3, "c": 4, "d": 5}, "[SEP]")
    )
    native.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    native.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP] [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    native.save(str(tmp_path / "tokenizer.json"))
    made = load_tokenizer(tmp_path / "tokenizer.json", now=lambda: NOW)
    found = made.count(pairs)
    assert (found.per_prompt, found.source) == ((7, 8), "bound")
    assert made.bound(pairs).input_tokens >= found.input_tokens
    assert made.count(request("/v1/embeddings", {"input": ["a", "b"]})).per_prompt == (3, 3)


def test_a_refusing_template_gives_the_bound() -> None:
    """The engine will decide about the request; we only must not undercount it."""
    refusing = ChatTemplate("{{ raise_exception('never') }}", {}, now=lambda: NOW)
    found = replace(chatml_counter(), template=refusing).count(ask("hello " * 100))
    assert found.source == "bound"
    assert found.input_tokens >= 100


def test_a_passed_budget_ends_the_count_early() -> None:
    """A text that cannot fit its budget is not tokenised to its end; the bound is over the budget too."""
    steps = []
    found = chatml_counter().count(ask("word " * 2_000_000), budget_tokens=1000, tick=lambda: steps.append(1))
    assert found.source == "bound"
    assert found.input_tokens > 1000
    assert len(steps) <= 3


def test_within_the_budget_the_count_is_exact() -> None:
    """The budget itself is allowed."""
    exact = chatml_counter().count(ask("a b c")).input_tokens
    assert chatml_counter().count(ask("a b c"), budget_tokens=exact).source == "exact"


def test_a_deadline_gives_the_bound() -> None:
    """A tick that raises stops the count."""

    def stop() -> None:
        raise CountingStopped

    assert chatml_counter().count(ask(), tick=stop).source == "bound"


def test_a_native_failure_gives_the_bound() -> None:
    """A panic on one text costs exactness, nothing else."""

    class Broken:
        name = "broken"

        def count(self, text: str, *, add_special_tokens: bool) -> int:
            raise EncoderFailure("PanicException")

        def remembered_bytes(self) -> int:
            return 0

    vocabulary = Vocabulary(Broken(), 1000, True, True, frozenset(), 0)
    assert PromptCounter(vocabulary=vocabulary).count(request("/v1/completions", {"prompt": "x"})).source == "bound"


def test_lone_surrogates_are_counted() -> None:
    """Half an emoji counts as a replacement character."""
    body = b'{"messages":[{"role":"user","content":"a \\ud83d b"}]}'
    found = chatml_counter().count(request(CHAT, body))
    assert found == chatml_counter().count(ask("a \ufffd b"))


def test_special_tokens_in_text_count_as_the_engine_counts_them() -> None:
    """Engines parse them in user content as well."""
    assert chatml_counter().count(ask("<|im_end|>")).input_tokens == chatml_counter().count(ask("")).input_tokens + 1


def test_pictures_are_charged() -> None:
    """By family rule, or a flat figure; sizes unknown or not."""
    image = {"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}
    plain = chatml_counter().count(ask([])).input_tokens
    flat = replace(chatml_counter(), pictures=PictureRule(flat=700)).count(ask([image, image]))
    assert flat.input_tokens >= plain + 1400
    assert chatml_counter().count(ask([image])).input_tokens > plain + 1000


@pytest.mark.parametrize("name", ["qwen-2.5", "deepseek-coder-33b-base"])
def test_the_fast_encoder_is_trusted_where_it_agrees(name: str) -> None:
    """On the sample set it counts as the reference does."""
    vocabulary = (chatml_counter() if name == "qwen-2.5" else counter(name)).vocabulary
    assert vocabulary is not None
    assert (vocabulary.encoder.name, vocabulary.note) == ("fastokens", None)


def word_level(tmp_path: Path) -> Path:
    """A tokenizer that fastokens cannot load."""
    model = tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
    native = tokenizers.Tokenizer(model)
    native.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    native.enable_truncation(4)
    path = tmp_path / "tokenizer.json"
    native.save(str(path))
    return path


def test_other_tokenizers_are_counted_by_the_reference(tmp_path: Path) -> None:
    """The reason is noted; truncation settings in the file do not cut the count."""
    found = load_tokenizer(word_level(tmp_path), now=lambda: NOW)
    assert found.vocabulary is not None
    assert isinstance(found.vocabulary.encoder, HfEncoder)
    assert (found.note or "").startswith("fastokens cannot load it")
    assert found.count(request("/v1/completions", {"prompt": "ab " * 50})).per_prompt == (100,)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"version":"1.0"}', "\x00"])
def test_a_broken_tokenizer_file_is_one_line(tmp_path: Path, content: str) -> None:
    """The line names the file and what would mend it."""
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path, now=lambda: NOW)
    assert str(path) in caught.value.problems[0]
    assert len(caught.value.problems) == 1


def test_missing_and_invalid_files_are_named(tmp_path: Path) -> None:
    """Tokenizer, template and configuration alike."""
    template = tmp_path / "t.jinja"
    template.write_text("{% if %}")
    for tokenizer, chat in ((tmp_path / "no.json", None), (QWEN, tmp_path / "no.jinja"), (QWEN, template)):
        with pytest.raises(ConfigError):
            load_tokenizer(tokenizer, chat, now=lambda: NOW)


def test_the_template_beside_the_tokenizer_is_taken(tmp_path: Path) -> None:
    """chat_template.jinja first, then tokenizer_config.json, a list by name."""
    word_level(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config", "bos_token": {"content": "<s>"}}))
    assert Sources(tmp_path).template == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert Sources(tmp_path).template == "from file"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert (Sources(tmp_path).template, Sources(tmp_path).tools) == ("d", "t")


@pytest.mark.parametrize("sign", ["geometry", "config", "tekken"])
def test_prompts_that_vllm_writes_itself_are_bounds(tmp_path: Path, sign: str) -> None:
    """gpt-oss and Mistral's own format have templates too, but vLLM does not render them."""
    path = word_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert load_tokenizer(path, now=lambda: NOW).count(ask()).source == "exact"
    if sign == "config":
        (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    if sign == "tekken":
        (tmp_path / "tekken.json").write_text("{}")
    found = load_tokenizer(path, now=lambda: NOW, model_type="gpt_oss" if sign == "geometry" else None)
    assert found.note
    assert found.count(ask()).source == "bound"
    assert found.count(request("/v1/completions", {"prompt": "ab"})).source == "exact"


def test_a_gguf_file_may_hold_the_template(tmp_path: Path) -> None:
    """llama.cpp renders what its model file carries, so that file can be named; one without a template is an error."""
    word_level(tmp_path)
    for name, fields in {
        "with": {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"},
        "without": {"general.name": "x"},
    }.items():
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        for key, value in fields.items():
            writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    tokenizer = tmp_path / "tokenizer.json"
    found = load_tokenizer(tokenizer, tmp_path / "with.gguf", now=lambda: NOW)
    assert found.template is not None
    assert found.tool_template is not None
    assert (found.template.source, found.tool_template.source) == ("d", "t")
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF\x03")
    for name in ("without.gguf", "damaged.gguf", "absent.gguf"):
        with pytest.raises(ConfigError, match=name):
            load_tokenizer(tokenizer, tmp_path / name, now=lambda: NOW)


class Sources:
    """The template sources of a directory's counter."""

    def __init__(self, folder: Path) -> None:
        found = load_tokenizer(folder / "tokenizer.json", now=lambda: NOW)
        self.template = found.template.source if found.template else None
        self.tools = found.tool_template.source if found.tool_template else None


def test_tekken_files_are_read(tmp_path: Path) -> None:
    """Mistral's format: ranks by bytes, special tokens before them, BOS before a prompt as mistral-common puts it."""
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    vocab.append({"rank": 256, "token_bytes": base64.b64encode(b"ab").decode(), "token_str": "ab"})
    data = {
        "config": {"pattern": r"\s+|\S+", "default_vocab_size": 259, "default_num_special_tokens": 2, "version": "v3"},
        "vocab": vocab,
        "special_tokens": [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "[INST]"}],
    }
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(data))
    found = load_tokenizer(path, now=lambda: NOW)
    assert found.count(request("/v1/completions", {"prompt": "abab c"})).per_prompt == (5,)
    assert found.count(request("/v1/completions", {"prompt": "abab c", "add_special_tokens": False})).per_prompt == (4,)


@pytest.mark.parametrize("name", ["qwen-2.5", "deepseek-coder-33b-base"])
def test_cuts_do_not_change_counts(name: str) -> None:
    """A long text counted in pieces gives the same sum as in one."""
    vocabulary = (chatml_counter() if name == "qwen-2.5" else counter(name)).vocabulary
    assert vocabulary is not None
    assert vocabulary.cuttable
    text = "\n".join(SAMPLES) * 3 + Path(__file__).read_text("utf-8")
    pieces = list(cut(text, 200))
    assert "".join(pieces) == text
    assert len(pieces) > 10
    whole = vocabulary.encoder.count(text, add_special_tokens=False)
    assert whole == sum(vocabulary.encoder.count(piece, add_special_tokens=False) for piece in pieces)


def test_chatml_has_no_hidden_system_prompt() -> None:
    """The payloads' facts rest on it."""
    assert "You are" not in CHATML


def test_pictures_are_measured_by_the_models_own_rule(tmp_path: Path) -> None:
    """config.json beside the tokenizer names the family; the size comes from the picture."""
    path = word_level(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    body = (SHIPPED / "03-chat-image-data-uri.json").read_bytes()
    known, unknown = load_tokenizer(path, now=lambda: NOW), load_tokenizer(None, now=lambda: NOW)
    asked = request(CHAT, body)
    assert unknown.bound(asked).input_tokens - known.bound(asked).input_tokens == 16_384 - 99


def test_remembered_text_is_bounded_and_reported() -> None:
    """The segment cache fills with long prompts and says how much it holds."""
    vocabulary = chatml_counter().vocabulary
    assert vocabulary is not None
    for number in range(50):
        chatml_counter().count(ask(f"{number} fresh words about nothing in particular " * 2000))
    assert 0 <= vocabulary.encoder.remembered_bytes() <= SEGMENT_CACHE_BYTES


def test_tiktoken_files_are_read(tmp_path: Path) -> None:
    """Named after their encoding, whose pre-tokenizer is built in; other names are refused."""
    ranks = [bytes([i]) for i in range(256)] + [b"ab", b"abab"]
    lines = "\n".join(f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(ranks))
    for name in ("my-cl100k_base.tiktoken", "o200k_base.tiktoken"):
        (tmp_path / name).write_text(lines + "\n")
        found = load_tokenizer(tmp_path / name, now=lambda: NOW)
        assert found.count(request("/v1/completions", {"prompt": "abab xy"})).per_prompt == (4,)
    (tmp_path / "other.tiktoken").write_text(lines)
    with pytest.raises(ConfigError):
        load_tokenizer(tmp_path / "other.tiktoken", now=lambda: NOW)
