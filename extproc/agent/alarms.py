"""Who shares a device with generation and should not: findings from process lists and declared use.

Owns the comparison; sees readings and configuration only. An alarm changes no admission: the memory is already
gone from what the driver calls free. It names what to move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from extproc.agent.devices.base import DeviceReading, DeviceState

#: Memory of processes nobody knows, below which a display server or a monitoring tool is meant.
FOREIGN_BYTES = 512 * 1024 * 1024
#: Used memory that no listed process accounts for, above which something died without giving it back.
ORPHANED_BYTES = 1024 * 1024 * 1024
#: A pod may use this much more than it declared before it is worth a word (allocator rounding).
EXCESS_SHARE = 1.05

SHARED = "shared_device"
FOREIGN = "foreign_process"
ORPHANED = "orphaned_memory"
EXCESS = "over_declared"
UNATTRIBUTED = "processes_unknown"
MEMORY_ERRORS = "memory_errors"
KINDS = (SHARED, FOREIGN, ORPHANED, EXCESS, UNATTRIBUTED, MEMORY_ERRORS)

#: Program names of engines, as /proc/PID/comm shows them (15 characters).
ENGINE_COMMANDS = ("vllm", "sglang", "llama-server", "ollama", "text-generation", "tritonserver", "trtllm")


@dataclass(frozen=True, slots=True)
class Alarm:
    """One finding; ``message`` names device, PIDs and figures."""

    kind: str
    device: str
    message: str


def find(
    devices: Iterable[DeviceReading],
    tenants: Mapping[str, Sequence[str]],
    declared_bytes: Mapping[int, int] | None = None,
) -> list[Alarm]:
    """Every alarm now.

    ``tenants``: names of the replicas configured on each device UUID; ``declared_bytes``: what the pod of a PID
    declared. Devices that are not believed raise nothing: their lists may be old.
    """
    alarms: list[Alarm] = []
    for device in devices:
        if device.state not in (DeviceState.OK, DeviceState.UNIFIED):
            continue
        alarms += _tenants(device, tenants.get(device.uuid, ()))
        if device.state is DeviceState.OK:
            alarms += _processes(device)
        alarms += _excess(device, declared_bytes or {})
        if device.ecc_uncorrected:
            alarms.append(Alarm(MEMORY_ERRORS, device.uuid, f"{device.ecc_uncorrected} uncorrected memory errors"))
    return alarms


def _tenants(device: DeviceReading, names: Sequence[str]) -> list[Alarm]:
    if len(names) < 2:
        return []
    return [Alarm(SHARED, device.uuid, f"several replicas on one device: {', '.join(sorted(names))}")]


def _processes(device: DeviceReading) -> list[Alarm]:
    used = device.used_bytes or 0
    if device.processes is None:
        return []
    if not device.processes:
        # Inside a PID namespace the list is empty or foreign: that is no proof of an idle card.
        if used <= ORPHANED_BYTES:
            return []
        text = f"{_gib(used)} used and no process listed: left over after a crash, or the agent lacks hostPID"
        return [Alarm(ORPHANED, device.uuid, text)]
    found: list[Alarm] = []
    if any(process.used_bytes is None for process in device.processes):
        pids = [process.pid for process in device.processes if process.used_bytes is None]
        found.append(
            Alarm(UNATTRIBUTED, device.uuid, f"no size for PIDs {_list(pids)}; the device's own figures count")
        )
        return found
    foreign = [
        process
        for process in device.processes
        if process.command and not _engine(process.command) and (process.used_bytes or 0) >= FOREIGN_BYTES
    ]
    for process in foreign:
        text = f"PID {process.pid} ({process.command}) holds {_gib(process.used_bytes or 0)}"
        found.append(Alarm(FOREIGN, device.uuid, text))
    unexplained = used - (device.engine_used_bytes() or 0)
    if unexplained > ORPHANED_BYTES:
        pids = [process.pid for process in device.processes]
        text = f"{_gib(unexplained)} used beyond the listed PIDs {_list(pids)}"
        found.append(Alarm(ORPHANED, device.uuid, text))
    return found


def _excess(device: DeviceReading, declared: Mapping[int, int]) -> list[Alarm]:
    return [
        Alarm(
            EXCESS,
            device.uuid,
            f"PID {process.pid} holds {_gib(process.used_bytes)} of {_gib(declared[process.pid])} declared",
        )
        for process in device.processes or ()
        if process.used_bytes is not None
        and process.pid in declared
        and process.used_bytes > declared[process.pid] * EXCESS_SHARE
    ]


def _engine(command: str) -> bool:
    # A Python engine's comm is "python3" or "VLLM::EngineCor"; a bare interpreter is not called foreign.
    lowered = command.lower()
    return lowered.startswith("python") or any(lowered.startswith(name[:15]) for name in ENGINE_COMMANDS)


def _list(pids: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(pids)))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
