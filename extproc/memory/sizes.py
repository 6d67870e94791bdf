"""Sizes and device lists as people write them: ``24GiB``, ``80GB``, ``24GiBx2``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from extproc.errors import UsageError
from extproc.memory.hf_fields import short

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
          "tib": 1 << 40, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}  # fmt: skip
_BARE = re.compile(r"(\d+(?:\.\d+)?)(?:\s*[xX*]\s*(\d+(?:\.\d+)?))?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


#: The most that an option which counts tokens can mean; larger figures are slips of the hand.
MOST_TOKENS = 1 << 40
#: More of any unit than a device list can mean; above it figures stop being finite.
MOST_UNITS = 2.0**53
#: Digits of a number of devices that are read and shown.
MAX_DIGITS = 12


def within(option: str, value: int | None, least: int, most: int = 1 << 20) -> None:
    """UsageError where a figure given by hand lies outside its bounds; None is an option not given."""
    if value is not None and value < least:
        raise UsageError(f"{option} is {value}; give at least {least}")
    if value is not None and value > most:
        raise UsageError(f"{option} is {value}; give at most {most}")


def refuse_empty(options: Mapping[str, object]) -> None:
    """UsageError for an option given as an empty string, as an unset shell variable leaves it."""
    for name, value in options.items():
        if any(isinstance(v, str) and not v.strip() for v in (value if isinstance(value, list) else [value])):
            label = "the model" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{label} is empty; give a value or leave it out")


def lacks_unit(text: str) -> str | None:
    """The complaint about a size or device list that is a bare number; None where it has a unit."""
    match = _BARE.fullmatch(text.strip())
    number = max(filter(None, match.groups()), key=float) if match else "0"
    return f"{number} what? write {number}GiB" if float(number) else None


def parse_size(text: str) -> int:
    """Bytes of ``24GiB``, ``80GB`` (10**9), ``512MiB`` never a bare number; UsageError with an example."""
    bare = lacks_unit(text)
    if bare is not None:
        raise UsageError(bare)
    match = _SIZE.fullmatch(text.strip())
    if match is None or match.group(2).lower() not in _UNITS:
        raise UsageError(f"size {short(text)} is not understood; write 24GiB, 80GB or 512MiB")
    number = float(match.group(1))
    if number > MOST_UNITS:
        raise UsageError(f"size {short(text)} is more than any device has; write 24GiB, 80GB or 512MiB")
    value = round(number * _UNITS[match.group(2).lower()])
    if value <= 0:
        raise UsageError(f"size {short(text)} must be more than 0")
    return value


def parse_devices(text: str) -> tuple[int, ...]:
    """Bytes of each device of ``24GiB``, ``80GiBx2`` or ``2x80GiB``; UsageError with an example."""
    text = text.strip()
    bare = lacks_unit(text)
    if bare is not None:
        raise UsageError(bare)
    match = re.fullmatch(r"(\d+)\s*[xX*]\s*(\d.*)", text)
    if match:
        count, size = match.group(1), match.group(2)
    else:
        match = re.fullmatch(r"(.*?[a-zA-Z\d])\s*[xX*]\s*(\d+)", text)
        size, count = match.groups() if match else (text, "1")
    if len(count) > MAX_DIGITS or not 1 <= int(count) <= 1024:
        raise UsageError(
            f"device {short(text)} names {count[:MAX_DIGITS]} devices; write 24GiB or 80GiBx2, 1 to 1024 of them"
        )
    return (parse_size(size),) * int(count)
