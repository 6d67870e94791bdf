"""Structured logs: one JSON object per line on stderr, repeated warnings counted instead of repeated.

Owns the format and the rate limit. An exception is logged as its type and where it was raised; its message only
for our own exceptions, because a foreign one may quote the input that it failed on.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from extproc.errors import KvgateError
from extproc.telemetry.record import utc

#: A message (by logger, level and template) at WARNING or above is written this often ...
BURST = 5
#: ... within this many seconds; then it is only counted, and the next one written says how many were not.
WINDOW_S = 30.0
#: Templates remembered by the limit; beyond it all are forgotten, which writes too much rather than too little.
MAX_TEMPLATES = 500
#: Attributes that every LogRecord has; whatever else it carries came through ``extra``.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "suppressed"}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class JsonFormatter(logging.Formatter):
    """LogRecord -> one line of JSON: ts, level, logger, msg, then the record's ``extra`` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for ``record``, without a line break."""
        line: dict[str, Any] = {
            "ts": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line.update({key: value for key, value in record.__dict__.items() if key not in _STANDARD})
        suppressed = getattr(record, "suppressed", 0)
        if suppressed:
            line["suppressed"] = suppressed
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = _error(record.exc_info[1])
        return json.dumps(line, default=str)


class RepeatLimit(logging.Filter):
    """Lets the first ``burst`` records of a template through per window and counts the rest."""

    def __init__(
        self, *, burst: int = BURST, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst, self._window_s, self._clock = burst, window_s, clock
        self._seen: dict[tuple[str, int, object], list[float]] = {}  # template -> [window start, written, suppressed]

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is written; the first one of a new window says how many were not."""
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.levelno, record.msg if isinstance(record.msg, str) else type(record.msg))
        now_s = self._clock()
        if len(self._seen) >= MAX_TEMPLATES and key not in self._seen:
            self._seen.clear()
        window = self._seen.setdefault(key, [now_s, 0, 0])
        if now_s - window[0] >= self._window_s:
            record.suppressed = int(window[2])
            window[:] = [now_s, 0, 0]
        if window[1] >= self._burst:
            window[2] += 1
            return False
        window[1] += 1
        return True


def configure(level: str | None = None, stream: IO[str] | None = None) -> None:
    """Send every logger of this process to ``stream`` (stderr) as JSON; the level is ``level`` or KVGATE_LOG_LEVEL or INFO.

    Calling it again replaces what the first call set up. A broken stderr never reaches the code that logs.
    """
    wanted = (level or os.environ.get("KVGATE_LOG_LEVEL") or "INFO").upper()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name("kvgate")
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.get_name() == "kvgate"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(wanted if wanted in LEVELS else "INFO")
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    if wanted not in LEVELS:
        logging.getLogger("kvgate").warning("KVGATE_LOG_LEVEL is not one of %s; INFO is used", ", ".join(LEVELS))


def _error(error: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {"type": type(error).__qualname__}
    if isinstance(error, KvgateError | OSError):
        found["message"] = str(error)
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    found["at"] = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    if error.__cause__ is not None:
        found["cause"] = type(error.__cause__).__qualname__
    return found
