"""Rates from counters: busy windows, resets and the percentiles."""

from __future__ import annotations

import pytest

from extproc.agent.engines.base import Counters
from extproc.agent.rates import RateMeter


def fed(*readings: tuple[float, Counters], busy: bool = True) -> RateMeter:
    """A meter that took these readings."""
    meter = RateMeter()
    for at_s, counters in readings:
        meter.add(at_s, counters, busy=busy)
    return meter


def test_prefill_rate_is_the_90th_percentile_of_busy_windows() -> None:
    """Nine slow windows and one fast one: the rate is what the better windows reached, not the mean."""
    total, readings = 0.0, [(0.0, Counters(computed_tokens=0.0))]
    for second, tokens in enumerate([1000] * 9 + [8000, 8000], start=1):
        total += tokens
        readings.append((float(second), Counters(computed_tokens=total)))
    assert fed(*readings).rates().prefill_tokens_per_s == 8000


def test_windows_without_enough_prefill_say_nothing() -> None:
    """A decode-only phase does not pull the capacity down; too little work gives no figure."""
    readings = [(float(n), Counters(computed_tokens=float(n * 10))) for n in range(50)]
    assert fed(*readings).rates().prefill_tokens_per_s is None


def test_requests_own_prefill_times_raise_a_low_window() -> None:
    """600 tokens prefilled in 0.1 s within a one-second window: the engine did 6,000 tokens/s."""
    readings = [
        (float(n), Counters(computed_tokens=600.0 * n, prefilled_tokens=600.0 * n, prefill_s=0.1 * n)) for n in range(5)
    ]
    assert fed(*readings).rates().prefill_tokens_per_s == pytest.approx(6000)


def test_a_counter_that_fell_is_a_reset_and_never_a_rate() -> None:
    """After a restart the window is dropped; later windows count again."""
    meter = fed(*((float(n), Counters(output_tokens=100.0 * n, computed_tokens=1000.0 * n)) for n in range(5)))
    before = meter.rates()
    assert meter.add(5.0, Counters(output_tokens=0.0, computed_tokens=0.0), busy=True)
    assert meter.rates() == before
    assert not meter.add(6.0, Counters(output_tokens=100.0, computed_tokens=1000.0), busy=True)
    assert meter.rates().output_tokens_per_s == pytest.approx(100)


def test_a_missing_counter_is_no_reset() -> None:
    """One scrape without a series neither resets nor adds."""
    meter = fed((0.0, Counters(output_tokens=500.0)), (1.0, Counters()))
    assert not meter.add(2.0, Counters(output_tokens=600.0), busy=True)
    assert meter.rates().output_tokens_per_s is None


def test_idle_time_is_not_a_slow_engine() -> None:
    """Windows in which nothing was in flight and nothing moved are not counted."""
    meter = RateMeter()
    meter.add(0.0, Counters(output_tokens=0.0), busy=True)
    meter.add(1.0, Counters(output_tokens=100.0), busy=False)
    for second in range(2, 100):
        meter.add(float(second), Counters(output_tokens=100.0), busy=False)
    assert meter.rates().output_tokens_per_s == pytest.approx(100)


def test_shares_and_means_cover_the_remembered_windows() -> None:
    """Hit share, TTFT, queue time and preemptions per request are sums over sums."""
    rates = fed(
        (0.0, Counters(cached_tokens=0, looked_up_tokens=0, ttft_s=0, ttft_count=0, preemptions=100, finished=0)),
        (
            5.0,
            Counters(cached_tokens=1500, looked_up_tokens=2000, ttft_s=3, ttft_count=6, preemptions=109, finished=90),
        ),
    ).rates()
    assert (rates.prefix_hit_share, rates.ttft_s, rates.preemptions_per_finished) == (0.75, 0.5, 0.1)


def test_decode_rate_is_the_slow_end_per_sequence() -> None:
    """One slow window in ten decides, since the figure bounds how long a request can run."""
    steps, seconds, readings = 0.0, 0.0, [(0.0, Counters(decode_steps=0.0, decode_s=0.0))]
    for second in range(1, 11):
        steps += 100
        seconds += 10.0 if second == 1 else 2.0
        readings.append((float(second), Counters(decode_steps=steps, decode_s=seconds)))
    assert fed(*readings).rates().decode_tokens_per_s == 10
