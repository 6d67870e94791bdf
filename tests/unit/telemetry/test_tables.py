"""What `kvgate status` prints."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from extproc.telemetry.decisionlog import end_record, recent_row
from extproc.telemetry.record import decision_record
from extproc.telemetry.state import state_json
from extproc.telemetry.tables import recent_text, size, status_text, table
from extproc.types import Decision
from tests.unit.telemetry.samples import FALLBACK, REJECT, TO_REMOTE, snapshot


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (72876032, "69.5 MiB"),
        (-41418752, "-39.5 MiB"),
        (6442450944, "6.0 GiB"),
    ],
)
def test_sizes_use_the_unit_that_fits(size_bytes: int | None, text: str) -> None:
    """Bytes are shown in KiB, MiB or GiB, negative ones too."""
    assert size(size_bytes) == text


def row(decision: Decision, end: dict[str, object] | None = None) -> dict[str, object]:
    record = decision_record(decision, at_s=1764421200.1234, decision_ms=1.25, count_ms=0.5, request_id="x-7")
    return recent_row(record, end)


def test_recent_shows_the_three_figures_and_the_end() -> None:
    """A decision's line has lane, request id, prompt, projection, room before and after, outcome, and how it ended."""
    end = end_record(
        "rid-1", ended="complete", free_at_end_bytes=2**30, actual_input_tokens=4125, actual_output_tokens=298
    )
    head, first = recent_text([row(FALLBACK, end)]).splitlines()
    assert head.split() == [
        *("AT", "LANE", "REQ_ID", "PROMPT", "PROJECTED_KV", "FREE_BEFORE", "FREE_AFTER", "OUTCOME"),
        *("REASON", "FREE_AT_END", "ACTUAL_IN", "EXPECTED_OUT", "ACTUAL_OUT", "ENDED", "RID"),
    ]
    assert (
        first.split()
        == (
            "13:00:00.123 fast-edit x-7 4123 69.5 MiB 225.0 MiB 155.5 MiB fallback:qwen-14b-q4 insufficient_headroom "
            "1.0 GiB 4125 310 298 complete rid-1"
        ).split()
    )


def test_a_refusal_shows_the_room_that_was_missing() -> None:
    """A rejected or rerouted request shows the negative room of the place that refused it."""
    for decision in (REJECT, TO_REMOTE):
        assert "-39.5 MiB" in recent_text([row(decision)])


def test_a_shadow_decision_is_marked() -> None:
    """What would have happened is not shown as what happened."""
    assert "fallback:qwen-14b-q4 (shadow)" in recent_text([row(replace(FALLBACK, mode="shadow"))])
    assert "(shadow)" not in recent_text([row(FALLBACK)])


def test_status_page_has_replicas_lanes_devices() -> None:
    """The page shows ledger, headroom per replica in bytes where they are known, lanes and devices."""
    taken, live = snapshot()
    page = {
        "ledger": {"state": "ok", "latency_ms": 0.2, "reservations": 1, "orphaned": 1, "over_admissions": 2},
        "state": state_json(taken, live),
        "recent": [],
    }
    text = status_text(page)
    assert text.startswith("ledger ok, 0.2 ms; 1 reservations, 1 orphaned, 2 over-admissions\n")
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert (
        lines["gpu-a-0"].split()
        == ("gpu-a-0 primary-32b ready 0.5 s 1.0 GiB 300.0 MiB 47.5 MiB 252.5 MiB 724.0 MiB 71 % 1 1 1/256 0").split()
    )
    assert lines["gpu-b-0"].split() == "gpu-b-0 qwen-14b-q4 unknown, drained - - - 0 blocks - - - 0 0 0 -".split()
    by_geometry = status_text(page, {"gpu-a-0": 2.0**20, "gpu-b-0": 2.0**20})
    assert "4.0 GiB" in by_geometry
    assert "0 blocks" not in by_geometry
    assert lines["fast-edit"].split() == ["fast-edit", "1"]
    assert lines["GPU-1"].split() == "GPU-1 ok 6.0 GiB 4.0 KiB 80.0 GiB".split()


def test_an_empty_fleet_says_so() -> None:
    """A pool without replicas is not an empty page."""
    ledger = {"state": "ok", "latency_ms": 0.2, "reservations": 0, "orphaned": 0, "over_admissions": 0}
    page = {"ledger": ledger, "state": {"replicas": [], "lanes": [], "devices": []}, "recent": []}
    assert status_text(page).endswith("no replicas")


def test_cells_cannot_break_the_terminal() -> None:
    """Escape sequences and endless names in a shared log are shown harmless and short."""
    text = table(("A",), [("\x1b[2Jx",), ("y" * 500,)])
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) == 36
