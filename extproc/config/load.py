"""Reads a configuration file: YAML without duplicate keys -> models -> absolute paths -> cross-checks.

Relative paths are found from the file's directory. Every mistake becomes one line ``FILE: path: what is wrong; mend``. Nothing here keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from extproc.config.checks import check
from extproc.config.models import Config
from extproc.config.paths import resolved
from extproc.config.spelling import meant
from extproc.errors import ConfigError

#: A configuration of ten thousand lanes has 1 MB; more is another file or a device that never ends.
MAX_BYTES = 16 * 2**20

#: pydantic error type -> how to mend it; ``{...}`` are fields of the error's context.
MENDS = {
    "extra_forbidden": "unknown key; remove it or correct its spelling",
    "missing": "missing; add it",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_unicode": "holds half of a character; write the character itself, not its escapes",
    "string_type": "must be text; put it in quotes",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entry",
    "string_too_long": "must be at most {max_length} characters long",
    "finite_number": "must be a finite number",
}


#: Longest part of a key that a mistake's line repeats.
MAX_SHOWN = 100
#: Longest explanation of what is no YAML: those quote names and tags.
MAX_PROBLEM = 300
MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping (YAML keeps the last one silently).

    Keys are compared as they are written, before anything is merged: a key beside ``<<`` overrides the merged one.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping as written; ``ComposerError`` for a key that stands twice or is no plain text."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be plain text", key.start_mark)
            if key.tag != MERGE and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge as YAML says: a key's own value stands, then the first merged one's; each key is kept once.

        Keeping all, merges of merges would multiply without bound.
        """
        own = [(key, value) for key, value in node.value if key.tag != MERGE]
        sources = [value for key, value in node.value if key.tag == MERGE]
        node.value = own  # before its sources are looked at: it may be one of them
        kept = {(key.tag, key.value): (key, value) for key, value in own}
        for source in sources:
            for mapping in source.value if isinstance(source, yaml.SequenceNode) else [source]:
                if not isinstance(mapping, yaml.MappingNode):
                    raise yaml.constructor.ConstructorError(None, None, "`<<` takes mappings", mapping.start_mark)
                self.flatten_mapping(mapping)
                for key, value in mapping.value:
                    kept.setdefault((key.tag, key.value), (key, value))
        node.value = list(kept.values())


def load(path: str | Path) -> Config:
    """The configuration in ``path``; ``ConfigError`` with every mistake. Warnings: ``checks.warnings(config)``."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError([f"{path}: is larger than {MAX_BYTES // 2**20} MiB; name a kvgate.yaml"])
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); name a readable file"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 at byte {error.start}; save it as UTF-8"]) from error
    return load_text(text, where=str(path), base=Path(path).absolute().parent)


def load_text(text: str, *, where: str, base: Path | None = None) -> Config:
    """The configuration written in ``text``; ``where`` names it in messages, ``base`` is the directory of its paths.

    Without ``base`` paths stay as they are written.
    """
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with stricter mappings
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        raise ConfigError(
            [f"{where}: {line}: {_shown(error.problem or 'not YAML', MAX_PROBLEM)}; correct the YAML there"]
        ) from error
    except yaml.reader.ReaderError as error:
        at = text.count("\n", 0, error.position) + 1
        raise ConfigError([f"{where}: line {at}: holds the character {error.character:#x}; remove it"]) from error
    except RecursionError as error:
        raise ConfigError([f"{where}: nested too deeply; flatten it"]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{where}: not YAML ({type(error).__name__}); correct the file"]) from error
    if not isinstance(data, dict):
        raise ConfigError([f"{where}: must be a mapping with `lanes` or `targets`; see docs/configuration.md"])
    try:
        config = Config.model_validate(data, by_alias=True, by_name=False)
        config = config if base is None else resolved(config, base)
    except ValidationError as error:
        raise ConfigError(_lines(where, error.errors(include_url=False, include_input=False))) from error
    except RecursionError as error:
        raise ConfigError([f"{where}: nested too deeply; flatten it"]) from error
    problems = [f"{where}: {line}" for line in check(config)]
    if problems:
        raise ConfigError(problems)
    return config.named(where)


def _lines(where: str, found: Sequence[Any]) -> list[str]:
    """One line per mistake; of a value that may be one word or a mapping, only what is wrong with the form it has."""
    inside = {item["loc"][:at] for item in found for at, part in enumerate(item["loc"][:-1]) if _is_branch(part)}
    return [_line(where, item) for item in found if not (_is_branch(item["loc"][-1]) and item["loc"][:-1] in inside)]


def _is_branch(part: object) -> bool:
    """Whether a part of a place is pydantic's name of one form of a value, which nobody wrote."""
    return isinstance(part, str) and part.startswith(("literal['closed'", "dict[literal['open'"))


def _line(where: str, item: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    mend = MENDS[kind].format(**context) if kind in MENDS else item["msg"]
    place = [part for part in item["loc"] if part != "[key]" and not _is_branch(part)]
    if kind == "extra_forbidden" and (key := meant(place)) is not None:
        mend = f"unknown key; did you mean {key}?"
    path = ".".join(_shown(str(part)) or "(empty)" for part in place) or "(top)"
    return f"{where}: {path}: {mend}"


def _shown(text: str, most: int = MAX_SHOWN) -> str:
    """What somebody wrote, on one line of a terminal: escaped where it cannot be printed, cut where it is long."""
    short = text if len(text) <= most else text[:most] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in short)
