"""What an API says of its own limits: for how long it wants no more requests, by an answer's status and headers.

Pure. Headers are those of OpenAI's protocol (``retry-after``, ``retry-after-ms``, ``x-ratelimit-*``: remaining counts,
and times to reset like ``6m0s`` or ``120ms``); Anthropic's tell a date, which needs a clock, so only their zeros count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Statuses that send everybody away for a while: nothing left to pay with, too many requests, overloaded (Anthropic).
SPENT = frozenset({402, 429, 529})
#: What is assumed where an API says "not now" and not until when, and what is believed at least and at most.
DEFAULT_S, LEAST_S, MOST_S = 5.0, 1.0, 60.0

_RETRY = (("retry-after-ms", 0.001), ("retry-after", 1.0))
#: remaining -> reset (None: not as a duration).
_LIMITS: Mapping[str, str | None] = {
    "x-ratelimit-remaining-requests": "x-ratelimit-reset-requests",
    "x-ratelimit-remaining-tokens": "x-ratelimit-reset-tokens",
    "anthropic-ratelimit-requests-remaining": None,
    "anthropic-ratelimit-tokens-remaining": None,
}
#: Every header that is read, for whoever has to ask for them by name.
HEADERS = (*(name for name, _ in _RETRY), *_LIMITS, *(name for name in _LIMITS.values() if name))

_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,6})?")
_DURATION = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,6}(?:\.\d+)?)s)?(?:(\d{1,9}(?:\.\d+)?)ms)?")


def closed_for_s(status: int | None, headers: Mapping[str, str]) -> float | None:
    """Seconds for which the API wants no more, within 1..60; None where it takes on. Header names are lower case."""
    waits = [float(text) * unit for name, unit in _RETRY if _NUMBER.fullmatch(text := headers.get(name, "").strip())]
    spent = [reset for name, reset in _LIMITS.items() if headers.get(name, "").strip() == "0"]
    resets = [seconds for name in spent if name and (seconds := _duration_s(headers.get(name, ""))) is not None]
    if status not in SPENT and not spent:
        return None
    known = waits[:1] if status in SPENT and waits else resets
    return min(MOST_S, max(LEAST_S, *known)) if known else DEFAULT_S


def _duration_s(text: str) -> float | None:
    """``6m0s``, ``1s``, ``120ms`` or plain seconds; None for anything else."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        return None
    hours, minutes, seconds, millis = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + millis / 1000
