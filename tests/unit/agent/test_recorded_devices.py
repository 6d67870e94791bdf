"""AMD, Intel and Apple devices against figures recorded on real machines (tests/data/devices/recorded.json names each source)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc.agent.devices.base import DeviceState, SourceDown
from extproc.agent.devices.command import MIB, QUERY, AppleMetal, IntelXpu
from extproc.agent.devices.sysfs import AmdSysfs

DATA = Path(__file__).parents[2] / "data" / "devices"
RECORDED: dict[str, Any] = json.loads((DATA / "recorded.json").read_text())


def named(kind: str, key: str = "name") -> Any:
    """One parameter per recording of a kind."""
    return pytest.mark.parametrize("row", [pytest.param(row, id=row[key]) for row in RECORDED[kind]])


def tree(root: Path, row: dict[str, Any]) -> AmdSysfs:
    """The recorded files of one card as a sysfs tree, and the host's memory beside it."""
    for name, text in row["files"].items():
        path = root / "drm/card0/device" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (root / "meminfo").write_text("".join(f"{k}: {v} kB\n" for k, v in row.get("meminfo", {}).items()))
    return AmdSysfs(root / "drm", meminfo_path=root / "meminfo")


@named("amd_sysfs")
def test_amd_cards_as_the_kernel_showed_them(tmp_path: Path, row: dict[str, Any]) -> None:
    """Totals, free memory and state follow from the kernel's own figures."""
    [reading] = tree(tmp_path, row).read()
    expected = {key: tuple(value) if isinstance(value, list) else value for key, value in row["expect"].items()}
    assert {key: getattr(reading, key) for key in expected} == expected


def test_a_small_card_with_memory_of_its_own_is_no_apu(tmp_path: Path) -> None:
    """4 GiB of VRAM beside a larger GTT: the maker of its chips tells a card from an APU's carve-out."""
    files = {"vendor": "0x1002", "mem_info_vram_total": str(4 << 30), "mem_info_vram_used": str(1 << 30)}
    gtt = {"mem_info_gtt_total": str(16 << 30), "mem_info_gtt_used": "0", "mem_info_vram_vendor": "samsung"}
    [reading] = tree(tmp_path, {"files": files | gtt}).read()
    assert (reading.state, reading.total_bytes, reading.free_bytes) == ("ok", 4 << 30, 3 << 30)


def commands(answers: dict[str, str]) -> Callable[[Sequence[str]], str]:
    """A machine on which these commands print these texts and every other fails."""

    def answer(command: Sequence[str]) -> str:
        if (words := " ".join(command)) not in answers:
            raise SourceDown(f"{command[0]}_failed: CalledProcessError")
        return answers[words]

    return answer


@named("intel_discovery")
def test_intel_cards_of_xpu_smi_1(row: dict[str, Any]) -> None:
    """Sizes are numbers in quotes; one that is N/A is unknown, and so is the card."""
    card = json.dumps(row["card"])
    stats = '{"device_level": [{"metrics_type": "XPUM_STATS_MEMORY_USED", "value": 82.44}]}'
    run = commands(
        {
            "xpu-smi discovery -j": f'{{"device_list": [{card}]}}',
            "xpu-smi discovery -d 0 -j": card,
            "xpu-smi stats -d 0 -j": stats,
        }
    )
    [reading] = IntelXpu(run).read()
    assert (reading.state, reading.total_bytes) == ("ok" if row["total_bytes"] else "unknown", row["total_bytes"])
    assert reading.uuid == row["card"].get("uuid", "intel:0")


@named("intel_query")
def test_intel_cards_of_xpu_smi_2(row: dict[str, Any]) -> None:
    """Used follows the driver while a model is loaded and gone; a row torn apart under load tells nothing."""
    asked = "xpu-smi --query-gpu=" + ",".join(QUERY) + " --format=csv"
    header = "index, uuid, name, memory.total (MiB), memory.used (MiB), utilization.gpu (%)"
    found = []
    for recorded in row["rows"]:
        index, busy, used, _free, _power, *torn = recorded.split(", ")
        text = ", ".join([index, "N/A", "Intel(R) Arc(TM) Pro B70 Graphics", str(row["total_mib"]), used, busy, *torn])
        [reading] = IntelXpu(commands({asked: f"{header}\n{text}\n"})).read()
        found.append((reading.uuid, reading.state, reading.used_bytes))
    used = [float(recorded.split(", ")[2]) for recorded in row["rows"]]
    assert found == [
        ("intel:2", DeviceState.OK, int(used[0] * MIB)),
        ("intel:2", DeviceState.OK, int(used[1] * MIB)),
        ("intel:2", DeviceState.UNKNOWN, None),
        ("intel:2", DeviceState.OK, int(used[3] * MIB)),
        ("intel:2", DeviceState.UNKNOWN, None),
    ]


def test_the_form_of_xpu_smi_is_found_out_once() -> None:
    """1.x refuses the query: asked once, then no more; a machine without the command stays a source that is down."""
    asked: list[str] = []
    old = commands({"xpu-smi discovery -j": '{"device_list": []}'})

    def counting(command: Sequence[str]) -> str:
        asked.append(command[1])
        return old(command)

    source = IntelXpu(counting)
    assert [list(source.read()), list(source.read())] == [[], []]
    assert asked == [f"--query-gpu={','.join(QUERY)}", "discovery", "discovery"]
    with pytest.raises(SourceDown):
        IntelXpu(commands({})).read()


@named("apple_working_set", "machine")
def test_the_working_set_is_never_above_metals(row: dict[str, Any]) -> None:
    """What Metal recommends on a machine bounds ours; equal where macOS grants the old share or a limit is set."""
    vm_stat = (DATA / RECORDED["apple_vm_stat"]["file"]).read_text()
    answers = {"sysctl hw.memsize machdep.cpu.brand_string": f"hw.memsize: {row['memory_bytes']}\n", "vm_stat": vm_stat}
    answers["sysctl -n iogpu.wired_limit_mb"] = f"{row.get('wired_limit_mb', 0)}\n"
    [reading] = AppleMetal(commands(answers)).read()
    total = reading.total_bytes or 0
    if row.get("newer"):
        assert 0.8 * row["working_set_bytes"] < total < row["working_set_bytes"]
    else:
        assert abs(total - row["working_set_bytes"]) <= row["rounding_bytes"]


def test_apple_memory_of_a_recorded_machine() -> None:
    """An M1 under memory pressure: free, inactive and speculative pages, within two thirds of 16 GiB."""
    row = RECORDED["apple_vm_stat"]
    sysctl = "".join(f"{key}: {value}\n" for key, value in row["sysctl"].items())
    answers = {
        "sysctl hw.memsize machdep.cpu.brand_string": sysctl,
        "vm_stat": (DATA / row["file"]).read_text(),
        "sysctl -n iogpu.wired_limit_mb": "0\n",
    }
    [reading] = AppleMetal(commands(answers)).read()
    pages = row["free_pages"] + row["inactive_pages"] + row["speculative_pages"]
    assert (reading.name, reading.state, reading.free_bytes) == ("Apple M1", "unified", pages * 16384)
    assert reading.total_bytes == 16 * 1024**3 * 2 // 3
