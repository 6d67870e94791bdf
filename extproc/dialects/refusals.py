"""Refusals in the client's own dialect: one table of codes and types, three shapes of body.

Agents decide by these words whether to compact their history, wait, or give up: OpenAI's and Codex' clients
read ``code``, Claude Code and Cline the beginning of the message ("prompt is too long"), Continue and Cline
the words "maximum context length", every SDK ``x-should-retry`` and ``retry-after-ms``. A refused stream gets
the same JSON: its status is not 200, so no client looks for events.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import MappingProxyType

from extproc.dialects.routes import recognise
from extproc.types import Reason, RequestHead


@dataclass(frozen=True, slots=True)
class Wording:
    """How one reason is named to clients.

    ``code`` and ``openai_type`` go into OpenAI's error object, ``anthropic_type`` into Anthropic's; ``too_long``
    marks refusals that a shorter prompt would cure and that must begin with the words agents look for.
    ``permanent`` says that the same request will never be taken.
    """

    code: str
    openai_type: str
    anthropic_type: str
    too_long: bool = False
    permanent: bool = True


_TOO_LONG = Wording("context_length_exceeded", "invalid_request_error", "invalid_request_error", too_long=True)
_BUSY = Wording("rate_limit_exceeded", "rate_limit_error", "rate_limit_error", permanent=False)
_AWAY = Wording("service_unavailable", "server_error", "overloaded_error", permanent=False)

#: reason -> wording. The statuses are the decision's; nothing here changes one.
WORDINGS: MappingProxyType[str, Wording] = MappingProxyType(
    {
        Reason.PROMPT_BUDGET_EXCEEDED: _TOO_LONG,
        Reason.EXCEEDS_CONTEXT: _TOO_LONG,
        Reason.EXCEEDS_POOL: _TOO_LONG,
        Reason.BODY_TOO_LARGE: Wording("request_too_large", "invalid_request_error", "request_too_large"),
        Reason.BAD_REQUEST: Wording("bad_request", "invalid_request_error", "invalid_request_error"),
        Reason.UNSUPPORTED_CONTENT_ENCODING: Wording(
            "unsupported_content_encoding", "invalid_request_error", "invalid_request_error"
        ),
        Reason.UNKNOWN_MODEL: Wording("model_not_found", "invalid_request_error", "not_found_error"),
        Reason.INSUFFICIENT_HEADROOM: _BUSY,
        Reason.PREFILL_BUSY: _BUSY,
        Reason.SEQUENCES_FULL: _BUSY,
        Reason.LANE_FULL: _BUSY,
        Reason.LANE_SHARE: _BUSY,
        Reason.ENGINE_QUEUE: _BUSY,
        Reason.QUEUE_FULL: _BUSY,
        Reason.QUEUE_TIMEOUT: _BUSY,
        Reason.UNKNOWN_STATE: _AWAY,
        Reason.NOT_READY: _AWAY,
        Reason.LEDGER_DOWN: _AWAY,
        Reason.INTERNAL: Wording("internal_error", "server_error", "api_error", permanent=False),
    }
)

#: SDKs honour Retry-After only within these whole seconds (OpenAI's: 0 < x <= 60).
_RETRY_S = (1, 60)


def error_body(
    dialect: str | None,
    *,
    status: int,
    reason: str,
    message: str,
    code: str | None = None,
    param: str | None = None,
    retry_after_ms: int | None = None,
    retry_after_s: int | None = None,
    request_id: str = "",
    head: RequestHead | None = None,
    input_tokens: int | None = None,
    limit_tokens: int | None = None,
) -> tuple[bytes, list[tuple[str, str]]]:
    """The JSON body of a refusal and the headers that go with it.

    The dialect is the given one, else that of ``head``'s path, else OpenAI's. With ``input_tokens`` and
    ``limit_tokens`` a refusal for length names both figures in the wording of the dialect.
    """
    if dialect is None and head is not None:
        dialect = recognise(head).dialect
    words = WORDINGS.get(reason, WORDINGS[Reason.INTERNAL])
    family = (dialect or "").partition(".")[0]
    if words.too_long:
        message = _TOO_LONG_WORDS.get(family, _openai_too_long)(message, input_tokens, limit_tokens)
    body = _SHAPES.get(family, _openai)(status, reason, words, message, code, param, request_id)
    headers = [("content-type", "application/json"), ("x-should-retry", "false" if words.permanent else "true")]
    if not words.permanent and retry_after_ms is not None:
        low, high = _RETRY_S
        seconds = retry_after_s if retry_after_s is not None else math.ceil(retry_after_ms / 1000)
        headers.append(("retry-after", str(min(high, max(low, seconds)))))
        headers.append(("retry-after-ms", str(retry_after_ms)))
    return json.dumps(body, separators=(",", ":")).encode(), headers


def _openai(
    status: int, reason: str, words: Wording, message: str, code: str | None, param: str | None, request_id: str
) -> dict[str, object]:
    return {
        "error": {
            "message": message,
            "type": words.openai_type,
            "param": param,
            "code": code or words.code,
            "reason": reason,
        }
    }


def _anthropic(
    status: int, reason: str, words: Wording, message: str, code: str | None, param: str | None, request_id: str
) -> dict[str, object]:
    where = f"{param}: " if param and not words.too_long and not message.startswith(param) else ""
    body: dict[str, object] = {
        "type": "error",
        "error": {"type": words.anthropic_type, "message": where + message, "reason": reason},
    }
    if request_id:
        body["request_id"] = request_id
    return body


def _ollama(
    status: int, reason: str, words: Wording, message: str, code: str | None, param: str | None, request_id: str
) -> dict[str, object]:
    return {"error": message, "code": code or words.code, "reason": reason}


def _openai_too_long(message: str, input_tokens: int | None, limit_tokens: int | None) -> str:
    if limit_tokens is None:
        return f"This request exceeds the maximum context length. {message} Please reduce the length of the messages."
    if input_tokens is None:
        return (
            f"This model's maximum context length is {limit_tokens} tokens. {message} "
            "Please reduce the length of the messages."
        )
    return (
        f"This model's maximum context length is {limit_tokens} tokens. However, your messages resulted in "
        f"{input_tokens} tokens. {message} Please reduce the length of the messages."
    )


def _anthropic_too_long(message: str, input_tokens: int | None, limit_tokens: int | None) -> str:
    if input_tokens is None or limit_tokens is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {input_tokens} tokens > {limit_tokens} maximum. {message}"


def _ollama_too_long(message: str, input_tokens: int | None, limit_tokens: int | None) -> str:
    figures = f" ({input_tokens} tokens > {limit_tokens})" if input_tokens is not None and limit_tokens else ""
    return f"the input length exceeds the context length{figures}. {message}"


_SHAPES = {"anthropic": _anthropic, "ollama": _ollama}
_TOO_LONG_WORDS = {"anthropic": _anthropic_too_long, "ollama": _ollama_too_long}
