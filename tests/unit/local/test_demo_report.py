"""The demo's figures from made-up outcomes."""

from __future__ import annotations

import json

import pytest

from extproc.local.client import Reply
from extproc.local.demo_load import Job, Outcome, classify, jobs
from extproc.local.demo_report import checks, idle_refusals, packing, run_figures, table


def job(number: int, tokens: int, alias: str = "a") -> Job:
    """A job that reserves so many cells, a tenth of them output."""
    return Job(number, 0.0, alias, b"", tokens - tokens // 10, tokens // 10)


def outcome(
    number: int, sent_s: float, took_s: float, tokens: int = 100, fate: str = "served", target: str = "primary"
) -> Outcome:
    """One outcome with what the figures look at."""
    reply = Reply(200, {}, b"", took_s / 2, took_s)
    return Outcome(job(number, tokens), sent_s, reply, fate, target if fate == "served" else None, None, tokens // 10)


def test_the_packer_fills_the_pool_first_fit() -> None:
    """Of five requests of 100 cells at once 250 cells hold two; the sixth fits when the first has ended."""
    outcomes = [outcome(n, 0.0, 1.0, target="primary" if n == 0 else "small") for n in range(5)] + [
        outcome(5, 2.0, 1.0)
    ]

    packed = packing(outcomes, primary="primary", cells=250, slots=16)

    assert (packed.ours, packed.packer) == (2, 3)
    assert packed.share == pytest.approx(2 / 3)


def test_the_packer_passes_over_what_does_not_fit_and_counts_slots() -> None:
    """First fit goes on with smaller requests; slots bind as cells do."""
    outcomes = [
        outcome(0, 0.0, 1.0, 200),
        outcome(1, 0.1, 1.0, 200),
        outcome(2, 0.2, 1.0, 40),
        outcome(3, 0.3, 1.0, 10),
    ]

    assert packing(outcomes, primary="primary", cells=250, slots=16).packer == 3
    assert packing(outcomes, primary="primary", cells=250, slots=2).packer == 2


def test_a_refusal_counts_as_idle_only_where_the_request_could_go() -> None:
    """A busy chain is no idle fallback, and a target outside the chain does not count."""
    busy = [outcome(0, 0.0, 2.0), outcome(1, 0.0, 2.0, target="small")]
    refused = [outcome(2, 1.0, 0.0, fate="refused"), outcome(3, 3.0, 0.0, fate="refused")]

    assert idle_refusals([*busy, *refused], {"a": ["primary", "small"]}) == 1
    assert idle_refusals([*busy, *refused], {"a": ["primary", "small", "remote"]}) == 2


@pytest.mark.parametrize(
    ("reply", "fate"),
    [
        (Reply(200, {}, json.dumps({"usage": {"completion_tokens": 3}}).encode(), 0.1, 0.2), "served"),
        (
            Reply(200, {"content-type": "text/event-stream"}, b'data: {"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n', 0.1, 0.2),
            "served",
        ),
        (Reply(200, {"content-type": "text/event-stream"}, b'data: {"choices":[]}\n\n', 0.1, 0.2), "broken"),
        (Reply(500, {}, b'{"error":{"message":"Context size has been exceeded."}}', 0.1, 0.2), "lost"),
        (
            Reply(200, {"content-type": "text/event-stream"}, b'data: {"error":{"message":"Context size has been exceeded."}}\n\n', 0.1, 0.2),
            "lost",
        ),
        (Reply(429, {"x-kvgate-decision": "reject", "x-kvgate-reason": "lane_full"}, b'{"error":{}}', 0.1, 0.2), "refused"),
        (Reply(503, {}, b"upstream connect error", 0.1, 0.2), "broken"),
        (Reply(0, {}, b"", None, 60.0, "no complete answer in 60 s"), "broken"),
    ],
)  # fmt: skip
def test_an_answer_has_one_fate(reply: Reply, fate: str) -> None:
    """Served, lost to a full cache, refused with a reason, or broken."""
    assert classify(job(0, 100), 0.0, reply).fate == fate


def test_the_load_is_the_same_for_the_same_seed() -> None:
    """Bodies and times repeat; bursts start at their pauses."""
    first, again = (jobs(40, 10, 5.0, len, seed=3) for _ in range(2))

    assert first == again
    assert jobs(40, 10, 5.0, len, seed=4) != first
    assert [int(one.at_s // 5.0) for one in first] == [number // 10 for number in range(40)]


def test_checks_fail_one_by_one() -> None:
    """Each claim is judged by its own figure."""
    without = run_figures([outcome(0, 0, 1, fate="lost")])
    good = run_figures([outcome(0, 0, 1)])
    packed = packing([outcome(0, 0, 1)], primary="primary", cells=100, slots=1)
    ledger = {"reservations": 0, "over_admissions": 0}

    assert all(check.holds for check in checks(without, good, packed, 0, ledger, True, 0))
    spoiled = [
        checks(good, good, packed, 0, ledger, True, 0),
        checks(without, without, packed, 0, ledger, True, 0),
        checks(without, run_figures([outcome(0, 0, 1, fate="broken")]), packed, 0, ledger, True, 0),
        checks(
            without,
            good,
            packing([outcome(0, 0, 1, target="small")], primary="primary", cells=100, slots=1),
            0,
            ledger,
            True,
            0,
        ),
        checks(without, good, packed, 1, ledger, True, 0),
        checks(without, good, packed, 0, {"reservations": 1, "over_admissions": 0}, True, 0),
        checks(without, good, packed, 0, {"reservations": 0, "over_admissions": 2}, True, 0),
        checks(without, good, packed, 0, ledger, False, 0),
        checks(without, good, packed, 0, ledger, True, 1),
    ]
    failing = [[check.name for check in found if not check.holds] for found in spoiled]
    assert [len(names) for names in failing] == [1] * 9
    assert len({names[0] for names in failing}) == 9


def test_the_table_shows_both_runs_side_by_side() -> None:
    """A line for each figure, one column a run."""
    without = run_figures([outcome(0, 0, 1, fate="lost")], default_target="primary")
    with_ = run_figures([outcome(0, 0.0, 1.0), outcome(1, 0.0, 3.0, target="small")])
    lines = {line.split("  ")[0]: line.split()[-2:] for line in table(without, with_)[1:]}

    assert lines["lost to a full cache"] == ["1", "0"]
    assert lines["served by small"] == ["0", "1"]
