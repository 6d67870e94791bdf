"""What Envoy and kvgate tell each other is documented by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.gateway import names, replies, usage

DOCS = Path(__file__).parents[3] / "docs"
SPOKEN = [
    *(
        value
        for key, value in vars(names).items()
        if key.startswith(("HEADER_", "LOG_", "ATTRIBUTE")) and isinstance(value, str)
    ),
    names.DECISION_NAMESPACE,
    names.PLAN_NAMESPACE,
    names.USAGE_NAMESPACE,
    *sorted({key for _, key in (*usage.PATHS, *usage.EVENT_PATHS)}),
    *names.RESPONSE_HEADERS.values(),
]
REPLIES = [replies.NO_SUCH_MODEL, replies.UNDECIDED, replies.OTHER, *replies.REPLIES]


@pytest.mark.parametrize("name", [name for name in SPOKEN if name != names.HEADER_PREFIX])
def test_protocol_names_are_documented(name: str) -> None:
    """Every header, metadata key, attribute and log name stands in docs/protocol.md."""
    text = (DOCS / "protocol.md").read_text(encoding="utf-8")
    assert f"`{name}`" in text or f'"{name}"' in text


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: f"{r.status}-{r.reason}")
def test_replies_are_documented(reply: replies.Reply) -> None:
    """Every answer of Envoy's own has its status, decision and reason in one row of docs/envoy.md."""
    rows = [line for line in (DOCS / "envoy.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert any(str(reply.status) in row and reply.decision in row and f"`{reply.reason}`" in row for row in rows)


def test_own_clusters_are_documented() -> None:
    """The names that Envoy's configuration keeps for itself are listed."""
    text = (DOCS / "envoy.md").read_text(encoding="utf-8")
    own = [names.CLUSTER_EXT_PROC, names.CLUSTER_ACCESS_LOG, names.CLUSTER_OPEN, names.CLUSTER_OTLP]
    assert [name for name in own if f"`{name}`" not in text] == []
