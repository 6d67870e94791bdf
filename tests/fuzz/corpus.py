"""Writes a starting corpus for fuzz_dialects.py: the shipped payloads, each behind its path byte.

python tests/fuzz/corpus.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extproc.dialects.routes import ROUTES
from tests.payloads.runner import SHIPPED

PATHS = ["/" + "/".join(segments) for segments in sorted(ROUTES)]
ENCODINGS = {"": 0, "gzip": 4, "deflate": 5, "zstd": 6, "br": 7}
LONGEST = 8192


def main(folder: Path) -> None:
    """One file per payload that is short enough to mutate."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in (SHIPPED / "index.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        body = (SHIPPED / row["file"]).read_bytes()
        path = row["path"].partition("?")[0].removeprefix("/v1")
        if len(body) <= LONGEST and path in PATHS:
            encoding = ENCODINGS[row.get("headers", {}).get("content-encoding", "")]
            (folder / row["file"]).write_bytes(bytes([PATHS.index(path), encoding]) + body)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
