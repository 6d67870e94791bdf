"""Edits change the span concerned and report where the model value went."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.dialects import edit
from tests.unit.dialects.asking import parsed

CHAT = "/v1/chat/completions"
MESSAGES = '"messages":[{"role":"user","content":"\\ud83d {\\"model\\":\\"no\\",\\"max_tokens\\":1}"}]'


def edited(text: str, path: str = CHAT, **changes: Any) -> tuple[str, str | None]:
    body = text.encode()
    found = parsed(path, body)
    assert found.request is not None
    result = edit(found.body, found.request, **changes)
    span = result.model_span
    return result.body.decode(), result.body[span[0] : span[1]].decode() if span else None


def test_nothing_to_change_is_the_same_object() -> None:
    """No edit, no copy."""
    body = ("{" + MESSAGES + ',"model":"m","max_tokens":5}').encode()
    found = parsed(CHAT, body)
    assert found.request is not None
    assert edit(found.body, found.request, cap=10, include_usage=True).body is body


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"model":"m", "max_tokens": 9000 ,M}', '{"model":"m", "max_tokens": 64 ,M}'),
        ('{"max_tokens":9000,"max_completion_tokens":10,M,"model":"m"}', '{"max_tokens":64,"max_completion_tokens":10,M,"model":"m"}'),
        ('{"max_tokens":null,"model":"m",M}', '{"max_tokens":64,"model":"m",M}'),
        ('{"max_tokens":-1,"model":"m",M}', '{"max_tokens":64,"model":"m",M}'),
        ('{"model":"m",M}', '{"max_tokens":64,"model":"m",M}'),
        ('{ "model":"m",M}', '{"max_tokens":64, "model":"m",M}'),
        ('{"max_completion_tokens":9000,"model":"m",M}', '{"max_tokens":64,"max_completion_tokens":64,"model":"m",M}'),
        ('{"seed":9223372036854775808,"x":1.0e+2,"model":"m",M,"max_tokens":1e5}', '{"seed":9223372036854775808,"x":1.0e+2,"model":"m",M,"max_tokens":64}'),
    ],
)  # fmt: skip
def test_a_cap_is_clamped_where_it_stands(before: str, after: str) -> None:
    """Larger and unlimited caps are rewritten, a missing one is inserted, every other byte stays."""
    text, model = edited(before.replace("M", MESSAGES), cap=64)
    assert text == after.replace("M", MESSAGES)
    assert model == '"m"'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"model":"m","stream":true,M}', '{"stream_options":{"include_usage":true},"model":"m","stream":true,M}'),
        ('{"stream_options":{},"model":"m","stream":true,M}', '{"stream_options":{"include_usage":true},"model":"m","stream":true,M}'),
        ('{"stream_options":null,"model":"m","stream":true,M}', '{"stream_options":{"include_usage":true},"model":"m","stream":true,M}'),
        ('{"stream_options":{"x":1},"model":"m","stream":true,M}', '{"stream_options":{"include_usage":true,"x":1},"model":"m","stream":true,M}'),
        ('{"model":"m","stream":true,M,"stream_options":{"include_usage": false}}', '{"model":"m","stream":true,M,"stream_options":{"include_usage": true}}'),
        ('{"model":"m","stream":false,M}', '{"model":"m","stream":false,M}'),
    ],
)  # fmt: skip
def test_usage_is_asked_for_in_streams(before: str, after: str) -> None:
    """Wherever the options stand, and only where the request streams."""
    text, model = edited(before.replace("M", MESSAGES), include_usage=True)
    assert text == after.replace("M", MESSAGES)
    assert model == '"m"'


@pytest.mark.parametrize("before", ['{"model":"m",M}', '{M,"model" : "m"}', '{"model":null,M}', "{M}"])
def test_the_model_is_renamed_at_the_top_only(before: str) -> None:
    """Never a "model" inside a message; a missing one is inserted; the new place is reported."""
    text, model = edited(before.replace("M", MESSAGES), model='new "ü"')
    assert json.loads(text)["model"] == 'new "ü"'
    assert MESSAGES in text
    assert model == json.dumps('new "ü"')


def test_all_edits_together() -> None:
    """Insertions and replacements in one pass, offsets still right."""
    text, model = edited("{" + MESSAGES + ',"model":"m","stream":true}', cap=3, include_usage=True, model="longer-name")
    value = json.loads(text)
    assert (value["model"], value["max_tokens"], value["stream_options"]) == ("longer-name", 3, {"include_usage": True})
    assert model == '"longer-name"'


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("/api/chat", '{"messages":[{"role":"user","content":"x"}]}', '{"options":{"num_predict":64},"messages":[{"role":"user","content":"x"}]}'),
        ("/api/chat", '{"messages":[{"role":"user","content":"x"}],"options":{"num_ctx":9}}', '{"messages":[{"role":"user","content":"x"}],"options":{"num_predict":64,"num_ctx":9}}'),
        ("/api/generate", '{"prompt":"x","options":{"num_predict":-1}}', '{"prompt":"x","options":{"num_predict":64}}'),
        ("/v1/responses", '{"input":"x"}', '{"max_output_tokens":64,"input":"x"}'),
        ("/v1/messages", '{"max_tokens":99,"messages":[]}', '{"max_tokens":64,"messages":[]}'),
        ("/completion", '{"prompt":"x"}', '{"n_predict":64,"prompt":"x"}'),
        ("/generate", '{"inputs":"x","parameters":{"best_of":1}}', '{"inputs":"x","parameters":{"max_new_tokens":64,"best_of":1}}'),
        ("/generate", '{"text":"x"}', '{"sampling_params":{"max_new_tokens":64},"text":"x"}'),
    ],
)  # fmt: skip
def test_each_dialect_has_its_own_cap(path: str, before: str, after: str) -> None:
    """The inserted name is the one that the dialect's engine reads."""
    assert edited(before, path, cap=64)[0] == after
    assert json.loads(after)


def test_a_byte_order_mark_survives() -> None:
    """Offsets count it; the edit leaves it."""
    text, model = edited('\ufeff{"model":"m",' + MESSAGES + "}", cap=5)
    assert text.startswith('\ufeff{"max_tokens":5,"model"')
    assert model == '"m"'
