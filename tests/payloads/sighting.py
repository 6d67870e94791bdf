"""One payload as we understand it: the parsed request with its counts, or the refusal, and what the body itself says."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.config.models import Lane
from extproc.decisions import denied
from extproc.dialects import (
    BodyLimits,
    ChatPrompt,
    InferenceRequest,
    Parsed,
    TextPrompt,
    TokenPrompt,
    error_body,
    parse,
)
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.types import Reason, RequestHead, TokenCount


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was found.

    ``document`` is the body as JSON where it is some, ``raw_bytes`` the file's size, ``texts`` are (role, text) of what
    people and tools wrote, ``calls`` the arguments of tool calls, ``tools`` the tools as JSON.
    """

    head: RequestHead
    raw_bytes: int
    parsed: Parsed | None = None
    error: BadRequest | None = None
    exact: TokenCount | None = None
    bound: TokenCount | None = None
    elapsed_ms: float = 0.0
    document: Any = None
    texts: tuple[tuple[str, str], ...] = ()
    calls: tuple[str, ...] = ()
    tools: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def request(self) -> InferenceRequest | None:
        """The understood request."""
        return self.parsed.request if self.parsed else None

    def tokens(self, *texts: str) -> int:
        """Tokens of some of its texts, each alone."""
        return sum(self.sizes[text] for text in texts)

    def refusal_type(self) -> str | None:
        """The ``type`` of the error as the client sees it."""
        if self.error is None:
            return None
        dialect = self.parsed.dialect if self.parsed else None
        words = {413: Reason.BODY_TOO_LARGE, 415: Reason.UNSUPPORTED_CONTENT_ENCODING}
        body, _ = error_body(
            dialect,
            status=self.error.status,
            reason=words.get(self.error.status, Reason.BAD_REQUEST),
            message=self.error.message,
            code=self.error.code,
            param=self.error.param,
            head=self.head,
        )
        found = json.loads(body).get("error")
        return str(found.get("type")) if isinstance(found, dict) else None

    def lane_refusal(self) -> BadRequest | None:
        """What a lane with its defaults says of it."""
        return denied(Lane(), self.request) if self.request is not None else None


def look(row: Mapping[str, Any], body: bytes, counter: PromptCounter) -> Sighting:
    """Parse and count one payload."""
    headers = {str(name).lower(): str(value) for name, value in (row.get("headers") or {}).items()}
    raw_bytes = len(body)
    if str(row["file"]).endswith(".http"):
        found, body = unwrapped(body)
        headers = {**found, **headers}
    head = RequestHead(row.get("method") or "POST", row["path"].partition("?")[0], headers)
    try:
        parsed = parse(head, body, BodyLimits())
    except BadRequest as error:
        return Sighting(head, raw_bytes, error=error, document=_json(body))
    request = parsed.request
    if request is None:
        return Sighting(head, raw_bytes, parsed, document=_json(parsed.body))
    # What it costs this thread: how long it waits for its turn on a busy machine says nothing of it.
    started = time.thread_time()
    exact = counter.count(request)
    elapsed_ms = (time.thread_time() - started) * 1000
    texts = tuple(pair for prompt in request.prompts for pair in texts_of(prompt))
    chats = [prompt for prompt in request.prompts if isinstance(prompt, ChatPrompt)]
    calls = tuple(text for prompt in chats for message in prompt.messages for text in call_texts(message))
    tools = "".join(json.dumps(prompt.tools) for prompt in chats if prompt.tools)
    document = _json(parsed.body)
    extra = [
        value for name in ("suffix",) if isinstance(document, dict) and isinstance(value := document.get(name), str)
    ]
    vocabulary = counter.vocabulary
    assert vocabulary is not None
    sizes = {
        text: vocabulary.count(text, add_special_tokens=False)
        for text in {*(text for _, text in texts), *calls, tools, *extra}
    }
    return Sighting(
        head, raw_bytes, parsed, None, exact, counter.bound(request), elapsed_ms, document, texts, calls, tools, sizes
    )


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def texts_of(prompt: object) -> list[tuple[str, str]]:
    """(role, text) of everything a person or tool wrote."""
    if isinstance(prompt, TextPrompt | TokenPrompt):
        return [("prompt", text) for text in prompt.texts]
    if not isinstance(prompt, ChatPrompt):
        return []
    found = []
    for message in prompt.messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                found.append((str(message.get("role")), text))
        found += [
            ("reasoning", t) for name in ("reasoning", "reasoning_content") if isinstance(t := message.get(name), str)
        ]
    return found


def call_texts(message: Mapping[str, Any]) -> list[str]:
    """Argument texts of a message's tool calls, in the present and in the older form."""
    calls = message.get("tool_calls")
    given = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = [function for function in (*given, message.get("function_call")) if isinstance(function, dict)]
    arguments = [function["arguments"] for function in functions if function.get("arguments") is not None]
    return [text if isinstance(text, str) else json.dumps(text) for text in arguments]


def unwrapped(raw: bytes) -> tuple[dict[str, str], bytes]:
    """(headers, body) of a raw HTTP/1.1 request as a proxy hands it on: without chunks and trailers."""
    mark = min((m for m in (b"\r\n\r\n", b"\n\n") if m in raw), key=raw.index, default=b"\r\n\r\n")
    first, _, rest = raw.partition(mark)
    lines = first.decode("latin-1").replace("\r\n", "\n").split("\n")[1:]
    headers = {n.strip().lower(): v.strip() for n, colon, v in (line.partition(":") for line in lines) if colon}
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        length = headers.get("content-length", "")
        return headers, rest[: int(length)] if length.isdigit() else rest
    body, end = b"", mark[: len(mark) // 2]
    while rest:
        size, _, rest = rest.partition(end)
        length_found = int(size.split(b";")[0].strip() or b"0", 16)
        if not length_found:
            break
        body, rest = body + rest[:length_found], rest[length_found:].removeprefix(end)
    return headers, body
