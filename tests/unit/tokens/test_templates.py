"""Chat templates: rendered by the engines' rules, refused without harm."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from extproc.dialects import ChatPrompt
from extproc.tokens.conversation import prepared, tool_form
from extproc.tokens.counter import CountingStopped
from extproc.tokens.templates import ChatTemplate, TemplateFailure

HI = [{"role": "user", "content": "hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 11, 29, tzinfo=UTC))


def render(source: str, messages: list[dict[str, Any]] = HI, tools: Any = None, **more: Any) -> str:
    return template(source).render(messages, tools, add_generation_prompt=more.pop("generation", True), **more)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}\n[{{ m.role }}]{{ m['content'] }}\n{% endfor %}", "<s>[user]hi\n"),
        ("{{ tools | tojson }}", '[{"a": "<é&>"}]'),
        ("{{ tools | tojson(indent=2) }}", '[\n  {\n    "a": "<é&>"\n  }\n]'),
        ("{{ strftime_now('%d %b %Y') }}", "29 Nov 2026"),
        ("{% for m in [1,2,3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ documents is none }}", "True"),
        ("    {% if true %}\n  x\n    {% endif %}\ny", "  x\ny"),
    ],
)
def test_the_environment_is_the_engines(source: str, text: str) -> None:
    """Trimmed blocks, JSON without HTML escapes, loop controls, generation blocks, special tokens, the date."""
    assert render(source, tools=[{"a": "<é&>"}]) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x.y }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_cannot_do_is_a_failure(source: str) -> None:
    """Refusals, sandbox violations and plain errors all end as one failure, which means: take the bound."""
    with pytest.raises(TemplateFailure):
        render(source)


def test_endless_output_is_stopped() -> None:
    """A template that multiplies its text ends at the limit."""
    source = "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 4000 + "{% endfor %}{% endfor %}"
    with pytest.raises(TemplateFailure):
        render(source, max_chars=10_000_000)


def test_a_tick_stops_rendering() -> None:
    """The deadline is looked at while the template runs."""

    def stop() -> None:
        raise CountingStopped

    with pytest.raises(CountingStopped):
        render("{% for i in range(1000) %}x{% endfor %}", tick=stop)


@pytest.mark.parametrize("content", ["Sure, ", [{"type": "text", "text": "Sure, "}]])
@pytest.mark.parametrize(("end", "expected"), [("", "Sure, "), (" | trim", "Sure,")])
def test_a_final_message_is_continued(content: Any, end: str, expected: str) -> None:
    """Everything behind the last message's text is cut, spaces as the template treats them."""
    text = "m.content" if isinstance(content, str) else "m.content[0].text"
    source = "{% for m in messages %}<{{ " + text + end + " }}></t>{% endfor %}"
    messages = [{"role": "assistant", "content": content}]
    rendered = render(source, messages, continue_final_message=True, generation=False)
    assert rendered == "<" + expected
    assert messages == [{"role": "assistant", "content": content}]


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": []}]])
def test_nothing_to_continue_is_a_failure(messages: list[dict[str, Any]]) -> None:
    """The engine refuses that too."""
    with pytest.raises(TemplateFailure):
        render("{{ messages }}", messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", True),
        ("{% set l = messages[1:] %}{% for m in l %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% macro r(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ r(m.content) }}{% endfor %}", True),
        ("{% macro r(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ r(m.role) }}{% endfor %}", False),
        ("{% for content in content %}{% endfor %}", True),
        ("{% for t in tools %}{{ t }}{% endfor %}", False),
    ],
)  # fmt: skip
def test_whether_a_template_wants_parts(source: str, parts: bool) -> None:
    """Engines hand parts only to templates that iterate over content."""
    assert template(source).wants_parts is parts


STRINGS = "{% for m in messages %}{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
NO_INLINE_SYSTEM = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endif %}{% endfor %}"


def prepare(source: str, messages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return prepared(ChatPrompt(messages, **more), template(source))[0]


def test_parts_become_lines_for_string_templates() -> None:
    """Text parts are joined by newlines; other parts leave no text."""
    content = [{"type": "text", "text": "a"}, {"type": "image"}, "b", {"type": "text", "text": None}]
    assert prepare(STRINGS, [{"role": "user", "content": content}])[0]["content"] == "a\nb"


def test_strings_become_parts_for_part_templates() -> None:
    """And tool results become strings again."""
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": [{"type": "text", "text": "b"}, "c"]}]
    found = prepare(PARTS, messages)
    assert [m["content"] for m in found] == [[{"type": "text", "text": "a"}], "b\nc"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ("{broken", {}), ("[1]", {}), ({"a": 2}, {"a": 2}), ("[" * 3000, {})],
)  # fmt: skip
def test_tool_arguments_become_objects(given: Any, expected: Any) -> None:
    """Templates iterate over them; what is no object becomes an empty one."""
    call = {"function": {"name": "f", "arguments": given}}
    found = prepare(STRINGS, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert found[0]["tool_calls"][0]["function"]["arguments"] == expected


def test_tools_are_printed_as_the_engine_prints_them() -> None:
    """Known fields in their order, absent ones null, others dropped."""
    given = {"function": {"parameters": {"x": 1}, "name": "f", "other": 1}, "type": "function", "extra": 2}
    printed = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"x": 1}}}
    assert tool_form(given) == printed
    assert list(tool_form(given)["function"]) == ["name", "description", "parameters"]


def test_developer_becomes_the_system_where_the_template_has_none() -> None:
    """And all system messages become one in the first place."""
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "b"},
    ]
    assert prepare(STRINGS, messages) == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "u"}]
    assert prepare(STRINGS + "{# 'developer' #}", messages)[2]["role"] == "developer"


def test_anthropic_system_blocks_run_together() -> None:
    """Without the line that differs on every request, and in the first place if the template insists."""
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    messages = [
        {"role": "system", "content": blocks},
        {"role": "user", "content": "u"},
        {"role": "system", "content": "c"},
    ]
    assert prepare(STRINGS, messages, merge_system=True)[0]["content"] == "ab"
    found = prepare(NO_INLINE_SYSTEM, messages, merge_system=True)
    assert [m["content"] for m in found] == ["abc", "u"]
