"""Devices without their hardware: plausibility, AMD, Intel, Apple, host memory, and which device is believed."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from extproc.agent.devices import meminfo
from extproc.agent.devices.base import ALL_ONES, DeviceReading, DeviceState, ProcessUse, SourceDown, plausible
from extproc.agent.devices.command import AmdSmi, AppleMetal, IntelXpu, run
from extproc.agent.devices.declared import declared_bytes
from extproc.agent.devices.host import Host
from extproc.agent.devices.sysfs import AmdSysfs
from extproc.agent.devices.watch import DeviceWatch

DATA = Path(__file__).parents[2] / "data" / "devices"
GIB = 1024**3
MIB = 1024**2


@pytest.mark.parametrize(
    ("figures", "problem"),
    [
        ((80 * GIB, 40 * GIB, 39 * GIB, 1 * GIB), None),
        ((80 * GIB, 40 * GIB, 40 * GIB, None), None),
        ((None, None, None, None), "memory_not_told"),
        ((0, 0, 0, None), "memory_total_absurd"),
        ((ALL_ONES, ALL_ONES, ALL_ONES, None), "memory_not_available"),
        ((80 * GIB, 90 * GIB, 0, None), "memory_parts_exceed_total"),
        ((80 * GIB, 7 * GIB, 7 * GIB, None), "memory_sum_impossible"),
        # f19: a vGPU layer showed 2716 of 3000 MiB used and nothing free; within rounding, so believed ...
        ((3000 * MIB, 0, 2716 * MIB, None), None),
        # ... and one whose free was left unset on a large slice is not.
        ((16160 * MIB, 0, 2716 * MIB, None), "memory_sum_impossible"),
    ],
)
def test_figures_must_be_able_to_be_true_together(
    figures: tuple[int | None, int | None, int | None, int | None], problem: str | None
) -> None:
    """Impossible sums are unknown; free is never computed from the rest (f09, f18, f19, f20)."""
    memory = plausible(*figures)
    assert memory.problem == problem
    assert memory.free_bytes == (figures[1] if problem is None else None)


def test_host_memory_is_available_not_free(tmp_path: Path) -> None:
    """Page cache is given back, so MemAvailable counts, less what the host keeps (f01)."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 125489508 kB\nMemFree: 7789944 kB\nMemAvailable: 118000000 kB\n")
    assert meminfo.available(meminfo.read(path), 2 * GIB) == (125489508 * 1024, 118000000 * 1024 - 2 * GIB)
    [reading] = Host("n", meminfo_path=path).read()
    assert (reading.uuid, reading.state, reading.free_bytes) == ("cpu:n", "unified", 118000000 * 1024 - GIB)


@pytest.mark.parametrize("text", ["", "MemTotal: 0 kB\nMemAvailable: 0 kB\n", "MemTotal: 100 kB\nMemFree: 50 kB\n"])
def test_meminfo_without_the_figures_is_a_source_down(tmp_path: Path, text: str) -> None:
    """Missing fields are no zero."""
    path = tmp_path / "meminfo"
    path.write_text(text)
    with pytest.raises(SourceDown, match="meminfo_unreadable"):
        Host("n", meminfo_path=path).read()


def test_amd_card_from_sysfs() -> None:
    """MI300X: VRAM files, unique id, temperature, uncorrected errors; connectors are not cards."""
    [reading] = AmdSysfs(DATA / "amd-mi300x").read()
    assert (reading.uuid, reading.state, reading.name) == ("amd:f3a5c0de01020304", "ok", "AMD Instinct MI300X OAM")
    assert (reading.total_bytes, reading.free_bytes) == (206141652992, 206141652992 - 180388626432)
    assert (reading.utilisation, reading.temperature_c, reading.ecc_uncorrected) == (0.87, 61, 2)


