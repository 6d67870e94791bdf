"""Ollama's /api/chat, /api/generate and /api/embed.

Limits live in ``options``; streaming is on unless switched off; an empty prompt or conversation only loads or
unloads the model. Go's decoder compares keys without case, so does the duplicate check.
"""

from __future__ import annotations

from dataclasses import replace

from extproc.dialects import fields
from extproc.dialects.content import Gathered, clean, image_of
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, ChatPrompt, InferenceRequest, Json, Prompt, Route, TextPrompt
from extproc.dialects.openai import guard_schema, pooled, prompts_of
from extproc.errors import BadRequest

_CAP_PATH = ("options", "num_predict")


def chat(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/api/chat; no messages means load or unload."""
    gathered = Gathered()
    messages = []
    for index, message in enumerate(fields.listing(members.get("messages"), "messages")):
        if type(message) is not dict:
            raise BadRequest(400, "invalid_type", f"messages[{index}] must be an object.", f"messages[{index}]")
        messages.append(_message(message, gathered))
    tools = fields.listing(members.get("tools"), "tools")
    prompt = ChatPrompt(messages=messages, tools=tools or None, kwargs=_think(members))
    prefill = bool(messages) and messages[-1].get("role") == "assistant"
    request = _generation(members, route, limits, gathered, (prompt,), empty=not messages)
    return replace(request, has_tools=bool(tools), prefill=prefill)


def generate(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/api/generate: prompt, suffix, system, an earlier context as token ids, pictures."""
    gathered = Gathered()
    prompt = fields.text(members, "prompt") or ""
    system = fields.text(members, "system")
    suffix = fields.text(members, "suffix")
    pictures = _pictures(members.get("images"), gathered)
    context = fields.listing(members.get("context"), "context")
    shape: Prompt
    if fields.flag(members, "raw") or suffix is not None or context:
        shape = TextPrompt(tuple(text for text in (system, prompt, suffix) if text))
    else:
        parts = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
        head = [{"role": "system", "content": system}] if system else []
        shape = ChatPrompt([*head, {"role": "user", "content": parts}], kwargs=_think(members))
    empty = not prompt and not suffix and not pictures
    request = _generation(members, route, limits, gathered, (shape,), empty=empty)
    return replace(request, context_ids=len(context))


def embed(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/api/embed (input) and /api/embeddings (prompt); no input loads the model."""
    name = "input" if "input" in members else "prompt"
    value = members.get(name)
    if value is None or value in ("", []):
        return replace(pooled(members, route, Gathered(), ()), reserve=False)
    return pooled(members, route, Gathered(), prompts_of(value, name))


def _generation(
    members: Members,
    route: Route,
    limits: BodyLimits,
    gathered: Gathered,
    prompts: tuple[Prompt, ...],
    *,
    empty: bool,
) -> InferenceRequest:
    options = members.members("options")
    if options is None and not members.is_null("options"):
        raise BadRequest(400, "invalid_type", "options must be an object.", "options")
    caps = fields.caps(members)
    context_tokens = None
    if options is not None:
        options.refuse_duplicates((*fields.CAP_NAMES, "num_ctx"))
        caps += fields.caps(options)
        context_tokens = fields.integer(options.get("num_ctx"), "options.num_ctx")
    return InferenceRequest(
        dialect=route.dialect or "",
        operation=route.operation or "",
        model=fields.text(members, "model"),
        stream=fields.flag(members, "stream", default=True),
        prompts=prompts,
        sequences=len(prompts),
        max_output_tokens=0 if empty else fields.largest(caps),
        images=tuple(gathered.images),
        unknown_parts=gathered.unknown_parts,
        reserve=not empty,
        include_usage_asked=True,
        context_tokens=context_tokens,
        schema_bytes=guard_schema(members, "format", limits),
        warnings=tuple(gathered.warnings),
        body_bytes=len(members.data),
        edit=fields.edit_points(members, caps, _CAP_PATH),
    )


def _message(message: dict[str, Json], gathered: Gathered) -> dict[str, Json]:
    """A message in OpenAI's form: pictures as parts, thinking as reasoning."""
    out = {**message, "content": clean(message.get("content"), gathered)}
    pictures = _pictures(out.pop("images", None), gathered)
    if pictures:
        out["content"] = [*pictures, {"type": "text", "text": out["content"] or ""}]
    if "thinking" in out:
        out["reasoning"] = out.pop("thinking")
    return out


def _pictures(images: Json, gathered: Gathered) -> list[Json]:
    found = [image_of(str(image)) for image in fields.listing(images, "images")]
    gathered.images.extend(found)
    return [{"type": "image"} for _ in found]


def _think(members: Members) -> dict[str, Json]:
    think = members.get("think")
    if think is None:
        return {}
    kwargs: dict[str, Json] = {"enable_thinking": bool(think)}
    if type(think) is str:
        kwargs["reasoning_effort"] = think
    return kwargs
