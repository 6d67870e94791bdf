"""Commands that look into the ledger or decide by a state: one line where they cannot, and nothing made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.cli import main

CONFIG = """
targets:
  t: {engine: vllm, prefillTokensPerS: {}, replicas: [{name: r, url: "http://127.0.0.1:1"}]}
  far: {engine: openai, url: "http://127.0.0.1:1"}
lanes: {a: {concurrency: 2}, small: {maxInputTokens: 100, fallback: t}, wide: {maxInputTokens: 100, fallback: far}}
aliases: {x: {lane: a, targets: [t]}, s: {lane: small, targets: [t]}, w: {lane: wide, targets: [t]}}
"""
#: Port 1 is nobody's.
AWAY = CONFIG + 'ledger: {url: "redis://127.0.0.1:1"}\n'
BODY = {"model": "x", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
REPLICA = {"target": "t", "replica": "r", "engine": "vllm", "kv_capacity_blocks": 1000, "kv_used_blocks": 0}
COMMANDS = [
    ("release", "rid"),
    ("drain", "r"),
    ("ledger", "audit"),
    ("explain", "body.json", "--path", "/v1/chat/completions"),
    ("plan",),
    ("status",),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a body."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "body.json").write_text(json.dumps(BODY))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_ledger_that_is_away_is_one_line(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    """With file, path and mend; nothing is done later by surprise."""
    Path("k.yaml").write_text(AWAY)
    status = main([*command, "-c", "k.yaml"])
    out, err = capsys.readouterr()

    assert (status, out) == (1, "")
    assert err.startswith("k.yaml: ledger.url: ledger away: ")
    assert err.endswith("; start the ledger or correct its address\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["memory", "embedded"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_private_ledger_is_not_answered_from(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], url: str
) -> None:
    """An empty ledger of our own would tell of an idle fleet."""
    Path("k.yaml").write_text(CONFIG + f"ledger: {{url: {url}}}\n")
    status = main([*command, "-c", "k.yaml"])
    out, err = capsys.readouterr()

    assert (status, out) == (1, "")
    assert err.startswith(f"k.yaml: ledger.url: {url!r} cannot be read from here: ")
    assert err.count("\n") == 1


def test_drain_without_local_replicas_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to choose from."""
    Path("k.yaml").write_text("lanes: {a: {}}")

    assert main(["drain", "r", "-c", "k.yaml"]) == 1
    assert capsys.readouterr().err == (
        "k.yaml: no replica is named 'r'; the file has no local replica at all; add one\n"
    )


# -- explain


def explain(capsys: pytest.CaptureFixture[str], state: dict[str, Any], body: object = BODY) -> dict[str, Any]:
    """The decision for a body on a state."""
    Path("k.yaml").write_text(CONFIG)
    Path("state.json").write_text(json.dumps(state))
    Path("body.json").write_text(body if isinstance(body, str) else json.dumps(body))
    arguments = ["explain", "body.json", "--path", "/v1/chat/completions", "-c", "k.yaml", "--state", "state.json"]
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def running(number: int, lane: str = "a") -> dict[str, Any]:
    """A reservation of one block."""
    return {"rid": f"r{number}", "blocks": 1, "lane": lane}


@pytest.mark.parametrize(
    ("in_flight", "held", "outcome"),
    [
        (0, 0, "admit"),
        (1, 0, "admit"),
        (2, 0, "reject:lane_full"),
        (2, 1, "reject:lane_full"),
        (1, 1, "admit"),
        (0, 2, "reject:lane_full"),
        (None, 2, "reject:lane_full"),
    ],
)
def test_requests_in_flight_count_whether_or_not_their_reservations_are_told(
    capsys: pytest.CaptureFixture[str], in_flight: int | None, held: int, outcome: str
) -> None:
    """The lane's figure and the reservations that name the lane: the larger one, and no request twice."""
    lanes = [] if in_flight is None else [{"lane": "a", "in_flight": in_flight}]
    state = {"replicas": [REPLICA | {"reservations": [running(n) for n in range(held)]}], "lanes": lanes}

    assert explain(capsys, state)["outcome"] == outcome


def test_sums_count_without_their_reservations(capsys: pytest.CaptureFixture[str]) -> None:
    """Reserved blocks are not free because nobody listed who holds them."""
    found = explain(capsys, {"replicas": [REPLICA | {"kv_reserved_blocks": 970, "sequences": 3}]})

    assert found["outcome"] == "reject:insufficient_headroom"
    assert found["candidates"][0]["free_before"]["kv_blocks"] == 10


def test_foreign_blocks_count_as_told(capsys: pytest.CaptureFixture[str]) -> None:
    """What the ledger once found foreign may no longer follow from the report alone."""
    found = explain(capsys, {"replicas": [REPLICA | {"kv_foreign_blocks": 500}]})

    assert found["candidates"][0]["free_before"]["kv_blocks"] == 480


def test_the_prefill_bucket_counts_as_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A full one refuses, unless the replica holds nothing."""
    held = {"reservations": [running(0)]}
    found = explain(capsys, {"replicas": [REPLICA | held | {"prefill_level_tokens": 1_000_000}]})

    assert found["outcome"] == "reject:prefill_busy"


def test_a_fallback_that_is_the_only_target_has_the_lanes_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """No other target stands before it, so it is the one the budget is for."""
    long = BODY | {"messages": [{"role": "user", "content": "word " * 200}]}
    state = {"replicas": [REPLICA]}

    assert explain(capsys, state, long | {"model": "s"})["outcome"] == "reject:prompt_budget_exceeded"
    assert explain(capsys, state, long | {"model": "w"})["outcome"] == "fallback:far"
    assert explain(capsys, state, long)["outcome"] == "admit"


def test_a_bad_body_is_answered_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON and as text."""
    found = explain(capsys, {"replicas": [REPLICA]}, BODY | {"messages": 5})
    assert (found["code"], found["param"]) == ("invalid_type", "messages")
    assert found["message"]

    main(["explain", "body.json", "--path", "/v1/chat/completions", "-c", "k.yaml", "--state", "state.json"])
    assert "answer invalid_type: " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "count"])
def test_a_header_without_a_name_is_wrong_usage(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Status 2 in both."""
    Path("k.yaml").write_text(CONFIG)

    assert main([command, "body.json", "--path", "/", "--header", "bad", "-c", "k.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"kvgate {command}: --header 'bad'")


@pytest.mark.parametrize(
    "command", [["up", "-c"], ["check"], ["envoy"], ["serve", "-c"], ["agent", "-c"]], ids=" ".join
)
def test_a_missing_file_is_status_1(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """In every command, with its name."""
    assert main([*command, "nowhere.yaml"]) == 1
    assert capsys.readouterr().err.startswith("nowhere.yaml: cannot be read")
