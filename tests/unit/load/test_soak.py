"""The soak's judge of memory tells what the load needs from what requests leave behind."""

from __future__ import annotations

import math
import statistics

import pytest

from tests.load.soak import PASSES, SPEED, Sample, grown, passes
from tests.load.work import trace

PASS_S = 360.0


def _samples(leak_mib_per_min: float, *, filled_within_s: float = 350.0) -> list[Sample]:
    """A process that fills what is bounded, needs up to 5 MiB by the moment of the pass, and loses memory steadily."""
    return [
        Sample(
            at_s,
            {"serve": 60 + 8 * min(1.0, at_s / filled_within_s) + 5 * math.sin(at_s % PASS_S / 20) ** 2
             + leak_mib_per_min * at_s / 60},
        )
        for at_s in (2.0 * number for number in range(int(PASSES * PASS_S / 2) + 20))
    ]  # fmt: skip


@pytest.mark.parametrize("leak", [0.0, 0.03, 0.12])
def test_growth_is_what_requests_leave_behind(leak: float) -> None:
    """Waves of the load and what fills up in the first pass do not count, a steady loss does."""
    assert statistics.median(grown(_samples(leak), "serve", PASS_S)) == pytest.approx(leak, abs=1e-9)


def test_each_moment_is_compared() -> None:
    """Every sample of the last pass but one has its counterpart in the last."""
    assert len(grown(_samples(0.0), "serve", PASS_S)) == PASS_S / 2


def test_every_pass_is_the_same_traffic() -> None:
    """Lengths and distances in time are those of the trace in each pass; no two requests share an id."""
    jobs, once = passes(20.0), trace(20.0, SPEED)
    assert len({job.id for job in jobs}) == len(jobs) == PASSES * len(once)
    for turn in range(PASSES):
        mine = jobs[turn * len(once) : (turn + 1) * len(once)]
        assert [(job.input, job.output, job.cap) for job in mine] == [(job.input, job.output, job.cap) for job in once]
        assert [job.at_s for job in mine] == pytest.approx([job.at_s + turn * 20.0 for job in once])
