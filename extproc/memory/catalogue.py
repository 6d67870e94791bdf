"""The shipped catalogue: facts of published models, each row with the public file it was read from.

Owns the lookup by name; the rows are ``catalogue.json`` beside this module, loaded on first use. A row holds the
cache-relevant fields of a ``config.json`` as published, so a row goes through the same rules as a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from importlib import resources

from extproc.errors import GeometryError
from extproc.memory.geometry import Geometry
from extproc.memory.hf import geometry_from_config
from extproc.memory.hf_fields import plain

#: What separates the parts of a model's name.
_PARTS = re.compile(r"[^a-z0-9.]+")
#: Share of equal spelling from which a misspelt name is recognised.
_ALIKE = 0.6


@cache
def _rows() -> Mapping[str, Mapping[str, object]]:
    text = resources.files("extproc.memory").joinpath("catalogue.json").read_text("utf-8")
    rows = json.loads(text)["models"]
    return {row["name"]: row for row in rows}


@cache
def _index() -> Mapping[str, str]:
    """Every accepted spelling: full name, name without owner, and aliases, in lower case."""
    index: dict[str, str] = {}
    for name, row in _rows().items():
        aliases = row.get("aliases", ())
        for spelling in (name, name.rpartition("/")[2], *(aliases if isinstance(aliases, list) else ())):
            index.setdefault(str(spelling).lower(), name)
    return index


def catalogue_names() -> tuple[str, ...]:
    """Full names of all rows, in the file's order."""
    return tuple(_rows())


def catalogue_row(name: str) -> Mapping[str, object] | None:
    """The row of that name, of its last path part, or of an alias; None where there is none."""
    full = _index().get(name.strip().lower())
    return _rows()[full] if full else None


def catalogue_geometry(name: str) -> Geometry:
    """Geometry of a catalogue row; GeometryError suggests names that are close."""
    row = catalogue_row(name)
    if row is None:
        near = close_names(name)
        hint = f"; close: {', '.join(near)}" if near else ""
        raise GeometryError(
            f"{plain(name)}: no such file, directory or catalogue model{hint}; all names: kvgate estimate --list"
        )
    return _geometry(str(row["name"]))


@cache
def _geometry(full_name: str) -> Geometry:
    row = _rows()[full_name]
    config = row["config"]
    if not isinstance(config, Mapping):
        raise GeometryError(f"catalogue row {full_name}: field 'config' is not an object")
    geometry = geometry_from_config(config, where=f"catalogue row {full_name}", name=full_name)
    return replace(geometry, source=str(row["source"]))


def close_names(name: str, limit: int = 5) -> tuple[str, ...]:
    """Catalogue names close to ``name``: those that share the most word parts, the ones spelled most alike first.

    Where none shares a part, names that are spelled much alike.
    """
    wanted = set(_PARTS.split(name.lower())) - {""}

    def score(full: str) -> tuple[int, float]:
        short = full.rpartition("/")[2].lower()
        alike = SequenceMatcher(None, name.lower().rpartition("/")[2], short).ratio()
        return len(wanted & set(_PARTS.split(full.lower()))), alike

    scored = sorted(((score(full), full) for full in _rows()), key=lambda each: (-each[0][0], -each[0][1], each[1]))
    near = [full for (shared, alike), full in scored if shared or alike > _ALIKE]
    return tuple(near[:limit])
