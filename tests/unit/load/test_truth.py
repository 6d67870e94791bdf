"""The judges of the load scenarios: what counts as over-admission, what the packer serves, when an engine was idle."""

from __future__ import annotations

from pathlib import Path

from tests.load import truth
from tests.load.clients import Attempt
from tests.load.evidence import Report
from tests.load.told import Told, judge, told
from tests.load.truth import Served
from tests.load.work import Job, racing, trace


def ran(name: str, start_s: float, end_s: float, blocks: int, engine: str = "a") -> Served:
    """One line of an engine's log."""
    return Served(name, engine, start_s, end_s, 16 * blocks - 16, 16, blocks, 0, start_s, "complete")


def asked(name: str, sent_s: float, *, refused: bool = False) -> Attempt:
    """One attempt, answered at once."""
    decision, status = ("reject", 429) if refused else ("admit", 200)
    return Attempt(name, 0, sent_s, sent_s + 0.01, status, decision, "", None, None, not refused)


def job(name: str, tokens: int, output: int = 16) -> Job:
    """A job of ``tokens`` in and ``output`` out."""
    return Job(name, 0.0, tokens, output, output)


def test_over_admission_is_what_those_inside_will_need() -> None:
    """60 + 50 blocks at once exceed 100 by 10 and the second request did it; one after the other they do not."""
    together = truth.load_of([ran("1", 0, 10, 60), ran("2", 5, 15, 50)], 100)
    assert (together.peak_blocks, together.over_blocks, together.over) == (110, 10, ("2",))
    apart = truth.load_of([ran("1", 0, 5, 60), ran("2", 5, 15, 50)], 100)
    assert (apart.peak_blocks, apart.over_blocks, apart.over) == (60, 0, ())


def test_the_packer_takes_in_order_what_fits_and_frees_at_the_very_end() -> None:
    """Of 6 + 6 + 4 blocks on ten the second does not fit; a fourth fits the moment the first has ended."""
    jobs = {name: job(name, tokens) for name, tokens in {"1": 80, "2": 80, "3": 48, "4": 80}.items()}
    assert [jobs[name].reserved_blocks for name in "1234"] == [6, 6, 4, 6]
    arrivals = [asked("1", 0.0), asked("2", 1.0), asked("3", 2.0), asked("4", 5.0)]
    log = [ran("1", 0, 5, 6), ran("3", 2, 9, 4)]
    assert truth.pack(arrivals, jobs, log, [10]).ids == {"1", "3", "4"}
    assert truth.pack(arrivals, jobs, log, [10, 10]).ids == {"1", "2", "3", "4"}


def test_refused_while_an_engine_was_idle() -> None:
    """An engine counts as idle from a while after its last end until its next arrival."""
    log = [ran("1", 0, 10, 5, "a"), ran("2", 0, 30, 5, "b"), ran("3", 20, 30, 5, "a")]
    refused = [
        asked(name, at_s, refused=True) for name, at_s in {"busy": 5, "lag": 10.1, "idle": 15, "again": 25}.items()
    ]
    found = truth.refused_while_idle(refused, log, ["a", "b"], lambda _: True, 0.25)
    assert [(attempt.id, engines) for attempt, engines in found] == [("idle", ["a"])]
    assert truth.refused_while_idle(refused, log, ["a", "b"], lambda _: False, 0.25) == []


def test_a_refusal_is_excused_only_by_what_nobody_could_have_known() -> None:
    """An unheard end or a request on its way takes the room it takes, and no more; a heard end takes none."""
    refused = Told("new", None, 10.0, 10.1, None, {"a": 0}, {"a": "insufficient_headroom"})
    blocks = {"old": 60, "coming": 30, "new": 50}
    ended = {"old": 9.0, "coming": 12.0}

    def judged(heard_s: float | None, coming_began_s: float) -> tuple[int, int, bool]:
        admitted = [
            Told("old", "a", 5.0, 5.1, heard_s, {}, {}), Told("coming", "a", coming_began_s, 10.05, 12.1, {}, {}),
            Told("coming", "b", 9.0, 9.1, None, {}, {}),
        ]  # fmt: skip
        verdict = judge(refused, "a", 50, 100, admitted, blocks, ended)
        return verdict.unheard_blocks, verdict.coming_blocks, verdict.excused

    assert judged(9.01, 10.02) == (0, 30, False)
    assert judged(10.01, 10.02) == (60, 30, True)
    assert judged(None, 10.2) == (60, 0, True)
    assert judged(9.01, 10.2) == (0, 0, False)


def test_what_kvgate_told_is_joined_by_rid() -> None:
    """A decision's figures and the time at which its end was heard."""
    candidates = [{"replica": "a", "free_before": {"kv_blocks": 7}, "refused_by": None}]
    decision = {"at": "2026-11-29T18:00:10.500Z", "rid": "r", "request_id": "x", "replica": "a", "decision_ms": 500.0,
                "candidates": candidates}  # fmt: skip
    found = told([("end", {"rid": "r", "at": "2026-11-29T18:00:12.000Z"}), ("decision", decision)])["x"]
    assert (found.over_s - found.began_s, found.heard_s) == (0.5, found.over_s + 1.5)
    assert (found.replica, found.free_blocks, found.refused_by) == ("a", {"a": 7}, {"a": None})


def test_held_share_counts_what_lies_within() -> None:
    """Half of the pool for half of the time is a quarter."""
    assert truth.held_share([ran("1", 0, 15, 50)], 100, 10, 20) == 0.25


def test_work_is_the_same_every_time() -> None:
    """Jobs come from the seed alone, and the trace plays its arrivals in order at the given speed."""
    assert racing(80, 2, 2, 3.0, seed=1) == racing(80, 2, 2, 3.0, seed=1)
    jobs = trace(20.0, 3.0)
    assert [j.at_s for j in jobs] == sorted(j.at_s for j in jobs)
    assert (jobs[0].input, jobs[0].output, jobs[1].at_s) == (374, 44, 4.315 / 3)


def test_publishing_one_scenario_leaves_the_others(tmp_path: Path) -> None:
    """A section is replaced in place; a missed aim is shown as such."""
    path = tmp_path / "evidence.md"
    for name, value in (("one", 1), ("two", 2), ("one", 3)):
        report = Report(name, name, "about", "command")
        report.figure("value", value, "3", holds=value == 3)
        report.publish(path)
    text = path.read_text()
    assert (text.count("<!-- one -->"), text.count("| value | 3 | 3 |"), text.count("| value | 2 | 3 |")) == (1, 1, 1)
    assert text.index("<!-- one -->") < text.index("<!-- two -->")
    assert report.failed == []
