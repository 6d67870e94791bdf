"""Payloads with known facts: what a request is, what it may take, how many tokens it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.payloads.runner import line, rows


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["file"])
def test_payload_gives_its_facts(row: Mapping[str, Any]) -> None:
    """Every fact that the index states of a payload is what we find, and the bound holds."""
    ok, text = line(row)
    print(text)
    assert ok, text
