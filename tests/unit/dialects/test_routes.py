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
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/completions/derender"),
        ("POST", "/v1/messages/render"),
        ("POST", "/v1/responses/render"),
        ("POST", "/cohere/v2/chat/render"),
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


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded", "audio/wav",
     "application/octet-stream", "multipart/x", "image/png"],
)  # fmt: skip
def test_no_content_type_carries_a_request_past_its_reservation(content_type: str) -> None:
    """llama.cpp generates from a JSON body whatever its declared type (tried with the real server)."""
    assert route("/v1/chat/completions", content_type=content_type)[1] == "inference"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/models/m/infer"),
        ("POST", "/v1/models/m/versions/1/infer"),
        ("POST", "/models/load"),
        ("POST", "/v1/models"),
        ("GET", "/v2/models/m/versions/1/stats"),
        ("POST", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/anything"),
        ("PUT", "/v1/responses/resp_1/cancel"),
        ("POST", "/props"),
        ("POST", "/slots"),
        ("POST", "/metrics"),
        ("POST", "/v1/systemone"),
        ("POST", "/v1/embed"),
        ("POST", "/api/pull"),
    ],
)
def test_what_changes_or_runs_something_unknown_is_unknown(method: str, path: str) -> None:
    """A segment that we know does not make a control call of whatever stands behind it: unknownPaths decides."""
    assert route(path, method) == (None, "unknown")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/org/name"),
        ("DELETE", "/v1/models/m"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("HEAD", "/health"),
        ("POST", "/ping"),
        ("GET", "/v1/models/responses"),
    ],
)
def test_resources_are_read_by_their_ids(method: str, path: str) -> None:
    """What names an id and only reads or removes is a control call."""
    assert route(path, method)[1] == "control"


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/cohere/v2/chat", "cohere.chat"),
        ("/v2/embed", "cohere.embed"),
        ("/generative_scoring", "vllm.generative_scoring"),
        ("/inference/v1/generate", "engine.generate"),
    ],
)
def test_engines_other_routes_are_inference(path: str, dialect: str) -> None:
    """They run the model, so they take reservations."""
    assert route(path) == (dialect, "inference")


def test_every_inference_dialect_has_a_reader() -> None:
    """A route without a reader would be a fault at the first request."""
    assert {r.dialect for r in ROUTES.values() if r.kind == "inference"} - {"engine.any"} <= set(READERS)


@pytest.mark.parametrize("path", ["/invocations", "/vertex_generate", "/encode", "/v1/responses/compact"])
def test_other_generating_endpoints_take_reservations(path: str) -> None:
    """Engines generate behind these names too."""
    assert route(path)[1] == "inference"
