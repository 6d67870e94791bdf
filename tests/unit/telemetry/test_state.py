"""STATE.json: what goes out comes back, and what is wrong is one line with path and mend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ConfigError
from extproc.ledger.base import State
from extproc.telemetry.state import load_state, snapshot_from_state, state_json
from tests.unit.telemetry.samples import snapshot

#: The example of the schema, word for word in its fields.
EXAMPLE: dict[str, Any] = {
    "replicas": [
        {
            "target": "primary-32b",
            "replica": "gpu-a-0",
            "engine": "vllm",
            "state": "ready",
            "age_s": 0.4,
            "kv_capacity_blocks": 4096,
            "block_tokens": 16,
            "kv_used_blocks": 1200,
            "running": 7,
            "waiting": 0,
            "max_sequences": 256,
            "max_model_tokens": 32768,
            "prefill_tokens_per_s": 7800,
            "reservations": [
                {
                    "rid": "r",
                    "state": "reserved",
                    "blocks": 180,
                    "input_tokens": 2000,
                    "expected_output_tokens": 700,
                    "age_s": 3.1,
                }
            ],
        }
    ],
    "devices": [{"uuid": "GPU-6f1e", "total_bytes": 85899345920, "free_bytes": 6442450944, "state": "ok"}],
    "lanes": [{"lane": "fast-edit", "in_flight": 1}],
}


def replica(**changes: object) -> dict[str, Any]:
    return {**EXAMPLE, "replicas": [{**EXAMPLE["replicas"][0], **changes}]}


def problems(data: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        snapshot_from_state(data, where="s.json")
    return caught.value.problems


def test_what_goes_out_comes_back() -> None:
    """A printed state reads back as the same snapshot and reservations, unknown replicas included."""
    taken, live = snapshot()
    assert snapshot_from_state(json.loads(json.dumps(state_json(taken, live), allow_nan=False))) == (taken, live)


def test_a_replica_whose_reservations_were_not_read_keeps_its_sums() -> None:
    """Sums stand where the list is missing, instead of an empty list that would read as no load."""
    taken, live = snapshot()
    del live["gpu-a-0"]
    back, _ = snapshot_from_state(state_json(taken, live))
    view = back.replicas["gpu-a-0"]
    assert (view.reserved_blocks, view.sequences, view.headroom_blocks) == (190, 1, 2896)


def test_an_age_just_below_zero_is_printed_as_zero() -> None:
    """A host clock a little ahead of the ledger's does not print a state that cannot be read."""
    taken, live = snapshot()
    early = {name: [replace(each, first_byte_at_s=2000.01) for each in items] for name, items in live.items()}
    assert state_json(taken, early)["replicas"][0]["reservations"][0]["first_byte_age_s"] == 0


def test_sums_follow_from_what_is_given() -> None:
    """Seven running with one reservation of ours is bypass: everything the engine uses counts as foreign."""
    back, live = snapshot_from_state(EXAMPLE)
    view = back.replicas["gpu-a-0"]
    assert (view.reserved_blocks, view.foreign_blocks, view.committed_blocks) == (180, 1200, 1380)
    assert (view.headroom_blocks, view.sequences, view.age_s) == (4096 - 1380, 1, 0.4)
    assert live["gpu-a-0"][0].reservation.need.input_blocks == 125
    assert live["gpu-a-0"][0].reservation.reserved_at_s == back.now_s - 3.1


def test_all_traffic_ours_makes_only_the_excess_foreign() -> None:
    """Where the engine runs no more than we reserved, only used blocks beyond ours are foreign."""
    view = snapshot_from_state(replica(running=1))[0].replicas["gpu-a-0"]
    assert (view.foreign_blocks, view.committed_blocks) == (1020, 1200)


def test_given_foreign_blocks_are_believed() -> None:
    """A figure in the file wins over the computed one; null says unknown."""
    assert snapshot_from_state(replica(kv_foreign_blocks=7))[0].replicas["gpu-a-0"].committed_blocks == 187
    unknown = snapshot_from_state(replica(kv_foreign_blocks=None))[0].replicas["gpu-a-0"]
    assert (unknown.committed_blocks, unknown.headroom_blocks) == (None, None)


def test_an_engine_that_shows_no_use_is_unknown_once_somebody_bypasses() -> None:
    """llama.cpp shows no used blocks: without bypass nothing is foreign, with bypass nobody knows."""
    quiet = snapshot_from_state(replica(kv_used_blocks=None, running=1))[0].replicas["gpu-a-0"]
    assert (quiet.foreign_blocks, quiet.headroom_blocks) == (0, 4096 - 180)
    assert snapshot_from_state(replica(kv_used_blocks=None, running=2))[0].replicas["gpu-a-0"].headroom_blocks is None


