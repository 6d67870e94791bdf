"""Paths to dialects: prefixes, encodings and neighbours."""

from __future__ import annotations

import pytest

from extproc.dialects import recognise
from extproc.dialects.parsing import READERS
from extproc.dialects.routes import ROUTES
from extproc.types import RequestHead


def route(path: str, method: str = "POST", content_type: str = "application/json") -> tuple[str | None, str]:
    found = recognise(RequestHead(method, path, {"content-type": content_type}))
    return found.dialect, found.kind


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", "openai.chat"),
        ("/chat/completions", "openai.chat"),
        ("/team/a/v1/chat/completions", "openai.chat"),
        ("/v1/chat/completions/", "openai.chat"),
        ("//v1//chat/completions", "openai.chat"),
        ("/v1/chat/complet%69ons", "openai.chat"),
        ("/v1/chat%2Fcompletions", "openai.chat"),
        ("/v1/chat/completions/batch", "openai.chat_batch"),
        ("/v1/completions", "openai.completions"),
        ("/v1/embeddings", "openai.embeddings"),
        ("/api/embeddings", "ollama.embed"),
        ("/v1/responses", "openai.responses"),
        ("/v1/messages", "anthropic.messages"),
        ("/anthropic/v1/messages", "anthropic.messages"),
        ("/api/chat", "ollama.chat"),
        ("/api/generate", "ollama.generate"),
        ("/generate", "engine.generate"),
        ("/v2/rerank", "vllm.rerank"),
        ("/completion", "llamacpp.completion"),
    ],
)
def test_inference_paths(path: str, dialect: str) -> None:
    """The last segments decide, whatever prefix stands before them and however they are encoded."""
    assert route(path) == (dialect, "inference")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/a-model"),
        ("GET", "/health"),
        ("GET", "/api/tags"),
        ("POST", "/api/show"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/chat/completions"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
def test_control_calls(method: str, path: str) -> None:
    """Calls that run no model take no reservation."""
    assert route(path, method)[1] == "control"


@pytest.mark.parametrize("path", ["/", "/v1/audio/transcriptions", "/v1/files", "/foo", "/v1/chat/completionsx"])
def test_unknown_paths(path: str) -> None:
    """What we do not know is left to the configured policy."""
    assert route(path) == (None, "unknown")


@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=B", "Audio/wav", "application/octet-stream"])
def test_opaque_content_is_unknown(content_type: str) -> None:
    """A body that cannot be JSON is not refused as bad JSON."""
    assert route("/v1/chat/completions", content_type=content_type) == (None, "unknown")


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded"]
)
def test_json_under_any_name_is_read(content_type: str) -> None:
    """llama.cpp and Ollama read JSON whatever its declared type."""
    assert route("/v1/chat/completions", content_type=content_type)[1] == "inference"


def test_every_inference_dialect_has_a_reader() -> None:
    """A route without a reader would be a fault at the first request."""
    assert {r.dialect for r in ROUTES.values() if r.kind == "inference"} <= set(READERS)
