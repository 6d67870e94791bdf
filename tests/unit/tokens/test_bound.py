"""The bound of texts and values: linear whatever is sent, nothing printed, and never below what could be printed."""

from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.dialects import ChatPrompt, InferenceRequest
from extproc.tokens import PromptCounter, bound, text_bound
from extproc.tokens.encoders import Vocabulary
from tests.unit.dialects.asking import request


def longest(text: str) -> int:
    """Bytes of the longest composed form, or characters of the decomposed one that accent-stripping tokenizers see."""
    composed = len(unicodedata.normalize("NFC", text).encode()), len(unicodedata.normalize("NFKC", text).encode())
    return max(len(text.encode()), *composed, len(unicodedata.normalize("NFKD", text)))


def starts_with_a_mark(char: str) -> bool:
    firsts = (char, unicodedata.normalize("NFD", char)[0], unicodedata.normalize("NFKD", char)[0])
    return any(map(unicodedata.combining, firsts))


def test_what_the_bound_of_marks_rests_on() -> None:
    """Over all of Unicode: a mark is in the run's class, composing never lengthens, and coming apart adds 6 at most."""
    run = re.compile(r"[\W\uff9e\uff9f]")
    grows = 0
    for code in (code for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF):
        char = chr(code)
        if unicodedata.is_normalized("NFKD", char) and not unicodedata.combining(char):
            continue
        assert run.match(char) or not starts_with_a_mark(char), hex(code)
        grown = len(unicodedata.normalize("NFD", char).encode()) - len(unicodedata.normalize("NFC", char).encode())
        assert grown >= 0, hex(code)
        grows = max(grows, grown)
    assert grows <= bound._EDGE


@pytest.mark.parametrize(
    "alphabet",
    [
        "\u0301\u0323", "\u0301\u0323\u0334\u0315\u0345", "\u0344\u0f73\u0f81\u0f71", "\uff9e\u0334\u3099",
        "\u0301\u0323ae\u1ebfΐ", "\u09c7\u09be\u0bc6\u0bbe\u0301", "\u0301\u2500㍍①🎉", "가각\u0301",
    ],
)  # fmt: skip
def test_runs_of_marks_are_bounded(alphabet: str) -> None:
    """Any order of marks, those that decompose into marks, letters and symbols between them, ASCII around them."""
    rng = random.Random(alphabet)
    for number in range(200):
        run = "".join(rng.choices(alphabet, k=rng.choice((1, 5, 30, 31, 40, 200))))
        text = ("", "x", "é", "ế", "x y ")[number % 5] + run + ("", "z", "가")[number % 3]
        assert longest(text) <= text_bound(text) <= 6 * len(text.encode()) + bound._EDGE


def test_a_long_run_of_marks_is_never_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text given to the normaliser holds more marks in a row than the limit; sorting those takes quadratic time."""
    seen: list[int] = []
    really = unicodedata.normalize

    def watched(form: Any, text: str) -> str:
        seen.append(max(map(len, re.findall("[\u0300-\u036f]+", text)), default=0))
        return really(form, text)

    monkeypatch.setattr(unicodedata, "normalize", watched)
    text = "a" + "\u0301" * 40_000 + "\u0323" * 40_000
    assert text_bound(text) >= len(text.encode())
    assert 0 < max(seen) <= bound.MARKS


def test_symbols_in_a_row_cost_what_they_cost() -> None:
    """A drawn line or a row of emoji is taken for marks at first sight; its bound is its bytes and the cut's slack."""
    for text in ("─" * 300, "👍" * 300, "。，" * 300):
        assert text_bound(text) == len(text.encode()) + bound._EDGE


def values(rng: random.Random, numbers: Sequence[Any], depth: int = 0) -> Any:
    """A JSON value of any shape."""
    kind = rng.randrange(7 if depth < 6 else 5)
    if kind < 5:
        return (None, False, rng.choice(numbers), 'é "x"\n\\', "word " * rng.randrange(9))[kind]
    inner = [values(rng, numbers, depth + 1) for _ in range(rng.randrange(5))]
    return inner if kind == 5 else {f"k\t{number}é": value for number, value in enumerate(inner)}


def test_a_value_is_measured_as_it_prints() -> None:
    """The arithmetic is not below the printed text, and equal to it where there are no numbers."""
    rng = random.Random(5)
    for _ in range(500):
        value = values(rng, (7, -3.25e-200, -(10**60), 10**23, 0.1, 1e22))
        printed = json.dumps(value, indent=4, ensure_ascii=False)
        assert text_bound(printed) <= bound._walked(value, text_bound)[1]
        plain = values(rng, (None,))
        assert bound._walked(plain, len)[1] == len(json.dumps(plain, indent=4, ensure_ascii=False))


DEEP = "[" * 300 + "1," * 20_000 + "1" + "]" * 300


def calls(arguments: str) -> InferenceRequest:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return request("/v1/chat/completions", {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]})


def test_deep_arguments_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 KB of arguments 300 levels deep would print as 24 MB: counted by arithmetic, with a tokenizer and without."""
    monkeypatch.setattr(bound, "_printed", lambda value: pytest.fail("printed") if type(value) is list else "")
    asked = calls(DEEP)
    found = PromptCounter().bound(asked).input_tokens
    assert found >= 20_000 * 1200
    blind = PromptCounter(vocabulary=Vocabulary(Seen(), 10, True, False, frozenset(), 0))
    counted = blind.count(asked)
    assert (counted.source, counted.input_tokens >= 20_000 * 1200) == ("bound", True)


def test_arguments_that_python_cannot_print_are_still_bounded() -> None:
    """Nested as deep as the parser takes and deeper than the printer does: a figure, not nothing."""
    depth = 700
    assert PromptCounter().bound(calls("[" * depth + "]" * depth)).input_tokens > 4 * depth * (depth - 1)


class Seen:
    """An encoder that counts characters and remembers what it was given."""

    name = "seen"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        self.texts.append(text)
        return len(text)

    def remembered_bytes(self) -> int:
        return 0


PAIRS = {"model": "m", "query": "é漢" * 500, "documents": ["a", "b"] * 50}
SUFFIXES = {"model": "m", "prompt": ["a", "b"] * 50, "suffix": "é漢" * 500}


@pytest.mark.parametrize(("path", "body"), [("/v1/rerank", PAIRS), ("/v1/completions", SUFFIXES)])
def test_a_text_of_every_prompt_is_measured_once(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query of a hundred pairs is normalised once, and tokenised once; the figures are those of each alone."""
    asked = request(path, body)
    seen: list[str] = []
    really = bound._step_bound

    def watched(text: str) -> int:
        seen.append(text)
        return really(text)

    monkeypatch.setattr(bound, "_step_bound", watched)
    blind = PromptCounter().bound(asked)
    assert seen == ["é漢" * 500]
    assert blind.per_prompt == tuple(map(bound.prompt_bound, asked.prompts))
    encoder = Seen()
    counter = PromptCounter(vocabulary=Vocabulary(encoder, 10, True, False, frozenset(), 0))
    assert counter.count(asked).per_prompt == (1001,) * 100
    assert sorted(encoder.texts) == ["a", "b", "é漢" * 500]


def test_long_tools_are_charged_by_arithmetic() -> None:
    """Tools as deep as the parser lets them be: the printed length, without a print of it."""
    tools: Any = [1] * 5000
    for _ in range(90):
        tools = [tools]
    prompt = ChatPrompt([{"role": "user", "content": "x"}], tools)
    assert bound.chat_bound(prompt) >= len(json.dumps(tools, indent=4))
