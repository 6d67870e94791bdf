"""What docs/ledger.md tells an operator to type is what the tests ran."""

from __future__ import annotations

from pathlib import Path

from extproc.ledger import keys, scripts

PAGE = (Path(__file__).parents[3] / "docs" / "ledger.md").read_text(encoding="utf-8")


def test_the_documented_acl_command_is_the_tested_one() -> None:
    """Word for word."""
    assert " ".join(keys.acl("default", "kvgate", "SECRET")) in PAGE


def test_every_key_and_script_is_documented() -> None:
    """None is missing from the page."""
    names = [*keys.SCRIPT_KEYS, *(name for name in scripts.FLAGS if name != "init")]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
