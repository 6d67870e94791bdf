"""Reads a folder of payloads (``KVGATE_PAYLOADS``, default the shipped copy) and checks every row, one line each."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.payloads.facts import Fact, facts
from tests.payloads.sighting import look
from tests.payloads.tokenizers import chatml_counter

SHIPPED = Path(__file__).parent.parent / "data" / "payloads"


def folder() -> Path:
    """The folder of payloads."""
    return Path(os.environ.get("KVGATE_PAYLOADS") or SHIPPED)


def rows() -> list[Mapping[str, Any]]:
    """The rows of the folder's index."""
    lines = (folder() / "index.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def line(row: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a payload gives its facts, and the line that says so: id, expected, got, and what could not be checked."""
    try:
        found = facts(row, look(row, (folder() / row["file"]).read_bytes(), chatml_counter()))
    except Exception as error:  # noqa: BLE001 - the runner's border: a row that breaks it is a finding, not its end
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = [Fact("understood", "a row", f"{type(error).__name__}: {error} ({place.name}:{place.lineno})", False)]
    return told(str(row.get("file")), found)


def told(name: str, found: Sequence[Fact]) -> tuple[bool, str]:
    """One row's line."""
    checked = [fact for fact in found if fact.ok is not None]
    ok = bool(checked) and all(fact.ok for fact in checked)
    expected = {fact.name: fact.expected for fact in checked}
    got = {fact.name: fact.got for fact in checked}
    wrong = "".join(f" | WRONG {f.name}: expected {f.expected!r}, got {f.got!r}" for f in checked if not f.ok)
    left = "".join(f" | {f.name} {f.got}" for f in found if f.ok is None)
    return ok, f"{'ok  ' if ok else 'FAIL'} {name}: expected {expected}, got {got}{wrong}{left}"


def run(show: Callable[[str], object]) -> bool:
    """Every payload; True if all give their facts."""
    results = [line(row) for row in rows()]
    for _, text in results:
        show(text)
    show(f"{sum(ok for ok, _ in results)} of {len(results)} payloads give their facts")
    return all(ok for ok, _ in results)
