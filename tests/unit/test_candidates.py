"""Where a request may go, in which order the ledger is asked, and how long it is expected to run there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from extproc.candidates import (
    FIRST_PER_TARGET,
    MAX_PER_TARGET,
    USUAL_DECODE_TOKENS_PER_S,
    Ask,
    Forecast,
    Place,
    Planner,
)
from extproc.config.models import Config, Lane
from extproc.ledger.base import ReplicaState, ReplicaView
from extproc.ledger.line import NOTHING, Due, Promised
from extproc.memory import KvModel
from extproc.types import Reason, TokenCount

LANE = Lane()


def planner(replicas: int) -> Planner:
    """``big`` with so many replicas of 1,600 tokens each, then ``small`` with one, then a remote."""
    made = [{"name": f"big-{n}", "url": "http://127.0.0.1:1", "kvTokens": 1600} for n in range(replicas)]
    config = Config.model_validate({
        "targets": {
            "big": {"engine": "vllm", "replicas": made},
            "small": {"engine": "vllm", "replicas": [{"name": "small-0", "url": "http://127.0.0.1:2", "kvTokens": 1600}]},
            "far": {"engine": "openai", "url": "https://127.0.0.1:3"},
        },
        "noAgent": "ledgerOnly",
    })  # fmt: skip
    return Planner(config, lambda target, block: KvModel.tokens_only(block or 16, target, "vllm", 1))


def rounds(
    replicas: int,
    *,
    forecast: Forecast | None = None,
    exact: bool = True,
    view: Callable[[str], ReplicaView | None] = lambda _: None,
    **more: object,
) -> list[list[Place]]:
    """The lists for a request of 160 tokens in and up to 80 out."""
    count = TokenCount((160,), "exact")
    ask = Ask(count, 1, 80, 0, exact, True)
    chain = ["big", "small", "far"]
    return list(
        planner(replicas).rounds(
            chain, LANE, dict.fromkeys(chain, ask), lambda _: forecast or Forecast(), view,
            lambda name: (0, 0, float(name.rpartition("-")[2])), **more,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def test_few_replicas_are_one_question() -> None:
    """Up to four replicas of a target: every place of the chain in one list."""
    (only,) = rounds(FIRST_PER_TARGET)
    assert [place.replica for place in only] == ["big-0", "big-1", "big-2", "big-3", "small-0", "far"]


def test_a_targets_other_replicas_come_before_the_next_target() -> None:
    """The best four are asked first, the others with the rest of the chain behind them, and no more than sixteen."""
    first, second = rounds(MAX_PER_TARGET + 4)
    assert [place.replica for place in first] == [f"big-{n}" for n in range(FIRST_PER_TARGET)]
    assert [place.replica for place in second[-3:]] == [f"big-{MAX_PER_TARGET - 1}", "small-0", "far"]
    assert len(first) + len(second) == MAX_PER_TARGET + 2


def seen(state: ReplicaState) -> ReplicaView:
    """What the ledger shows of a remote in this state."""
    zeros = dict.fromkeys(("reserved_blocks", "sequences", "reservations", "orphaned", "over_admissions"), 0)
    return ReplicaView(
        report=None, replica="far", target="far", state=state, age_s=1.0, foreign_blocks=None, committed_blocks=0,
        headroom_blocks=None, prefill_level_tokens=0.0, **zeros,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "refused_by"),
    [
        (None, None),
        (ReplicaState.READY, None),
        (ReplicaState.STALE, None),
        (ReplicaState.UNKNOWN, None),
        (ReplicaState.LOST, Reason.UNKNOWN_STATE),
        (ReplicaState.DRAINING, Reason.NOT_READY),
    ],
)
def test_only_what_was_seen_closes_a_remote(state: ReplicaState | None, refused_by: Reason | None) -> None:
    """Remotes need no report; one that says away or out of quota takes them out for now."""
    (only,) = rounds(1, view=lambda name: seen(state) if state is not None and name == "far" else None)
    place = only[-1]
    assert (place.replica, place.refused_by, place.candidate is None) == ("far", refused_by, refused_by is not None)


def test_found_replicas_stand_where_their_name_stands() -> None:
    """`discover`: every member is asked for, with the settings of the one in the file; none known is a refusal for now."""
    config = Config.model_validate({
        "targets": {"big": {"engine": "vllm", "replicas": [
            {"name": "pool", "url": "http://engines:1", "discover": "dns", "kvTokens": 1600},
            {"name": "own", "url": "http://127.0.0.1:1", "kvTokens": 1600},
        ]}},
        "noAgent": "ledgerOnly",
    })  # fmt: skip
    made = Planner(config, lambda target, block: KvModel.tokens_only(block or 16, target, "vllm", 1))
    ask = {"big": Ask(TokenCount((160,), "exact"), 1, 80, 0, True, True)}

    def names(*found: str) -> list[tuple[str, Reason | None]]:
        places = made.rounds(
            ["big"], LANE, ask, lambda _: Forecast(), lambda _: None, lambda name: (0, 0, float(name == "own")),
            members=lambda name: found if name == "pool" else (),
        )  # fmt: skip
        return [(place.replica, place.refused_by) for these in places for place in these]

    assert names("pool@10.0.0.1", "pool@fd00::2") == [("pool@10.0.0.1", None), ("pool@fd00::2", None), ("own", None)]
    assert names() == [("own", None)]
    alone = Config.model_validate(
        {"targets": {"big": {"engine": "vllm", "replicas": [{"name": "pool", "url": "http://e:1", "discover": "dns"}]}}}
    )
    made = Planner(alone, lambda target, block: KvModel.tokens_only(block or 16, target, "vllm", 1))
    assert names() == [("big", Reason.UNKNOWN_STATE)]


def test_what_is_promised_belongs_to_its_replica() -> None:
    """What others were told of one replica is no matter at the next."""
    told = Promised((Due(1, 7),))
    (only,) = rounds(2, promised=lambda name: told if name == "big-1" else NOTHING)
    kept = {place.replica: place.candidate.promised for place in only if place.candidate is not None}
    assert kept == {"big-0": NOTHING, "big-1": told, "small-0": NOTHING, "far": NOTHING}


@pytest.mark.parametrize(
    ("forecast", "exact", "seconds"),
    [
        (Forecast(), True, 80 / USUAL_DECODE_TOKENS_PER_S),
        (Forecast(token_s=0.05), True, 4.0),
        (Forecast(output_tokens=60, run_s=1.0, token_s=0.05), False, 1.0),
        (Forecast(output_tokens=10, run_s=1.0, token_s=0.05), False, 0.5),
        (Forecast(run_s=1.0), False, 1.0),
        (Forecast(output_tokens=60, run_s=1.0, token_s=0.05), True, 4.0),
    ],
    ids=[
        "nothing known",
        "pace known",
        "as others of its kind",
        "short of that",
        "no usage was told",
        "runs to its cap",
    ],
)
def test_expected_run(forecast: Forecast, exact: bool, seconds: float) -> None:
    """Retry times go by the runs of past answers, or where those say too much by its output at their pace."""
    place = rounds(1, forecast=forecast, exact=exact)[0][0]
    assert place.candidate is not None
    assert place.candidate.expected_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("context", "hidden", "cap", "tokens"),
    [
        (8192, 32_768, 80, 8112),
        (8192, 32_768, None, 8191),
        (65_536, 32_768, 80, 32_928),
        (100, 32_768, 80, 160),
        (None, 32_768, 80, 32_928),
        (8192, 0, 80, 160),
    ],
)
def test_unseen_text_is_charged_no_more_than_the_context_holds(
    context: int | None, hidden: int, cap: int | None, tokens: int
) -> None:
    """Earlier turns that the engine keeps take the room that context and cap leave them; what was seen is never cut."""
    config = Config.model_validate({
        "models": {"m": {"contextTokens": context} if context else {}},
        "targets": {"big": {"engine": "vllm", "model": "m", "replicas": [
            {"name": "big-0", "url": "http://127.0.0.1:1", "kvTokens": 160_000},
        ]}},
        "noAgent": "ledgerOnly",
    })  # fmt: skip
    made = Planner(config, lambda target, block: KvModel.tokens_only(block or 16, target, "vllm", 1))
    ask = Ask(TokenCount((160 + hidden,), "bound", hidden_tokens=hidden), 1, cap, 0, True, True)
    (only,) = made.rounds(["big"], LANE, {"big": ask}, lambda _: Forecast(), lambda _: None, lambda _: (0, 0, 0.0))
    place = only[0]
    if context == 100:
        assert place.refused_by is Reason.EXCEEDS_CONTEXT
    else:
        assert place.candidate is not None
        assert place.candidate.need.prefill_tokens == tokens
