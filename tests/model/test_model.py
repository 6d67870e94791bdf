"""The rules hold in random worlds: the engine's own count never exceeds its pool, and the ledger ends at zero.

``KVGATE_MODEL_RUNS`` (default 400) runs from ``KVGATE_MODEL_SEED`` (default 0) on the real scripts; a fifth of them
with the reference in lockstep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.model.adapters import Both, Reference, ScriptLedger
from tests.model.check import check
from tests.support.valkey import ValkeyServer

RUNS = int(os.environ.get("KVGATE_MODEL_RUNS", "400"))
SEED = int(os.environ.get("KVGATE_MODEL_SEED", "0"))


@pytest.fixture(scope="module")
def scripts() -> Iterator[ScriptLedger]:
    """The real scripts on a real server."""
    with ValkeyServer() as server:
        ledger = ScriptLedger(server.port, "model")
        yield ledger
        ledger.close()


@pytest.mark.timeout(3600)
def test_no_engine_ever_holds_more_than_its_pool(scripts: ScriptLedger) -> None:
    """Crashes, pauses, outages, lost data, restarts, lost and late records: 0 violations without bypass."""
    totals = check(SEED, RUNS, scripts)
    assert totals.runs == RUNS
    assert totals.admitted > 5 * RUNS
    assert totals.refused > RUNS
    assert totals.peak_share > 0.9


@pytest.mark.timeout(3600)
def test_scripts_and_reference_agree_in_every_world(scripts: ScriptLedger) -> None:
    """Every answer of every call is the same."""
    assert check(SEED + 1_000_000, RUNS // 5, Both(scripts)).runs == RUNS // 5


def test_the_reference_alone_holds_the_rules() -> None:
    """Also the ledger without Redis."""
    assert check(SEED + 2_000_000, RUNS // 5, Reference()).runs == RUNS // 5
