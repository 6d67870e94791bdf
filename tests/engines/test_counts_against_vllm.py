"""Counts against a real vLLM on CPU, live: one engine per tokenizer family, 240 conversations each.

Run by ``make test-engines``. The figures that ``make test`` checks were recorded with ``vllm_oracle.py`` beside this
file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conversations import all_requests
from tests.engines.vllm_oracle import oracle
from tests.payloads.tokenizers import counter
from tests.unit.dialects.asking import request

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

FAMILIES = (
    "qwen-2.5",
    "qwen-3",
    "qwen-3.5",
    "glm-4-32b-0414",
    "deepseek-r1-distill-llama-8b",
    "minimax-m3",
    "jt-coder-8b-base",
)


@pytest.mark.parametrize("family", FAMILIES)
async def test_counts_equal_the_engines_usage(family: str, tmp_path: Path) -> None:
    """usage.prompt_tokens of chat, messages, responses and completions is what we count before the engine sees them."""
    answers = await oracle(family, tmp_path)
    wrong = []
    for number, ((path, body), expected) in enumerate(zip(all_requests(), answers["counts"], strict=True)):
        if expected is not None:
            counted = counter(family).count(request(path, body))
            if (counted.input_tokens, counted.source) != (expected, "exact"):
                wrong.append((number, path, expected, counted))
    answered = sum(count is not None for count in answers["counts"])
    print(f"{family}: {answered} answered, {len(wrong)} differ")
    assert not wrong
    assert answered >= 200
