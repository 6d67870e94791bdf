"""What every device source offers, and what one device looks like at one moment.

Owns shapes and the plausibility of memory figures; knows no library. A figure that is not supported, N/A,
all ones, zero in total or impossible in sum is unknown; it is never replaced by a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from extproc.errors import DependencyDown
from extproc.ledger.base import DeviceReport

#: NVML's "not available" in a 64-bit field.
ALL_ONES = 2**64 - 1
#: How far free + used + reserved may be from the total: drivers round, and the three are not read at one instant.
SUM_TOLERANCE = 0.05
#: The same as an absolute figure, for small slices.
SUM_TOLERANCE_BYTES = 512 * 1024 * 1024
#: No device has less (a vGPU slice of 256 MiB is the smallest sold) or more memory.
LEAST_TOTAL_BYTES = 64 * 1024 * 1024
MOST_TOTAL_BYTES = 2**43


class DeviceState(StrEnum):
    """How far a device's memory can be believed."""

    OK = "ok"
    LOST = "lost"
    UNKNOWN = "unknown"
    UNIFIED = "unified"  # the host's memory is the device's; free counts what the host can give


class SourceDown(DependencyDown):
    """A whole device library cannot be used now; the message is a stable word and a detail."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process on a device; ``used_bytes`` None where the driver does not tell."""

    pid: int
    used_bytes: int | None
    command: str = ""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device, slice or memory pool at one moment; None is "not told".

    ``parent`` is the card a MIG slice or partition belongs to. ``processes`` None: the list could not be read
    (an empty list does not prove an idle card inside a PID namespace).
    """

    uuid: str
    state: DeviceState
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    parent: str | None = None
    processes: tuple[ProcessUse, ...] | None = None
    temperature_c: int | None = None
    utilisation: float | None = None
    clock_mhz: int | None = None
    ecc_uncorrected: int | None = None
    throttled: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    def engine_used_bytes(self) -> int | None:
        """Memory of all processes together; None where any of them is not told."""
        if not self.processes or any(process.used_bytes is None for process in self.processes):
            return None
        return sum(process.used_bytes or 0 for process in self.processes)


class DeviceSource(Protocol):
    """One vendor's way to look at its devices; calls may block, errors stay with one device."""

    @property
    def name(self) -> str:
        """The source's name in health and metrics."""
        ...

    def read(self) -> Sequence[DeviceReading]:
        """Every device; ``SourceDown`` where the library as a whole cannot be used."""
        ...

    def close(self) -> None:
        """Give the library back."""
        ...


class DeviceReader(Protocol):
    """What the agent's loop asks of all devices together."""

    async def read(self, timeout_s: float) -> None:
        """Read every device once; bounded, never raises."""
        ...

    def reports(self, node: str, instance: str, offset_s: float) -> list[DeviceReport]:
        """One report per known device, on the ledger's clock."""
        ...

    def readings(self, mono_s: float) -> Sequence[DeviceReading]:
        """Every known device as it is believed at ``mono_s``."""
        ...

    def lost(self) -> frozenset[str]:
        """UUIDs of devices that are gone."""
        ...

    def health(self) -> str:
        """ok, or why devices cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory figures that passed the plausibility check, or none of them."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    problem: str | None = None


def plausible(total: int | None, free: int | None, used: int | None, reserved: int | None = None) -> Memory:
    """The figures if they can be true together; else none, and why.

    ``free`` is what the driver says, never total - used: on NVML v2 that would give the reserved part away.
    """
    if total is None or free is None or used is None:
        return Memory(problem="memory_not_told")
    if ALL_ONES in (total, free, used, reserved):
        return Memory(problem="memory_not_available")
    if not LEAST_TOTAL_BYTES <= total <= MOST_TOTAL_BYTES:
        return Memory(problem="memory_total_absurd")
    if free < 0 or used < 0 or free > total or used > total:
        return Memory(problem="memory_parts_exceed_total")
    gap = abs(total - free - used - (reserved or 0))
    if gap > max(SUM_TOLERANCE * total, SUM_TOLERANCE_BYTES):
        return Memory(problem="memory_sum_impossible")
    return Memory(total, free, used, reserved)
