"""Anthropic's /v1/messages and count_tokens, turned into messages as vLLM 0.32 does it (entrypoints/anthropic)."""

from __future__ import annotations

from msgspec.structs import replace

from extproc.dialects import fields
from extproc.dialects.content import IMAGE_PART, TOOL_REFERENCE, Gathered, clean, kind_of, take_image, text_of
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, ChatPrompt, InferenceRequest, Json, Route
from extproc.dialects.openai import generation, with_template
from extproc.errors import BadRequest

Message = dict[str, Json]

#: Blocks that change which tools are declared.
_CHANGES = frozenset({"tool_addition", "tool_removal"})

#: Blocks that never reach a prompt where they stand.
_SILENT = _CHANGES | {"redacted_thinking", TOOL_REFERENCE}


def messages(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/messages. The thinking budget lies inside max_tokens and adds nothing."""
    gathered = Gathered()
    if members.is_null("messages"):
        raise BadRequest(400, "missing_field", "messages is required.", "messages")
    out: list[Message] = []
    system = _system(members.get("system"), gathered)
    if system:
        out.append({"role": "system", "content": system})
    given = fields.listing(members.get("messages"), "messages")
    for index, message in enumerate(given):
        if type(message) is not dict:
            raise BadRequest(400, "invalid_type", f"messages[{index}] must be an object.", f"messages[{index}]")
        _message(message, out, gathered)
    tools = [_tool(tool) for tool in _in_effect(fields.listing(members.get("tools"), "tools"), given)]
    prompt = ChatPrompt(messages=out, tools=tools or None, merge_system=True, kwargs=_kwargs(members))
    request = generation(
        members,
        route,
        limits,
        gathered,
        (with_template(prompt, fields.text(members, "chat_template"), gathered),),
        tools=tools,
        prefill=bool(given) and given[-1].get("role") == "assistant",
    )
    # Anthropic's streams always carry usage; there is nothing to ask for.
    return replace(request, include_usage_asked=True)


def count_tokens(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/messages/count_tokens: the same body, nothing is reserved."""
    return replace(messages(members, route, limits), reserve=False, stream=False, max_output_tokens=0)


def _in_effect(declared: list[Json], messages: list[Json]) -> list[Json]:
    """The tools at the end of the conversation, which are those that a template sees.

    One added by reference is no longer deferred, one added by value is declared, a removed one is gone.
    """
    changes = [
        block
        for message in messages
        if type(content := message.get("content")) is list
        for block in content
        if kind_of(block) in _CHANGES
    ]
    if not changes:
        return declared
    tools: dict[str | int, Json] = {}
    for at, tool in enumerate(declared):
        name = tool.get("name") if type(tool) is dict else None
        tools[name if type(name) is str else at] = tool
    removed: set[str] = set()
    for block in changes:
        change = fields.mapping(block.get("tool"), "tool")
        definition = change.get("definition")
        name = (definition if type(definition) is dict else change).get("name")
        if type(name) is not str:
            continue
        if type(definition) is dict:
            tools[name] = definition
        elif kind_of(block) == "tool_addition" and type(tools.get(name)) is dict:
            tools[name] = {**tools[name], "defer_loading": None}
        if kind_of(block) == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _system(system: Json, gathered: Gathered) -> Json:
    """A system prompt as text or text parts; how an engine joins them, and what it drops, is the counter's business."""
    if type(system) is not list:
        return clean(system, gathered)
    said = [part for part in system if kind_of(part) not in _CHANGES]
    return [part for part in clean(said, gathered) if type(part) is str or part.get("text")]


def _message(message: Message, out: list[Message], gathered: Gathered) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        system = _system(content, gathered)
        if system:
            out.append({"role": "system", "content": system})
        return
    new: Message = {"role": role}
    if type(content) is list:
        _blocks(content, role, new, out, gathered)
    else:
        new["content"] = clean(content, gathered)
    if role != "user" or "content" in new:
        out.append(new)


def _blocks(blocks: list[Json], role: Json, new: Message, out: list[Message], gathered: Gathered) -> None:
    """Content blocks: text and pictures stay, thinking and tool calls become fields, tool results messages."""
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = kind_of(block)
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            _tool_result(block, out, gathered)
        elif kind == "document":
            parts += _document(block, gathered)
        elif kind not in _SILENT and (kind != "text" or block.get("text")):
            parts += clean([block], gathered)
    if thoughts:
        new["reasoning"] = "".join(thoughts)
    if calls:
        new["tool_calls"] = calls
    if len(parts) == 1 and type(parts[0]) is dict and parts[0].get("type") == "text":
        new["content"] = parts[0].get("text")
    elif parts:
        new["content"] = parts


def _tool_result(block: Message, out: list[Message], gathered: Gathered) -> None:
    content = block.get("content")
    texts: list[str] = []
    pictures: list[Json] = []
    references: list[Json] = []
    blocks = content if type(content) is list else [content]
    # vLLM takes text or a list of blocks here, and skips what is no block.
    if type(content) is dict or (blocks is content and any(type(item) is not dict for item in blocks)):
        gathered.loose = True
    for item in blocks:
        kind = kind_of(item)
        if kind == "image" and type(item) is dict:
            take_image(item, gathered)
            pictures.append(IMAGE_PART)
        elif kind == TOOL_REFERENCE and type(item) is dict:
            name = item.get("tool_name") or item.get("name")
            references += [{"type": kind, "name": name}] if name and type(name) is str else []
        elif kind not in _SILENT and item is not None:
            parts = _document(item, gathered) if kind == "document" else clean([item], gathered)
            pictures += [IMAGE_PART for part in parts if kind_of(part) == "image"]
            texts += [text for part in parts if (text := text_of(part)) or kind == "text"]
    out.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": "\n".join(texts)})
    if pictures:
        out.append({"role": "user", "content": pictures})
    if references:
        # A template that knows deferred tools writes the definitions here.
        out.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": references})


def _document(block: Message, gathered: Gathered) -> list[Json]:
    """A document: plain text counts as text, anything encoded as an unknown part, its title and context beside it."""
    # vLLM passes over documents, others read them.
    gathered.loose = True
    source = fields.mapping(block.get("source"), "source")
    kind = source.get("type")
    words = [str(text) for name in ("title", "context") if (text := block.get(name))]
    if kind == "text" and type(source.get("data")) is str:
        return [{"type": "text", "text": "\n".join((*words, source["data"]))}]
    beside: list[Json] = [{"type": "text", "text": "\n".join(words)}] if words else []
    if kind == "content":
        content = source.get("content")
        return [*beside, *clean(content if type(content) is list else [content], gathered)]
    gathered.unknown_parts += 1
    gathered.warn("document_not_counted")
    return beside


def _tool(tool: Json) -> Json:
    if type(tool) is not dict:
        return tool
    schema = tool.get("input_schema")
    if type(schema) is dict and "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    function.update({name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None})
    return {"type": "function", "function": function}


def _kwargs(members: Members) -> dict[str, Json]:
    kwargs: dict[str, Json] = {}
    thinking = fields.mapping(members.get("thinking"), "thinking")
    effort = fields.mapping(members.get("output_config"), "output_config").get("effort")
    if thinking.get("type") == "disabled":
        effort = "none"
    given = fields.mapping(members.get("chat_template_kwargs"), "chat_template_kwargs")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs["enable_thinking"] = effort != "none"
    kwargs.update(given)
    return kwargs
