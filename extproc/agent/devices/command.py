"""Devices that only a vendor's command shows: Intel (xpu-smi), AMD without sysfs (amd-smi), Apple (vm_stat, sysctl).

Owns the commands' outputs. A command runs with a time-out, without a shell, in the source's own thread; one that
is missing means that the hardware is not there.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from extproc.agent.devices.base import DeviceReading, DeviceState, SourceDown, plausible

#: Longest a command may take; xpu-smi needs about a second.
TIMEOUT_S = 5.0
MIB = 1024 * 1024

Run = Callable[[Sequence[str]], str]


def run(command: Sequence[str]) -> str:
    """A command's standard output; ``SourceDown`` where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, timeout=TIMEOUT_S, check=True, text=True, errors="replace"
        )
    except FileNotFoundError as error:
        raise SourceDown(f"{command[0]}_not_installed") from error
    except (subprocess.SubprocessError, OSError) as error:
        raise SourceDown(f"{command[0]}_failed: {type(error).__name__}") from error
    return done.stdout


class IntelXpu:
    """Intel data-centre and Arc cards through ``xpu-smi``.

    2.x prints any field as CSV (``--query-gpu``); 1.x has JSON of ``discovery`` and ``stats``. Which one answers is
    found out once.
    """

    name = "intel"

    def __init__(self, run_command: Run = run) -> None:
        self._run = run_command
        self._queries = True

    def read(self) -> Sequence[DeviceReading]:
        """Every card; ``SourceDown`` where neither form of the command answers."""
        if self._queries:
            try:
                return _queried(self._run(["xpu-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv"]))
            except SourceDown:
                listed = self._listed()
                self._queries = False
                return listed
        return self._listed()

    def close(self) -> None:
        """Nothing to give back."""

    def _listed(self) -> list[DeviceReading]:
        """1.x: every card of ``xpu-smi discovery -j``, with memory from ``xpu-smi stats``."""
        listed = _json(self._run(["xpu-smi", "discovery", "-j"]))
        cards = listed.get("device_list") if isinstance(listed, dict) else None
        if not isinstance(cards, list):
            raise SourceDown("xpu-smi_unreadable")
        return [self._card(card) for card in cards if isinstance(card, dict)]

    def _card(self, card: dict[str, Any]) -> DeviceReading:
        index = str(card.get("device_id", ""))
        uuid, name = (
            str(card.get("uuid") or f"intel:{card.get('pci_bdf_address', index)}"),
            str(card.get("device_name", "")),
        )
        try:
            detail = _json(self._run(["xpu-smi", "discovery", "-d", index, "-j"]))
            stats = _json(self._run(["xpu-smi", "stats", "-d", index, "-j"]))
        except SourceDown as error:
            return DeviceReading(uuid, DeviceState.UNKNOWN, name, notes=(str(error),))
        total = _whole(detail.get("memory_physical_size_byte")) if isinstance(detail, dict) else None
        used_mib = _metric(stats, "XPUM_STATS_MEMORY_USED")
        busy, heat = _metric(stats, "XPUM_STATS_GPU_UTILIZATION"), _metric(stats, "XPUM_STATS_GPU_CORE_TEMPERATURE")
        reading = _intel(uuid, name, total, used_mib, busy)
        return replace(reading, temperature_c=None if heat is None else int(heat))


#: Fields asked of xpu-smi 2.x. ``memory.free`` is not: it is total - used there too (its metrics/memory.cpp), and under
#: load it was seen as N/A beside a good ``memory.used``.
QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu")


