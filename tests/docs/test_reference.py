"""Reasons and commands are documented where docs/operations.md says so, and every link between documents leads somewhere."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re

import pytest

import extproc
import extproc.commands
from extproc.cli import COMMANDS
from extproc.policy.refusals import TABLE
from extproc.telemetry import tables
from tests.docs.reference import ROOT, table_rows

ROWS = table_rows("operations.md")  # commands, reasons, and in capitals the columns of `kvgate status`
REASONS = {str(reason): str(row[0]) for reason, row in TABLE.items()}
MODULES = {module.name for module in pkgutil.iter_modules(extproc.commands.__path__)}
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def test_every_reason_is_documented_with_its_status() -> None:
    """The table of refusals has each reason, with the status that clients get."""
    assert {name: cells[0] for name, cells in ROWS.items() if name in REASONS} == REASONS


def test_every_command_is_documented() -> None:
    """The table of commands has each command, and no command that does not exist."""
    assert {name for name in ROWS if name.islower()} - set(REASONS) == set(COMMANDS)


def test_the_columns_of_status_exist() -> None:
    """No column is explained that `kvgate status` does not print."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([A-Z_]+)`(?=[^|\n]*\| (?:replica|decision) \|)", text))
    assert explained
    assert explained <= {*tables._REPLICA_HEAD, *tables._RECENT_HEAD}


def test_every_part_of_the_package_is_in_the_architecture() -> None:
    """The table of parts names each module and package of extproc, and none that does not exist."""
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {
        module.name for module in pkgutil.iter_modules(extproc.__path__)
    }


def test_every_command_module_is_a_command() -> None:
    """No module lies in extproc/commands that `kvgate` does not offer, and none that it offers is missing."""
    assert {module for module, _ in COMMANDS.values()} == {name for name in MODULES if not name.startswith("_")}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_command_offers_help_and_arguments(command: str) -> None:
    """Each command module has what the command line needs: HELP, configure, run."""
    module = importlib.import_module(f"extproc.commands.{COMMANDS[command][0]}")
    assert isinstance(module.HELP, str)
    assert callable(module.configure)
    assert callable(module.run)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document) -> None:
    """Every relative link of a document names a file that exists."""
    links = [target for target, _ in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in target]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", sorted((ROOT / "docs/adr").glob("*.md")), ids=lambda path: path.name)
def test_decision_record_is_complete(document) -> None:
    """Each decision record has a number, a status, its context, the decision and the consequences."""
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(document.name[:4])}. ")
    assert re.findall(r"^Status: (accepted|superseded by \d+)$", text, re.MULTILINE)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_notice_names_what_is_here() -> None:
    """Each path that NOTICE gives credit for exists, and each model fact and figure says where it comes from."""
    paths = re.findall(r"`([a-z_/.-]+)`", (ROOT / "NOTICE").read_text(encoding="utf-8"))
    assert len(paths) == 6
    assert [path for path in paths if not (ROOT / path).exists()] == []
    models = json.loads((ROOT / "extproc/memory/catalogue.json").read_text(encoding="utf-8"))["models"]
    assert [model["name"] for model in models if not model["source"]] == []
    cases = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "tests/data/metrics").glob("*/case.json")]
    assert cases
    assert all(case["source"] for case in cases)
