"""Structured logs: one JSON object per line, repeats counted, foreign messages kept out."""

from __future__ import annotations

import io
import json
import logging
import sys
import uuid
from collections.abc import Iterator

import pytest

from extproc.errors import LedgerDown
from extproc.telemetry import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, raising = root.level, logging.raiseExceptions
    text = io.StringIO()
    logs.configure("INFO", text)
    yield text
    for handler in [each for each in root.handlers if each.get_name() == "kvgate"]:
        root.removeHandler(handler)
    root.setLevel(before)
    logging.raiseExceptions = raising
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def logger() -> logging.Logger:
    return logging.getLogger(f"kvgate.test.{uuid.uuid4().hex}")


def test_a_line_is_one_json_object_with_its_extras(stream: io.StringIO) -> None:
    """Level, logger, message and extra fields stand in one object; a line break in the message makes no second line."""
    log = logger()
    log.info("served %s\nlines", 2, extra={"rid": "r1", "waited_ms": 3})
    (found,) = lines(stream)
    assert found.pop("ts", "").endswith("Z")  # type: ignore[attr-defined]
    assert found == {"level": "info", "logger": log.name, "msg": "served 2\nlines", "rid": "r1", "waited_ms": 3}


def test_a_foreign_exception_shows_type_and_place_but_not_its_message(stream: io.StringIO) -> None:
    """A library's message may quote the prompt it failed on, so only our own exceptions' messages are written."""
    log = logger()
    for error in (ValueError("SECRET PROMPT"), LedgerDown("no answer in 50 ms")):
        try:
            raise error
        except (ValueError, LedgerDown):
            log.exception("decision failed")
    foreign, own = lines(stream)
    assert "SECRET" not in stream.getvalue()
    assert foreign["error"]["type"] == "ValueError"  # type: ignore[index]
    assert foreign["error"]["at"][-1].startswith("test_logs.py:")  # type: ignore[index]
    assert own["error"]["message"] == "no answer in 50 ms"  # type: ignore[index]


def test_the_level_comes_from_the_environment(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVGATE_LOG_LEVEL decides what is written; a name that is no level is said and INFO used."""
    monkeypatch.setenv("KVGATE_LOG_LEVEL", "error")
    logs.configure(stream=stream)
    logger().warning("quiet")
    assert stream.getvalue() == ""
    monkeypatch.setenv("KVGATE_LOG_LEVEL", "loud")
    logs.configure(stream=stream)
    logger().info("seen")
    assert [line["level"] for line in lines(stream)] == ["warning", "info"]


def test_configuring_twice_writes_each_line_once(stream: io.StringIO) -> None:
    """A second call replaces the first."""
    logs.configure("INFO", stream)
    logger().info("once")
    assert len(lines(stream)) == 1


def test_repeats_are_counted_instead_of_written() -> None:
    """After the burst a template is only counted, and the next window's first line says how many were not written."""
    now = [0.0]
    limit = logs.RepeatLimit(burst=2, window_s=10.0, clock=lambda: now[0])

    def passes(level: int = logging.ERROR, text: str = "Redis is away: %s") -> tuple[bool, int]:
        record = logging.LogRecord("kvgate.x", level, "f", 1, text, (now[0],), None)
        return limit.filter(record), getattr(record, "suppressed", 0)

    assert [passes() for _ in range(5)] == [(True, 0), (True, 0), (False, 0), (False, 0), (False, 0)]
    assert passes(text="another: %s") == (True, 0)
    assert passes(level=logging.INFO) == (True, 0)
    now[0] = 10.0
    assert passes() == (True, 3)


def test_the_limit_remembers_a_bounded_number_of_templates() -> None:
    """Messages that are never the same cannot fill the memory."""
    limit = logs.RepeatLimit()
    for index in range(3 * logs.MAX_TEMPLATES):
        limit.filter(logging.LogRecord("kvgate.x", logging.ERROR, "f", 1, f"odd {index}", (), None))
    assert len(limit._seen) <= logs.MAX_TEMPLATES


def test_a_closed_stderr_does_not_reach_the_caller(stream: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    """Logging to a stream that is gone neither raises nor prints a traceback."""
    logs.configure("INFO", stream)
    stream.close()
    logger().error("nobody hears")
    assert capsys.readouterr().err == ""
    logs.configure("INFO", sys.stderr)
