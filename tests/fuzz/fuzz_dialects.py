"""Fuzz target: bytes -> request -> bound -> edit.

The first byte of an input chooses the path, the second the content-encoding. Anything but a request or a 4xx is a
finding, and so is an edit whose result is not read back as what it was told to be.
"""

from __future__ import annotations

import atheris

with atheris.instrument_imports(include=["extproc.dialects", "extproc.tokens.bound", "extproc.memory.vision"]):
    from extproc.dialects import BodyLimits, Parsed, edit, parse
    from extproc.errors import BadRequest
    from extproc.tokens.bound import prompt_bound
    from extproc.types import RequestHead

from tests.fuzz.corpus import ENCODINGS, PATHS
from tests.fuzz.target import Finding, run

LIMITS = BodyLimits(max_bytes=1 << 20)
CAP = 7


def judge(data: bytes) -> None:
    """One request, read, bounded, edited and read again."""
    if len(data) < 2:
        return
    path, encoding = PATHS[data[0] % len(PATHS)], ENCODINGS[data[1] % len(ENCODINGS)]
    parsed = understood(path, {"content-encoding": encoding} if encoding else {}, data[2:])
    if parsed is None or parsed.request is None:
        return
    request = parsed.request
    if sum(map(prompt_bound, request.prompts)) < 0 or request.sequences < 0 or (request.max_output_tokens or 0) < 0:
        raise Finding("a negative figure")
    if parsed.route.kind != "inference":
        return
    edited = edit(parsed.body, request, cap=CAP, include_usage=True, model="m")
    again = understood(path, {}, edited.body)
    if again is None or again.request is None:
        raise Finding("an edit made a body that is not read any more")
    if again.model != "m" or again.model_span != edited.model_span:
        raise Finding("the edit lost the model's place")
    if again.request.prompts != request.prompts:
        raise Finding("the edit changed a prompt")


def understood(path: str, headers: dict[str, str], body: bytes) -> Parsed | None:
    """The parsed request, None where it is refused as it should be."""
    try:
        return parse(RequestHead("POST", path, headers), body, LIMITS)
    except BadRequest as error:
        if error.status not in (400, 413, 415) or not error.code or not error.message:
            raise Finding(f"a refusal with status {error.status}, code {error.code!r}") from error
        return None


if __name__ == "__main__":
    run(judge)
