"""Figures of a run: printed, checked against their aims, and published in docs/evidence.md.

A section of the document belongs to one scenario and says with what command, on what machine, at what commit and when
its figures were measured; publishing one scenario leaves the others as they are.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "evidence.md"
HEAD = """# Evidence under load

Measured figures, not promises: each section is written by the command it names, with the machine, the commit and the
date. Engines are emulated (paged KV, chunked prefill, preemption by recomputation) unless the section says otherwise;
Envoy and Valkey are real. What an engine held is what the *engine* counted.
"""


@dataclass(slots=True)
class Report:
    """One scenario's figures in order; ``failed`` are the aims that were missed."""

    name: str
    title: str
    about: str
    command: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def figure(self, what: str, value: object, aim: str = "", *, holds: bool = True) -> None:
        """One line; ``aim`` says what it should be, ``holds`` whether it is."""
        self.rows.append((what, str(value), aim))
        if not holds:
            self.failed.append(f"{what}: {value}, not {aim}")

    def text(self) -> str:
        """The figures for a terminal."""
        width = max(len(what) for what, _, _ in self.rows)
        lines = [f"  {what:<{width}}  {value}{f'   (aim: {aim})' if aim else ''}" for what, value, aim in self.rows]
        lines += [f"  MISSED {line}" for line in self.failed]
        return "\n".join([self.title, *lines])

    def section(self) -> str:
        """The figures as a section of the document."""
        table = [f"| {what} | {value} | {aim} |" for what, value, aim in self.rows]
        return "\n".join([
            f"## {self.title}", "", self.about, "", f"`{self.command}`, {machine()}", "",
            "| figure | measured | aim |", "|---|---|---|", *table, "",
        ])  # fmt: skip

    def publish(self, path: Path = DOCUMENT) -> None:
        """Write the section into the document, in place of its former figures."""
        found = path.read_text(encoding="utf-8") if path.exists() else HEAD
        marked = f"<!-- {self.name} -->\n{self.section()}<!-- /{self.name} -->\n"
        pattern = re.compile(rf"<!-- {self.name} -->\n.*<!-- /{self.name} -->\n", re.DOTALL)
        text = pattern.sub(lambda _: marked, found) if pattern.search(found) else f"{found.rstrip()}\n\n{marked}"
        path.write_text(text, encoding="utf-8")


def machine() -> str:
    """Processor, cores, Python, commit and date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, commit {commit or 'unknown'}, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}"
    )


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def share(part: int, whole: int) -> str:
    """``part`` of ``whole`` as a percentage."""
    return f"{100 * part / whole:.1f} %" if whole else "none"


def spread(values: list[float], unit: str = "s") -> str:
    """Median, 90th percentile and largest."""
    ordered = sorted(values)
    if not ordered:
        return "none"
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9)]
    return f"p50 {at[0]:.2f} {unit}, p90 {at[1]:.2f} {unit}, max {ordered[-1]:.2f} {unit}"
