"""Output grammars: how large and how branched the schemas of a request are, wherever a dialect lets them stand.

Engines compile a grammar without a time limit, so what might take hours is refused before it is sent on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, Json
from extproc.errors import BadRequest

#: Where a schema or grammar may stand in an object: OpenAI, vLLM and its older names, SGLang and llama.cpp, Ollama,
#: responses, Anthropic.
_PLACES: tuple[tuple[str, ...], ...] = (
    ("response_format",),
    ("structured_outputs",),
    ("guided_json",),
    ("guided_grammar",),
    ("guided_regex",),
    ("json_schema",),
    ("grammar",),
    ("regex",),
    ("ebnf",),
    ("format",),
    ("text", "format"),
    ("output_config", "format"),
    ("output_format",),
)

#: Choices under which no tool's schema becomes a grammar unless the tool itself asks for it.
_FREE_CHOICES = (None, "auto", "none")

_UNIONS = frozenset({"oneOf", "anyOf", "allOf"})


def guard(members: Members, limits: BodyLimits, tools: Sequence[Json] | None = None) -> int:
    """Bytes of the output grammar in one object, and that of ``tools`` where the engine is held to it.

    Raises:
        BadRequest: 400 ``schema_too_complex``.
    """
    total = 0
    given = members.spans
    for path in _PLACES:
        if path[0] not in given:
            continue
        holder: Members | None = members
        for name in path[:-1]:
            holder = holder.members(name) if holder is not None else None
        if holder is None or holder.is_null(path[-1]):
            continue
        begin, end = holder.spans[path[-1]]
        total += end - begin
        _judge(holder.get(path[-1]), end - begin, holder.param(path[-1]), limits)
    forced = [tool for tool in tools or () if _strict(tool)]
    choice = members.get("tool_choice") if tools else None
    if tools and (choice if type(choice) is not dict else choice.get("type")) not in _FREE_CHOICES:
        forced = list(tools)
    if forced:
        _judge(forced, _chars(forced), "tools", limits)
    return total


def _judge(value: Json, size: int, param: str, limits: BodyLimits) -> None:
    if size > limits.max_schema_bytes:
        raise BadRequest(
            400, "schema_too_complex", f"The output schema is over the limit of {limits.max_schema_bytes} bytes.", param
        )
    if _union_depth(value) > limits.max_schema_unions:
        raise BadRequest(
            400, "schema_too_complex", f"The output schema nests more than {limits.max_schema_unions} unions.", param
        )


def _strict(tool: Json) -> bool:
    if type(tool) is not dict:
        return False
    function = tool.get("function")
    return tool.get("strict") is True or (type(function) is dict and function.get("strict") is True)


def _union_depth(root: Json) -> int:
    """How deep oneOf, anyOf and allOf nest in each other, in a schema given as text too (SGLang, guided_json)."""
    deepest = 0
    stack = [(root, 0)]
    while stack:
        value, unions = stack.pop()
        deepest = max(deepest, unions)
        if type(value) is dict:
            stack.extend((v, unions + (k in _UNIONS)) for k, v in value.items())
        elif type(value) is list:
            stack.extend((v, unions) for v in value)
        elif type(value) is str and value.lstrip()[:1] == "{" and "Of" in value:
            stack.append((_parsed(value), unions))
    return deepest


def _parsed(text: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _chars(root: Json) -> int:
    """About the bytes of a value as JSON, without printing it."""
    total = 0
    stack = [root]
    while stack:
        value = stack.pop()
        total += 4
        if type(value) is str:
            total += len(value)
        elif type(value) is dict:
            total += sum(map(len, value))
            stack.extend(value.values())
        elif type(value) is list:
            stack.extend(value)
    return total
