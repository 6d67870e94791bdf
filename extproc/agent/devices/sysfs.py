"""AMD cards through the kernel's DRM files: no library, no root, the same names since Linux 5.x.

Owns /sys/class/drm: ``mem_info_vram_total``/``_used`` and their GTT kin (amdgpu). Intel's drivers show no
memory use there (``command`` asks xpu-smi).
An APU's carve-out is not its memory: where GTT is larger than a small VRAM whose maker the kernel does not know, the
device is unified.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extproc.agent.devices import meminfo
from extproc.agent.devices.base import DeviceReading, DeviceState, Memory, SourceDown, plausible

ROOT = Path("/sys/class/drm")
AMD = "0x1002"
#: An APU's VRAM carve-out is at most this large; a larger one is taken as the memory it is.
CARVE_OUT_BYTES = 4 * 1024**3
#: Part of a unified device's memory that the operating system keeps for itself.
HOST_KEEPS_BYTES = 2 * 1024**3


class AmdSysfs:
    """Every amdgpu card; what ``amdsmi`` would tell, without it."""

    name = "amd"

    def __init__(self, root: Path = ROOT, *, meminfo_path: Path = meminfo.PATH) -> None:
        self._root = root
        self._meminfo_path = meminfo_path

    def read(self) -> Sequence[DeviceReading]:
        """Every card; ``SourceDown`` where the kernel shows none."""
        found = cards(self._root, AMD)
        if not found:
            raise SourceDown("no_amdgpu_device")
        return [self._card(card) for card in found]

    def close(self) -> None:
        """Nothing to give back."""

    def _card(self, card: Path) -> DeviceReading:
        device = card / "device"
        uuid = f"amd:{_text(device / 'unique_id') or _slot(device)}"
        name = _text(device / "product_name") or f"AMD {_text(device / 'device') or ''}".strip()
        total, used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
        gtt_total, gtt_used = _number(device / "mem_info_gtt_total"), _number(device / "mem_info_gtt_used")
        if total is not None and total <= CARVE_OUT_BYTES and (gtt_total or 0) > total and not _soldered(device):
            return self._apu(uuid, name, gtt_total or 0, gtt_used)
        # The kernel tells total and used of the card's own memory; nothing is reserved beside them.
        free = None if total is None or used is None else total - used
        memory = plausible(total, free, used)
        busy = _number(device / "gpu_busy_percent")
        return DeviceReading(
            uuid=uuid,
            state=_state(memory),
            name=name,
            total_bytes=memory.total_bytes,
            free_bytes=memory.free_bytes,
            used_bytes=memory.used_bytes,
            temperature_c=_temperature(device),
            utilisation=None if busy is None else busy / 100,
            ecc_uncorrected=_ecc(device),
            notes=() if memory.problem is None else (memory.problem,),
        )

    def _apu(self, uuid: str, name: str, gtt_total: int, gtt_used: int | None) -> DeviceReading:
        host = meminfo.available(meminfo.read(self._meminfo_path), HOST_KEEPS_BYTES)
        if host is None or gtt_used is None or gtt_used > gtt_total:
            return DeviceReading(uuid, DeviceState.UNKNOWN, name, notes=("meminfo_unreadable",))
        # GTT bounds what the GPU may map, MemAvailable what the host can give.
        free = min(gtt_total - gtt_used, host[1])
        return DeviceReading(
            uuid, DeviceState.UNIFIED, name, total_bytes=gtt_total, free_bytes=free, used_bytes=gtt_used
        )


def cards(root: Path, vendor: str) -> list[Path]:
    """Cards of one vendor, connectors (card0-DP-1) left out."""
    try:
        entries = sorted(root.glob("card[0-9]*"))
    except OSError:
        return []
    return [e for e in entries if e.name[4:].isdigit() and _text(e / "device" / "vendor") == vendor]


def _soldered(device: Path) -> bool:
    """Whether the card has memory chips of its own: amdgpu knows their maker (amdgpu_vram_mgr.c hides the file else)."""
    return _text(device / "mem_info_vram_vendor") not in (None, "unknown")


def _state(memory: Memory) -> DeviceState:
    return DeviceState.OK if memory.problem is None else DeviceState.UNKNOWN


def _slot(device: Path) -> str:
    """The PCI address: the name of what the card's link points to."""
    return device.resolve().name


def _text(path: Path) -> str | None:
    """A file's text; None where it is missing or cannot be read (a card that fell off the bus answers EIO)."""
    try:
        return path.read_text("ascii", "replace").strip() or None
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _temperature(device: Path) -> int | None:
    for path in sorted(device.glob("hwmon/hwmon*/temp1_input")):
        milli = _number(path)
        if milli is not None:
            return milli // 1000
    return None


def _ecc(device: Path) -> int | None:
    """Uncorrected errors of the memory controller: ``ras/umc_err_count`` holds "ue: N" and "ce: N"."""
    for line in (_text(device / "ras" / "umc_err_count") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "ue" and value.strip().isdigit():
            return int(value)
    return None
