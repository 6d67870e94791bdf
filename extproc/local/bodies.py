"""A request body given on the command line: a file or standard input, read no further than its limit."""

from __future__ import annotations

import sys
from pathlib import Path

from extproc.errors import ConfigError


def read_body(name: str, max_bytes: int) -> bytes:
    """The body in the file ``name``, ``-`` for standard input; of a longer one ``max_bytes`` + 1, so that it is refused.

    ``ConfigError`` where it cannot be read.
    """
    try:
        if name == "-":
            return sys.stdin.buffer.read(max_bytes + 1)
        with Path(name).open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        why = f"cannot be read ({error.strerror}); name a readable file, or - for standard input"
        raise ConfigError([f"{name}: {why}"]) from error
