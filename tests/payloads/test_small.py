"""Small bodies of every dialect, odd and hostile ones among them, each with facts derived from the engines' own documents."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.payloads.facts import facts
from tests.payloads.runner import told
from tests.payloads.sighting import look
from tests.payloads.tokenizers import chatml_counter

FILE = Path(__file__).parent.parent / "data" / "small_payloads.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def body_of(row: Mapping[str, Any]) -> bytes:
    """The body, which a row holds as JSON, as text, or as base64 where it is neither."""
    if "json" in row:
        return json.dumps(row["json"], ensure_ascii=False).encode()
    return row["text"].encode() if "text" in row else base64.b64decode(row["base64"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_small_payload_gives_its_facts(row: Mapping[str, Any]) -> None:
    """Every fact that a row states is what we find, and the bound holds."""
    ok, text = told(row["file"], facts(row, look(row, body_of(row), chatml_counter())))
    assert ok, text
