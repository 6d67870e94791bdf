"""The bound is one: no tokenizer at hand makes more tokens of any text or conversation."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.dialects import BodyLimits, parse
from extproc.tokens import PromptCounter, text_bound
from extproc.types import RequestHead
from tests.engines.conversations import Dice, chat, text
from tests.payloads.tokenizers import chatml_counter, counter

pytestmark = pytest.mark.fuzz

#: Small ones always; with HYPOTHESIS_PROFILE=fuzz every family that the test package ships with a fast tokenizer.
FAMILIES = ["deepseek-coder-33b-base", "jiutian-139moe-chat"]
if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz":
    FAMILIES += [
        "qwen-3", "qwen-3.5", "deepseek-v2", "deepseek-v3.1", "deepseek-v4", "deepseek-llm-7b-base", "deepseek-r1-distill-llama-8b",
        "glm-4-32b-0414", "minimax-m3", "minimax-text-01", "janus-pro-7b", "jt-coder-8b-base", "jt-math-8b-instruct", "deepseek-ocr",
    ]  # fmt: skip

dense = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="0123456789abcdef", max_size=300),
    st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=", max_size=300),
    st.text(alphabet=st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), max_size=100),
    st.text(alphabet=st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF), max_size=60),
    st.text(alphabet=st.characters(min_codepoint=0x300, max_codepoint=0x36F) | st.sampled_from("aeiouñü"), max_size=60),
    st.text(alphabet="\u0301\u0323\u0334\u0344\u0345\u0f73\u3099\uff9eeế", min_size=30, max_size=200),
    st.text(alphabet=" \t\n\r\u3000\u00a0", max_size=100),
    st.text(alphabet="\ufdfa\u0390\u1d160\u0958가힣ﬁ①㍍", max_size=60),
    st.text(alphabet=st.characters(categories=["Cc", "Cf", "Co", "Cn", "So"]), max_size=80),
)


@pytest.mark.parametrize("family", FAMILIES)
@given(sample=dense)
@example(sample="\U0001d160" * 20)
@example(sample="\ufdfa" * 20)
@example(sample="\u0390" * 20)
@example(sample="é\u0323" * 20)
@example(sample="ế" + "\u0301" * 40 + "\u0323" * 40)
@example(sample="\u0344" * 40)
@example(sample="\uff9e\u0334" * 40)
def test_no_text_has_more_tokens(family: str, sample: str) -> None:
    """Digits, hex, base64, CJK, emoji, marks, blanks, compatibility forms: bytes bound them all."""
    vocabulary = counter(family).vocabulary
    assert vocabulary is not None
    assert vocabulary.count(sample, add_special_tokens=True) <= text_bound(sample) + 4


@given(sample=dense)
def test_the_chatml_vocabulary_too(sample: str) -> None:
    """The same with Qwen2.5, which normalises to NFC first."""
    vocabulary = chatml_counter().vocabulary
    assert vocabulary is not None
    assert vocabulary.count(sample, add_special_tokens=True) <= text_bound(sample) + 4


@given(st.integers(1000, 10**9))
def test_no_conversation_has_more_tokens(seed: int) -> None:
    """Tools, calls, results and templates included."""
    body = json.dumps(chat(Dice(seed))).encode()
    request = parse(RequestHead("POST", "/v1/chat/completions", {}), body, BodyLimits()).request
    assert request is not None
    for counted in (chatml_counter(), counter("jiutian-139moe-chat")):
        exact = counted.count(request)
        assert exact.input_tokens <= PromptCounter().bound(request).input_tokens


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_the_bound_grows_with_the_text(seed: int, more: int) -> None:
    """A longer text never has a smaller bound."""
    first = text(Dice(seed))
    assert text_bound(first + "x" * more) >= text_bound(first)
