"""Reads the tables of docs/*.md and the shape of the configuration, so that tests can compare the two."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| *`([^`]+)` *\|(.*)\|$")


def table_rows(document: str) -> dict[str, list[str]]:
    """Rows of every table in docs/``document`` whose first cell is code: that code -> the other cells."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    found = [ROW.match(line) for line in text.splitlines()]
    rows = [(m[1], [cell.strip() for cell in m[2].split("|")]) for m in found if m]
    names = [name for name, _ in rows]
    assert len(names) == len(set(names)), "a key stands twice"
    return dict(rows)


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a configuration model with its field, as ``targets.*.replicas[].url``; sections are not keys."""
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        inner = list(_sections(field.annotation))
        for section, step in inner:
            yield from config_keys(section, path + step + ".")
        if not inner or _is_choice(field.annotation):
            yield path, field


def default_text(field: FieldInfo) -> str:
    """The default as the documentation writes it."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "none"
    if value in ((), {}):
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`"


def _is_choice(annotation: object) -> bool:
    return any(typing.get_origin(part) is typing.Literal for part in typing.get_args(annotation))


def _sections(annotation: object, step: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """(section, how it hangs below its key: nothing, ``[]`` or ``.*``) of the sections in an annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, step
    elif origin is typing.Annotated:
        yield from _sections(arguments[0], step)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _sections(argument, step)
    elif origin is tuple:
        yield from _sections(arguments[0], step + "[]")
    elif origin is dict:
        keys = typing.get_args(arguments[0]) if typing.get_origin(arguments[0]) is typing.Literal else ("*",)
        for key in keys:
            yield from _sections(arguments[1], f"{step}.{key}")
