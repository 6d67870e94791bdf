"""docs/agent.md against the code: every metric and every alarm kind stands there."""

from __future__ import annotations

from pathlib import Path

from extproc.agent import alarms, names
from extproc.agent.engines import ENGINES
from extproc.config.models import Target

PAGE = (Path(__file__).parents[3] / "docs" / "agent.md").read_text()


def test_the_metrics_table_is_the_code() -> None:
    """Name, labels and meaning of each metric, and none besides."""
    expected = [f"| `{metric.exposed}` | {', '.join(metric.labels) or '-'} | {metric.help} |" for metric in names.ALL]
    assert [line for line in PAGE.splitlines() if line.startswith("| `kvgate_agent_")] == expected


def test_every_alarm_is_explained() -> None:
    """Each kind of alarm is named on the page."""
    assert [kind for kind in alarms.KINDS if f"`{kind}`" not in PAGE] == []


def test_every_configurable_engine_has_a_row() -> None:
    """The configuration's engine names and the engine table are the same set."""
    assert set(ENGINES) == set(Target.model_fields["engine"].annotation.__args__)  # type: ignore[union-attr]
