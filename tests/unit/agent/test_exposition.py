"""The exposition parser on what engines really write, and on what they should not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.agent.exposition import parse

VLLM_BODY = (Path(__file__).parents[2] / "data" / "metrics" / "vllm-0.32-idle" / "metrics.txt").read_text()


def values(text: str, name: str) -> list[float]:
    """The values of one series."""
    return [sample.value for sample in parse(text).get(name)]


@pytest.mark.parametrize(
    ("line", "name", "labels", "value"),
    [
        ("vllm:x 1", "vllm_x", {}, 1.0),
        ("vllm:x{} 1.5e3 1700000000000", "vllm_x", {}, 1500.0),
        ('a{b="c",} 2', "a", {"b": "c"}, 2.0),
        ('a { b = "c" } 2', "a", {"b": "c"}, 2.0),
        ('a{b="}{,\\"\\\\\\n"} 2', "a", {"b": '}{,"\\\n'}, 2.0),
        ("a\t3", "a", {}, 3.0),
        ("a 4\r", "a", {}, 4.0),
        ('a{b="1"} 5 # {trace_id="x"} 0.5', "a", {"b": "1"}, 5.0),
        ('a 5 # {trace_id="x"} 0.5', "a", {}, 5.0),
        ("a -.5", "a", {}, -0.5),
        ("a +Inf", "a", {}, math.inf),
    ],
)
def test_legal_lines_are_read(line: str, name: str, labels: dict[str, str], value: float) -> None:
    """Every legal form gives its sample, with the colon of the name normalised away."""
    exposition = parse(line + "\n")
    assert [(dict(s.labels), s.value) for s in exposition.get(name)] == [(labels, value)]
    assert exposition.bad_lines == 0


@pytest.mark.parametrize(
    "line",
    ["a 1,5", "a", "a one", "a 0x10", "a 1_000", 'a{b="c} 1', "a{b=c} 1", 'a{b="c"', "1a 1", 'a{b="c"}', 'a{="c"} 1'],
)
def test_bad_lines_are_counted_and_cost_nothing_else(line: str) -> None:
    """A line that cannot be read is skipped and counted; its neighbours are read (g06)."""
    exposition = parse(f"x 1\n{line}\ny 2\n")
    assert (exposition.bad_lines, [s.value for s in exposition.get("x")], [s.value for s in exposition.get("y")]) == (
        1, [1.0], [2.0],
    )  # fmt: skip


def test_nan_is_a_sample_not_a_zero() -> None:
    """NaN is handed on as NaN; the rows make it unknown."""
    assert math.isnan(values("# TYPE x gauge\nllamacpp:x nan\n", "llamacpp_x")[0])


def test_wanted_names_give_what_the_whole_body_gives() -> None:
    """Reading only some names changes nothing about them."""
    whole = parse(VLLM_BODY)
    some = parse(VLLM_BODY, frozenset({"vllm_num_requests_running", "vllm_cache_config_info"}))
    assert set(some.samples) == {"vllm_num_requests_running", "vllm_cache_config_info"}
    assert all(some.samples[name] == whole.samples[name] for name in some.samples)


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    """The parser never raises, and every line is a sample, a comment or a bad line."""
    exposition = parse(text)
    assert exposition.bad_lines <= text.count("\n") + 1
