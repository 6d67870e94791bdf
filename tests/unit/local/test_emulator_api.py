"""Bodies of the emulated engine: tokens, caps, lengths, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from extproc.local.emulator_api import (
    CHAT,
    COMPLETIONS,
    ApiFault,
    Call,
    Rules,
    encoder,
    generations,
    output_text,
    read_call,
)
from extproc.local.paged import EngineShape

SHAPE = EngineShape(blocks=65, block_tokens=16, max_model_tokens=1024)
RULES = Rules(SHAPE, frozenset({"m"}), None, seed=1, mean_output_tokens=50, llamacpp=False)


def read(path: str = COMPLETIONS, headers: dict[str, str] | None = None, rules: Rules = RULES, **body: object) -> Call:
    """Read one body given as keywords."""
    return read_call(path, headers or {}, json.dumps({"model": "m", **body}).encode(), rules)


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (COMPLETIONS, {"prompt": "12345"}, (2,)),
        (COMPLETIONS, {"prompt": ["1234", "\u00e4\u00e4\u00e4"]}, (1, 2)),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, (3,)),
        (COMPLETIONS, {"prompt": [[5], [6, 7]]}, (1, 2)),
        (CHAT, {"messages": [{"role": "user", "content": "12345678"}]}, (6,)),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": "1234"}]}, {"content": None}]}, (9,)),
    ],
)
def test_the_byte_rule(path: str, body: dict[str, object], tokens: tuple[int, ...]) -> None:
    """One token per started four bytes, four more per chat message, ids as they stand."""
    assert read(path, **body).prompts == tokens


def test_the_header_says_the_tokens() -> None:
    """Headers give input and output tokens exactly, the cap permitting."""
    call = read(headers={"x-emulator-input-tokens": "77", "x-emulator-output-tokens": "9"}, prompt="a", max_tokens=100)

    assert (call.prompts, call.outputs) == ((77,), (9,))


def test_answers_are_as_long_for_the_same_seed_and_body() -> None:
    """Lengths come from the seed and the body, differ between bodies and end at the cap."""
    one, again, other = (read(prompt=text, max_tokens=900) for text in ("a", "a", "b"))
    capped = read(prompt="a", max_tokens=1)

    assert one.outputs == again.outputs
    assert one.outputs != other.outputs
    assert (capped.outputs, capped.reason(0)) == ((1,), "length")


def test_the_cap_is_clamped_to_the_context_as_vllm_does() -> None:
    """prompt + max_tokens over the context is cut without an error."""
    call = read(prompt=[1] * 1000, max_tokens=500, ignore_eos=True)

    assert call.outputs == (24,)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [1] * 1024}, 400),
        ({"prompt": "a", "max_tokens": 1025}, 400),
        ({"prompt": "a", "max_tokens": "5"}, 400),
        ({"prompt": "a", "n": 0}, 400),
        ({"prompt": {}}, 400),
        ({"prompt": "a", "model": "other"}, 404),
    ],
)
def test_errors_are_the_engines(body: dict[str, object], status: int) -> None:
    """Statuses of vLLM 0.32 for the same mistakes."""
    with pytest.raises(ApiFault) as fault:
        read(**body)
    assert fault.value.status == status
    assert fault.value.body["error"]["code"] == status


def test_llamacpp_names_the_context_in_its_error() -> None:
    """A prompt over the context is ``exceed_context_size_error`` with both figures."""
    rules = Rules(SHAPE, frozenset({"m"}), None, 1, 50, llamacpp=True)
    with pytest.raises(ApiFault) as fault:
        read(rules=rules, prompt=[1] * 2000, max_tokens=5)

    error = fault.value.body["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 2000, 1024)


def test_output_text_is_four_bytes_a_token() -> None:
    """Text of a range continues where the one before ended."""
    assert len(output_text(0, 100)) == 400
    assert output_text(0, 40) + output_text(40, 100) == output_text(0, 100)


def test_common_prefixes_have_common_keys_only_with_a_prefix_cache() -> None:
    """Equal starts share block names; without the cache nothing is shared between calls."""
    calls = [read(prompt="x" * 640 + tail, n=2) for tail in ("a" * 64, "b" * 64)]
    cached = [generations(call, "r", prefix_cache=True)[0].prompt_keys for call in calls]
    plain = [generations(call, "r", prefix_cache=False) for call in calls]

    assert cached[0][:10] == cached[1][:10]
    assert cached[0][10:] != cached[1][10:]
    assert plain[0][0].prompt_keys == plain[0][1].prompt_keys
    assert not set(plain[0][0].prompt_keys) & set(plain[1][0].prompt_keys)


def test_a_tokenizer_counts_exactly(tmp_path: Path) -> None:
    """With a tokenizer.json texts are counted by it, and chat messages as ChatML."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    rules = replace(RULES, encode=encoder(str(tmp_path / "tokenizer.json")))
    chat = read(CHAT, rules=rules, messages=[{"role": "user", "content": "a b"}])

    assert read(rules=rules, prompt="a b a").prompts == (3,)
    assert chat.prompts == (len("<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n".split()),)
