"""Any bytes on any path: understood or refused with a 4xx, within bounds; edits change what they say and no more."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.dialects import BodyLimits, Parsed, decode_body, edit, parse
from extproc.dialects.fields import CAP_NAMES
from extproc.dialects.routes import ROUTES
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.types import RequestHead

pytestmark = pytest.mark.fuzz

LIMITS = BodyLimits(max_bytes=1 << 20)
PATHS = ["/" + "/".join(segments) for segments in ROUTES]
NAMES = [
    "model", "messages", "role", "content", "type", "text", "image_url", "url", "input", "prompt", "tools", "function", "name",
    "arguments", "tool_calls", "stream", "stream_options", "include_usage", "n", "best_of", "options", "num_ctx", "system",
    "source", "data", "tool_result", "tool_use", "documents", "query", "parameters", "sampling_params", "response_format",
    "instructions", "output", "thinking", "images", "context", "suffix", "reasoning", "text_1", "text_2", "input_ids", "inputs", *CAP_NAMES,
]  # fmt: skip
WORDS = [
    "user", "assistant", "system", "developer", "tool", "text", "image", "image_url", "tool_use", "tool_result", "thinking",
    "function_call", "function_call_output", "reasoning", "message", "data:image/png;base64,iVBORw0KGgo=", "https://x/y", "{}", "",
]  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=25,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=8)


def understood(path: str, body: bytes, encoding: str = "") -> Parsed | BadRequest:
    """The outcome of parsing: anything but these two is a fault of ours."""
    headers = {"content-encoding": encoding} if encoding else {}
    try:
        return parse(RequestHead("POST", path, headers), body, LIMITS)
    except BadRequest as error:
        refusal = error
    assert refusal.status in (400, 413, 415)
    assert refusal.code
    assert refusal.message
    return refusal


@given(st.sampled_from(PATHS), st.binary(max_size=300))
def test_any_bytes(path: str, body: bytes) -> None:
    """Noise is refused, never an exception of another kind."""
    understood(path, body)


@given(st.sampled_from(PATHS), bodies)
def test_any_json_is_understood_or_refused(path: str, value: dict[str, Any]) -> None:
    """Any shape under the names we read: a request whose bound can be computed, or a 4xx."""
    found = understood(path, json.dumps(value).encode())
    if isinstance(found, Parsed) and found.request is not None:
        request = found.request
        counted = PromptCounter().count(request)
        assert counted.input_tokens >= 0
        assert request.sequences >= 0
        assert request.max_output_tokens is None or request.max_output_tokens >= 0


@given(st.sampled_from(PATHS), bodies, st.integers(0, 10**6), st.booleans(), st.none() | st.text(max_size=12))
def test_edits_change_what_they_say(path: str, value: dict[str, Any], cap: int, usage: bool, model: str | None) -> None:
    """After an edit the body parses, caps are within the cap, the model's place is right, the rest is unchanged."""
    body = json.dumps(value).encode()
    found = understood(path, body)
    if not isinstance(found, Parsed) or found.request is None or found.route.kind != "inference":
        return
    request = found.request
    result = edit(found.body, request, cap=cap, include_usage=usage, model=model)
    after = json.loads(result.body)
    if result.model_span is not None:
        begin, end = result.model_span
        assert json.loads(result.body[begin:end]) == after["model"]
    if model is not None:
        assert after["model"] == model
    again = understood(path, result.body)
    assert isinstance(again, Parsed)
    assert again.request is not None
    if request.edit.cap_path:
        assert again.request.max_output_tokens is not None
        assert again.request.max_output_tokens <= cap or request.max_output_tokens == 0
    assert again.request.prompts == request.prompts
    touched = {"model", "stream_options", "options", "parameters", "sampling_params", *CAP_NAMES}
    assert {k: v for k, v in after.items() if k not in touched} == {k: v for k, v in value.items() if k not in touched}


@given(bodies, st.sampled_from([None, 0, 2]), st.booleans())
def test_places_do_not_depend_on_spelling(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    """White space and escapes move the spans, not the meaning."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    first = understood("/v1/chat/completions", json.dumps(value).encode())
    second = understood("/v1/chat/completions", text.encode("utf-8", "surrogatepass"))
    if isinstance(first, Parsed) and isinstance(second, Parsed):
        assert first.request is not None
        assert second.request is not None
        assert first.request.prompts == second.request.prompts
        assert first.request.max_output_tokens == second.request.max_output_tokens
        if second.model_span is not None:
            assert json.loads(second.body[slice(*second.model_span)]) == value["model"]


@given(st.sampled_from(["gzip", "deflate", "zstd"]), st.binary(max_size=400))
def test_any_bytes_as_an_encoding(encoding: str, body: bytes) -> None:
    """Decompressors end with data or a 4xx."""
    understood("/v1/completions", body, encoding)


@given(st.sampled_from(["gzip", "deflate", "zstd"]), st.binary(max_size=2000), st.data())
def test_damaged_encodings(encoding: str, plain: bytes, data: st.DataObject) -> None:
    """One changed, cut or repeated piece of a valid stream: data within the limit or a 4xx."""
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}[encoding](plain)
    place = data.draw(st.integers(0, len(packed) - 1))
    piece = data.draw(st.binary(max_size=4))
    head = RequestHead("POST", "/v1/completions", {"content-encoding": encoding})
    status = 200
    size = 0
    try:
        size = len(decode_body(head, packed[:place] + piece + packed[place + 1 :], LIMITS).data)
    except BadRequest as error:
        status = error.status
    assert status in (200, 400, 413)
    assert size <= LIMITS.max_bytes


@settings(max_examples=25)
@given(st.sampled_from("[{"), st.integers(1, 3000), st.sampled_from(["messages", "tools", "input", "x"]))
def test_any_depth(opening: str, depth: int, name: str) -> None:
    """Nesting is read or refused, in any field, wanted or not."""
    inner = "[" * depth + "]" * depth if opening == "[" else '{"a":' * depth + "1" + "}" * depth
    understood("/v1/chat/completions", f'{{"messages":[],"{name}":{inner}}}'.encode())
