"""Readers of the fields that decide what a request may take: caps, sequence counts, flags.

Every reader takes the members of an object and a name and either returns a usable value or raises
``BadRequest`` with the JSON path. Absent and null mean the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, CapField, EditPoints, Json
from extproc.errors import BadRequest

#: Largest whole number that any engine can take as a limit (int64).
_MAX_INTEGER = 2**63 - 1

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
    for name in names:
        if name in members:
            value = integer(members.get(name), members.param(name))
            found.append(
                CapField(members.param(name), members.spans[name], None if value is None or value < 0 else value)
            )
    return tuple(found)


def largest(found: Iterable[CapField]) -> int | None:
    """The cap that counts: the largest value present, None without one."""
    values = [cap.value for cap in found if cap.value is not None]
    return max(values) if values else None


def edit_points(members: Members, found: tuple[CapField, ...], path: tuple[str, ...]) -> EditPoints:
    """Where edits of this body go; ``path`` leads to the dialect's own cap."""
    stream_options = members.members("stream_options")
    return EditPoints(
        start=members.start,
        empty=not members.spans,
        model=members.spans.get("model"),
        caps=found,
        cap_path=path,
        native_cap=any(cap.name == ".".join(path) for cap in found),
        options=members.spans.get("options") if len(path) > 1 else None,
        stream_options=members.spans.get("stream_options"),
        include_usage=stream_options.spans.get("include_usage") if stream_options else None,
    )
