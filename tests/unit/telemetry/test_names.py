"""Names: one module, one docs table each, kept equal."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.telemetry import names

DOCS = Path(__file__).parents[3] / "docs"
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)


def rows(document: str) -> list[tuple[str, list[str]]]:
    text = (DOCS / document).read_text(encoding="utf-8")
    return [(name, [cell.strip() for cell in rest.split(" | ")]) for name, rest in ROW.findall(text)]


def test_docs_list_every_metric_with_its_labels_and_meaning() -> None:
    """docs/metrics.md and the module name the same metrics, kinds, labels and meanings, in the same order."""
    expected = [
        (m.exposed, [m.kind, ", ".join(f"`{label}`" for label in m.labels) or "-", m.help]) for m in names.METRICS
    ]
    assert rows("metrics.md") == expected


def test_docs_list_every_span_event_and_attribute() -> None:
    """docs/tracing.md and the module name the same spans, events and attributes."""
    expected = [*names.SPANS_AND_EVENTS.items(), *names.ATTRIBUTES.items()]
    assert [(name, cells[0]) for name, cells in rows("tracing.md")] == expected


def test_names_keep_their_prefix() -> None:
    """Metrics start with kvgate_, spans with kvgate., attributes with kvgate. or a GenAI convention."""
    assert all(re.fullmatch(r"kvgate_[a-z_]+", metric.name) for metric in names.METRICS)
    assert all(name.startswith("kvgate.") for name in names.SPANS_AND_EVENTS)
    assert {name for name in names.ATTRIBUTES if not name.startswith(("kvgate.", "gen_ai."))} == {"error.type"}


def test_no_other_module_spells_a_name() -> None:
    """Metric names are written in names.py alone, so that a rename has one place."""
    package = Path(names.__file__).parents[1]
    spelled = {metric.name for metric in names.METRICS}
    for path in package.rglob("*.py"):
        if path.name != "names.py":
            text = path.read_text(encoding="utf-8")
            assert not [name for name in spelled if f'"{name}' in text], path
