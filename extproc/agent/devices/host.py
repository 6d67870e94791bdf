"""A host without a GPU: its memory as one device, so that CPU engines have a place in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extproc.agent.devices import meminfo
from extproc.agent.devices.base import DeviceReading, DeviceState, SourceDown

#: Memory the operating system keeps for itself.
HOST_KEEPS_BYTES = 1024**3


class Host:
    """The host's memory as the device ``cpu:<node>``."""

    name = "host"

    def __init__(self, node: str, *, meminfo_path: Path = meminfo.PATH) -> None:
        self._uuid = f"cpu:{node}"
        self._path = meminfo_path

    def read(self) -> Sequence[DeviceReading]:
        """One reading; state unified, since the host's own programs use the same memory."""
        host = meminfo.available(meminfo.read(self._path), HOST_KEEPS_BYTES)
        if host is None:
            raise SourceDown("meminfo_unreadable")
        total, free = host
        return [
            DeviceReading(
                self._uuid,
                DeviceState.UNIFIED,
                "host memory",
                total_bytes=total,
                free_bytes=free,
                used_bytes=total - free,
            )
        ]

    def close(self) -> None:
        """Nothing to give back."""
