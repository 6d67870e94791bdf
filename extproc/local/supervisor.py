"""One process tree: children start in order, each ready before the next, and all of them end with us.

Owns processes, their logs and their signals; knows nothing of what they serve. Every child leads a process group of
its own, so that a terminal's Ctrl-C reaches only the supervisor, which then stops them in reverse order; the kernel
ends a child whose supervisor was killed (PR_SET_PDEATHSIG, Linux).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from extproc.errors import KvgateError

POLL_S = 0.05
#: After SIGKILL the kernel needs a moment to take a process away.
KILL_WAIT_S = 5.0
#: So much of a log's end is looked at for the last line.
TAIL_BYTES = 8192
PR_SET_PDEATHSIG = 1

#: None: ready. Otherwise what it still waits for.
Ready = Callable[[], str | None]


class ChildFailed(KvgateError):
    """A child that did not become ready or ended early; the message is one line with the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    """One program to run.

    ``ready`` is asked every 50 ms for at most ``ready_within_s``; ``stop_within_s`` is how long it may take to end
    after SIGTERM before it is killed. ``orphan_signal`` is what the kernel sends it when the supervisor dies without a word: a
    program with children of its own wants SIGTERM, so that it can end them.
    """

    name: str
    command: Sequence[str]
    ready: Ready = lambda: None
    environment: Mapping[str, str] | None = None
    ready_within_s: float = 20.0
    stop_within_s: float = 5.0
    orphan_signal: signal.Signals = signal.SIGKILL


@dataclass(slots=True)
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    log: Path
    restarts_left: int


class Supervisor:
    """Starts, watches and stops children; use it as a context manager.

    ``restarts`` is how often each child is started again after an early end (0: its early end is the stack's).
    ``check_stopped`` is called wherever it waits, and may raise to end the wait.
    """

    def __init__(
        self,
        log_directory: Path,
        *,
        restarts: int = 0,
        say: Callable[[str], None] = lambda line: None,
        check_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self.log_directory = log_directory
        self._check_stopped = check_stopped
        self._restarts = restarts
        self._say = say
        self._running: list[_Running] = []
        log_directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, child: Child) -> None:
        """Start one child and wait until it is ready; ``ChildFailed`` if it ends or its time runs out."""
        log = self.log_directory / f"{child.name}.log"
        running = _Running(child, _spawn(child, log), log, self._restarts)
        self._running.append(running)
        self._await_ready(running)

    def check(self) -> None:
        """Look at every child once; restart what may be restarted, else ``ChildFailed``."""
        self._check_stopped()
        for running in self._running:
            code = running.process.poll()
            if code is None:
                continue
            line = f"{running.child.name} ended early ({how_it_ended(code)}); {_tail(running.log)}"
            if not running.restarts_left:
                raise ChildFailed(line)
            running.restarts_left -= 1
            self._say(f"{line}; starting it again")
            _end_group(running.process, signal.SIGKILL)
            running.process = _spawn(running.child, running.log)
            self._await_ready(running)

    def watch(self, stopped: Callable[[], bool]) -> None:
        """Check the children until ``stopped`` says so; ``ChildFailed`` as ``check`` raises it."""
        while not stopped():
            self.check()
            time.sleep(POLL_S)

    def pid(self, name: str) -> int:
        """Process id of a running child."""
        return next(running.process.pid for running in self._running if running.child.name == name)

    def stop(self) -> list[str]:
        """Stop all children, the last started first; returns the names of those that had to be killed."""
        killed: list[str] = []
        while self._running:
            running = self._running.pop()
            process = running.process
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process must wake to hear it
                try:
                    process.wait(running.child.stop_within_s)
                except subprocess.TimeoutExpired:
                    killed.append(running.child.name)
            # Whatever it started and left behind goes with it.
            _end_group(process, signal.SIGKILL)
            process.wait(KILL_WAIT_S)
        return killed

    def _await_ready(self, running: _Running) -> None:
        child, process = running.child, running.process
        deadline_s = time.monotonic() + child.ready_within_s
        while True:
            self._check_stopped()
            code = process.poll()
            if code is not None:
                raise ChildFailed(f"{child.name} did not start ({how_it_ended(code)}); {_tail(running.log)}")
            waits_for = child.ready()
            if waits_for is None:
                return
            if time.monotonic() > deadline_s:
                raise ChildFailed(
                    f"{child.name} was not ready within {child.ready_within_s:g} s ({waits_for}); {_tail(running.log)}"
                )
            time.sleep(POLL_S)


def _spawn(child: Child, log: Path) -> subprocess.Popen[bytes]:
    environment = dict(os.environ if child.environment is None else child.environment)
    with log.open("ab") as sink:
        try:
            return subprocess.Popen(
                list(child.command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(child.orphan_signal),
            )
        except OSError as error:
            raise ChildFailed(f"{child.name} did not start: {child.command[0]}: {error.strerror}") from error


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What the child runs between fork and exec; the library is loaded before the fork."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def set_signal() -> None:
        prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl
            os.kill(os.getpid(), number)

    return set_signal


def _end_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        return  # macOS: the group holds only zombies


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _tail(log: Path) -> str:
    """The last line of a log that says why, which no routine line of a JSON log does, and where the rest is."""
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = [line.strip() for line in source.read().decode(errors="replace").splitlines() if line.strip()]
    spoken = [line for line in lines if not _routine(line)] or lines
    said = f"its last line: {spoken[-1][:300]}" if spoken else "it wrote nothing"
    return f"{said}; log: {log}"


def _routine(line: str) -> bool:
    """Whether a line is JSON of a child that is well: ready, or a record below a warning."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("level", "info") in ("debug", "info")
