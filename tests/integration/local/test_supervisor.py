"""Real processes under the supervisor: order, readiness, early deaths, and that nothing survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from extproc.local.supervisor import Child, ChildFailed, Supervisor

SLEEPER = "import time, sys; print('up', flush=True); time.sleep(600)"
#: Writes its name to the file on SIGTERM, after a moment.
POLITE = """
import pathlib, signal, sys, time
name, journal = sys.argv[1:]
def bye(*_):
    with open(journal, "a") as out: out.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
pathlib.Path(journal + "." + name).touch()
while True: time.sleep(0.01)
"""
DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)


def python(name: str, code: str, *words: str, **more: object) -> Child:
    """A child that runs a piece of Python."""
    return Child(name, [sys.executable, "-c", code, *words], **more)  # type: ignore[arg-type]


def wrote(log: Path, text: str = "") -> Callable[[], str | None]:
    """Ready when the log holds the text."""
    return lambda: None if log.exists() and text in log.read_text() and log.stat().st_size else "its first line"


def exists(path: Path) -> Callable[[], str | None]:
    """Ready when the file is there."""
    return lambda: None if path.exists() else f"{path.name}"


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether the process is gone soon."""
    deadline_s = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not alive(pid)


def test_children_stop_in_reverse_order(tmp_path: Path) -> None:
    """The last started hears SIGTERM first, and each ends before the next is told."""
    journal = tmp_path / "journal"
    with Supervisor(tmp_path / "logs") as supervisor:
        for name in ("a", "b", "c"):
            ready = exists(Path(f"{journal}.{name}"))
            supervisor.start(python(name, POLITE, name, str(journal), ready=ready, stop_within_s=60.0))
        killed = supervisor.stop()

    assert journal.read_text().split() == ["c", "b", "a"]
    assert killed == []


def test_a_child_that_does_not_listen_is_killed_in_time(tmp_path: Path) -> None:
    """SIGTERM ignored: it is killed after its time and named."""
    log = tmp_path / "deaf.log"
    supervisor = Supervisor(tmp_path)
    supervisor.start(python("deaf", DEAF, stop_within_s=0.2, ready=wrote(log)))
    pid = supervisor.pid("deaf")

    assert supervisor.stop() == ["deaf"]
    assert not alive(pid)


def test_a_stopped_child_still_ends(tmp_path: Path) -> None:
    """A child under SIGSTOP is woken to hear SIGTERM."""
    supervisor = Supervisor(tmp_path)
    supervisor.start(python("sleeper", SLEEPER, ready=wrote(tmp_path / "sleeper.log")))
    os.kill(supervisor.pid("sleeper"), signal.SIGSTOP)

    assert supervisor.stop() == []


def test_grandchildren_go_with_their_parent(tmp_path: Path) -> None:
    """What a child started and left behind is killed with its group."""
    log = tmp_path / "parent.log"
    supervisor = Supervisor(tmp_path)
    supervisor.start(python("parent", PARENT, ready=wrote(log)))
    grandchild = int(log.read_text())
    supervisor.stop()

    assert gone(grandchild)


def test_an_early_death_is_one_line_with_the_end_of_the_log(tmp_path: Path) -> None:
    """The message names the child, its exit status, its last line and the log's path."""
    code = "import sys; print('first'); print('no such model'); sys.exit(3)"
    with Supervisor(tmp_path) as supervisor, pytest.raises(ChildFailed) as failed:
        supervisor.start(python("engine", code, ready=lambda: "an answer"))

    text = str(failed.value)
    assert text == f"engine did not start (exit status 3); its last line: no such model; log: {tmp_path}/engine.log"


def test_routine_lines_of_a_json_log_are_not_the_reason(tmp_path: Path) -> None:
    """The line shown is the last that says why: no readiness, no record below a warning."""
    lines = ["k.yaml: port 1 is taken", '{"ready": "unix:/s", "pid": 1}', '{"level": "info", "msg": "shards loaded"}']
    code = f"import sys; print(*{lines!r}, sep=chr(10)); sys.exit(1)"
    with (
        Supervisor(tmp_path) as supervisor,
        pytest.raises(ChildFailed, match=r"its last line: k\.yaml: port 1 is taken;"),
    ):
        supervisor.start(python("serve", code, ready=lambda: "an answer"))


def test_a_child_that_is_never_ready_is_reported(tmp_path: Path) -> None:
    """The message says what it waited for; the child is stopped with the rest."""
    with Supervisor(tmp_path) as supervisor:
        with pytest.raises(ChildFailed, match=r"slow was not ready within 0\.2 s \(port 1\); it wrote nothing"):
            supervisor.start(Child("slow", ["sleep", "600"], lambda: "port 1", ready_within_s=0.2))
        pid = supervisor.pid("slow")

    assert not alive(pid)


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    """A command that does not exist is one line, not a traceback."""
    with (
        Supervisor(tmp_path) as supervisor,
        pytest.raises(ChildFailed, match="ghost did not start: /no/such: No such file"),
    ):
        supervisor.start(Child("ghost", ["/no/such"]))


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_early_end_ends_the_stack_or_is_mended(tmp_path: Path, restarts: int) -> None:
    """Without restarts an early end is raised; with one the child runs again under a new pid, once."""
    said: list[str] = []
    with Supervisor(tmp_path, restarts=restarts, say=said.append) as supervisor:
        supervisor.start(python("worker", SLEEPER, ready=wrote(tmp_path / "worker.log")))
        for _ in range(restarts):
            first = supervisor.pid("worker")
            os.kill(first, signal.SIGKILL)
            assert gone(first)
            supervisor.check()
            assert supervisor.pid("worker") != first
        last = supervisor.pid("worker")
        os.kill(last, signal.SIGKILL)
        assert gone(last)
        with pytest.raises(ChildFailed, match=r"worker ended early \(signal SIGKILL\)"):
            supervisor.check()

    assert len(said) == restarts


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor takes its children with it."""
    code = (
        "import sys, time, pathlib; from extproc.local.supervisor import Child, Supervisor\n"
        f"s = Supervisor(pathlib.Path({str(tmp_path)!r})); s.start(Child('c', ['sleep', '600'])); print(s.pid('c'), flush=True); time.sleep(600)"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        running = alive(child)
        owner.kill()

    assert running
    assert gone(child)
