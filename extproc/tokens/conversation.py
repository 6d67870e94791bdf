"""Messages as the engine hands them to its chat template.

Follows vLLM 0.32 (renderers/chat_utils.py, renderers/hf.py): which fields survive, how parts become text, when
tool arguments become objects, what happens to developer messages. Every rule changes rendered bytes, so every
rule changes counts.
"""

from __future__ import annotations

import json

from extproc.dialects.content import TEXT_TYPES, TOOL_REFERENCE
from extproc.dialects.model import ChatPrompt, Json
from extproc.tokens.templates import ChatTemplate

#: Claude Code puts a line that differs on every request first in its system prompt; vLLM drops it.
_BILLING_HEADER = "x-anthropic-billing-header"


def prepared(
    prompt: ChatPrompt, template: ChatTemplate, *, keep_billing: bool = False
) -> tuple[list[dict[str, Json]], list[Json] | None]:
    """Messages and tools for ``template``; the prompt's own values are not changed.

    ``keep_billing`` keeps Claude Code's billing line, which other engines than vLLM put into the prompt.
    """
    given = prompt.messages
    if prompt.merge_system:
        given = [kept for message in given if (kept := _joined_system(message, keep_billing)) is not None]
    messages = [_message(message, template.wants_parts, keep_billing) for message in given]
    if prompt.merge_system and template.system_first:
        messages = _one_system(messages, "")
    if not template.knows_developer and any(message["role"] == "developer" for message in messages):
        messages = _one_system([_as_system(message) for message in messages], "\n\n")
    tools = [tool_form(tool) for tool in prompt.tools] if prompt.tools else None
    return messages, tools


def _joined_system(message: dict[str, Json], keep_billing: bool) -> dict[str, Json] | None:
    """Anthropic's system blocks run together without the billing block; None where nothing is left."""
    if message.get("role") != "system":
        return message
    content = message.get("content")
    texts = [_text(part) or "" for part in (content if isinstance(content, list) else [content])]
    if isinstance(content, list) and not keep_billing:
        texts = [text for text in texts if not text.startswith(_BILLING_HEADER)]
    joined = "".join(texts)
    return {"role": "system", "content": joined} if joined else None


def _message(message: dict[str, Json], wants_parts: bool, keep_billing: bool) -> dict[str, Json]:
    role = message.get("role")
    out: dict[str, Json] = {"role": role, "content": _content(message.get("content"), role, wants_parts, keep_billing)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            out["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        out["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    return out


def _content(content: Json, role: Json, wants_parts: bool, keep_billing: bool) -> Json:
    parts = [] if content is None else content if isinstance(content, list) else [content]
    if role == "system" and not keep_billing:
        parts = [kept for part in parts if (kept := _without_billing(part)) is not None]
    if not wants_parts:
        # Empty parts leave no empty line: vLLM drops them before it joins.
        return "\n".join(text for part in parts if (text := _text(part)))
    wrapped = [kept for part in parts if (kept := _wrapped(part)) is not None]
    if role == "tool" and all(part["type"] == "text" for part in wrapped):
        return "\n".join(part["text"] for part in wrapped)
    return wrapped


def _text(part: Json) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return None
    text = part.get("name" if part.get("type") == TOOL_REFERENCE else "text")
    return text if isinstance(text, str) else None


def _wrapped(part: Json) -> dict[str, Json] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        return None
    text = _text(part)
    if part.get("type") == "image" and not text:
        return {"type": "image"}
    if text is None:
        return None
    if part.get("type") == TOOL_REFERENCE:
        return {"type": TOOL_REFERENCE, "name": text}
    extras = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    return {"type": "text", "text": text, **extras}


_PART_FIELDS = frozenset({"type", "uuid", *TEXT_TYPES.values()})


def _without_billing(part: Json) -> Json:
    text = _text(part)
    if text is None or not text.startswith(_BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _call(call: Json) -> Json:
    """A tool call whose arguments are an object, as templates expect it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def tool_form(tool: Json) -> Json:
    """A tool as vLLM's request model prints it: fixed fields first, absent ones null, unknown ones gone."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    form = {name: function.get(name) for name in ("name", "description", "parameters")}
    form.update({name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None})
    out = {"type": tool.get("type", "function"), "function": form}
    if tool.get("defer_loading") is not None:
        out["defer_loading"] = tool["defer_loading"]
        form.setdefault("defer_loading", tool["defer_loading"])
    return out


def _as_system(message: dict[str, Json]) -> dict[str, Json]:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _one_system(messages: list[dict[str, Json]], joint: str) -> list[dict[str, Json]]:
    """All system messages merged into the first place, if one stands elsewhere."""
    systems = [message for message in messages if message["role"] == "system"]
    if len(systems) < 2 and (not systems or messages[0] is systems[0]):
        return messages
    texts = []
    for message in systems:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(text for part in content if (text := _text(part)) is not None)
        if content:
            texts.append(content)
    merged: dict[str, Json] = {"role": "system", "content": joint.join(texts)}
    return [merged, *(message for message in messages if message["role"] != "system")]
