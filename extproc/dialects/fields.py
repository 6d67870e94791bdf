"""Readers of the fields that decide what a request may take: caps, sequence counts, flags.

Every reader takes the members of an object and a name and either returns a usable value or raises
``BadRequest`` with the JSON path. Absent and null mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, CapField, EditPoints, Json, Span
from extproc.errors import BadRequest

_items = msgspec.json.Decoder(list[msgspec.Raw])
_BETWEEN = re.compile(rb"[ \t\n\r,]*")

#: Largest whole number that any engine can take as a limit (int64).
_MAX_INTEGER = 2**63 - 1

#: Every name of a number of sequences per prompt (llama.cpp: n_cmpl; SGLang, TensorRT-LLM: beam_width).
WIDTH_NAMES = ("n", "best_of", "beam_width", "n_cmpl")

#: Every name of a least number of output tokens.
MINIMUM_NAMES = ("min_tokens", "min_new_tokens")

#: What, beside caps, must not be said twice in an object of options.
OPTION_NAMES = frozenset({*WIDTH_NAMES, *MINIMUM_NAMES, "ignore_eos", "num_ctx", "include_usage"})

#: Every name of an output cap; the largest value present is the cap, because engines differ in precedence.
CAP_NAMES = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict", "max_new_tokens")


def integer(value: Json, param: str) -> int | None:
    """A whole number, or None for null; 256.0 is one, "256", true and 0.5 are not.

    Raises:
        BadRequest: 400 ``invalid_type`` or ``invalid_value``.
    """
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise BadRequest(400, "invalid_type", f"{param} must be an integer.", param)
    if not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise BadRequest(400, "invalid_value", f"{param} is out of range.", param)
    return value


def count(members: Members, name: str, limits: BodyLimits) -> int:
    """A number of sequences (n, best_of, beam width): 1 where absent."""
    value = integer(members.get(name), members.param(name))
    if value is None:
        return 1
    if not 1 <= value <= limits.max_sequences:
        raise BadRequest(
            400, "invalid_value", f"{name} must be between 1 and {limits.max_sequences}.", members.param(name)
        )
    return value


def flag(members: Members, name: str, *, default: bool = False) -> bool:
    """A boolean."""
    value = members.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise BadRequest(400, "invalid_type", f"{name} must be a boolean.", members.param(name))
    return value


def text(members: Members, name: str) -> str | None:
    """A string, None where absent, null or empty."""
    value = members.get(name)
    if value is None or value == "":
        return None
    if type(value) is not str:
        raise BadRequest(400, "invalid_type", f"{members.param(name)} must be a string.", members.param(name))
    return value


def mapping(value: Json, param: str) -> Mapping[str, Json]:
    """An object, empty where null."""
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest(400, "invalid_type", f"{param} must be an object.", param)
    return value


def listing(value: Json, param: str) -> list[Json]:
    """A list, empty where null."""
    if value is None:
        return []
    if type(value) is not list:
        raise BadRequest(400, "invalid_type", f"{param} must be an array.", param)
    return value


def caps(members: Members, names: Iterable[str] = CAP_NAMES) -> tuple[CapField, ...]:
    """Every cap present in one object; negative values (llama.cpp, Ollama: no limit) and null are no cap."""
    found = []
    for name in members.given(names):
        value = integer(members.get(name), members.param(name))
        unlimited = value is not None and value < 0
        found.append(CapField(members.param(name), members.spans[name], None if unlimited else value, unlimited))
    return tuple(found)


def largest(found: Iterable[CapField]) -> int | None:
    """The cap that counts: the largest value present, None without one or where one of them lifts the limit."""
    found = tuple(found)
    values = [cap.value for cap in found if cap.value is not None]
    return max(values) if values and not any(cap.unlimited for cap in found) else None


def width(members: Members, limits: BodyLimits) -> int:
    """Sequences per prompt: the largest of the names that one object gives it."""
    return max((count(members, name, limits) for name in members.given(WIDTH_NAMES)), default=1)


def minimum(members: Members) -> int:
    """Output tokens that the engine is forced to produce: the largest of the names that one object gives it."""
    named = members.given(MINIMUM_NAMES)
    return max((integer(members.get(name), members.param(name)) or 0 for name in named), default=0)


def options(members: Members, name: str) -> Members | None:
    """A nested object of options, None where absent or null.

    Raises:
        BadRequest: 400 ``invalid_type``, or ``duplicate_key`` for a name that decides something.
    """
    nested = members.members(name)
    if nested is None and not members.is_null(name):
        raise BadRequest(400, "invalid_type", f"{members.param(name)} must be an object.", members.param(name))
    if nested is not None:
        nested.refuse_duplicates({*CAP_NAMES, *OPTION_NAMES})
    return nested


def listed(members: Members, name: str, limits: BodyLimits) -> list[Members]:
    """The objects of options in a list, each with the places of its values.

    Raises:
        BadRequest: 400 for an empty list, one longer than an object may have members, and anything that ``options`` refuses.
    """
    param = members.param(name)
    begin, end = members.spans[name]
    try:
        raws = _items.decode(memoryview(members.data)[begin:end])
    except msgspec.DecodeError:
        raise BadRequest(400, "invalid_json", f"{param} cannot be read.", param) from None
    if not 0 < len(raws) <= limits.max_members:
        raise BadRequest(400, "invalid_value", f"{param} must have between 1 and {limits.max_members} entries.", param)
    found = []
    for index, raw in enumerate(raws):
        # Behind the bracket or the comma, and any white space.
        begin = _BETWEEN.match(members.data, begin + (0 if index else 1)).end()  # type: ignore[union-attr]
        at = (begin, begin + len(memoryview(raw)))
        found.append(Members(members.data, limits, at=at, path=f"{param}[{index}]"))
        found[-1].refuse_duplicates({*CAP_NAMES, *OPTION_NAMES})
        begin = at[1]
    return found


def edit_points(members: Members, found: tuple[CapField, ...], path: tuple[str, ...]) -> EditPoints:
    """Where edits of this body go; ``path`` leads to the dialect's own cap."""
    stream_options = options(members, "stream_options")
    outer, depth = _outer(members, path)
    return EditPoints(
        start=members.start,
        empty=not members.spans,
        model=members.spans.get("model"),
        caps=found,
        cap_path=path,
        native_cap=any(cap.name == ".".join(path) for cap in found),
        outers=() if outer is None else (outer,),
        outer_depth=depth,
        stream_options=members.spans.get("stream_options"),
        include_usage=stream_options.spans.get("include_usage") if stream_options else None,
    )


def _outer(members: Members, path: tuple[str, ...]) -> tuple[Span | None, int]:
    """The innermost value on the way to the last name of ``path``, and how many names lead to it."""
    span: Span | None = None
    within: Members | None = members
    for depth, name in enumerate(path[:-1]):
        if within is None or name not in within.spans:
            return span, depth
        span, within = within.spans[name], within.members(name)
    return span, max(0, len(path) - 1)
