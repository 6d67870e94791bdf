"""What a process was told it may use of a device: the limits that MPS and vGPU layers put into its environment.

Owns reading ``/proc/PID/environ``; a process of another user or namespace declares nothing we can see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
#: HAMi's ``CUDA_DEVICE_MEMORY_LIMIT[_N]=16000m``; CUDA MPS' ``CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=16G,1=8G``.
LIMITS = re.compile(r"CUDA_(?:DEVICE_MEMORY_LIMIT(?:_\d+)?|MPS_PINNED_DEVICE_MEM_LIMIT)=(.*)")
_SIZE = re.compile(r"(?:\d+=)?(\d+)([kKmMgG]?)")
_UNITS = {"": 1024**2, "k": 1024, "m": 1024**2, "g": 1024**3}


def declared_bytes(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """The limit of each process that has one, in bytes; of several (one per device) the largest."""
    return {pid: limit for pid in pids if (limit := _limit(pid, proc)) is not None}


def _limit(pid: int, proc: Path) -> int | None:
    try:
        environment = (proc / str(pid) / "environ").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return None
    sizes = [
        int(size[1]) * _UNITS[size[2].lower()]
        for entry in environment
        if (found := LIMITS.fullmatch(entry))
        for part in found[1].split(",")
        if (size := _SIZE.fullmatch(part.strip()))
    ]
    return max(sizes, default=None)
