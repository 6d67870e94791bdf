"""The NVIDIA source through a compiled libnvidia-ml: live change, loss of one card, MIG, v1 and v2, processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.nvml import Stub, build, line

MIB = 1024 * 1024
A, B = "GPU-11111111-2222-3333-4444-555555555555", "GPU-99999999-2222-3333-4444-555555555555"
SLICES = [f"MIG-0000000{n}-2222-3333-4444-555555555555" for n in range(3)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stub."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: Path, tmp_path: Path) -> Iterator[Stub]:
    """A reader process with a GB10-like host: 119.7 GiB in total, 112.5 available."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 125489508 kB\nMemFree: 7789944 kB\nMemAvailable: 118000000 kB\n")
    reader = Stub(library, tmp_path, str(meminfo), "GPU-declared")
    yield reader
    reader.end()


def test_memory_is_the_drivers_and_changes_live(stub: Stub) -> None:
    """Free is v2's free, reserved is told apart, and a change shows at the next read (f09)."""
    stub.put(line(A, total=183359, used=8000, reserved=726, util=37, temp=55, ecc=3, procs="4242:7500"))
    first = stub.read()[A]
    stub.put(line(A, total=183359, used=100000, reserved=726))
    second = stub.read()[A]
    assert (first["state"], first["total_bytes"], first["free_bytes"], first["reserved_bytes"]) == (
        "ok", 183359 * MIB, (183359 - 8000 - 726) * MIB, 726 * MIB,
    )  # fmt: skip
    assert (first["utilisation"], first["temperature_c"], first["ecc_uncorrected"]) == (0.37, 55, 3)
    assert first["processes"] == [{"pid": 4242, "used_bytes": 7500 * MIB, "command": ""}]
    assert second["free_bytes"] == (183359 - 100000 - 726) * MIB


@pytest.mark.parametrize("v2_error", [999, 3, 25])
def test_v1_stands_in_for_v2_on_any_error(stub: Stub, v2_error: int) -> None:
    """A v2 that exists and fails falls back to v1, for this device only (f10)."""
    stub.put(line(A, used=1000, v2err=v2_error), line(B, used=1000))
    read = stub.read()
    assert (read[A]["free_bytes"], read[A]["reserved_bytes"]) == ((143771 - 1000 - 627) * MIB, None)
    assert read[B]["reserved_bytes"] == 627 * MIB


def test_a_lost_card_leaves_the_other_alone(stub: Stub) -> None:
    """GPU_IS_LOST marks one card lost; the other is read as before (f11)."""
    stub.put(line(A, used=1000), line(B, used=2000))
    stub.read()
    stub.put(line(A, used=1000, err=15), line(B, used=3000))
    read = stub.read()
    assert (read[A]["state"], read[A]["free_bytes"]) == ("lost", None)
    assert (read[B]["state"], read[B]["used_bytes"]) == ("ok", 3000 * MIB)


@pytest.mark.parametrize(("error", "state"), [(3, "unknown"), (4, "unknown"), (999, "unknown"), (15, "lost")])
def test_errors_on_a_discrete_card_never_become_host_memory(stub: Stub, error: int, state: str) -> None:
    """Not supported, no permission and unknown stay unknown on an A100; only known parts are unified (f05)."""
    stub.put(line(A, "NVIDIA_A100-SXM4-80GB", total=81920))
    stub.read()
    stub.put(line(A, "NVIDIA_A100-SXM4-80GB", total=81920, err=error))
    read = stub.read()[A]
    assert (read["state"], read["total_bytes"], read["free_bytes"]) == (state, None, None)


