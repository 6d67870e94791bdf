"""What a payload's row expects, fact by fact, and what we find.

Each fact is a function of one sighting (the parsed request and its counts); facts nobody knows are reported as
such, so that a new row never passes by silence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.dialects import BodyLimits, ChatPrompt, InferenceRequest, Parsed, TextPrompt, parse
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.types import RequestHead, TokenCount


@dataclass(frozen=True, slots=True)
class Sighting:
    """One payload as we understand it: a parsed request with counts, or the refusal."""

    parsed: Parsed | None
    error: BadRequest | None
    exact: TokenCount | None
    bound: TokenCount | None
    text_tokens: int
    tools_tokens: int
    elapsed_ms: float
    roles: Mapping[str, int]
    call_tokens: int

    @property
    def request(self) -> InferenceRequest | None:
        """The understood request."""
        return self.parsed.request if self.parsed else None


@dataclass(frozen=True, slots=True)
class Fact:
    """One comparison."""

    name: str
    expected: object
    got: object
    ok: bool


def look(row: Mapping[str, Any], body: bytes, counter: PromptCounter) -> Sighting:
    """Parse and count one payload."""
    headers = {name.lower(): value for name, value in row.get("headers", {}).items()}
    if row["file"].endswith(".http"):
        body = dechunked(body)
    head = RequestHead(row.get("method", "POST"), row["path"].partition("?")[0], headers)
    nothing: dict[str, int] = {}
    try:
        parsed = parse(head, body, BodyLimits())
    except BadRequest as error:
        return Sighting(None, error, None, None, 0, 0, 0.0, nothing, 0)
    request = parsed.request
    if request is None:
        return Sighting(parsed, None, None, None, 0, 0, 0.0, nothing, 0)
    started = time.perf_counter()
    exact = counter.count(request)
    elapsed_ms = (time.perf_counter() - started) * 1000
    roles: dict[str, int] = {}
    calls = tools = 0
    for prompt in request.prompts:
        for role, text in texts_of(prompt):
            roles[role] = roles.get(role, 0) + tokens(text, counter)
        if isinstance(prompt, ChatPrompt):
            tools += tokens(json.dumps(prompt.tools), counter) if prompt.tools else 0
            calls += sum(tokens(text, counter) for m in prompt.messages for text in call_texts(m))
    return Sighting(parsed, None, exact, counter.bound(request), sum(roles.values()), tools, elapsed_ms, roles, calls)


def tokens(text: str, counter: PromptCounter) -> int:
    """Tokens of one text alone."""
    assert counter.vocabulary is not None
    return counter.vocabulary.count(text, add_special_tokens=False)


def texts_of(prompt: object) -> list[tuple[str, str]]:
    """(role, text) of everything a person or tool wrote."""
    if isinstance(prompt, TextPrompt):
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
        if isinstance(message.get("reasoning"), str):
            found.append(("reasoning", message["reasoning"]))
    return found


def call_texts(message: Mapping[str, Any]) -> list[str]:
    """Argument texts of a message's tool calls."""
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
    return [text if isinstance(text, str) else json.dumps(text) for text in arguments]


def dechunked(raw: bytes) -> bytes:
    """The body of a raw HTTP request with chunked coding, as a proxy hands it on."""
    rest = raw.replace(b"\r\n", b"\n").partition(b"\n\n")[2]
    body = b""
    while True:
        size, _, rest = rest.partition(b"\n")
        length = int(size.split(b";")[0], 16)
        if not length:
            return body
        body, rest = body + rest[:length], rest[length:].lstrip(b"\n")


Check = Callable[[Any, Sighting, Mapping[str, Any]], tuple[object, bool]]


