"""Short commands of kvgate, run as an operator would, and what a local run reads from them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extproc.errors import DependencyDown

COMMAND_TIMEOUT_S = 20.0
POLL_S = 0.25


def kvgate(*words: str) -> subprocess.CompletedProcess[str]:
    """One command, bounded in time; ``DependencyDown`` where it does not end."""
    command = [sys.executable, "-m", "extproc.cli", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DependencyDown(f"kvgate {words[0]} did not end within {COMMAND_TIMEOUT_S:g} s") from error


def status(config_file: Path, *, recent: int = 1) -> dict[str, Any]:
    """``kvgate status --json`` with so many decisions; ``DependencyDown`` with its own line where it fails."""
    done = kvgate("status", "-c", str(config_file), "--json", "--recent", str(recent))
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise DependencyDown(f"kvgate status failed: {said[-1] if said else f'exit status {done.returncode}'}")
    data = json.loads(done.stdout)
    assert isinstance(data, dict)
    return data


def await_fleet(config_file: Path, within_s: float, check: Callable[[], None]) -> dict[str, str]:
    """Wait until every replica is ready in the ledger's eyes; what is not when the time is up, by replica.

    ``check`` is called between looks and may raise.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        check()
        states = {str(row["replica"]): str(row["state"]) for row in status(config_file)["state"]["replicas"]}
        late = {replica: state for replica, state in states.items() if state != "ready"}
        if (states and not late) or time.monotonic() > deadline_s:
            return late or ({} if states else {"all": "unknown"})
        time.sleep(POLL_S)
