"""Coverage-guided fuzzing of bytes -> request -> bound and of the decompressors (atheris).

    python tests/fuzz/fuzz_dialects.py [CORPUS] -max_total_time=600

Needs ``atheris`` beside kvgate's own requirements. The first byte of an input chooses the path, the second the
encoding. Anything but a request or a 4xx, or more than two seconds for one input, is a finding.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["extproc.dialects", "extproc.tokens.bound"]):
    from extproc.dialects import BodyLimits, edit, parse
    from extproc.dialects.routes import ROUTES
    from extproc.errors import BadRequest
    from extproc.tokens.bound import prompt_bound
    from extproc.types import RequestHead

PATHS = ["/" + "/".join(segments) for segments in sorted(ROUTES)]
ENCODINGS = ["", "", "", "", "gzip", "deflate", "zstd", "br"]
LIMITS = BodyLimits(max_bytes=1 << 20)
SLOW_S = 2.0


def one(data: bytes) -> None:
    """One input, judged."""
    if len(data) < 2:
        return
    path, encoding, body = PATHS[data[0] % len(PATHS)], ENCODINGS[data[1] % len(ENCODINGS)], data[2:]
    started = time.process_time()
    try:
        parsed = parse(RequestHead("POST", path, {"content-encoding": encoding} if encoding else {}), body, LIMITS)
    except BadRequest as error:
        if error.status not in (400, 413, 415):
            raise AssertionError(f"status {error.status}") from error
    else:
        request = parsed.request
        if request is not None:
            sum(prompt_bound(prompt) for prompt in request.prompts)
            if parsed.route.kind == "inference":
                edited = edit(parsed.body, request, cap=7, include_usage=True, model="m")
                again = parse(RequestHead("POST", path, {}), edited.body, LIMITS)
                if again.model != "m" or again.model_span != edited.model_span:
                    raise AssertionError("the edit lost the model's place")
    if time.process_time() - started > SLOW_S:
        raise AssertionError("one input took too long")


def main() -> None:
    """Run libFuzzer."""
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
