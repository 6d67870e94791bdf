"""Host memory from /proc/meminfo, for devices that share it and for hosts without a GPU."""

from __future__ import annotations

from pathlib import Path

PATH = Path("/proc/meminfo")


def read(path: Path = PATH) -> dict[str, int] | None:
    """Fields in bytes by name, or None where the file cannot be read."""
    try:
        text = path.read_text("ascii", "replace")
    except OSError:
        return None
    fields: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            fields[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return fields


def available(fields: dict[str, int] | None, keep_bytes: int) -> tuple[int, int] | None:
    """Total and available bytes, the latter less what the host keeps; None where either is missing.

    MemAvailable, never MemFree: page cache is given back (a GB10 showed 7.4 of 120 GiB free while idle).
    """
    if not fields or not fields.get("MemTotal") or "MemAvailable" not in fields:
        return None
    total, free = fields["MemTotal"], fields["MemAvailable"]
    return (total, max(0, free - keep_bytes)) if 0 <= free <= total else None
