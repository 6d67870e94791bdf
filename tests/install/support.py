"""What the install tests share: the repository's root, its lock files, and a wheel built from a copy of the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = ("base", "local", "demo", "dev", "fuzz")
#: One pinned requirement: name, version, and the environment marker behind ``;`` if there is one.
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==(\S+)(?: ; (.*?))?(?: \\)?$")


def pins(lock: str) -> list[tuple[str, str, str]]:
    """(name, version, marker or "") of every requirement in requirements/``lock``.txt."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="ascii").splitlines()
    return [(m[1], m[2], m[3] or "") for m in map(PIN.match, lines) if m]


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of what it is made of, with the setuptools of this environment."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "extproc", source / "extproc", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel
