"""Counts against a real vLLM's ``usage.prompt_tokens``, recorded by tests/engines/vllm_oracle.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conversations import COUNT, all_requests
from tests.payloads.tokenizers import counter, tokenizer_dir
from tests.unit.dialects.asking import request

ORACLE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "vllm_usage.json").read_text("utf-8")
)


@pytest.mark.parametrize("family", sorted(ORACLE))
def test_counts_equal_the_engines_usage(family: str) -> None:
    """Every conversation that the engine took has exactly its count, and a bound that is not below."""
    recorded = ORACLE[family]
    digest = hashlib.sha256((tokenizer_dir(family) / "tokenizer.json").read_bytes()).hexdigest()[:16]
    assert digest == recorded["tokenizer_sha256"]
    wrong, answered = [], 0
    for number, ((path, body), expected) in enumerate(zip(all_requests(), recorded["counts"], strict=True)):
        if expected is None:
            continue
        answered += 1
        found = request(path, body)
        exact, bound = counter(family).count(found), counter(family).bound(found)
        if (exact.input_tokens, exact.source) != (expected, "exact") or bound.input_tokens < expected:
            wrong.append((number, path, expected, exact, bound.input_tokens))
    print(f"{family}: {answered} conversations of {COUNT}, {len(wrong)} differ")
    assert not wrong
    assert answered >= 160


def test_six_families_have_two_hundred_conversations_each() -> None:
    """The record itself is large enough to mean something."""
    large = [name for name, record in ORACLE.items() if sum(c is not None for c in record["counts"]) >= 200]
    assert len(large) >= 6
