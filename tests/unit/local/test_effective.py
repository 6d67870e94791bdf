"""The configuration a local run really uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config import load
from extproc.errors import ConfigError
from extproc.local import effective
from extproc.local.demo_stack import make_engines


def test_the_demo_configuration_is_the_one_under_deploy() -> None:
    """People read deploy/demo/kvgate.yaml, the command uses the package's; they are one text."""
    shown = Path(__file__).parents[3] / "deploy" / "demo" / "kvgate.yaml"

    assert shown.read_text() == effective.DEMO_CONFIG.read_text()


def test_a_value_is_set_in_a_copy_however_its_key_is_spelt() -> None:
    """Names with dots are keys like any other; missing sections are made; the original stays."""
    data = {"targets": {"qwen-2.5": {"url": "old"}}}
    changed = effective.with_value(data, "new", "targets", "qwen-2.5", "url")

    assert changed == {"targets": {"qwen-2.5": {"url": "new"}}}
    assert effective.with_value({}, 1, "a", "b") == {"a": {"b": 1}}
    assert data["targets"]["qwen-2.5"]["url"] == "old"


def test_an_unknown_replica_is_an_error() -> None:
    """The message names the replica."""
    with pytest.raises(ConfigError, match="ghost-0"):
        effective.with_engine({"targets": {"a": {"replicas": [{"name": "a-0", "url": "x"}]}}}, "ghost-0", "y")


def test_engines_given_by_url_make_a_whole_configuration(tmp_path: Path) -> None:
    """Two engines of one model are two replicas of one target; another model is another target and alias."""
    engines = {
        "http://127.0.0.1:5": ("vllm", "m"),
        "http://127.0.0.1:6": ("vllm", "m"),
        "http://127.0.0.1:7": ("llamacpp", "n"),
    }
    data = effective.for_engines(engines)
    config = effective.write(tmp_path / "kvgate.yaml", data)

    assert {name: [row.url for row in target.replicas] for name, target in config.targets.items()} == {
        "engine-0": ["http://127.0.0.1:5", "http://127.0.0.1:6"],
        "engine-1": ["http://127.0.0.1:7"],
    }
    assert {name: alias.targets for name, alias in config.aliases.items()} == {"m": ("engine-0",), "n": ("engine-1",)}


def test_emulated_engines_leave_no_model_files_in_the_configuration(tmp_path: Path) -> None:
    """Without the wheel the demo's configuration loads, names no tokenizer, and the line says EMULATED."""
    engines = make_engines(tmp_path, [1, 2, 3, 4], emulated=True)
    path = tmp_path / "kvgate.yaml"
    effective.write(path, engines.fill(effective.read(effective.DEMO_CONFIG)))

    assert "EMULATED" in engines.description
    assert [model.tokenizer for model in load(path).models.values()] == [None] * 3