def _valid(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    if expected is False:
        return ("refused" if seen.error else "accepted"), seen.error is not None
    if expected == "pass-through":
        return (seen.parsed and seen.parsed.route.kind), seen.parsed is not None and seen.request is None
    if expected == "policy":
        return ("refused" if seen.error else "accepted"), seen.error is None or seen.error.status == 400
    return ("refused: " + seen.error.message if seen.error else True), seen.error is None


def _error(name: str) -> Check:
    def check(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
        got = getattr(seen.error, name, None)
        return got, got == expected

    return check


def _field(name: str) -> Check:
    def check(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
        got = getattr(seen.request, name, "no request")
        return got, got == expected

    return check


def _exact(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    got = seen.exact.input_tokens if seen.exact else None
    return got, got == expected and seen.exact is not None and seen.exact.source == "exact"


def _each(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    got = list(seen.exact.per_prompt) if seen.exact else None
    return got, got == expected


def _images(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    images = seen.request.images if seen.request else ()
    got = [{"width": i.width, "height": i.height, "bytes": i.encoded_bytes} for i in images]
    if isinstance(expected, int):
        return len(got), len(got) == expected
    return got, len(got) == len(expected) and all(
        all(g.get(key) == value for key, value in e.items() if key in g) for g, e in zip(got, expected, strict=True)
    )


def _kv_max(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    output = seen.request.kv_tokens_output_max if seen.request else None
    got = None if output is None or seen.exact is None else seen.exact.input_tokens + output
    return got, got == expected


def _less(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    return seen.text_tokens, seen.text_tokens < expected


def _never_cap(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    got = seen.request.max_output_tokens if seen.request else None
    return got, got != expected


def _about(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    return seen.text_tokens, abs(seen.text_tokens - expected) <= expected * 0.25


def _tools(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    prompt = seen.request.prompts[0] if seen.request else None
    got = len(prompt.tools or []) if isinstance(prompt, ChatPrompt) else 0
    return got, got == expected


def _without_tools(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    # Plain ChatML ignores tools, so the exact count is the one without them.
    return _exact(expected, seen, row)


def _roles(*names: str) -> Check:
    def check(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
        got = sum(count for role, count in seen.roles.items() if (role in names) != (names[0] == "not"))
        return got, got >= expected

    return check


def _bound_over(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> tuple[object, bool]:
    got = seen.bound.input_tokens if seen.bound else 0
    return got, seen.exact is not None and got >= seen.exact.input_tokens


#: fact -> how it is checked. Facts that only explain are listed as such below.
CHECKS: dict[str, Check] = {
    "valid": _valid,
    "status": _error("status"),
    "code": _error("code"),
    "param": _error("param"),
    "model": _field("model"),
    "stream": _field("stream"),
    "sequences": _field("sequences"),
    "inputs": _field("sequences"),
    "max_output": _field("max_output_tokens"),
    "never": _never_cap,
    "prompts": lambda e, s, r: (
        len(s.request.prompts) if s.request else 0,
        bool(s.request) and len(s.request.prompts) == e,
    ),
    "reserve": lambda e, s, r: (
        s.request.reserve if s.request else False,
        bool(e) == (s.request.reserve if s.request else False),
    ),
    "chatml_tokens": _exact,
    "prompt_tokens": _exact,
    "input_tokens": _exact,
    "input_tokens_sum": _exact,
    "prompt_tokens_each": _each,
    "longest": lambda e, s, r: (
        max(s.exact.per_prompt) if s.exact else 0,
        bool(s.exact) and max(s.exact.per_prompt) == e,
    ),
    "chatml_tokens_without_tools": _without_tools,
    "text_tokens": lambda e, s, r: (s.text_tokens + s.call_tokens, s.text_tokens + s.call_tokens >= e),
    "text_tokens_about": _about,
    "system_tokens": _roles("system"),
    "message_tokens": _roles("not", "system"),
    "tool_call_args_tokens": lambda e, s, r: (s.call_tokens, s.call_tokens >= e),
    "tools_tokens_lower_bound": lambda e, s, r: (s.tools_tokens, s.tools_tokens >= e),
    "tools": _tools,
    "images": _images,
    "kv_tokens_max": _kv_max,
    "wrong_if_base64_counted_as_text": _less,
    "wrong_if_b64_as_text": _less,
    "utf8_bytes": _bound_over,
    "schema_chars": lambda e, s, r: (
        s.request.schema_bytes if s.request else 0,
        bool(s.request) and s.request.schema_bytes >= e,
    ),
    "schema_in_prompt": lambda e, s, r: (s.text_tokens, s.text_tokens < 1000),
    "deadline_ms": lambda e, s, r: (round(s.elapsed_ms), s.elapsed_ms <= e),
    "inflated_bytes": lambda e, s, r: (
        len(s.parsed.body) if s.parsed else 0,
        bool(s.parsed) and len(s.parsed.body) == e,
    ),
}

#: Facts that explain others, or that a later stage decides (a lane's policy, the model table), with the reason.
EXPLAINED = {
    "rule": "prose",
    "choose": "prose",
    "unless": "prose",
    "decision": "a lane's policy; the request only says prompt_logprobs",
    "image_tokens_formula": "memory/vision",
    "b64_chars": "size of the data URI itself",
    "tools_json_bytes": "size of the input",
    "returned": "what the client gets back of the sequences",
    "base": "the model table resolves adapters",
    "host_bytes": "host memory of logits",
    "bytes_per_token": "ratio of two other facts",
    "bytes_div4_is_under": "ratio of two other facts",
    "bytes_div2_is_under": "ratio of two other facts",
    "chars": "size of the input",
    "content_length": "Envoy's",
}


def facts(row: Mapping[str, Any], seen: Sighting) -> list[Fact]:
    """Every fact of a row, and that the bound is one."""
    found = []
    for name, expected in row["expect"].items():
        if name in EXPLAINED:
            continue
        check = CHECKS.get(name)
        if check is None:
            found.append(Fact(name, expected, "this fact is not known to the runner", False))
            continue
        got, ok = check(expected, seen, row)
        found.append(Fact(name, expected, got, ok))
    if seen.exact is not None and seen.bound is not None and seen.request is not None and not seen.request.images:
        found.append(
            Fact(
                "bound holds",
                f">= {seen.exact.input_tokens}",
                seen.bound.input_tokens,
                seen.bound.input_tokens >= seen.exact.input_tokens,
            )
        )
    return found