def test_slices_are_devices_and_the_parent_is_not(stub: Stub) -> None:
    """Each MIG slice reports its own room under its own UUID; the parent's sum is not reported (f06, f07)."""
    free = (4800, 120, 4800)
    slices = [
        line(uuid, "NVIDIA_H200_MIG_1g.18gb", total=4864, used=4864 - room, reserved=0, parent=A)
        for uuid, room in zip(SLICES, free, strict=True)
    ]
    stub.put(line(A, mig=1, used=43000), *slices)
    read = stub.read()
    assert sorted(read) == sorted(SLICES)
    assert [read[uuid]["free_bytes"] // MIB for uuid in SLICES] == [4800, 120, 4800]
    assert {read[uuid]["parent"] for uuid in SLICES} == {A}
    assert {read[uuid]["utilisation"] for uuid in SLICES} == {None}


@pytest.mark.parametrize(("error", "state"), [(15, "lost"), (999, "unknown"), (4, "unknown")])
def test_a_sliced_card_takes_its_slices_along(stub: Stub, error: int, state: str) -> None:
    """What ails the card ails every slice of it, and no other card (f07, f11)."""
    slices = [line(uuid, total=4864, used=64, reserved=0, parent=A) for uuid in SLICES]
    stub.put(line(A, mig=1), line(B), *slices)
    stub.read()
    stub.put(line(A, mig=1, err=error), line(B), *slices)
    read = stub.read()
    assert {uuid: read[uuid]["state"] for uuid in read} == dict.fromkeys(SLICES, state) | {B: "ok"}
    assert {read[uuid]["free_bytes"] for uuid in SLICES} == {None}


@pytest.mark.parametrize(("error", "state"), [(15, "lost"), (999, "unknown")])
def test_a_slice_that_fails_is_told_and_alone(stub: Stub, error: int, state: str) -> None:
    """It does not drop out of the list in silence."""
    slices = [line(uuid, total=4864, used=64, reserved=0, parent=A) for uuid in SLICES]
    stub.put(line(A, mig=1), *slices)
    stub.read()
    stub.put(line(A, mig=1), line(SLICES[0], total=4864, used=64, reserved=0, parent=A, err=error), *slices[1:])
    read = stub.read()
    assert [read[uuid]["state"] for uuid in SLICES] == [state, "ok", "ok"]


def test_what_is_no_longer_listed_is_lost_and_comes_back(stub: Stub) -> None:
    """A card off the bus makes the list shorter and shifts the others; a slice of another partition is gone."""
    stub.put(line(A), line(B, used=2000))
    stub.read()
    stub.put(line(B, used=3000))
    read = stub.read()
    assert (read[A]["state"], read[A]["free_bytes"]) == ("lost", None)
    assert (read[B]["state"], read[B]["used_bytes"]) == ("ok", 3000 * MIB)
    stub.put(line(A), line(B))
    assert {uuid: device["state"] for uuid, device in stub.read().items()} == {A: "ok", B: "ok"}


def test_a_library_in_trouble_loses_nothing(stub: Stub) -> None:
    """Where no card can be read, one that is not listed proves nothing."""
    stub.put(line(A), line(B))
    stub.read()
    stub.put(line(A, err=999))
    read = stub.read()
    assert {uuid: device["state"] for uuid, device in read.items()} == {A: "unknown"}


@pytest.mark.parametrize("v2_error", [0, 3])
def test_unified_parts_show_what_the_host_can_give(stub: Stub, v2_error: int) -> None:
    """GB10: MemAvailable less what the host keeps, whether its driver refuses or answers nonsense (f01, f02)."""
    stub.put(line(A, "NVIDIA_GB10", total=121688, used=118827, v2err=v2_error))
    read = stub.read()[A]
    assert read["state"] == "unified"
    assert read["free_bytes"] == 118000000 * 1024 - 2 * 1024**3
    assert read["total_bytes"] == 125489508 * 1024


@pytest.mark.parametrize(
    ("name", "error", "state"),
    [
        ("NVIDIA_GH200_480GB", 0, "ok"),
        ("NVIDIA_GH200_480GB", 1003, "unified"),
        ("NVIDIA_GH200_480GB", 1004, "unknown"),
        ("NVIDIA_A100-SXM4-80GB", 1003, "unknown"),
    ],
)
def test_only_a_known_part_that_refuses_its_memory_gets_the_hosts(
    stub: Stub, name: str, error: int, state: str
) -> None:
    """GH200 tells its own memory; where its driver says "not supported" the host's counts, on no other error or card."""
    stub.put(line(A, name, total=97871, v2err=error))
    assert stub.read()[A]["state"] == state


def test_an_operator_may_declare_a_device_unified(stub: Stub) -> None:
    """A part whose name is not known yet is unified where the operator says so (f02)."""
    stub.put(line("GPU-declared", "NVIDIA_Next", total=121688))
    assert stub.read()["GPU-declared"]["state"] == "unified"


def test_impossible_figures_are_unknown(stub: Stub) -> None:
    """Zero in total is no device of 0 MB, it is unknown (f04)."""
    stub.put(line(A, total=0, reserved=0))
    read = stub.read()[A]
    assert (read["state"], read["total_bytes"]) == ("unknown", None)


@pytest.mark.parametrize(
    ("error", "words"),
    [(999, "nvml_unavailable"), (18, "nvml_driver_library_mismatch"), (9, "nvml_driver_not_loaded")],
)
def test_a_broken_library_is_no_node_without_cards(stub: Stub, error: int, words: str) -> None:
    """A daemon-reload or a driver upgrade takes the source down with its reason; it comes back by itself (f13, f14)."""
    stub.put(line(A))
    stub.read()
    stub.put(f"init {error}")
    assert stub.read()["down"].startswith(words)
    stub.put(line(A))
    assert stub.read()[A]["state"] == "ok"


def test_process_sizes_that_are_not_told_stay_unknown(stub: Stub) -> None:
    """All ones is "not available", and the device's own figures stand (f17)."""
    stub.put(line(A, used=60000, procs="10:-1,11:5120"))
    read = stub.read()[A]
    assert [process["used_bytes"] for process in read["processes"]] == [None, 5120 * MIB]
    assert read["used_bytes"] == 60000 * MIB


def test_an_empty_process_list_changes_no_figure(stub: Stub) -> None:
    """Inside a PID namespace the list is empty while the card is in use (f16)."""
    stub.put(line(A, used=71000))
    read = stub.read()[A]
    assert (read["processes"], read["used_bytes"], read["state"]) == ([], 71000 * MIB, "ok")


def test_throttling_is_named(stub: Stub) -> None:
    """Clock event reasons that slow work down are told by name."""
    stub.put(line(A, throttle=0x20 | 0x8 | 0x1))
    assert stub.read()[A]["throttled"] == ["hw_slowdown", "sw_thermal"]
