"""Reads a folder of payloads (``KVGATE_PAYLOADS``, default the shipped copy) and checks every row, one line each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.payloads.facts import facts, look
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
    """Whether a payload gives its facts, and the line that says so: id, expected, got."""
    body = (folder() / row["file"]).read_bytes()
    found = facts(row, look(row, body, chatml_counter()))
    ok = all(fact.ok for fact in found)
    expected = {fact.name: fact.expected for fact in found}
    got = {fact.name: fact.got for fact in found}
    wrong = "".join(f" | WRONG {f.name}: expected {f.expected!r}, got {f.got!r}" for f in found if not f.ok)
    return ok, f"{'ok  ' if ok else 'FAIL'} {row['file']}: expected {expected}, got {got}{wrong}"


def run(show: Callable[[str], object]) -> bool:
    """Every payload; True if all give their facts."""
    results = [line(row) for row in rows()]
    for _, text in results:
        show(text)
    show(f"{sum(ok for ok, _ in results)} of {len(results)} payloads give their facts")
    return all(ok for ok, _ in results)
