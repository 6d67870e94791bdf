"""How a process keeps little of the memory that it no longer uses.

Owns the settings of CPython's garbage collector and of the C library's heaps; knows nothing of what runs. Both keep
freed memory for reuse: after one dense minute a process can look for hours as if it leaked.
"""

from __future__ import annotations

import ctypes
import gc
import os

#: Heaps of the C library for all threads together: the event loop's and one more.
HEAPS = 2
#: What sets as much from outside; whoever did so knows better.
HEAPS_VARIABLE = "MALLOC_ARENA_MAX"
#: The number of that setting in glibc's malloc.h.
_M_ARENA_MAX = -8


def share_heaps() -> None:
    """Let threads share ``HEAPS`` heaps; call it while there is one thread. Nothing happens elsewhere than on glibc.

    By default each of gRPC's threads gets a heap of its own, up to eight for every core, and each heap keeps what the
    densest moment of its thread needed: measured on two cores, 4.9 MiB were free in ten heaps, 2.4 MiB in two.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and HEAPS_VARIABLE not in os.environ:
        mallopt(_M_ARENA_MAX, HEAPS)


def settle() -> None:
    """Take everything loaded so far out of later garbage collections.

    CPython collects fully once what outlived two younger collections exceeds a quarter of all that lived at the last
    full one. With the 57,000 objects of a start among them that is after some minutes or never, for tens of
    milliseconds each time. Until then cycles of gRPC's wait, and so do the freed tuples that CPython keeps for reuse:
    up to 2,000 of each length up to 20, which only a full collection frees. Without the start's objects a full
    collection takes a millisecond and comes with every hundredth of the youngest.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # sets what "all that lived" is measured by
