"""Refusals in the words that clients act upon."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.dialects import error_body
from extproc.dialects.refusals import WORDINGS
from extproc.policy.refusals import PERMANENT, TABLE
from extproc.types import Reason, RequestHead


def refused(dialect: str | None, reason: Reason, **more: Any) -> tuple[dict[str, Any], dict[str, str]]:
    status = TABLE[reason][0]
    body, headers = error_body(dialect, status=status, reason=str(reason), message="Too big.", **more)
    return json.loads(body), dict(headers)


def test_every_reason_has_a_wording() -> None:
    """A reason without words would reach a client as an internal error."""
    assert set(WORDINGS) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("dialect", ["openai.chat", "anthropic.messages", "ollama.chat", None])
def test_retry_headers_follow_the_reason(dialect: str | None, reason: Reason) -> None:
    """x-should-retry is false exactly where no waiting cures it, and only then Retry-After is absent."""
    _, headers = refused(dialect, reason, retry_after_ms=1500)
    assert headers["content-type"] == "application/json"
    assert headers["x-should-retry"] == ("false" if reason in PERMANENT else "true")
    assert headers.get("retry-after") == (None if reason in PERMANENT else "2")
    assert headers.get("retry-after-ms") == (None if reason in PERMANENT else "1500")


@pytest.mark.parametrize(("ms", "seconds"), [(1, "1"), (1000, "1"), (1001, "2"), (60_000, "60"), (999_000, "60")])
def test_retry_after_is_whole_seconds_that_sdks_honour(ms: int, seconds: str) -> None:
    """Rounded up, within 1 to 60."""
    assert refused("openai.chat", Reason.LANE_FULL, retry_after_ms=ms)[1]["retry-after"] == seconds


def test_openai_clients_know_the_code_of_a_long_prompt() -> None:
    """Codex reads the code, Cline and Continue the words "maximum context length"."""
    body, _ = refused("openai.chat", Reason.EXCEEDS_CONTEXT, param="messages")
    error = body["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "context_length_exceeded",
        "invalid_request_error",
        "messages",
    )
    assert "maximum context length" in error["message"]
    figures, _ = refused("openai.chat", Reason.EXCEEDS_CONTEXT, input_tokens=9000, limit_tokens=8192)
    assert figures["error"]["message"].startswith(
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
    )


def test_a_limit_is_named_where_the_input_is_only_bounded() -> None:
    """The limit is a fact and stays; a figure that nobody counted is not told as one."""
    body, _ = refused("openai.chat", Reason.EXCEEDS_CONTEXT, limit_tokens=8192)
    assert body["error"]["message"].startswith("This model's maximum context length is 8192 tokens. ")
    assert "resulted in" not in body["error"]["message"]


def test_anthropic_clients_know_the_beginning_of_the_message() -> None:
    """Claude Code and Cline compact on "prompt is too long"."""
    body, _ = refused("anthropic.messages", Reason.PROMPT_BUDGET_EXCEEDED, request_id="req_1")
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "invalid_request_error", "req_1")
    assert body["error"]["message"].startswith("prompt is too long: ")
    figures, _ = refused("anthropic.messages", Reason.EXCEEDS_POOL, input_tokens=9000, limit_tokens=8192)
    assert figures["error"]["message"].startswith("prompt is too long: 9000 tokens > 8192 maximum")


def test_ollama_clients_get_a_string() -> None:
    """Their client prints the error field as it is."""
    body, _ = refused("ollama.chat", Reason.EXCEEDS_CONTEXT)
    assert "exceeds the context length" in body["error"]


@pytest.mark.parametrize(
    ("reason", "openai", "anthropic"),
    [
        (Reason.UNKNOWN_MODEL, "model_not_found", "not_found_error"),
        (Reason.BODY_TOO_LARGE, "request_too_large", "request_too_large"),
        (Reason.INSUFFICIENT_HEADROOM, "rate_limit_exceeded", "rate_limit_error"),
        (Reason.UNKNOWN_STATE, "service_unavailable", "overloaded_error"),
        (Reason.INTERNAL, "internal_error", "api_error"),
    ],
)
def test_codes_and_types(reason: Reason, openai: str, anthropic: str) -> None:
    """Each family's own names."""
    assert refused("openai.chat", reason)[0]["error"]["code"] == openai
    assert refused("anthropic.messages", reason)[0]["error"]["type"] == anthropic


def test_bad_requests_keep_their_code_and_field() -> None:
    """The finer code wins over the reason's."""
    body, _ = refused("openai.chat", Reason.BAD_REQUEST, code="invalid_type", param="max_tokens")
    assert (body["error"]["code"], body["error"]["param"]) == ("invalid_type", "max_tokens")


def test_a_refusal_before_parsing_speaks_the_paths_dialect() -> None:
    """The head says what the client is."""
    body, _ = refused(None, Reason.BODY_TOO_LARGE, head=RequestHead("POST", "/v1/messages", {}))
    assert body["type"] == "error"
