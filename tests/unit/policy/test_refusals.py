"""Refusals: the statuses clients rely on, and a Retry-After that SDKs honour."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.policy.refusals import PERMANENT, TABLE, refuse, retry_after_seconds
from extproc.types import Reason

STATUSES = {
    400: {"prompt_budget_exceeded", "exceeds_context", "exceeds_pool", "bad_request"},
    404: {"unknown_model"},
    413: {"body_too_large"},
    415: {"unsupported_content_encoding"},
    429: {"insufficient_headroom", "prefill_busy", "sequences_full", "lane_full", "lane_share", "engine_queue",
          "queue_full", "queue_timeout"},
    503: {"unknown_state", "not_ready", "ledger_down", "internal"},
}  # fmt: skip


def test_every_reason_has_the_status_of_the_contract() -> None:
    """The table of 01-product, reason by reason."""
    found = {status: {str(r) for r, row in TABLE.items() if row[0] == status} for status in STATUSES}
    assert found == STATUSES
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", sorted(PERMANENT))
def test_a_permanent_reason_names_no_time(reason: Reason) -> None:
    """What no waiting cures carries no Retry-After."""
    assert refuse(reason, earliest_s=3.0, spread=0.5).retry_after_ms is None


@given(st.sampled_from(sorted(set(Reason) - PERMANENT)), st.none() | st.floats(-10, 10_000), st.floats(0, 0.999))
def test_retry_after_is_within_what_sdks_honour(reason: Reason, earliest: float | None, spread: float) -> None:
    """0 < ms <= 60,000 and whole seconds within 1..60, rounded up."""
    refusal = refuse(reason, earliest_s=earliest, spread=spread)
    assert refusal.retry_after_ms is not None
    assert 0 < refusal.retry_after_ms <= 60_000
    seconds = retry_after_seconds(refusal.retry_after_ms)
    assert 1 <= seconds <= 60
    assert seconds * 1000 >= min(refusal.retry_after_ms, 60_000)


def test_spread_of_a_known_time() -> None:
    """t x U(1, 1.3)."""
    assert refuse(Reason.LANE_FULL, earliest_s=2.0, spread=0.0).retry_after_ms == 2000
    assert refuse(Reason.LANE_FULL, earliest_s=2.0, spread=0.5).retry_after_ms == 2300


def test_spread_of_an_unknown_time() -> None:
    """5 s x U(0.6, 1.4)."""
    assert refuse(Reason.LANE_FULL, earliest_s=None, spread=0.0).retry_after_ms == 3000
    assert refuse(Reason.LANE_FULL, earliest_s=None, spread=0.5).retry_after_ms == 5000
