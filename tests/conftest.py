"""Shared pytest configuration: Hypothesis profiles, and the check that no test leaves a process behind.

A test that starts a server ends it. What still runs when a worker's session is over fails the run and is named;
nothing is killed here, so that the leak stays to be looked at.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

#: Marks every process that a test starts, grandchildren and orphans included: they inherit the environment.
OWNER = "KVGATE_TEST_OWNER"
#: Processes that were told to stop just before the session's end get this long to be gone.
GRACE_S = 10.0

#: How long an example takes, or its making, says how busy the machine is, not whether the code is right.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", **UNTIMED)
hypothesis.settings.register_profile("fuzz", **UNTIMED, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

SURVIVORS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Give this process, and so whatever it starts, a mark of its own."""
    os.environ[OWNER] = f"{os.getpid()}.{secrets.token_hex(8)}"
    config.stash[SURVIVORS] = []
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_WorkerReports(config))


class _WorkerReports:
    """Takes from each finished xdist worker the processes that outlived it."""

    def __init__(self, config: pytest.Config) -> None:
        self._survivors = config.stash[SURVIVORS]

    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Called by xdist in the controller; ``node.workeroutput`` is what the worker left."""
        self._survivors += getattr(node, "workeroutput", {}).get("survivors", [])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a process that one of its tests started still runs."""
    config = session.config
    survivors = config.stash[SURVIVORS]
    controller = not hasattr(config, "workerinput")
    if not controller:
        config.workeroutput["survivors"] = _survivors()  # type: ignore[attr-defined]
        return
    if config.getoption("dist", "no") == "no":
        survivors += _survivors()
    if survivors:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the processes that tests left running."""
    for line in terminalreporter.config.stash[SURVIVORS]:
        terminalreporter.write_line(f"FAILED a test left this process running: {line}", red=True)


def _survivors() -> list[str]:
    until = time.monotonic() + GRACE_S
    while (found := list(_running())) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _running() -> Iterator[str]:
    """Pid and command line of every live process that carries this session's mark or descends from it."""
    me, mark = os.getpid(), f"{OWNER}={os.environ[OWNER]}".encode()
    parents = {pid: parent for pid, parent in _processes() if pid != me}
    for pid in parents:
        ancestor = pid
        while ancestor in parents:
            ancestor = parents[ancestor]
        try:
            marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended while we looked, or is not ours to look at
        # Python's own helper of multiprocessing ends with its parent.
        if (marked or ancestor == me) and command and "multiprocessing.resource_tracker" not in command:
            yield f"{pid} {command[:200]}"


def _processes() -> Iterator[tuple[int, int]]:
    """(pid, parent) of every process that is no zombie."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            yield int(entry.name), int(parent)
