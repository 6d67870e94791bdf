"""OpenAI's /v1/responses: items instead of messages, turned into messages as vLLM 0.32 does it.

(entrypoints/openai/responses/utils.py.) Items are walked leniently: what we do not know is counted, not refused.
"""

from __future__ import annotations

import json

from extproc.dialects import fields
from extproc.dialects.content import Gathered, clean, kind_of, strings_of, text_beside
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, ChatPrompt, InferenceRequest, Json, Route
from extproc.dialects.openai import generation, with_template
from extproc.errors import BadRequest

Message = dict[str, Json]

#: Item types that are one tool call.
_CALLS = frozenset({"function_call", "custom_tool_call"})

#: Item types that are a tool's answer.
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})


def responses(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """One response: instructions, then the input as text or items."""
    gathered = Gathered()
    messages: list[Message] = []
    instructions = members.get("instructions")
    if type(instructions) is str and instructions:
        messages.append({"role": "system", "content": instructions})
    elif type(instructions) is list:
        _items(instructions, messages, gathered)
    messages += _previous(members.get("previous_input_messages"), gathered)
    given = members.get("input")
    if type(given) is str:
        messages.append({"role": "user", "content": clean(given, gathered)})
    elif type(given) is list:
        _items(given, messages, gathered)
    elif given is not None:
        raise BadRequest(400, "invalid_type", "input must be text or a list of items.", "input")
    _hidden(members, gathered)
    tools = [_tool(tool) for tool in _flat_tools(fields.listing(members.get("tools"), "tools"))]
    last = given[-1] if type(given) is list and given else None
    continues = type(last) is dict and last.get("status") in ("in_progress", "incomplete") and _is_message(last)
    prompt = ChatPrompt(
        messages=messages,
        tools=tools or None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        kwargs=_kwargs(members),
    )
    return generation(
        members,
        route,
        limits,
        gathered,
        (with_template(prompt, fields.text(members, "chat_template"), gathered),),
        tools=tools,
        prefill=continues,
        cap_path=("max_output_tokens",),
    )


def _hidden(members: Members, gathered: Gathered) -> None:
    """What the prompt holds beside this body: earlier turns and stored prompts that the engine knows by their ids."""
    if not members.is_null("previous_response_id"):
        gathered.hide("previous_response_not_counted")
    if not members.is_null("conversation"):
        gathered.hide("conversation_not_counted")
    stored = members.get("prompt")
    if type(stored) is dict:
        gathered.hide("stored_prompt_not_counted")


def _previous(given: Json, gathered: Gathered) -> list[Message]:
    """vLLM's ``previous_input_messages``, in a form of its own (Harmony's): their text, and never an exact count."""
    if given is None:
        return []
    gathered.unknown_parts += 1
    gathered.warn("unknown_input_item")
    return [{"role": "user", "content": strings_of(item, gathered)} for item in fields.listing(given, "input")]


def _is_message(item: Message) -> bool:
    return item.get("type", "message") in ("message", "reasoning")


def _kwargs(members: Members) -> dict[str, Json]:
    kwargs: dict[str, Json] = {}
    effort = fields.mapping(members.get("reasoning"), "reasoning").get("effort")
    given = fields.mapping(members.get("chat_template_kwargs"), "chat_template_kwargs")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    kwargs.update(given)
    return kwargs


def _flat_tools(tools: list[Json]) -> list[Json]:
    """Function tools, those inside a namespace under their flat names; built-in tools (web search …) as they are."""
    flat: list[Json] = []
    for tool in tools:
        inner = tool.get("tools") if type(tool) is dict and tool.get("type") == "namespace" else None
        if type(inner) is list:
            flat += [{**t, "name": f"{tool.get('name')}__{t.get('name')}"} for t in inner if type(t) is dict]
        else:
            flat.append(tool)
    return flat


def _tool(tool: Json) -> Json:
    if type(tool) is not dict or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _items(items: list[Json], messages: list[Message], gathered: Gathered) -> None:
    for index, item in enumerate(items):
        if type(item) is not dict:
            raise BadRequest(400, "invalid_type", f"input[{index}] must be an object.", f"input[{index}]")
        previous = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        message = _item(item, previous, gathered)
        if message is not None:
            messages.append(message)


def _item(item: Message, previous: Message | None, gathered: Gathered) -> Message | None:
    """The message that an item makes; None where it joins the assistant's previous message instead."""
    kind = kind_of(item)
    if kind in _CALLS:
        call = _call(item)
        if previous is None:
            return {"role": "assistant", "tool_calls": [call]}
        previous.setdefault("tool_calls", []).append(call)
        return None
    if kind == "reasoning":
        return _joined(previous, "reasoning", _reasoning(item))
    if kind in _OUTPUTS:
        return {"role": "tool", "content": clean(item.get("output"), gathered), "tool_call_id": item.get("call_id")}
    if "role" not in item:
        return _unknown(item, gathered)
    content = clean(item.get("content"), gathered)
    if item["role"] != "assistant":
        return {"role": item["role"], "content": content}
    if type(content) is list and len(content) == 1 and type(content[0]) is dict and "text" in content[0]:
        content = content[0]["text"]
    return _joined(previous, "content", content)


def _unknown(item: Message, gathered: Gathered) -> Message:
    """An item of a type we do not know, charged once; a compaction stands for turns that nobody here can read."""
    unknown, images = gathered.unknown_parts, len(gathered.images)
    text = text_beside(item, kind_of(item), gathered)
    if len(gathered.images) == images:
        gathered.unknown_parts = unknown + 1
        gathered.warn("unknown_input_item")
    return {"role": "user", "content": text}


def _joined(previous: Message | None, name: str, value: Json) -> Message | None:
    if previous is not None and previous.get(name) is None:
        previous[name] = value
        return None
    return {"role": "assistant", name: value}


def _call(item: Message) -> Message:
    if item.get("type") == "custom_tool_call":
        arguments: Json = json.dumps({"input": item.get("input") or ""})
    else:
        arguments = item.get("arguments")
    return {
        "id": item.get("call_id"),
        "function": {"arguments": arguments, "name": item.get("name")},
        "type": "function",
    }


def _reasoning(item: Message) -> str:
    """The readable reasoning; encrypted content is opaque to every engine here."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if type(parts) is list and parts and type(parts[0]) is dict:
            return str(parts[0].get("text") or "")
    return ""
