"""Counting beside the event loop: threads for long texts, a process for giants, deadlines, bounded memory."""

from __future__ import annotations

from extproc.counting.pool import GIANT_BYTES, INLINE_BYTES, MAX_PENDING_BYTES, Counting, CountingStats
from extproc.counting.specs import CounterSpec

__all__ = ["GIANT_BYTES", "INLINE_BYTES", "MAX_PENDING_BYTES", "CounterSpec", "Counting", "CountingStats"]
