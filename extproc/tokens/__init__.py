"""Tokens of a request: exact by the model's own tokenizer and chat template, else a true upper bound.

Owns counting. Knows no clock (a tick and ``now`` are arguments), no threads, no engine state.
"""

from __future__ import annotations

from extproc.tokens.bound import prompt_bound, text_bound
from extproc.tokens.counter import CountingStopped, PromptCounter, load_tokenizer
from extproc.tokens.overheads import overhead_of

__all__ = ["CountingStopped", "PromptCounter", "load_tokenizer", "overhead_of", "prompt_bound", "text_bound"]
