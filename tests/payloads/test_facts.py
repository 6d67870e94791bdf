"""The runner itself: a wrong fact is wrong, what it cannot check it says, and no row ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.payloads.runner import line, run

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(body, expect, other fields of the row) -> (ok, line)."""
    monkeypatch.setenv("KVGATE_PAYLOADS", str(tmp_path))

    def judged(body: Any, expect: Any, **row: Any) -> tuple[bool, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        name = row.pop("file", "a.json")
        (tmp_path / name).write_bytes(data)
        return line({"file": name, "path": CHAT, "expect": expect, **row})

    return judged


@pytest.mark.parametrize(
    ("expect", "row"),
    [
        ({"valid": False}, {}),
        ({"valid": True, "model": "other"}, {}),
        ({"valid": True, "base": "other"}, {}),
        ({"valid": True, "returned": 99}, {}),
        ({"valid": True, "text_tokens": 0}, {}),
        ({"valid": True, "text_tokens": 5}, {}),
        ({"valid": True, "message_tokens": 0}, {}),
        ({"valid": True, "chars": 3}, {}),
        ({"valid": True, "utf8_bytes": 3}, {}),
        ({"valid": True, "bytes_per_token": 9}, {}),
        ({"valid": True, "bytes_div4_is_under": False}, {}),
        ({"valid": True, "b64_chars": 4}, {}),
        ({"valid": True, "content_length": 1}, {}),
        ({"valid": True, "schema_in_prompt": True}, {}),
        ({"valid": True, "images": [{"width": 5}]}, {}),
        ({"valid": True, "warnings": ["content_object"]}, {}),
        ({"valid": True, "sequences_max": 0}, {}),
        ({"valid": True, "chatml_tokens_lower_bound": 10}, {}),
        ({"valid": "policy", "choose": "400 (never)"}, {}),
        ({"valid": "policy", "decision": "400 prompt_logprobs_not_allowed"}, {}),
        ({"status": 400}, {}),
        ({"error_type": "invalid_request_error"}, {}),
        ({"valid": True}, {"bytes": 1}),
        ({}, {}),
        ({"rule": "prose"}, {}),
        ({"valid": 7}, {}),
    ],
)
def test_a_wrong_fact_fails(judge: Any, expect: Any, row: dict[str, Any]) -> None:
    """Each of these is false of the plainest chat there is."""
    ok, told = judge(HI, expect, **row)
    assert not ok
    assert "WRONG" in told or "unchecked" in told


@pytest.mark.parametrize(
    "expect",
    [
        {"valid": False, "max_output": None, "status": 400, "code": "invalid_json"},
        {"never": 5},
        {"reserve": 0},
    ],
)
def test_a_refused_body_has_no_figures(judge: Any, expect: Any) -> None:
    """What would be true of no request is not true of a refusal."""
    assert not judge(b"{bad", expect)[0]


@pytest.mark.parametrize(
    ("body", "expect"),
    [
        (HI, {"dialect": "openai.chat", "unknown_parts": 0, "warnings": [], "images": 0, "n": 1, "prefill": False}),
        (HI, {"chatml_tokens_about": 9, "bound_at_least": 9, "sequences_max": 1, "text_tokens_lower_bound": 1}),
        ({**HI, "max_tokens": 5, "min_tokens": 4}, {"min_tokens": 4, "kv_tokens_max": 14, "include_usage": False}),
        ({**HI, "max_tokens": 5, "ignore_eos": True}, {"ignore_eos": True, "returned": 1}),
        (b"{bad", {"valid": False, "error_type": "invalid_request_error", "code": "invalid_json"}),
        ({**HI, "prompt_logprobs": -1}, {"valid": "policy", "decision": "400 prompt_logprobs_not_allowed unless …"}),
    ],
)
def test_a_right_fact_holds(judge: Any, body: Any, expect: Any) -> None:
    """Names that a row may use."""
    ok, told = judge(body, expect)
    assert ok, told


def test_what_is_not_known_is_said(judge: Any) -> None:
    """A fact nobody can check neither passes nor fails in silence."""
    ok, told = judge(HI, {"valid": True, "rule": "prose", "colour": "red"})
    assert ok
    assert "rule unchecked: prose" in told
    assert "colour unchecked: the runner does not know this fact" in told


@pytest.mark.parametrize(
    "calls",
    [
        [{}],
        [5],
        {},
        [{"function": None}],
        [{"function": {"name": "f"}}],
        [{"function": {"name": "f", "arguments": {"a": 1}}}],
    ],
)
def test_a_tool_call_may_lack_anything(judge: Any, calls: Any) -> None:
    """Calls without arguments, without a function, in the wrong shape."""
    body = {**HI, "messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
    told = judge(body, {"sequences": 1})[1]
    assert "understood" not in told


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
@pytest.mark.parametrize("chunked", [True, False])
def test_raw_http(judge: Any, ending: str, chunked: bool) -> None:
    """Chunks are undone byte by byte, a body with a length is taken as it lies."""
    body = json.dumps(HI, indent=1).replace("\n", "\r\n").encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x"]
    head.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}")
    end = ending.encode()
    if chunked:
        pieces = [body[:9], body[9:]]
        body = (
            b"".join(b"%x;a=b%s%s%s" % (len(p), end, p, end) for p in pieces) + b"0" + end + b"X-Trailer: 1" + end + end
        )
    expect = {"valid": True, "content_length": None if chunked else len(body), "chatml_tokens": 9}
    ok, told = judge("\r\n".join(head).replace("\r\n", ending).encode() + end + end + body, expect, file="a.http")
    assert ok, told


def test_no_row_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a row without a path, a body of noise: each is a line."""
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)))
    rows = [
        {"file": "missing.json", "path": CHAT, "expect": {}},
        {"file": "noise.bin"},
        {"file": "noise.bin", "path": CHAT},
    ]
    (tmp_path / "index.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("KVGATE_PAYLOADS", str(tmp_path))
    lines: list[str] = []
    assert not run(lines.append)
    assert [text[:4] for text in lines] == ["FAIL", "FAIL", "FAIL", "0 of"]
