"""The table of public bug reports names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "cases" / "system.md").read_text(encoding="utf-8")


def named() -> list[tuple[str, str]]:
    """(file, test) of every name; an ellipsis stands for the file named before it in the same row."""
    found = []
    for row in TABLE.splitlines():
        file = ""
        for path, test in re.findall(r"`([\w/.…]+)::(test_\w+)`", row):
            file = file if path == "…" else path
            found.append((file, test))
    return sorted(set(found))


@pytest.mark.parametrize(("file", "test"), named())
def test_named_test_exists(file: str, test: str) -> None:
    """A renamed or removed test takes its row along."""
    assert re.search(rf"^(async )?def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_row_says_something() -> None:
    """Each case has one row with a test or a reason, and rows are in order."""
    ids = [row.split("|")[1].strip() for row in TABLE.splitlines() if re.match(r"\| [abdeij]\d\d", row)]
    assert len(ids) > 60
    assert ids == sorted(set(ids))
