"""``python -m tests.ground_truth [FILE]``: one line per row; exit status 0 or 1 by the rule in ``runner``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ground_truth.rows import RowError
from tests.ground_truth.runner import load_rows, run_rows


def main() -> int:
    """Run the rows and report."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    try:
        rows = load_rows(path)
    except RowError as e:
        print(e, file=sys.stderr)
        return 1
    return 0 if run_rows(rows, print).ok else 1


if __name__ == "__main__":
    sys.exit(main())
