"""Small forms of the load scenarios (``python -m tests.load``): the same judges, minutes shorter."""

from __future__ import annotations

import pytest

from tests.load import llamacpp, race, retry, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_racing_requests_never_exceed_what_an_engine_holds() -> None:
    """320 requests race to two deciders: 0 over capacity by the engines' count, and none refused while an engine idles."""
    report = race.run(race.TEST, "")
    print(report.text())
    assert report.failed == []


def test_real_llamacpp_never_runs_out_of_cells() -> None:
    """80 requests race for one unified cache: its own log shows no overflow, every answer is whole or a proper 429."""
    report = llamacpp.run(llamacpp.TEST, "")
    print(report.text())
    assert report.failed == []


def test_who_comes_back_when_told_is_admitted() -> None:
    """Steady overload with two deciders: every refusal says when, whoever returns then is let in, every answer is whole."""
    report = retry.run(retry.TEST, "")
    print(report.text())
    assert report.failed == []


def test_a_trace_leaves_nothing_behind() -> None:
    """Seconds of recorded traffic: every answer whole or a proper 429, sums equal their parts, the ledger ends at 0."""
    report = soak.run(soak.TEST, "")
    print(report.text())
    assert report.failed == []
