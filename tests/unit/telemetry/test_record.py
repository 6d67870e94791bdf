"""The decision record: the one object that explain, the log, the span and status share."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from extproc.telemetry.record import clean, decision_record, figures_of
from extproc.types import ConsideredCandidate, Decision, Figures, Need
from tests.unit.telemetry.samples import FALLBACK, NEED, PRIMARY_FULL, REJECT, SMALL_FREE, TO_REMOTE


def record(decision: Decision) -> dict[str, object]:
    return decision_record(decision, at_s=1764421200.1234, decision_ms=1.25, count_ms=0.5)


def test_has_every_field_of_the_schema() -> None:
    """A fallback's record carries the schema's fields with the schema's values."""
    expected = {
        "rid": "rid-1",
        "mode": "enforce",
        "lane": "fast-edit",
        "model": "qwen-coder",
        "input_tokens": 4123,
        "count_source": "exact",
        "expected_output_tokens": 310,
        "decision": "fallback",
        "outcome": "fallback:qwen-14b-q4",
        "target": "qwen-14b-q4",
        "replica": "gpu-b-0",
        "reason": "insufficient_headroom",
        "status": None,
        "retry_after_ms": None,
        "waited_ms": 0,
    }
    found = record(FALLBACK)
    assert expected == {key: found[key] for key in expected}
    assert found["candidates"][0] == {  # type: ignore[index]
        "target": "primary-32b",
        "replica": "gpu-a-0",
        "score": 0.81,
        "terms": {"capability": 0.34},
        "need": {"kv_blocks": 278, "kv_bytes": 72876032, "prefill_tokens": 4123, "sequences": 1, "vram_bytes": 0},
        "free_before": {"kv_blocks": 120, "kv_bytes": 31457280},
        "free_after": {"kv_blocks": -158, "kv_bytes": -41418752},
        "refused_by": "insufficient_headroom",
    }


def test_bytes_follow_from_the_need_where_only_blocks_are_known() -> None:
    """Figures without bytes get them at the need's bytes per block."""
    assert record(FALLBACK)["candidates"][1]["free_before"] == {"kv_blocks": 900, "kv_bytes": 900 * 262144}  # type: ignore[index]


def test_bytes_stay_unknown_without_geometry() -> None:
    """No bytes are invented for a model whose geometry is unknown."""
    blocks_only = replace(NEED, kv_bytes=0)
    found = record(replace(FALLBACK, candidates=(replace(SMALL_FREE, need=blocks_only),)))
    assert found["candidates"][0]["free_after"] == {"kv_blocks": 622, "kv_bytes": None}  # type: ignore[index]


def test_a_refusal_shows_status_and_wait() -> None:
    """A rejection carries the HTTP status and what the client was told to wait."""
    found = record(REJECT)
    assert (found["status"], found["retry_after_ms"], found["outcome"]) == (429, 1300, "reject:insufficient_headroom")


def test_time_is_utc_with_milliseconds() -> None:
    """The time of the decision is RFC 3339 in UTC."""
    assert record(FALLBACK)["at"] == "2025-11-29T13:00:00.123Z"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("qwen-coder", "qwen-coder"),
        ("ключ", "ключ"),
        ("a\ud800b", "a?b"),
        ("a\x1b[31mb\n", "a?[31mb?"),
        ("x" * 5000, "x" * 200),
        ("", ""),
        (None, None),
    ],
)
def test_client_text_is_cleaned(given: str | None, shown: str | None) -> None:
    """Lone surrogates, control characters and length cannot travel further than the record."""
    assert clean(given) == shown


def test_always_encodes_as_strict_json() -> None:
    """Whatever a client sends as model, and whatever a scorer computes, the record is UTF-8 and strict JSON."""
    odd = replace(PRIMARY_FULL, score=float("nan"), terms={"latency": float("inf")})
    found = record(replace(FALLBACK, model="m\udfff", candidates=(odd,)))
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    assert found["candidates"][0]["terms"] == {"latency": None}  # type: ignore[index]


def test_body_and_headers_never_enter_the_record() -> None:
    """The forwarded body and headers hold prompt text and credentials, so the record has neither."""
    found = record(replace(FALLBACK, body=b'{"prompt":"SECRET"}', headers=(("authorization", "SECRET"),)))
    assert "SECRET" not in json.dumps(found)


def test_figures_are_those_of_the_place_taken() -> None:
    """Where a local replica took the request, its room is shown."""
    assert figures_of(record(FALLBACK))["replica"] == "gpu-b-0"  # type: ignore[index]


def test_figures_are_those_of_the_refusal_where_nothing_local_took_it() -> None:
    """A remote has no pool, so the room that was missing is shown."""
    assert figures_of(record(TO_REMOTE))["replica"] == "gpu-a-0"  # type: ignore[index]
    assert figures_of(record(REJECT))["replica"] == "gpu-a-0"  # type: ignore[index]


def test_no_figures_where_nothing_is_known() -> None:
    """A decision without any known pool shows none."""
    unknown = ConsideredCandidate("p", "r", Need(1, 1, 1, 1, 1), Figures(None, None), "unknown_state")
    assert figures_of(record(replace(REJECT, candidates=(unknown,)))) is None
