"""What a process keeps of the memory that it no longer uses, and how it gives that back.

Owns CPython's garbage collector and the C library's heaps; knows nothing of what runs. Both keep freed memory for reuse
without a bound in time: after one dense minute a process looks for hours as if it leaked.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

#: A call takes a tenth of a millisecond at ten MiB of heap, so this often costs nothing.
TRIM_S = 10.0


def settle() -> None:
    """Take everything loaded so far out of later garbage collections.

    CPython collects fully once what outlived two younger collections exceeds a quarter of all that lived at the last
    full one. With the 57,000 objects of a start among them that is every few minutes or never, for tens of
    milliseconds each time. Until then cycles of gRPC's wait, and so do the freed tuples that CPython keeps for reuse:
    up to 2,000 of each length up to 20, which only a full collection frees. Without the start's objects a full
    collection takes a millisecond and comes with every hundredth of the youngest.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # sets what "all that lived" is measured by


async def keep_trimmed() -> None:
    """Give pages of the C heaps that hold nothing back to the system, again and again; elsewhere than on glibc returns.

    glibc gives back the end of a heap only: one small block behind the buffers of a burst keeps all of them resident.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(TRIM_S)
        trim(0)