def _queried(text: str) -> list[DeviceReading]:
    """The cards of ``xpu-smi --query-gpu=... --format=csv``; a row with other cells than its header tells nothing."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        raise SourceDown("xpu-smi_unreadable")
    header = [cell.partition(" (")[0] for cell in lines[0]]
    if tuple(header) != QUERY:
        raise SourceDown("xpu-smi_unreadable")
    readings = []
    for cells in lines[1:]:
        row = dict(zip(header, cells, strict=False))
        known = row.get("uuid", "")
        uuid = known if known and known != "N/A" else f"intel:{row['index']}"
        if len(cells) != len(header):
            readings.append(
                DeviceReading(uuid, DeviceState.UNKNOWN, row.get("name", ""), notes=("xpu-smi_row_garbled",))
            )
            continue
        total_mib, used_mib, busy = (_decimal(row[name]) for name in QUERY[3:])
        total = None if total_mib is None else int(total_mib * MIB)
        readings.append(_intel(uuid, row["name"], total, used_mib, busy))
    return readings


def _intel(
    uuid: str, name: str, total: int | None, used_mib: float | None, busy_percent: float | None
) -> DeviceReading:
    """A card of which Level Zero tells total and used; free is what is left of them."""
    used = None if used_mib is None else int(used_mib * MIB)
    free = None if total is None or used is None else total - used
    memory = plausible(total, free, used)
    return DeviceReading(
        uuid=uuid,
        state=DeviceState.OK if memory.problem is None else DeviceState.UNKNOWN,
        name=name,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        used_bytes=memory.used_bytes,
        utilisation=None if busy_percent is None else busy_percent / 100,
        notes=() if memory.problem is None else (memory.problem,),
    )


class AppleMetal:
    """Apple silicon: GPU and CPU share memory; ``sysctl`` tells the total and the wired limit, ``vm_stat`` the rest.

    Metal's recommended working set (MTLDevice.recommendedMaxWorkingSetSize) is ``iogpu.wired_limit_mb`` where that is
    set; else at least 2/3 of memory up to 36 GiB and 3/4 above. Newer macOS grants more (107.52 of 128 GiB), so the
    figure here is a lower bound; tests/data/devices/recorded.json has the machines it was held against.
    """

    name = "apple"

    def __init__(self, run_command: Run = run) -> None:
        self._run = run_command

    def read(self) -> Sequence[DeviceReading]:
        """One unified device; ``SourceDown`` where this is no Mac."""
        facts = dict(
            line.split(": ", 1) for line in self._run(["sysctl", "hw.memsize", "machdep.cpu.brand_string"]).splitlines()
            if ": " in line
        )  # fmt: skip
        total = _whole(facts.get("hw.memsize"))
        if total is None:
            raise SourceDown("not_a_mac")
        limit = self._wired_limit()
        working_set = limit or (total * 2 // 3 if total <= 36 * 1024**3 else total * 3 // 4)
        pages = self._pages()
        name = facts.get("machdep.cpu.brand_string", "Apple")
        if pages is None:
            return [DeviceReading("apple:0", DeviceState.UNKNOWN, name, notes=("vm_stat_unreadable",))]
        page_bytes, counts = pages
        # Inactive pages are given back on demand, like Linux' MemAvailable. Purgeable ones stand in the active and
        # inactive queues too, so adding them would count some twice.
        reclaimable = sum(counts.get(key, 0) for key in ("free", "inactive", "speculative"))
        free = min(reclaimable * page_bytes, working_set)
        return [
            DeviceReading(
                "apple:0",
                DeviceState.UNIFIED,
                name,
                total_bytes=working_set,
                free_bytes=free,
                used_bytes=working_set - free,
            )
        ]

    def close(self) -> None:
        """Nothing to give back."""

    def _wired_limit(self) -> int | None:
        try:
            text = self._run(["sysctl", "-n", "iogpu.wired_limit_mb"])
        except SourceDown:
            return None
        value = _whole(text.strip())
        return value * MIB if value else None

    def _pages(self) -> tuple[int, dict[str, int]] | None:
        text = self._run(["vm_stat"])
        size = re.search(r"page size of (\d+) bytes", text)
        counts = {
            match[1].lower(): int(match[2]) for match in re.finditer(r"^Pages (\w+):\s+(\d+)\.", text, re.MULTILINE)
        }
        return (int(size[1]), counts) if size and "free" in counts else None


class AmdSmi:
    """AMD cards through ``amd-smi`` where the kernel's files are not mounted (some containers)."""

    name = "amd-smi"

    def __init__(self, run_command: Run = run) -> None:
        self._run = run_command

    def read(self) -> Sequence[DeviceReading]:
        """Every card of ``amd-smi metric --mem-usage --json`` with the UUID of ``amd-smi list --json``."""
        listed, usage = (
            _json(self._run(["amd-smi", "list", "--json"])),
            _json(self._run(["amd-smi", "metric", "--mem-usage", "--json"])),
        )
        usage = usage.get("gpu_data") if isinstance(usage, dict) else usage
        if not isinstance(listed, list) or not isinstance(usage, list):
            raise SourceDown("amd-smi_unreadable")
        memory_of = {entry.get("gpu"): entry.get("mem_usage") for entry in usage if isinstance(entry, dict)}
        return [self._card(card, memory_of.get(card.get("gpu"))) for card in listed if isinstance(card, dict)]

    def close(self) -> None:
        """Nothing to give back."""

    @staticmethod
    def _card(card: dict[str, Any], usage: Any) -> DeviceReading:
        total, used, free = (_sized(usage, f"{what}_vram") for what in ("total", "used", "free"))
        memory = plausible(total, free, used)
        return DeviceReading(
            uuid=str(card.get("uuid") or f"amd:{card.get('bdf', card.get('gpu'))}"),
            state=DeviceState.OK if memory.problem is None else DeviceState.UNKNOWN,
            name="AMD",
            total_bytes=memory.total_bytes,
            free_bytes=memory.free_bytes,
            used_bytes=memory.used_bytes,
            notes=() if memory.problem is None else (memory.problem,),
        )


def _sized(usage: Any, key: str) -> int | None:
    """``{"value": 192, "unit": "MB"}``; amd-smi's MB are MiB. "N/A" is not known."""
    entry = usage.get(key) if isinstance(usage, dict) else None
    if not isinstance(entry, dict) or entry.get("unit") != "MB":
        return None
    value = _whole(entry.get("value"))
    return None if value is None else value * MIB


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SourceDown("not_json") from error


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else None


def _decimal(text: str) -> float | None:
    """A decimal figure of a CSV cell; None for "N/A" and the like."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _metric(stats: Any, name: str) -> float | None:
    """A device-level figure of ``xpu-smi stats -j``."""
    entries = stats.get("device_level") if isinstance(stats, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("metrics_type") == name:
            value = entry.get("value")
            return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return None
