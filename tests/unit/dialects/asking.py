"""Shared by the dialects' tests: a body to its request, or to its refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.dialects import BodyLimits, ChatPrompt, InferenceRequest, Parsed, parse
from extproc.errors import BadRequest
from extproc.types import RequestHead


def parsed(path: str, body: Any, *, limits: BodyLimits | None = None, headers: dict[str, str] | None = None) -> Parsed:
    """The parsed request of a body given as JSON value or bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(RequestHead("POST", path, headers or {}), data, limits or BodyLimits())


def request(path: str, body: Any, *, limits: BodyLimits | None = None) -> InferenceRequest:
    """The request of a body that must be one."""
    found = parsed(path, body, limits=limits).request
    assert found is not None
    return found


def chat_prompt(path: str, body: Any) -> ChatPrompt:
    """The conversation of a body."""
    prompt = request(path, body).prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refusal(path: str, body: Any, *, limits: BodyLimits | None = None) -> BadRequest:
    """The refusal of a body that must be refused."""
    with pytest.raises(BadRequest) as caught:
        parsed(path, body, limits=limits)
    return caught.value
