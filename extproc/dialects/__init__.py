"""Requests in every client's dialect, understood once; edits and refusals in the same dialect.

Owns what bytes mean. Knows no tokenizer, no engine state, no Envoy.
"""

from __future__ import annotations

from extproc.dialects.body import decode_body
from extproc.dialects.edits import edit
from extproc.dialects.jsonbody import too_complex, values_of
from extproc.dialects.model import (
    BodyLimits,
    CapField,
    ChatPrompt,
    DecodedBody,
    EditedBody,
    EditPoints,
    InferenceRequest,
    Parsed,
    Prompt,
    Route,
    TextPrompt,
    TokenPrompt,
)
from extproc.dialects.parsing import parse
from extproc.dialects.refusals import error_body
from extproc.dialects.routes import recognise

__all__ = [
    "BodyLimits",
    "CapField",
    "ChatPrompt",
    "DecodedBody",
    "EditPoints",
    "EditedBody",
    "InferenceRequest",
    "Parsed",
    "Prompt",
    "Route",
    "TextPrompt",
    "TokenPrompt",
    "decode_body",
    "edit",
    "error_body",
    "parse",
    "recognise",
    "too_complex",
    "values_of",
]
