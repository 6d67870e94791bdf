"""Learning: quantiles that cover, silence below twenty samples, bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learning import FULL_SAMPLES, MAX_KEYS, MIN_SAMPLES, Learning
from extproc.ledger.lessons import Lesson

KEY = ("fast", "big", "chat:s:-:long")
BYTES = ("big", True, False)


def test_too_few_samples_predict_nothing() -> None:
    """Below the threshold the cap stays the prediction."""
    learning = Learning()
    for _ in range(MIN_SAMPLES - 1):
        learning.observe_output(KEY, 100)
    assert learning.expected_output(KEY) is None
    learning.observe_output(KEY, 100)
    assert learning.expected_output(KEY) is not None


@given(st.lists(st.integers(1, 100_000), min_size=MIN_SAMPLES, max_size=FULL_SAMPLES - 1))
def test_the_quantile_covers_nine_of_ten_and_overshoots_little(values: list[int]) -> None:
    """At least 90 % of the samples lie at or below the prediction; it is at most 10 % above the true quantile."""
    learning = Learning()
    for value in values:
        learning.observe_output(KEY, value)
    expected = learning.expected_output(KEY)
    assert expected is not None
    assert sum(v <= expected for v in values) >= 0.9 * len(values) - 1e-9
    true = sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]
    assert expected <= true * 1.1 + 1


def test_yesterday_fades() -> None:
    """After a change of behaviour the prediction follows within a few hundred answers."""
    learning = Learning()
    for _ in range(1000):
        learning.observe_output(KEY, 4000)
    for _ in range(3 * FULL_SAMPLES):
        learning.observe_output(KEY, 50)
    expected = learning.expected_output(KEY)
    assert expected is not None
    assert expected < 60


def test_keys_are_bounded() -> None:
    """Clients cannot grow the memory; the least recently used key is forgotten."""
    learning = Learning()
    for number in range(MAX_KEYS + 5):
        for _ in range(MIN_SAMPLES):
            learning.observe_output(("fast", "big", str(number)), 10)
    assert learning.expected_output(("fast", "big", "0")) is None
    assert learning.expected_output(("fast", "big", str(MAX_KEYS + 4))) is not None


def test_bytes_become_tokens_once_calibrated() -> None:
    """Output tokens are guessed from body bytes after twenty answers that carried their usage."""
    learning = Learning()
    assert learning.tokens_from_bytes(BYTES, 1000) is None
    for tokens in range(10, 10 + MIN_SAMPLES):
        learning.observe_bytes(BYTES, tokens * 40, tokens)
    guess = learning.tokens_from_bytes(BYTES, 40_000)
    assert guess is not None
    assert abs(guess - 1000) <= 100


def test_pace_is_the_mean_of_whole_answers() -> None:
    """The first answer sets it, later ones move it a little, and very short ones say nothing."""
    learning = Learning()
    assert learning.token_s("big") is None
    learning.observe_pace("big", 1.0, 2)
    assert learning.token_s("big") is None
    learning.observe_pace("big", 4.0, 100)
    assert learning.token_s("big") == 0.04
    learning.observe_pace("big", 7.2, 100)
    assert learning.token_s("big") == pytest.approx(0.041)
    for _ in range(200):
        learning.observe_pace("big", 8.0, 100)
    assert learning.token_s("big") == pytest.approx(0.08, rel=0.01)


def test_the_typical_run_covers_six_of_ten_answers() -> None:
    """Known after a few answers, whether or not anybody says how many tokens they had."""
    learning = Learning()
    for seconds in (1.0, 1.0, 1.0, 9.0):
        learning.observe_run(KEY, seconds)
    assert learning.typical_run_s(KEY) is None
    learning.observe_run(KEY, 9.0)
    assert learning.typical_run_s(KEY) == pytest.approx(1.0, rel=0.1)
    learning.observe_run(KEY, 9.0)
    assert learning.typical_run_s(KEY) == pytest.approx(9.0, rel=0.1)


def test_what_another_sidecar_learned_is_used_until_there_is_enough_of_our_own() -> None:
    """The one that hears the answers' ends tells; the others predict the same lengths, bytes and pace."""
    hears, new = Learning(), Learning()
    for tokens in range(10, 10 + 2 * MIN_SAMPLES):
        hears.observe_output(KEY, tokens)
        hears.observe_run(KEY, tokens * 0.04)
        hears.observe_bytes(BYTES, tokens * 40, tokens)
        hears.observe_pace("big", tokens * 0.04, tokens)
    new.hear(hears.tell())
    assert new.expected_output(KEY) == hears.expected_output(KEY) is not None
    assert new.typical_run_s(KEY) == hears.typical_run_s(KEY) is not None
    assert new.tokens_from_bytes(BYTES, 40_000) == hears.tokens_from_bytes(BYTES, 40_000) is not None
    assert new.token_s("big") == hears.token_s("big") == pytest.approx(0.04)
    assert new.expected_output(("slow", "big", "chat")) is None
    for _ in range(MIN_SAMPLES):
        new.observe_output(KEY, 5000)
    expected = new.expected_output(KEY)
    assert expected is not None
    assert expected >= 5000


def test_only_what_is_new_is_told() -> None:
    """A lesson is told while answers come, so that one whose sidecar hears none any more can fade."""
    learning = Learning()
    assert learning.tell() == []
    for _ in range(MIN_SAMPLES):
        learning.observe_output(KEY, 100)
        learning.observe_pace("big", 4.0, 100)
    assert sorted(lesson.name.split("\x1f")[0] for lesson in learning.tell()) == ["output", "pace"]
    assert learning.tell() == []
    learning.observe_output(KEY, 100)
    assert [lesson.weight for lesson in learning.tell()] == [MIN_SAMPLES + 1]


@pytest.mark.parametrize("kind", ["output", "run", "of another release"])
@pytest.mark.parametrize("figures", [(), (100.0, 100.0), (float("nan"),), (0.0,), (-1.0,), (float("inf"),)])
def test_an_absurd_lesson_is_none(kind: str, figures: tuple[float, ...]) -> None:
    """What another release, or a broken one, tells is not used."""
    learning = Learning()
    learning.hear([Lesson("\x1f".join((kind, *KEY)), 100, figures)])
    assert learning.expected_output(KEY) is None
    assert learning.typical_run_s(KEY) is None
