"""docs/configuration.md says everything about every key, and nothing that is not so."""

from __future__ import annotations

import re

import pytest

from extproc.config import Config, load_text
from tests.docs.reference import ROOT, config_keys, default_text, table_rows

KEYS = dict(config_keys(Config))
ROWS = table_rows("configuration.md")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), re.DOTALL)


def test_every_key_is_documented() -> None:
    """Each key of the configuration has its row; no row describes a key that does not exist."""
    assert set(ROWS) == set(KEYS)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_default_is_documented(key: str) -> None:
    """The documented default is the one in force, and there is a meaning."""
    assert ROWS[key][0] == default_text(KEYS[key])
    assert ROWS[key][1]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_loads(example: str) -> None:
    """Every YAML example of the page is a configuration that `kvgate check` accepts."""
    assert load_text(example, where="docs/configuration.md").lanes
