"""Pictures: the engine's own figure where family, limits and size are known, a bound that says so otherwise."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.dialects import InferenceRequest
from extproc.tokens import PromptCounter, load_tokenizer
from extproc.tokens.pictures import picture_rule
from tests.payloads.tokenizers import NOW, counter, tokenizer_dir
from tests.unit.dialects.asking import request
from tests.unit.memory.test_vision import png

CHAT = "/v1/chat/completions"
QWEN_VL = tokenizer_dir("qwen2-vl-2b-instruct-awq") / "tokenizer.json"


def picture(width: int, height: int) -> dict[str, Any]:
    """A content part with a PNG of that size."""
    data = base64.b64encode(png(width, height) + bytes(64)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def ask(*parts: Any, **more: Any) -> InferenceRequest:
    """A chat whose one message has these parts."""
    return request(
        CHAT, {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}], **more}
    )


def vision(family: str | None = "qwen2_vl", processor: dict[str, Any] | None = None) -> PromptCounter:
    """Qwen2-VL's own tokenizer and template under a family's rule."""
    return replace(counter("qwen2-vl-2b-instruct-awq"), pictures=picture_rule(family, processor or {}))


def test_a_measured_picture_is_counted_exactly() -> None:
    """Its pad stands in the rendered text once, and for each of its tokens in the engine's prompt."""
    plain = vision().count(ask())
    one = vision().count(ask(picture(1024, 1024)))
    # <|vision_start|> and <|vision_end|> around 37 x 37 pads.
    assert (one.input_tokens - plain.input_tokens, one.source) == (37 * 37 + 2, "exact")
    two = vision().count(ask(picture(1024, 1024), picture(28, 560)))
    assert (two.input_tokens - one.input_tokens, two.source) == (20 + 2, "exact")


@pytest.mark.parametrize(
    "asked",
    [
        ask({"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}),
        ask(picture(64, 64), {"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}),
        ask(picture(64, 64), {"type": "text", "text": "<|image_pad|>"}),
        ask(picture(64, 64), {"type": "?", "note": "a part that we do not know"}),
        ask(picture(64, 64), mm_processor_kwargs={"max_pixels": 10**7}),
    ],
    ids=["url", "one of two", "a pad in the text", "unknown part", "the client's own limits"],
)
def test_what_is_not_known_is_a_bound(asked: InferenceRequest) -> None:
    """And is charged the family's maximum where the size is not known."""
    found = vision().count(asked)
    assert found.source == "bound"
    if not asked.unknown_parts and all(image.width is None for image in asked.images[-1:]):
        assert found.input_tokens > 16_384


def test_other_families_are_bounds() -> None:
    """Their rule gives the figure, but how the engine places it is not followed to the token."""
    for family in ("gemma3", "internvl", None):
        found = vision(family).count(ask(picture(640, 480)))
        assert found.source == "bound"
        assert found.input_tokens > vision(family).count(ask()).input_tokens


def test_a_clients_processor_settings_cannot_hide_tokens() -> None:
    """``mm_processor_kwargs`` may raise the limit on the area: the largest number in them is charged."""
    asked = ask(picture(8000, 8000), mm_processor_kwargs={"size": {"longest_edge": 64_000_000}})
    # What the engine makes of it: 8,000 x 8,000 pixels at 28 x 28 a token.
    assert vision().count(asked).input_tokens >= (8000 // 28) ** 2
    assert "mm_processor_kwargs" in asked.warnings


def test_the_processors_file_sets_the_limits(tmp_path: Path) -> None:
    """preprocessor_config.json beside the tokenizer, in both spellings; one that does not say makes bounds."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((QWEN_VL.parent / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    settings = tmp_path / "preprocessor_config.json"
    asked = ask(picture(1024, 1024))

    def counted() -> tuple[int, str]:
        known = load_tokenizer(tmp_path / "tokenizer.json", now=lambda: NOW)
        found = known.count(asked)
        return found.input_tokens - known.count(ask()).input_tokens - 2, found.source

    assert counted() == (37 * 37, "exact")
    settings.write_text(json.dumps({"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 784 * 100}))
    assert counted() == (100, "exact")
    edges = {"shortest_edge": 3136, "longest_edge": 784 * 400}
    settings.write_text(json.dumps({"patch_size": 14, "merge_size": 2, "size": edges}))
    assert counted() == (400, "exact")
    settings.write_text(json.dumps({"patch_size": 14}))
    assert counted()[1] == "bound"


def test_the_operators_figure_stands_for_what_cannot_be_known() -> None:
    """A picture whose size and rule are known keeps its own."""
    remote = {"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}
    known, both = ask(picture(1024, 1024)), ask(picture(1024, 1024), remote)
    rule = picture_rule("qwen2_vl", {}, flat=700)
    assert rule.most(known) + 700 <= rule.most(both) <= rule.most(known) + 720
    assert picture_rule(None, {}, flat=700).most(known) <= 720


def test_text_of_an_unknown_part_with_a_picture_is_not_lost() -> None:
    """A template that takes parts gets the text as well as the charge for the picture."""
    long = "many words " * 300
    asked = ask({"type": "document", "title": long, "source": {"data": base64.b64encode(png(64, 64)).decode() * 9}})
    bare = ask({"type": "document", "source": {"data": base64.b64encode(png(64, 64)).decode() * 9}})
    assert vision().count(asked).input_tokens >= vision().count(bare).input_tokens + 600
