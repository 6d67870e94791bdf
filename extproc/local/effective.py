"""The configuration a local run really uses: a given one with ports, paths and the ledger's address filled in.

Owns the rewriting of plain YAML data; the result is written beside the run's logs, so that every command of kvgate
(``status -c FILE``) can be pointed at it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from extproc.config import Config, load
from extproc.errors import ConfigError

DEMO_CONFIG = Path(__file__).parent / "demo" / "kvgate.yaml"

Data = dict[str, Any]


def read(path: Path) -> Data:
    """The plain data of a configuration that loads; ``ConfigError`` with every mistake otherwise.

    Its paths are absolute, because the result is written to another directory.
    """
    return load(path).model_dump(mode="json", by_alias=True, exclude_unset=True)


def write(path: Path, data: Mapping[str, Any]) -> Config:
    """Write the data and load it as every command will."""
    path.write_text(yaml.safe_dump(dict(data), sort_keys=False), encoding="utf-8")
    return load(path)


def with_value(data: Data, value: object, *path: str) -> Data:
    """A copy with ``value`` at ``path``, one key a word; missing sections are made."""
    out = copy.deepcopy(data)
    section = out
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    return out


def with_engine(data: Data, replica: str, url: str) -> Data:
    """A copy in which the replica of that name listens at ``url``; ``ConfigError`` where there is none."""
    out = copy.deepcopy(data)
    for target in out.get("targets", {}).values():
        for row in target.get("replicas", []):
            if row["name"] == replica:
                row["url"] = url
                return out
    raise ConfigError([f"targets: no replica is called {replica!r}; add it"])


def for_engines(engines: Mapping[str, tuple[str, str]]) -> Data:
    """A whole configuration for engines found at URLs: ``url -> (engine, served model)``; one lane, one alias a model."""
    targets: Data = {}
    aliases: Data = {}
    for number, (url, (engine, served)) in enumerate(engines.items()):
        name = next(
            (known for known, row in targets.items() if row["servedModel"] == served and row["engine"] == engine), None
        )
        if name is None:
            name = f"engine-{len(targets)}"
            targets[name] = {"engine": engine, "servedModel": served, "replicas": []}
            aliases.setdefault(served, {"lane": "default", "targets": []})["targets"].append(name)
        targets[name]["replicas"].append({"name": f"engine-{number}-0", "url": url})
    return {
        "ledger": {"url": "embedded", "pool": "local"},
        "targets": targets,
        "lanes": {"default": {}},
        "aliases": aliases,
    }
