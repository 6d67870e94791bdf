"""Ollama's /api/chat, /api/generate and /api/embed.

Limits live in ``options``; streaming is on unless switched off; an empty prompt or conversation only loads or
unloads the model. Go's decoder compares keys without case, so does the duplicate check.
"""

from __future__ import annotations

from msgspec.structs import replace

from extproc.dialects import fields, schemas
from extproc.dialects.content import Gathered, clean, image_of
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, ChatPrompt, InferenceRequest, Json, Prompt, Route, TextPrompt
from extproc.dialects.openai import pooled, prompts_of, with_template
from extproc.errors import BadRequest

_CAP_PATH = ("options", "num_predict")

#: Keys of one level that Go's decoder folds, and what it folds below them; maps (arguments, properties) keep theirs.
_Keys = dict[str, "_Keys | None"]
_CALL: _Keys = {"id": None, "type": None, "function": {"index": None, "name": None, "arguments": None}}
_MESSAGE: _Keys = {
    **dict.fromkeys(("role", "content", "thinking", "images", "tool_name", "tool_call_id")),
    "tool_calls": _CALL,
}
_TOOL: _Keys = {
    "type": None,
    "items": None,
    "function": {
        "name": None,
        "description": None,
        "parameters": dict.fromkeys(("type", "$defs", "items", "required", "properties")),
    },
}


def chat(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/api/chat; no messages means load or unload."""
    gathered = Gathered()
    messages = []
    for index, message in enumerate(fields.listing(members.get("messages"), "messages")):
        if type(message) is not dict:
            raise BadRequest(400, "invalid_type", f"messages[{index}] must be an object.", f"messages[{index}]")
        messages.append(_message(folded(message, _MESSAGE, f"messages[{index}]"), gathered))
    given = fields.listing(members.get("tools"), "tools")
    tools = [folded(tool, _TOOL, f"tools[{index}]") for index, tool in enumerate(given)]
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
    template = fields.text(members, "template")
    shape: Prompt
    if fields.flag(members, "raw") or suffix is not None or context:
        shape = TextPrompt(tuple(text for text in (system, template, prompt, suffix) if text))
        if template is not None and "{" in template:
            gathered.hide("chat_template_in_request")
    else:
        parts = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
        head = [{"role": "system", "content": system}] if system else []
        shape = ChatPrompt([*head, {"role": "user", "content": parts}], kwargs=_think(members))
        shape = with_template(shape, template, gathered)
    empty = not prompt and not suffix and not pictures
    request = _generation(members, route, limits, gathered, (shape,), empty=empty)
    return replace(request, context_ids=len(context))


def embed(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/api/embed (input) and /api/embeddings (prompt); no input loads the model."""
    name = "input" if "input" in members else "prompt"
    value = members.get(name)
    if value is None or value in ("", []):
        return replace(pooled(members, route, Gathered(), ()), reserve=False)
    gathered = Gathered()
    return pooled(members, route, gathered, prompts_of(value, name, gathered))


def folded(value: Json, keys: _Keys, param: str) -> Json:
    """``value`` with the keys that Go's decoder compares without case spelled as it spells them, below it too.

    Raises:
        BadRequest: 400 ``duplicate_key`` where two keys fold to one.
    """
    if type(value) is list:
        return [folded(item, keys, param) for item in value]
    if type(value) is not dict:
        return value
    out: dict[str, Json] = {}
    for key, inner in value.items():
        name = key if key in keys else key.casefold()
        if name not in keys:
            name = key
        if name in out:
            raise BadRequest(400, "duplicate_key", f"The key {param}.{name} occurs more than once.", f"{param}.{name}")
        below = keys.get(name)
        out[name] = inner if below is None else folded(inner, below, f"{param}.{name}")
    return out


def _generation(
    members: Members,
    route: Route,
    limits: BodyLimits,
    gathered: Gathered,
    prompts: tuple[Prompt, ...],
    *,
    empty: bool,
) -> InferenceRequest:
    options = fields.options(members, "options")
    caps = fields.caps(members)
    context_tokens = None
    if options is not None:
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
        hidden=gathered.hidden,
        reserve=not empty,
        include_usage_asked=True,
        context_tokens=context_tokens,
        schema_bytes=schemas.guard(members, limits),
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