def test_amd_apu_uses_what_the_host_can_give(tmp_path: Path) -> None:
    """The 512 MiB carve-out is not its memory: GTT bounds it, and MemAvailable bounds that."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 130000000 kB\nMemAvailable: 30000000 kB\n")
    [reading] = AmdSysfs(DATA / "amd-apu", meminfo_path=path).read()
    assert (reading.state, reading.free_bytes) == ("unified", 30000000 * 1024 - 2 * GIB)


def test_an_unreadable_amd_card_is_unknown(tmp_path: Path) -> None:
    """A card whose files are gone or nonsense keeps its name and tells no figure."""
    shutil.copytree(DATA / "amd-mi300x", tmp_path / "drm")
    (tmp_path / "drm/card0/device/mem_info_vram_used").write_text("-5\n")
    [reading] = AmdSysfs(tmp_path / "drm").read()
    assert (reading.state, reading.total_bytes, reading.free_bytes) == ("unknown", None, None)


def test_no_amd_card_is_a_source_down(tmp_path: Path) -> None:
    """Not there is not zero."""
    with pytest.raises(SourceDown, match="no_amdgpu_device"):
        AmdSysfs(tmp_path).read()


def outputs(answers: dict[str, str]) -> object:
    """A command runner that answers from files; anything else is not installed."""

    def answer(command: Sequence[str]) -> str:
        words = " ".join(command)
        if words not in answers:
            raise SourceDown(f"{command[0]}_not_installed")
        return (DATA / "outputs" / answers[words]).read_text()

    return answer


def test_intel_card_from_xpu_smi() -> None:
    """Total from discovery, used from the statistics."""
    run_command = outputs(
        {
            "xpu-smi discovery -j": "xpu-smi-discovery.json",
            "xpu-smi discovery -d 0 -j": "xpu-smi-discovery-0.json",
            "xpu-smi stats -d 0 -j": "xpu-smi-stats-0.json",
        }
    )
    [reading] = IntelXpu(run_command).read()  # type: ignore[arg-type]
    assert (reading.state, reading.total_bytes, reading.used_bytes) == ("ok", 128 * GIB, 88 * GIB)
    assert (reading.free_bytes, reading.temperature_c, reading.utilisation) == (40 * GIB, 51, 0.425)


def test_intel_card_without_statistics_is_unknown() -> None:
    """One failing command costs that card only its figures."""
    [reading] = IntelXpu(outputs({"xpu-smi discovery -j": "xpu-smi-discovery.json"})).read()  # type: ignore[arg-type]
    assert (reading.state, reading.free_bytes, reading.notes) == ("unknown", None, ("xpu-smi_not_installed",))


def test_amd_smi_reads_what_is_told_and_no_more() -> None:
    """Sizes with their unit; "N/A" is unknown, not 0 (f04)."""
    run_command = outputs(
        {"amd-smi list --json": "amd-smi-list.json", "amd-smi metric --mem-usage --json": "amd-smi-mem.json"}
    )
    known, unknown = AmdSmi(run_command).read()  # type: ignore[arg-type]
    assert (known.state, known.free_bytes) == ("ok", 24560 * MIB)
    assert (unknown.state, unknown.total_bytes) == ("unknown", None)


def test_apple_memory_is_bounded_by_the_working_set() -> None:
    """96 GiB: three quarters may be wired for the GPU; of that, what vm_stat calls reclaimable is free."""
    run_command = outputs({"sysctl hw.memsize machdep.cpu.brand_string": "sysctl.txt", "vm_stat": "vm_stat.txt"})
    [reading] = AppleMetal(run_command).read()  # type: ignore[arg-type]
    pages = 524288 + 1048576 + 65536
    assert (reading.state, reading.total_bytes, reading.free_bytes) == ("unified", 72 * GIB, pages * 16384)


def test_a_missing_command_is_hardware_that_is_not_there() -> None:
    """No command, no device, one stable word."""
    with pytest.raises(SourceDown, match="kvgate-no-such-command_not_installed"):
        run(["kvgate-no-such-command"])


def reading(state: DeviceState = DeviceState.OK, uuid: str = "GPU-a") -> DeviceReading:
    """A device with 40 of 80 GiB free."""
    believed = state in (DeviceState.OK, DeviceState.UNIFIED)
    sizes = (80 * GIB, 40 * GIB, 40 * GIB) if believed else (None, None, None)
    return DeviceReading(uuid, state, "card", *sizes)


def test_a_lost_device_is_believed_again_after_three_good_readings() -> None:
    """No flapping back: figures stay unknown until enough fresh readings came (f11)."""
    watch = DeviceWatch([])
    watch.take([reading()], 1.0)
    watch.take([reading(DeviceState.LOST)], 2.0)
    assert watch.lost() == {"GPU-a"}
    states = []
    for at_s in (3.0, 4.0, 5.0):
        watch.take([reading()], at_s)
        states.append((watch.readings(at_s)[0].state, bool(watch.lost())))
    assert states == [("unknown", True), ("unknown", True), ("ok", False)]


def test_an_old_reading_is_unknown_not_empty() -> None:
    """A source that stopped answering leaves no figures behind."""
    watch = DeviceWatch([])
    watch.take([reading()], 1.0)
    assert watch.readings(10.0)[0].free_bytes == 40 * GIB
    old = watch.readings(17.0)[0]
    assert (old.state, old.free_bytes, old.total_bytes) == ("unknown", None, None)


class Hanging:
    """A driver call that does not return until told."""

    name = "hanging"

    def __init__(self) -> None:
        self.go = threading.Event()

    def read(self) -> Sequence[DeviceReading]:
        """Block, then show one device."""
        self.go.wait(300)
        return [reading()]

    def close(self) -> None:
        """Nothing to give back."""


class Working(Hanging):
    """A source that answers at once."""

    name = "working"

    def read(self) -> Sequence[DeviceReading]:
        """One other device."""
        return [reading(uuid="GPU-b")]


async def test_a_hanging_driver_holds_up_nobody() -> None:
    """One source blocks for good: the other is read in time, and the blocked one is taken up when it returns."""
    hanging = Hanging()
    watch = DeviceWatch([hanging, Working()])
    began = asyncio.get_running_loop().time()
    await watch.read(4.0)
    elapsed_s = asyncio.get_running_loop().time() - began
    assert [device.uuid for device in watch.readings(0.0)] == ["GPU-b"]
    assert watch.health() == "hanging: no answer yet"
    assert elapsed_s < 60.0
    hanging.go.set()
    await watch.read(60.0)
    assert {device.uuid for device in watch.readings(0.0)} == {"GPU-a", "GPU-b"}
    watch.close()


class Failing(Working):
    """A source that worked once and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def read(self) -> Sequence[DeviceReading]:
        """As long as it works."""
        if self.broken:
            raise SourceDown("nvml_unavailable")
        return super().read()


