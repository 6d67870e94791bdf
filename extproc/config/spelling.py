"""Which key was probably meant: the keys that stand at a path of the configuration, and the one nearest to a wrong one.

Pure; knows the models' shape and nothing of files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from extproc.config.models import Config, Section


def meant(path: Sequence[str | int]) -> str | None:
    """The known key nearest to the last part of ``path``, an unknown key; None where none comes near."""
    *above, wrong = path
    known = {key.lower(): key for section in _sections_at(above) for key in _keys(section)}
    # Other tools write the same words as max_input_tokens or max-input-tokens.
    plain = str(wrong).replace("_", "").replace("-", "").lower()
    found = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return known[found[0]] if found else None


def _sections_at(path: Sequence[str | int]) -> list[type[Section]]:
    kinds: list[Any] = [Config]
    for part in path:
        kinds = [inner for kind in kinds for inner in _inside(kind, str(part))]
    return [kind for kind in kinds if _is_section(kind)]


def _inside(kind: Any, part: str) -> Iterator[Any]:
    """What stands at ``part`` of a value of this type: a field's type, an entry's of a mapping or a list."""
    if _is_section(kind):
        field = next((field for field in kind.model_fields.values() if field.alias == part), None)
        if field is not None:
            yield from _parts(field.annotation)
        return
    for argument in get_args(kind):
        yield from _parts(argument)


def _parts(annotation: Any) -> Iterator[Any]:
    """A type, and those that it is a union of."""
    yield annotation
    yield from get_args(annotation)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _keys(section: type[Section]) -> Iterator[str]:
    return (field.alias for field in section.model_fields.values() if field.alias is not None)
