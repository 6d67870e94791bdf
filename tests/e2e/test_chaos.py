"""The short form of ``make chaos``: some of its faults, its load, its account."""

from __future__ import annotations

import pytest

from tests.chaos.run import play


@pytest.mark.chaos
@pytest.mark.slow
def test_twenty_seconds_of_faults() -> None:
    """Nothing over capacity, nothing left reserved, no stream harmed, every refusal well formed."""
    lines: list[str] = []
    account = play(20.0, 1, say=lines.append)
    print("\n".join(lines))
    print({name: value for name, value in account.figures.items() if name != "logs"})
    assert account.problems == [], account.figures.get("logs")
    assert sum(account.faults.values()) >= 3
    assert account.figures["whole answers"] > 0