async def test_a_source_that_worked_and_fails_is_named() -> None:
    """f13: not ready, with the reason; hardware that never was there is no trouble."""
    source, never = Failing(), Failing()
    never.broken = True
    watch = DeviceWatch([source, never])
    await watch.read(60.0)
    assert watch.health() == "ok"
    source.broken = True
    await watch.read(60.0)
    assert watch.health() == "working: nvml_unavailable"
    watch.close()


def test_process_sums_need_every_size() -> None:
    """One unknown size makes the sum unknown; an empty list proves nothing (f16, f17)."""
    known = DeviceReading("u", DeviceState.OK, processes=(ProcessUse(1, 5), ProcessUse(2, 7)))
    partly = DeviceReading("u", DeviceState.OK, processes=(ProcessUse(1, 5), ProcessUse(2, None)))
    empty = DeviceReading("u", DeviceState.OK, processes=())
    assert [d.engine_used_bytes() for d in (known, partly, empty)] == [12, None, None]


def test_declared_limits_are_read_from_the_environment(tmp_path: Path) -> None:
    """vGPU and MPS limits of a process; one without any declares nothing (i07)."""
    for pid, environment in (
        (1, b"PATH=/bin\0CUDA_DEVICE_MEMORY_LIMIT_0=16000m\0"),
        (2, b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G,1=1G\0"),
        (3, b"HOME=/\0"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(environment)
    assert declared_bytes([1, 2, 3, 4], tmp_path) == {1: 16000 * MIB, 2: 2 * GIB}


class Surprising(Working):
    """A library that raises what it never documented."""

    name = "surprising"

    def read(self) -> list[DeviceReading]:
        """Raise."""
        raise AttributeError("no such symbol")


async def test_a_library_that_surprises_is_named_and_alone() -> None:
    """The round goes on, and devices of other libraries are read."""
    watch = DeviceWatch([Surprising(), Working()])
    await watch.read(60.0)
    seen = {device.uuid: device.state.value for device in watch.readings(time.monotonic())}
    health = watch.health()
    watch.close()
    assert list(seen.values()) == ["ok"]
    assert health == "surprising: failed: AttributeError"
