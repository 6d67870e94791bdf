"""Conversations without a template: every string counted, and the template charged at no less than any one adds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from extproc.config.models import TemplateFamily
from extproc.dialects import ChatPrompt, InferenceRequest
from extproc.tokens import PromptCounter, overhead_of
from extproc.tokens.overheads import ANY, FAMILIES
from tests.engines.conversations import all_requests
from tests.payloads.tokenizers import counter
from tests.unit.dialects.asking import request

CHAT = "/v1/chat/completions"

#: Every template that the test package ships with a tokenizer, and the family it belongs to.
TEMPLATES = {
    "qwen-2.5": "chatml",
    "qwen-3": "chatml",
    "qwen-3.5": "chatml",
    "qwq-32b": "chatml",
    "qwen2.5-vl-3b-instruct-awq": "chatml",
    "jt-coder-8b-base": "chatml",
    "deepseek-v2": "deepseek",
    "deepseek-v3": "deepseek",
    "deepseek-v3.1": "deepseek",
    "deepseek-r1-distill-llama-8b": "deepseek",
    "glm-4-32b-0414": "glm",
    "glm-4.5v": "glm",
    "glm-4.7-flash": "glm",
    "minimax-m3": None,
    "minimax-text-01": None,
}


def conversations() -> list[InferenceRequest]:
    """Some of the conversations of the engine's record, of every dialect, and the shortest one there is."""
    found = [request(path, body) for path, body in list(all_requests())[::7]]
    chats = [each for each in found if isinstance(each.prompts[0], ChatPrompt)]
    return [*chats, request(CHAT, {"messages": [{"role": "user", "content": "hi"}]})]


@pytest.mark.parametrize(("name", "family"), TEMPLATES.items())
def test_no_template_adds_more_than_its_family(name: str, family: str | None) -> None:
    """Over the family's figures and over those for any template, with the model's own tokenizer and by bytes alone."""
    known = counter(name)
    exact = [(each, known.count(each)) for each in conversations()]
    rendered = [(each, count.input_tokens) for each, count in exact if count.source == "exact"]
    assert len(rendered) > 15
    for overhead in (overhead_of(family), ANY):
        blind = replace(known, template=None, tool_template=None, overhead=overhead)
        wrong = [
            (each.prompts, tokens, found)
            for each, tokens in rendered
            if (found := blind.count(each)).input_tokens < tokens or found.source != "bound"
        ]
        assert not wrong
        assert all(PromptCounter(overhead=overhead).count(each).input_tokens >= tokens for each, tokens in rendered)


def test_a_long_turn_is_counted_closely() -> None:
    """What a bound by bytes overstates threefold is within a few per cent with a tokenizer and a family."""
    text = json.dumps([{"role": "user", "content": path} for path, _ in all_requests()] * 8)
    asked = request(CHAT, {"messages": [{"role": "user", "content": text}]})
    known = counter("qwen-2.5")
    exact = known.count(asked).input_tokens
    found = replace(known, template=None, overhead=overhead_of("chatml")).count(asked).input_tokens
    assert exact <= found <= exact * 1.05
    assert known.bound(asked).input_tokens > 2 * exact


def test_a_template_s_own_system_prompt_counts_where_it_may_stand() -> None:
    """Mistral's newer templates speak 1,200 tokens of their own unless the client brings a system message."""
    user = {"role": "user", "content": "hi"}
    counts = {
        name: PromptCounter(overhead=overhead_of("mistral")).count(request(CHAT, {"messages": messages})).input_tokens
        for name, messages in {
            "none": [user],
            "empty": [{"role": "system", "content": " "}, user],
            "own": [{"role": "system", "content": "Be brief."}, user],
            "parts": [
                {"role": "system", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
                user,
            ],
        }.items()
    }
    assert counts["none"] > 1200
    assert counts["empty"] > 1200
    assert counts["own"] < 100
    assert counts["parts"] < 200


def test_the_operators_figure_takes_the_place_of_the_families() -> None:
    """``templateOverheadTokens`` is what the template says by itself, with a family or without."""
    assert overhead_of("mistral", 5).fixed == overhead_of(None, 5).fixed == 5
    assert overhead_of("mistral", 5).system == 0
    assert overhead_of("mistral", 5).per_message == FAMILIES["mistral"].per_message


def test_models_that_say_much_are_known_by_their_type() -> None:
    """Without a family a Mistral's geometry raises the figures of any template and lowers none."""
    found = overhead_of(None, None, "mistral3")
    assert found.system == FAMILIES["mistral"].system
    assert (found.fixed, found.per_message, found.tools) == (ANY.fixed, ANY.per_message, ANY.tools)
    assert overhead_of(None, None, "qwen2") == ANY


def test_the_configuration_names_the_families_there_are() -> None:
    """The configuration's list and the table are one."""
    assert set(get_args(TemplateFamily)) == set(FAMILIES)
