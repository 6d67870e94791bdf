"""The short form of ``make chaos``: some of its faults, its load, its account; for each deployment of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.chaos import failovers
from tests.chaos.faults import Fault
from tests.chaos.run import FEWEST_FAULTS, PHASES, Phase, play

SINGLE, CLUSTER, SENTINELS = PHASES


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "deck"),
    [
        (SINGLE, SINGLE.deck),
        (CLUSTER, (failovers.owner_killed, failovers.slot_moved)),
        (SENTINELS, (failovers.master_killed, failovers.sentinel_stopped)),
    ],
    ids=[phase.name for phase in PHASES],
)
def test_twenty_seconds_of_faults(phase: Phase, deck: Sequence[Fault]) -> None:
    """Nothing over capacity, nothing left reserved, no stream harmed, every refusal well formed."""
    lines: list[str] = []
    account = play(replace(phase, deck=deck), 20.0, 1, say=lines.append)
    print("\n".join(lines))
    print({name: value for name, value in account.figures.items() if name != "logs"})
    assert account.problems == [], account.figures.get("logs")
    assert account.faults.total() >= FEWEST_FAULTS
    assert account.figures["whole answers"] > 0