def test_a_report_without_age_is_unknown_never_fresh() -> None:
    """`age_s: null` means nobody reported, so a ready state is not believed."""
    view = snapshot_from_state(replica(age_s=None))[0].replicas["gpu-a-0"]
    assert (view.state, view.report, view.headroom_blocks) == ("unknown", None, None)


def test_an_orphan_has_an_expired_lease() -> None:
    """Hand-written orphans count, and their lease is over."""
    item = {"rid": "o", "state": "orphaned", "blocks": 5}
    back, live = snapshot_from_state(replica(reservations=[item]))
    assert back.replicas["gpu-a-0"].orphaned == 1
    assert (live["gpu-a-0"][0].state, live["gpu-a-0"][0].lease_at_s <= back.now_s) == (State.ORPHANED, True)


def test_fields_of_a_later_release_are_passed_over() -> None:
    """An unknown field is no error, because later releases add some."""
    assert snapshot_from_state(replica(numa_zone="a", something_new=1))[0].replicas


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "s.json: (top): must be an object; write {…}"),
        ({}, "s.json: replicas: missing; add it, [] for an empty fleet"),
        ({"replicas": 3}, "s.json: replicas: has a value that cannot be used here; write a list of objects"),
        ({"replicas": ["x"]}, "s.json: replicas[0]: must be an object; write {…}"),
        (replica(engine=""), "s.json: replicas[0].engine: missing; add it"),
        (replica(target=None), "s.json: replicas[0].target: missing; add it"),
        (
            replica(state="okay"),
            "s.json: replicas[0].state: must be one of ready, draining, stale, wedged, lost, unknown; choose one",
        ),
        (
            replica(block_tokens=0),
            "s.json: replicas[0].block_tokens: must be at least 1; write the engine's block size in tokens",
        ),
        (replica(kv_used_block=3), "s.json: replicas[0].kv_used_block: unknown key; did you mean 'kv_used_blocks'?"),
    ],
)
def test_a_mistake_is_one_line(data: object, line: str) -> None:
    """Each mistake names file, path and mend."""
    assert line in problems(data)


@pytest.mark.parametrize("value", [-1, 1.5, True, "12", float("nan"), float("inf"), 2**70, [1]])
def test_a_count_is_a_whole_number(value: object) -> None:
    """Negative, fractional, boolean, textual, infinite and absurd counts are refused."""
    (line,) = problems(replica(kv_used_blocks=value))
    assert line.startswith("s.json: replicas[0].kv_used_blocks: has a value that cannot be used here; write a whole")


def test_names_stand_once() -> None:
    """A replica or a reservation that stands twice would count twice."""
    twice = {**EXAMPLE, "replicas": [EXAMPLE["replicas"][0]] * 2}
    assert problems(twice) == [
        "s.json: replicas[1].reservations[0].rid: 'r' stands twice; give every reservation its own",
        "s.json: replicas[1].replica: 'gpu-a-0' stands twice; give every replica its own name",
    ]


def test_all_mistakes_are_reported_at_once() -> None:
    """A reader of a long file need not fix and retry line by line."""
    assert len(problems(replica(engine=None, state="okay", running=-1))) == 3


def test_a_whole_status_page_is_accepted(tmp_path: Path) -> None:
    """`kvgate status --json > FILE` is a state file as it stands."""
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"ledger": {}, "state": EXAMPLE, "recent": []}))
    assert "gpu-a-0" in load_state(path)[0].replicas


@pytest.mark.parametrize(
    ("content", "ending"),
    [
        (b'{"replicas": [', "line 1, column 15: not JSON (Expecting value); correct it there"),
        (b"\xff\xfe", "is not UTF-8 at byte 0; save it as UTF-8"),
        (b"[" * 100_000, "nested too deeply; flatten it"),
        (b'{"replicas": [], "now_s": NaN}', "now_s: has a value that cannot be used here; write a finite number"),
        (None, "cannot be read (No such file or directory); name a readable file"),
    ],
)
def test_an_unreadable_file_is_one_line(tmp_path: Path, content: bytes | None, ending: str) -> None:
    """Broken files end in one line that names the file, never a traceback."""
    path = tmp_path / "state.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_state(path)
    (line,) = caught.value.problems
    assert line.startswith(f"{path}: {ending}")
