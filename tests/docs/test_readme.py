"""README.md leads to every page, and the configurations that ship begin without surprises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc.cli import COMMANDS
from extproc.config import load
from extproc.config.checks import warnings
from tests.docs.reference import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHIPPED = sorted([*(ROOT / "deploy/examples").glob("*.yaml"), ROOT / "deploy/compose/kvgate.yaml"])


def test_readme_links_every_page() -> None:
    """Nobody has to guess that a page exists."""
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r"\]\(([^)#\s]+)", README)) == set()


def test_readme_commands_can_be_pasted() -> None:
    """Every command line of ours names the virtual environment's program and a command that exists."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    ours = [words for words in map(str.split, lines) if words and words[0].endswith("kvgate")]
    assert {words[0] for words in ours} == {".venv/bin/kvgate"}
    assert {"up", "check", "serve", "agent", "envoy", "status"} <= {words[1] for words in ours} <= set(COMMANDS)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configuration_warns_of_nothing_but_the_tokenizer(file: Path) -> None:
    """Whoever copies a shipped file is warned only of the tokenizer that it cannot name."""
    assert [line for line in warnings(load(file)) if ".tokenizer: " not in line] == []
