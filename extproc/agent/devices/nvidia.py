"""NVIDIA devices through NVML (nvidia-ml-py): cards, MIG slices, unified-memory parts.

Owns NVML's calls and errors. Creates no CUDA context (asking one costs 0.6 GiB). The library is loaded and
initialised again after a failure, since a driver upgrade or a host's daemon-reload breaks it for good.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]  # the package ships no types

from extproc.agent.devices import meminfo
from extproc.agent.devices.base import (
    ALL_ONES,
    DeviceReading,
    DeviceState,
    Memory,
    ProcessUse,
    SourceDown,
    plausible,
)

T = TypeVar("T")

#: NVML error -> what it says about the device. Everything else is unknown, never unified.
ERROR_STATES: Mapping[int, DeviceState] = {
    pynvml.NVML_ERROR_GPU_IS_LOST: DeviceState.LOST,
    pynvml.NVML_ERROR_NOT_FOUND: DeviceState.LOST,
    getattr(pynvml, "NVML_ERROR_RESET_REQUIRED", 16): DeviceState.LOST,
}
#: Errors of the whole library: say why, and never "no GPUs".
LIBRARY_ERRORS: Mapping[int, str] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "nvml_library_not_found",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "nvml_driver_not_loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "nvml_driver_library_mismatch",
    pynvml.NVML_ERROR_NO_PERMISSION: "nvml_no_permission",
    pynvml.NVML_ERROR_UNINITIALIZED: "nvml_uninitialised",
}
#: Parts whose GPU memory is the host's. By name: drivers differ in whether they answer "not supported" or nonsense.
UNIFIED_NAMES = re.compile(r"\b(GB10|DGX Spark|Thor|Orin|Xavier|Tegra|Jetson|nvgpu)\b", re.IGNORECASE)
#: Parts with memory of their own beside the host's, whose drivers at times refuse to tell it; then the host's counts.
COHERENT_NAMES = re.compile(r"\b(GH200|GB200|GB300)\b", re.IGNORECASE)
#: Part of a unified device's memory that the operating system keeps for itself.
HOST_KEEPS_BYTES = 2 * 1024**3
#: Bits of the clock event reasons that slow work down (nvml.h nvmlClocksEventReason*).
THROTTLE_BITS: Mapping[int, str] = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


class Nvml:
    """Every NVIDIA device NVML shows; ``unified`` names devices (by UUID) the operator declares as unified."""

    name = "nvml"

    def __init__(self, *, unified: frozenset[str] = frozenset(), meminfo_path: Path = meminfo.PATH) -> None:
        self._unified = unified
        self._meminfo_path = meminfo_path
        self._started = False
        self._no_v2: set[str] = set()
        self._cards: dict[int, Sequence[DeviceReading]] = {}
        self._slots: dict[tuple[str, int], str] = {}
        self._seen: dict[str, DeviceReading] = {}

    def read(self) -> Sequence[DeviceReading]:
        """Every card and slice; ``SourceDown`` where NVML itself does not work."""
        self._start()
        try:
            cards = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.close()
            raise SourceDown(LIBRARY_ERRORS.get(error.value, f"nvml_unavailable: {error}")) from error
        if cards == 0 and self._seen:
            raise SourceDown("nvml_unavailable: every device vanished")
        readings: list[DeviceReading] = []
        for index in range(cards):
            readings += self._card(index)
        if readings and all(reading.state is DeviceState.UNKNOWN for reading in readings):
            # A daemon-reload on the host breaks every handle of a container at once; a new start may mend it.
            if self._seen:
                self.close()
            return readings
        self._seen |= {reading.uuid: reading for reading in readings}
        return [*readings, *self._vanished({reading.uuid for reading in readings})]

    def _vanished(self, there: set[str]) -> list[DeviceReading]:
        """What was there and is no longer listed while others are: a card off the bus, a slice of another partition."""
        return [
            DeviceReading(uuid, DeviceState.LOST, known.name, parent=known.parent, notes=("nvml: no longer listed",))
            for uuid, known in self._seen.items()
            if uuid not in there
        ]

    def close(self) -> None:
        """Shut NVML down; the next read starts it again."""
        if self._started:
            self._started = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _start(self) -> None:
        if self._started:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise SourceDown(LIBRARY_ERRORS.get(error.value, f"nvml_unavailable: {error}")) from error
        self._started = True

    def _card(self, index: int) -> list[DeviceReading]:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            # With the card go all its slices.
            return [_failed(known.uuid, error, known.name, known.parent) for known in self._cards.get(index, ())]
        name = _optional(lambda: _text(pynvml.nvmlDeviceGetName(handle))) or ""
        try:
            found = (
                self._slices(handle, uuid, name) if self._sliced(handle, uuid) else [self._device(handle, uuid, name)]
            )
        except pynvml.NVMLError as error:
            found = [_failed(known, error, name, uuid) for (card, _), known in self._slots.items() if card == uuid]
        self._cards[index] = found
        return found

    def _sliced(self, handle: Any, uuid: str) -> bool:
        """Whether the card is in MIG mode; NVMLError where one that had slices does not tell."""
        try:
            return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == 1)
        except pynvml.NVMLError:
            if any(card == uuid for card, _ in self._slots):
                raise
            return False

    def _slices(self, handle: Any, parent: str, name: str) -> list[DeviceReading]:
        """The MIG slices of a card; the parent's sums are nobody's headroom and are not reported."""
        found: list[DeviceReading] = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                slice_handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                uuid = self._slots[parent, index] = _text(pynvml.nvmlDeviceGetUUID(slice_handle))
            except pynvml.NVMLError as error:
                known = self._slots.get((parent, index))
                if error.value == pynvml.NVML_ERROR_NOT_FOUND:  # a slot without a slice
                    self._slots.pop((parent, index), None)
                elif known is not None:
                    found.append(_failed(known, error, name, parent))
                continue
            found.append(self._device(slice_handle, uuid, name, parent=parent))
        return found

    def _device(self, handle: Any, uuid: str, name: str, *, parent: str | None = None) -> DeviceReading:
        try:
            memory, state = self._memory(handle, uuid, name)
        except pynvml.NVMLError as error:
            return _failed(uuid, error, name, parent)
        reasons = _optional(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0
        notes = () if memory.problem is None else (memory.problem,)
        # On a slice these answer for the card or not at all, so the slice goes without.
        whole = parent is None
        return DeviceReading(
            uuid=uuid,
            state=state,
            name=name,
            total_bytes=memory.total_bytes,
            free_bytes=memory.free_bytes,
            used_bytes=memory.used_bytes,
            reserved_bytes=memory.reserved_bytes,
            parent=parent,
            processes=_processes(handle),
            temperature_c=_optional(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, 0))) if whole else None,
            utilisation=_optional(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100) if whole else None,
            clock_mhz=_optional(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)))
            if whole
            else None,
            ecc_uncorrected=_optional(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))) if whole else None,
            throttled=tuple(word for bit, word in THROTTLE_BITS.items() if reasons & bit),
            notes=notes,
        )

    def _memory(self, handle: Any, uuid: str, name: str) -> tuple[Memory, DeviceState]:
        """v2, on any error v1 (remembered per device); unified parts from the host's memory instead."""
        if uuid in self._unified or UNIFIED_NAMES.search(name):
            return self._host_memory()
        memory = self._memory_v2(handle, uuid)
        if memory is None:
            try:
                info = pynvml.nvmlDeviceGetMemoryInfo(handle)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED and COHERENT_NAMES.search(name):
                    return self._host_memory()
                raise
            memory = plausible(int(info.total), int(info.free), int(info.used))
        return memory, DeviceState.OK if memory.problem is None else DeviceState.UNKNOWN

    def _host_memory(self) -> tuple[Memory, DeviceState]:
        host = meminfo.available(meminfo.read(self._meminfo_path), HOST_KEEPS_BYTES)
        if host is None:
            return Memory(problem="meminfo_unreadable"), DeviceState.UNKNOWN
        total, free = host
        return Memory(total, free, total - free), DeviceState.UNIFIED

    def _memory_v2(self, handle: Any, uuid: str) -> Memory | None:
        version = getattr(pynvml, "nvmlMemory_v2", None)
        if version is None or uuid in self._no_v2:
            return None
        try:
            info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except pynvml.NVMLError as error:
            if error.value not in ERROR_STATES:  # a lost card says nothing about v2
                self._no_v2.add(uuid)
            return None
        return plausible(int(info.total), int(info.free), int(info.used), int(info.reserved))


def _failed(uuid: str | None, error: Any, name: str = "", parent: str | None = None) -> DeviceReading:
    state = ERROR_STATES.get(error.value, DeviceState.UNKNOWN)
    return DeviceReading(uuid or "", state, name, parent=parent, notes=(f"nvml: {error}",))


def _processes(handle: Any) -> tuple[ProcessUse, ...] | None:
    """Compute processes; None where the list cannot be read. Sizes that are None or all ones stay unknown."""
    listed = _optional(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if listed is None:
        return None
    return tuple(
        ProcessUse(int(process.pid), None if size in (None, ALL_ONES) else int(size), _command(int(process.pid)))
        for process in listed
        for size in (process.usedGpuMemory,)
    )


def _command(pid: int) -> str:
    """The program's name, or nothing where the PID belongs to another namespace."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _optional(ask: Callable[[], T]) -> T | None:
    """A figure that a device may not support; its absence is no error."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
