"""A short form of the demo: the same orchestration, fewer requests; `make demo` is the whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_loses_requests_without_kvgate_and_none_with_it(tmp_path: Path) -> None:
    """Real llama.cpp dies under the bursts alone; behind kvgate no answer and no log line tells of a full cache."""
    command = [sys.executable, "-m", "extproc.cli", "demo", "--requests", "48", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    result = json.loads(done.stdout)
    holds = {check["name"]: check["holds"] for check in result["checks"]}

    assert result["without"]["fates"].get("lost", 0) > 0
    assert result["with_"]["fates"].get("lost", 0) == 0
    assert sum(result["with_"]["fates"].values()) == 48
    assert holds["llama.cpp's own logs say the same"]
    assert holds["the ledger is exactly empty at the end"]
    assert holds["the ledger admitted nothing that did not fit"]
    assert done.returncode == (0 if all(holds.values()) else 1)
    assert bool(list(tmp_path.iterdir())) == (done.returncode != 0)  # logs stay only where something failed


def test_a_stopped_demo_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """SIGINT in the middle of the load: one line, status 1, every child gone."""
    command = [sys.executable, "-m", "extproc.cli", "demo"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as demo:
        assert demo.stderr is not None
        lines = []
        for line in demo.stderr:
            lines.append(line.strip())
            if line.startswith("run 1 of 2"):
                demo.send_signal(signal.SIGINT)
        status = demo.wait(300)

    assert (status, lines[-1]) == (1, "kvgate demo: stopped by SIGINT")
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_makes_no_sense_is_wrong_usage() -> None:
    """No request at all is refused before anything starts."""
    done = subprocess.run(
        [sys.executable, "-m", "extproc.cli", "demo", "--requests", "0"], capture_output=True, text=True, timeout=300
    )

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
