"""Reads the Prometheus text exposition format as engines really write it.

Owns syntax only; what a name means is the engines' business. A line that cannot be read is skipped and
counted, so one bad line never costs the good ones (llama.cpp once wrote ``nan`` and decimal commas).
Names lose their colon (``vllm:x`` and ``vllm_x`` are the same series, depending on the exporter's path).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

#: More than any engine writes (vLLM 0.32: 67 kB); a larger body is cut here and the rest counted as one bad line.
MAX_TEXT = 8 * 1024 * 1024

#: ``name="value"`` inside the braces; a value may hold escaped quotes, backslashes and newlines.
_LABEL = re.compile(r'\s*([A-Za-z_][\w.]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
#: A number as Go, Python and C++ print it; a decimal comma, hex and underscores are refused.
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_:][\w:.]*")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_ESCAPE = re.compile(r'\\[n"\\]')
_NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value; ``value`` may be NaN or infinite, as written."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples by normalised name, in the body's order, and how many lines could not be read."""

    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    bad_lines: int = 0

    def get(self, name: str) -> tuple[Sample, ...]:
        """The samples of one series; empty where the body has none."""
        return self.samples.get(name, ())


def normalise(name: str) -> str:
    """The name by which a series is looked up: every colon is an underscore."""
    return name.replace(":", "_")


def parse(text: str, wanted: Collection[str] | None = None) -> Exposition:
    """The samples of one body; with ``wanted`` (normalised names) the rest is passed over unread.

    Comments, blank lines, timestamps, exemplars, CRLF and ``# EOF`` are accepted. Never raises.
    """
    found: dict[str, list[Sample]] = {}
    bad = 0
    cache: dict[str, Mapping[str, str]] = {}
    if len(text) > MAX_TEXT:
        text, bad = text[:MAX_TEXT].rpartition("\n")[0], 1
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        brace = line.find("{")
        # A brace that follows a space belongs to an exemplar, not to the name.
        head = line[:brace] if brace >= 0 else line
        if brace < 0 or " " in head.strip():
            parts = head.split(None, 1)
            if not parts:
                continue
            name = parts[0].replace(":", "_")
            if wanted is not None and name not in wanted:
                continue
            sample = _sample(parts[0], "", parts[1] if len(parts) > 1 else "", cache)
        else:
            name = head.strip().replace(":", "_")
            if wanted is not None and name not in wanted:
                continue
            close = _closing(line, brace)
            sample = None if close < 0 else _sample(head.strip(), line[brace + 1 : close], line[close + 1 :], cache)
        if sample is None:
            bad += 1
            continue
        found.setdefault(name, []).append(sample)
    return Exposition({name: tuple(samples) for name, samples in found.items()}, bad)


def _closing(line: str, brace: int) -> int:
    """Where the label set ends: the first closing brace outside a quoted value, or -1."""
    close = line.find("}", brace)
    if close < 0 or (line.count('"', brace, close) % 2 == 0 and "\\" not in line[brace:close]):
        return close
    quoted = escaped = False
    for at in range(brace + 1, len(line)):
        char = line[at]
        if escaped:
            escaped = False
        elif quoted and char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif char == "}" and not quoted:
            return at
    return -1


def _sample(name: str, labels: str, rest: str, cache: dict[str, Mapping[str, str]]) -> Sample | None:
    fields = rest.split(None, 1)
    if not fields or not _NUMBER.fullmatch(fields[0]) or not _NAME.fullmatch(name):
        return None
    known = cache.get(labels)
    if known is None:
        parsed = _labels(labels)
        if parsed is None:
            return None
        known = cache[labels] = parsed
    return Sample(known, float(fields[0]))


def _labels(text: str) -> Mapping[str, str] | None:
    if not text.strip():
        return _NO_LABELS
    labels: dict[str, str] = {}
    at = 0
    while at < len(text) and text[at:].strip():
        match = _LABEL.match(text, at)
        if match is None:
            return None
        value = match[2]
        labels[match[1]] = _ESCAPE.sub(lambda found: _ESCAPES[found[0]], value) if "\\" in value else value
        at = match.end()
    return labels
