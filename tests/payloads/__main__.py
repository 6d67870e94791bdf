"""``python -m tests.payloads``: one line per payload; exit status 0 if all give their facts."""

from __future__ import annotations

import sys

from tests.payloads.runner import run

if __name__ == "__main__":
    sys.exit(0 if run(print) else 1)
