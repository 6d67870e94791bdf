"""Public bug report i11: the documented autoscaling thresholds are what their own arithmetic gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc.config.models import Target

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Scaling by these metrics")[2].partition("\n## ")[0]
ROWS = [tuple(map(float, row.strip("|").split("|"))) for row in re.findall(r"^\| 0\..*\|$", SECTION, re.MULTILINE)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_i11_a_threshold_leaves_room_until_the_new_replica_helps(row: tuple[float, ...]) -> None:
    """Watermark, growth, start-up and polling give the threshold, and requests are refused only above it."""
    watermark, growth, start_s, polling_s, threshold = row
    assert threshold == pytest.approx(1 - watermark - growth * (start_s + polling_s))
    assert 0 < threshold < 1 - watermark
    assert watermark == Target.model_fields["watermark"].default


def test_i11_the_table_is_read() -> None:
    """The page has its worked examples."""
    assert len(ROWS) == 3
