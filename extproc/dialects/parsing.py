"""One request from bytes to ``Parsed``: route, encoding, members, dialect."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from extproc.dialects import anthropic, native, ollama, openai, responses
from extproc.dialects.body import decode_body
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, DecodedBody, InferenceRequest, Parsed, Route
from extproc.dialects.routes import recognise
from extproc.errors import BadRequest
from extproc.types import RequestHead

Reader = Callable[[Members, Route, BodyLimits], InferenceRequest]

#: dialect -> reader of its bodies. A dialect of an inference route that is missing here would be a fault of ours.
READERS: dict[str, Reader] = {
    "openai.chat": openai.chat,
    "openai.chat_batch": openai.chat_batch,
    "openai.completions": openai.completions,
    "openai.embeddings": openai.embeddings,
    "openai.responses": responses.responses,
    "openai.count_tokens": responses.responses,
    "anthropic.messages": anthropic.messages,
    "anthropic.count_tokens": anthropic.count_tokens,
    "ollama.chat": ollama.chat,
    "ollama.generate": ollama.generate,
    "ollama.embed": ollama.embed,
    "vllm.rerank": native.pairs,
    "vllm.score": native.pairs,
    "vllm.pooling": openai.embeddings,
    "vllm.classify": openai.embeddings,
    "llamacpp.completion": native.completion,
    "llamacpp.infill": native.infill,
    "vllm.generative_scoring": native.pairs,
    "llamacpp.embedding": openai.embeddings,
    "engine.generate": native.generate,
    "sglang.vertex": native.vertex,
    "cohere.chat": openai.cohere_chat,
    "cohere.embed": openai.cohere_embed,
}
#: Body member -> dialect, for endpoints that take any of several bodies (SageMaker's /invocations, Vertex').
_SHAPES = {
    "messages": "openai.chat",
    "instances": "sglang.vertex",
    "prompt": "openai.completions",
    "prompt_embeds": "openai.completions",
    "input": "openai.embeddings",
    "query": "vllm.rerank",
    "text_1": "vllm.score",
    "queries": "vllm.score",
    "data_1": "vllm.score",
    "data": "vllm.pooling",
    "inputs": "engine.generate",
    "text": "engine.generate",
    "input_ids": "engine.generate",
    "input_embeds": "engine.generate",
    "token_ids": "engine.generate",
}

#: Dialects whose engine compares keys without case (Go's encoding/json).
_FOLDED = "ollama."


def parse(head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
    """Understand one complete request.

    Raises:
        BadRequest: the body cannot be what its path says; never for control calls and unknown paths.
    """
    route = recognise(head)
    if route.kind == "inference":
        return _inference(route, decode_body(head, body, limits), limits)
    return _passing(route, head, body, limits)


def _inference(route: Route, decoded: DecodedBody, limits: BodyLimits) -> Parsed:
    dialect = route.dialect or ""
    if not decoded.data:
        raise BadRequest(400, "invalid_json", "The request body is empty.")
    members = Members(decoded.data, limits)
    folded = dialect.startswith(_FOLDED)
    members.refuse_duplicates(openai.MATTERS, fold=folded)
    if folded:
        members.fold(openai.MATTERS)
    if dialect == "engine.any":
        dialect = next((named for member, named in _SHAPES.items() if member in members), "")
        if not dialect:
            raise BadRequest(400, "missing_field", "The body has neither messages nor a prompt nor an input.")
        route = replace(route, dialect=dialect)
    request = READERS[dialect](members, route, limits)
    return Parsed(route, decoded.data, decoded.changed, request, request.model, request.model_span)


def _passing(route: Route, head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
    """Control calls and unknown paths: understood as far as they can be, never refused."""
    nothing = Parsed(route, body, False, None)
    if not body or route.kind == "unknown":
        return nothing
    try:
        decoded = decode_body(head, body, limits)
        members = Members(decoded.data, limits)
        model = members.get("model")
        reader = READERS.get(route.dialect or "")
        request = replace(reader(members, route, limits), reserve=False) if reader is not None else None
    except BadRequest:
        return nothing
    return Parsed(
        route, decoded.data, decoded.changed, request, model if type(model) is str else None, members.spans.get("model")
    )
