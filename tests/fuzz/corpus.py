"""Starting corpus and dictionary of the fuzz targets: the shipped payloads, and the names that kvgate reads.

An input of ``requests`` is a byte for the path, a byte for the content-encoding, then the body; an input of
``encodings`` is read by ``fuzz_encodings``. Payloads that are too long to mutate well are left out.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

import zstandard

from extproc.dialects.content import IMAGE_TYPES, TEXT_TYPES
from extproc.dialects.openai import MATTERS
from extproc.dialects.routes import ROUTES

#: The payloads that the tests ship; the same folder as tests.payloads, which needs more than a fuzzer has installed.
PAYLOADS = Path(__file__).resolve().parents[1] / "data" / "payloads"

PATHS = ["/" + "/".join(segments) for segments in sorted(ROUTES)]
ENCODINGS = ["", "", "", "", "gzip", "deflate", "zstd", "br"]
LONGEST = 8192

_NAMES = {
    "role", "content", "type", "image_url", "url", "function", "name", "arguments", "tool_calls", "tool_call_id", "include_usage",
    "source", "data", "tool_result", "tool_use", "documents", "query", "parameters", "sampling_params", "response_format", "num_ctx",
    "output", "thinking", "reasoning", "text_1", "text_2", "input_ids", "anyOf", "user", "assistant", "system", "developer", "tool",
}  # fmt: skip


def write(folder: Path) -> None:
    """``folder``/requests, ``folder``/encodings and ``folder``/dictionary, beside what earlier runs found."""
    bodies = dict(_payloads())
    for name, (path, encoding, body) in bodies.items():
        if len(body) <= LONGEST and path in PATHS and encoding in ENCODINGS:
            _put(folder / "requests" / name, bytes([PATHS.index(path), ENCODINGS.index(encoding)]) + body)
    for name, (_, encoding, body) in bodies.items():
        if encoding == "" and len(body) <= LONGEST:
            for number, pack in enumerate((gzip.compress, zlib.compress, zstandard.compress)):
                _put(folder / "encodings" / f"{name}.{number}", bytes([number]) + pack(body))
    words = sorted({*MATTERS, *_NAMES, *TEXT_TYPES, *IMAGE_TYPES})
    pieces = [f'"{word}"' for word in words] + [
        "data:image/png;base64,",
        "\\ud800",
        "1e999",
        '":null,"',
        "[[[[",
        '{"a":',
    ]
    lines = [json.dumps(piece) for piece in pieces if piece.isascii()]
    (folder / "dictionary").write_text("\n".join(lines) + "\n", "ascii")


def _payloads() -> list[tuple[str, tuple[str, str, bytes]]]:
    rows = map(json.loads, (PAYLOADS / "index.jsonl").read_text("utf-8").splitlines())
    return [
        (
            row["file"],
            (
                row["path"].partition("?")[0].removeprefix("/v1"),
                row.get("headers", {}).get("content-encoding", ""),
                (PAYLOADS / row["file"]).read_bytes(),
            ),
        )
        for row in rows
    ]


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
