"""What both fuzz targets share: the limits of one input, and libFuzzer's start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import atheris

#: Processor time of one input; libFuzzer's own -timeout (wall time) only catches what never ends.
SLOW_S = 2.0


class Finding(Exception):
    """What no input may do."""


def run(judge: Callable[[bytes], None]) -> None:
    """Hand ``judge`` one input after the other until libFuzzer's limits (``sys.argv``) are reached."""

    def one(data: bytes) -> None:
        started = time.process_time()
        judge(data)
        if (spent := time.process_time() - started) > SLOW_S:
            raise Finding(f"one input took {spent:.1f} s of processor time")

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
