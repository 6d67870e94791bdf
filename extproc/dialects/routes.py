"""Paths to dialects: the one table, and the rule that compares a path with it.

A path is matched by its last segments, so route prefixes do not matter. Percent-encoding is undone first,
because the engines' servers undo it too: an encoded letter must not turn inference into an unknown path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from extproc.dialects.model import Route
from extproc.types import RequestHead

UNKNOWN = Route(None, None, "unknown")

#: Last path segments -> route. Longer entries win over shorter ones.
ROUTES: dict[tuple[str, ...], Route] = {
    ("chat", "completions"): Route("openai.chat", "chat", "inference"),
    ("completions", "batch"): Route("openai.chat_batch", "chat", "inference"),
    ("completions",): Route("openai.completions", "text_completion", "inference"),
    ("embeddings",): Route("openai.embeddings", "embeddings", "inference"),
    ("responses",): Route("openai.responses", "chat", "inference"),
    ("responses", "input_tokens"): Route("openai.count_tokens", "count_tokens", "control"),
    ("messages",): Route("anthropic.messages", "chat", "inference"),
    ("messages", "count_tokens"): Route("anthropic.count_tokens", "count_tokens", "control"),
    ("api", "chat"): Route("ollama.chat", "chat", "inference"),
    ("api", "generate"): Route("ollama.generate", "text_completion", "inference"),
    ("api", "embed"): Route("ollama.embed", "embeddings", "inference"),
    ("api", "embeddings"): Route("ollama.embed", "embeddings", "inference"),
    ("completion",): Route("llamacpp.completion", "text_completion", "inference"),
    ("infill",): Route("llamacpp.infill", "text_completion", "inference"),
    ("embedding",): Route("llamacpp.embedding", "embeddings", "inference"),
    ("generate",): Route("engine.generate", "text_completion", "inference"),
    ("generate_stream",): Route("engine.generate", "text_completion", "inference"),
    ("vertex_generate",): Route("engine.any", "chat", "inference"),
    ("invocations",): Route("engine.any", "chat", "inference"),
    ("encode",): Route("engine.generate", "embeddings", "inference"),
    ("responses", "compact"): Route("openai.responses", "chat", "inference"),
    ("rerank",): Route("vllm.rerank", "rerank", "inference"),
    ("reranking",): Route("vllm.rerank", "rerank", "inference"),
    ("score",): Route("vllm.score", "score", "inference"),
    ("pooling",): Route("vllm.pooling", "embeddings", "inference"),
    ("classify",): Route("vllm.classify", "classify", "inference"),
    ("generative_scoring",): Route("vllm.generative_scoring", "score", "inference"),
    ("v2", "chat"): Route("cohere.chat", "chat", "inference"),
    ("v2", "embed"): Route("cohere.embed", "embeddings", "inference"),
    ("tokenize",): Route("engine.tokenize", "count_tokens", "control"),
    ("detokenize",): Route("engine.control", None, "control"),
    ("apply-template",): Route("engine.control", None, "control"),
    ("completions", "render"): Route("engine.control", None, "control"),
    ("completions", "derender"): Route("engine.control", None, "control"),
    ("messages", "render"): Route("engine.control", None, "control"),
    ("responses", "render"): Route("engine.control", None, "control"),
    ("chat", "render"): Route("engine.control", None, "control"),
    ("ping",): Route("engine.control", None, "control"),
    ("api", "show"): Route("ollama.control", None, "control"),
}

#: Last path segments of what is only read: these are control calls by GET, unknown paths by anything that changes.
READ: dict[tuple[str, ...], Route] = {
    ("models",): Route("openai.control", None, "control"),
    ("health",): Route("engine.control", None, "control"),
    ("version",): Route("engine.control", None, "control"),
    ("metrics",): Route("engine.control", None, "control"),
    ("load",): Route("engine.control", None, "control"),
    ("props",): Route("engine.control", None, "control"),
    ("slots",): Route("engine.control", None, "control"),
    ("api", "tags"): Route("ollama.control", None, "control"),
    ("api", "ps"): Route("ollama.control", None, "control"),
    ("api", "version"): Route("ollama.control", None, "control"),
}

#: Resources named by ids ("*") in the path; a model's id may have a slash in it.
_RESOURCES = (("models", "*"), ("models", "*", "*"), ("responses", "*"), ("responses", "*", "input_items"))

#: Calls by POST on one of these.
_ACTIONS = (("responses", "*", "cancel"),)

_RESOURCE = Route("openai.control", None, "control")

_LONGEST = 2

#: Methods that carry inference.
_INFERENCE_METHODS = frozenset({"POST", "PUT"})

#: Methods that read or take away what is there already, and name it in the path.
_PLAIN_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


def recognise(head: RequestHead) -> Route:
    """The route of a request by its path and method; ``kind`` is ``unknown`` where none fits.

    The content type has no say: llama.cpp generates from a JSON body under any type, so a declared one must not carry
    a request past its reservation. A body on an inference path that is no JSON is refused as such.
    """
    segments = [part for part in unquote(head.path).split("/") if part]
    method = head.method.upper()
    route = _by_suffix(segments, ROUTES)
    if route is not None:
        runs = route.kind == "inference" and method in _INFERENCE_METHODS
        return route if runs or route.kind == "control" else Route(route.dialect, None, "control")
    if method in _PLAIN_METHODS:
        return _by_suffix(segments, READ) or _named(segments, _RESOURCES)
    return _named(segments, _ACTIONS if method == "POST" else ())


def _by_suffix(segments: list[str], table: Mapping[tuple[str, ...], Route]) -> Route | None:
    for length in range(min(_LONGEST, len(segments)), 0, -1):
        route = table.get(tuple(segments[-length:]))
        if route is not None:
            return route
    return None


def _named(segments: list[str], patterns: Iterable[tuple[str, ...]]) -> Route:
    for pattern in patterns:
        last = segments[-len(pattern) :]
        if len(last) == len(pattern) and all(p in ("*", s) for p, s in zip(pattern, last, strict=True)):
            return _RESOURCE
    return UNKNOWN
