"""Output limits: the engine's refusal is predicted, caps are ceilings, fatal engines reserve them in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.policy.limits import DEFAULT_OUTPUT_TOKENS, OutputLimits, OutputRequest, output_limits
from extproc.types import Reason

BASE = OutputRequest(
    input_tokens=1000,
    total_input_tokens=1000,
    sequences=1,
    client_cap=500,
    lane_cap=1200,
    context_tokens=8192,
    pool_tokens=16384,
    fatal=False,
    clamp=False,
    learned=None,
    runs_to_cap=False,
)


def limits(**changes: object) -> OutputLimits | Reason:
    """The limits of the base request with changes."""
    return output_limits(replace(BASE, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, OutputLimits(500, 500, False)),
        ({"learned": 120}, OutputLimits(500, 120, False)),
        ({"learned": 9000}, OutputLimits(500, 500, False)),
        ({"learned": 120, "runs_to_cap": True}, OutputLimits(500, 500, False)),
        ({"learned": 120, "min_tokens": 300}, OutputLimits(500, 300, False)),
        ({"client_cap": 0}, OutputLimits(0, 0, False)),
        ({"client_cap": None}, OutputLimits(7192, 1200, False)),
        ({"client_cap": None, "learned": 40}, OutputLimits(7192, 40, False)),
        ({"client_cap": None, "clamp": True}, OutputLimits(1200, 1200, True)),
        ({"client_cap": None, "fatal": True, "learned": 40}, OutputLimits(1200, 1200, True)),
        ({"client_cap": 5000}, OutputLimits(5000, 1200, False)),
        ({"client_cap": 5000, "clamp": True}, OutputLimits(1200, 1200, True)),
        ({"client_cap": 5000, "fatal": True}, OutputLimits(1200, 1200, True)),
        ({"client_cap": 1200, "fatal": True}, OutputLimits(1200, 1200, False)),
        ({"client_cap": 65535, "lane_cap": None}, Reason.EXCEEDS_CONTEXT),
        ({"client_cap": 65535, "lane_cap": None, "clamp": True}, OutputLimits(7192, 7192, True)),
        ({"input_tokens": 8192, "total_input_tokens": 8192}, Reason.EXCEEDS_CONTEXT),
        ({"input_tokens": 8192, "total_input_tokens": 8192, "client_cap": 0}, OutputLimits(0, 0, False)),
        ({"context_tokens": None, "pool_tokens": 1100}, Reason.EXCEEDS_POOL),
        ({"context_tokens": None, "pool_tokens": 1100, "clamp": True}, OutputLimits(100, 100, True)),
        ({"context_tokens": None, "pool_tokens": None, "client_cap": None, "lane_cap": None},
         OutputLimits(DEFAULT_OUTPUT_TOKENS, DEFAULT_OUTPUT_TOKENS, False)),
        ({"sequences": 4, "pool_tokens": 2000, "context_tokens": None}, Reason.EXCEEDS_POOL),
        ({"sequences": 4, "pool_tokens": 2000, "context_tokens": None, "fatal": True}, OutputLimits(250, 250, True)),
        ({"generates": False}, OutputLimits(0, 0, False)),
        ({"generates": False, "input_tokens": 9000}, Reason.EXCEEDS_CONTEXT),
        ({"min_tokens": 600, "fatal": True, "lane_cap": 400}, Reason.EXCEEDS_CONTEXT),
    ],
)  # fmt: skip
def test_table(changes: dict[str, object], expected: OutputLimits | Reason) -> None:
    """Each row of the rule: cap absent, absurd, over the lane, over the context, over the pool."""
    assert limits(**changes) == expected


def test_editor_cap_of_65535_on_a_128k_model_predicts_the_engines_refusal() -> None:
    """Case c11: 62,466 in + 65,535 out > 128,000 is refused unless the lane clamps."""
    asked = {"input_tokens": 62466, "total_input_tokens": 62466, "client_cap": 65535, "lane_cap": None,
             "context_tokens": 128000, "pool_tokens": None}  # fmt: skip
    assert limits(**asked) is Reason.EXCEEDS_CONTEXT
    assert limits(**asked, clamp=True) == OutputLimits(65534, 65534, True)


counts = st.integers(0, 300_000)


@given(
    st.builds(
        OutputRequest,
        input_tokens=counts,
        total_input_tokens=counts,
        sequences=st.integers(1, 64),
        client_cap=st.none() | st.integers(0, 2**31),
        lane_cap=st.none() | st.integers(1, 100_000),
        context_tokens=st.none() | st.integers(1, 300_000),
        pool_tokens=st.none() | st.integers(1, 1_000_000),
        fatal=st.booleans(),
        clamp=st.booleans(),
        learned=st.none() | st.integers(0, 100_000),
        runs_to_cap=st.booleans(),
        min_tokens=st.integers(0, 1000),
        generates=st.booleans(),
    )
)
def test_what_is_reserved_never_exceeds_the_cap_and_the_cap_never_the_room(request: OutputRequest) -> None:
    """expected <= cap; input + cap fits the context and the pool; fatal engines reserve the whole cap."""
    found = output_limits(request)
    if isinstance(found, Reason):
        return
    assert 0 <= found.expected_tokens <= found.cap_tokens
    if request.context_tokens is not None:
        assert request.input_tokens + found.cap_tokens <= request.context_tokens
    if request.pool_tokens is not None and request.generates:
        assert request.total_input_tokens + request.sequences * found.cap_tokens <= request.pool_tokens
    if request.fatal and request.generates:
        assert found.expected_tokens == found.cap_tokens
    if found.write_cap:
        assert request.fatal or request.clamp
