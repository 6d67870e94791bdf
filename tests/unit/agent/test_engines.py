"""Every engine row against bodies of real releases: one folder of ``tests/data/metrics`` per release and setting."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from extproc.agent.engines import ENGINES
from extproc.agent.engines.base import Answer, Hints

DATA = Path(__file__).parents[2] / "data" / "metrics"
CASES = sorted(path.parent.name for path in DATA.glob("*/case.json"))


def load(name: str) -> tuple[dict[str, Any], dict[str, Answer]]:
    """A case's description and its answers."""
    case = json.loads((DATA / name / "case.json").read_text())
    answers = {
        path: Answer(entry["status"], (DATA / name / entry["file"]).read_bytes())
        for path, entry in case["answers"].items()
    }
    return case, answers


def jsonable(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("name", CASES)
def test_reading_equals_the_expected_one(name: str) -> None:
    """Every figure the case states is read as stated, and unknown stays None."""
    case, answers = load(name)
    reading = ENGINES[case["engine"]].read(answers, Hints(**case["hints"]))
    read = jsonable(asdict(reading))
    expected = case["expected"]
    counters = expected.pop("counters", {})
    assert {key: read[key] for key in expected} == expected
    assert {key: read["counters"][key] for key in counters} == counters
    assert reading.bad_lines == 0


def test_enough_releases_come_from_engines_or_named_sources() -> None:
    """At least ten bodies are recorded, or built from a repository's definitions with path and commit."""
    kinds: Counter[str] = Counter()
    for name in CASES:
        source = load(name)[0]["source"]
        kinds[source["kind"]] += 1
        if source["kind"] == "built":
            assert len(source["commit"]) == 40
            assert "/" in source["repository"]
            assert source["path"]
    assert kinds["recorded"] + kinds["built"] >= 10


@pytest.mark.parametrize("name", CASES)
def test_every_endpoint_of_the_row_is_in_the_case(name: str) -> None:
    """A case answers what the row asks, so that a new endpoint does not go untested."""
    case, answers = load(name)
    assert set(answers) == {endpoint.path for endpoint in ENGINES[case["engine"]].endpoints}
