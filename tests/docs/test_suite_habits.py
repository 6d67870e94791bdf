"""The suite's own rules hold: a process that outlives its test fails the session."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reference import ROOT

LEAK = """
import subprocess

def test_leaks_a_grandchild_that_lost_its_parent():
    subprocess.run(["sh", "-c", "sleep 120 & exit 0"], stdout=subprocess.DEVNULL)
"""
CLEAN = """
import subprocess

def test_ends_what_it_starts():
    subprocess.run(["sleep", "0"], check=True)
"""


def session(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A pytest session of one file under the suite's own conftest, apart from the session that runs now."""
    shutil.copy(ROOT / "tests/conftest.py", folder)
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        *options,
        "test_it.py",
    ]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("options", [("-n0",), ("-n1",)], ids=["alone", "worker"])
def test_leaked_process_fails_the_session(options: tuple[str, ...], tmp_path: Path) -> None:
    """A grandchild that lost its parent is still found, named, and turns a green session red."""
    done = session(tmp_path, LEAK, *options)
    line = next((line for line in done.stdout.splitlines() if "left this process running" in line), "")
    if line:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split(": ")[1].split()[0]), signal.SIGKILL)
    assert line.endswith("sleep 120"), done.stdout
    assert "1 passed" in done.stdout
    assert done.returncode == 1


def test_clean_session_passes(tmp_path: Path) -> None:
    """A session whose tests end what they start stays green."""
    done = session(tmp_path, CLEAN, "-n1")
    assert ("1 passed" in done.stdout, done.returncode) == (True, 0), done.stdout
