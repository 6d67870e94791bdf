"""Starting corpus and dictionary of the fuzz targets: payloads, conversations in every dialect, the names that are read.

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
from tests.engines.conversations import all_requests

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


_PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2"
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

#: A body of each shape that neither the payloads nor the conversations have.
SHAPES = (
    ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PICTURE}}]}],
                           "mm_processor_kwargs": {"size": {"longest_edge": 9}}, "n": 2, "min_tokens": 3, "ignore_eos": True}),
    ("/chat/completions", {"messages": [], "functions": [{"name": "f"}], "documents": [{"text": "d"}], "reasoning_effort": "low"}),
    ("/completions", {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "suffix": "s", "best_of": 3, "use_beam_search": True}),
    ("/messages", {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {"type": "base64", "data": _PICTURE[22:]}}]},
        {"type": "document", "source": {"type": "text", "data": "d"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking", "data": "d"},
                                          {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}]}],
        "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f", "input_schema": {}}], "thinking": {"budget_tokens": 9}}),
    ("/responses", {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, {"type": "x", "y": "z"},
        {"type": "custom_tool_call", "name": "f", "input": "i"}, {"role": "user", "content": [{"type": "input_image", "image_url": _PICTURE}]}],
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}], "text": {"format": {"type": "text"}}}),
    ("/api/chat", {"messages": [{"role": "user", "content": "c", "images": [_PICTURE[22:]], "tool_calls": [_CALL]}], "think": "high",
                   "options": {"num_predict": -1, "num_ctx": 4096}, "format": {"type": "object"}, "tools": [_CALL]}),
    ("/api/generate", {"prompt": "p", "suffix": "s", "system": "y", "context": [1, 2], "raw": True, "images": [_PICTURE[22:]]}),
    ("/api/embed", {"input": ["a", "b"]}),
    ("/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}),
    ("/score", {"text_1": ["a", "b"], "text_2": "c"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}], "prompt": "d", "n_predict": 4}),
    ("/completion", {"prompt": [1, "a", 2], "n_predict": 4, "multimodal_data": [_PICTURE[22:]]}),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": [_PICTURE[22:]]}}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3, "best_of": 2}}),
    ("/generate", {"text": ["a"], "sampling_params": [{"max_new_tokens": 3, "n": 2}], "image_data": _PICTURE}),
    ("/generate", {"input_ids": [[1, 2]], "sampling_params": {"n": 2}}),
    ("/invocations", {"text_1": "a", "text_2": "b"}),
)  # fmt: skip


def write(folder: Path) -> None:
    """``folder``/requests, ``folder``/encodings and ``folder``/dictionary, beside what earlier runs found."""
    bodies = dict(_payloads())
    for name, (path, encoding, body) in bodies.items():
        if len(body) <= LONGEST and path in PATHS and encoding in ENCODINGS:
            _put(folder / "requests" / name, bytes([PATHS.index(path), ENCODINGS.index(encoding)]) + body)
    made = [*SHAPES, *((path.removeprefix("/v1"), body) for path, body in all_requests())]
    for number, (path, fields) in enumerate(made):
        body = json.dumps(fields, ensure_ascii=number % 2 == 0).encode()
        if len(body) <= LONGEST:
            _put(folder / "requests" / f"made-{number}", bytes([PATHS.index(path), 0]) + body)
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
