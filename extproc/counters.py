"""Counts one request for every target of its chain, each distinct tokenizer once, all within one deadline.

Owns the sharing of counts between targets; how a count is made is ``tokens``' business, where it runs ``counting``'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from extproc.counting import count
from extproc.dialects import InferenceRequest
from extproc.modelset import ModelSet
from extproc.types import TokenCount

#: What is left of the deadline never falls below this, so that a later tokenizer may still answer with its bound.
LEAST_MS = 1.0


class Counters:
    """The counters of one process; ``deadline_ms`` bounds all counting of one request."""

    __slots__ = ("_counters", "_deadline_ms")

    def __init__(self, models: ModelSet, *, deadline_ms: int) -> None:
        self._counters = models.counters
        self._deadline_ms = deadline_ms

    async def count(
        self, chain: Sequence[str], request: InferenceRequest, *, budget_tokens: int | None
    ) -> dict[str, TokenCount]:
        """The count per target; a target whose model has the tokenizer of an earlier one shares its count.

        ``budget_tokens`` lets counting stop early once the input is known to be longer.
        """
        until = time.monotonic() + self._deadline_ms / 1000.0
        found: dict[int, TokenCount] = {}
        counts: dict[str, TokenCount] = {}
        for target in chain:
            counter = self._counters[target]
            key = id(counter)
            if key not in found:
                left_ms = max(LEAST_MS, (until - time.monotonic()) * 1000.0)
                found[key] = await count(counter, request, deadline_ms=left_ms, budget_tokens=budget_tokens)
            counts[target] = found[key]
        return counts
