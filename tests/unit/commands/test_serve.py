"""``kvgate serve`` before it serves: addresses that cannot be had, and workers, each in one line and an exit status."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from extproc.cli import main
from extproc.errors import ConfigError
from extproc.listening import make_way
from extproc.local.workers import Command, supervise

CONFIG = 'lanes: {a: {}}\nledger: {url: "redis://127.0.0.1:1"}\n'
#: More than any of these processes takes on a busy machine.
PATIENCE_S = 120.0


def serve(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str, config: str = CONFIG) -> tuple[int, str]:
    """Exit status and standard error of a service that is not to start."""
    path = tmp_path / "k.yaml"
    path.write_text(config)
    status = main(["serve", "-c", str(path), *arguments])
    return status, capsys.readouterr().err


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--listen", "garbage"),
        ("--listen", ""),
        ("--listen", "unix:/" + "a" * 107),
        ("--admin", "garbage"),
        ("--admin", "127.0.0.1:99999"),
        ("--admin", "unix:/run/x"),
        ("--workers", "0"),
        ("--workers", "65"),
    ],
)
def test_wrong_usage_is_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, str]
) -> None:
    """The line names the option."""
    status, err = serve(capsys, tmp_path, *arguments)

    assert status == 2
    assert err.startswith(f"kvgate serve: {arguments[0]}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["listen", "admin"])
def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, taken: str, option: str) -> None:
    """It names the option, the address and the system's reason."""
    other = "listen" if option == "admin" else "admin"
    status, err = serve(capsys, tmp_path, f"--{option}", taken, f"--{other}", "127.0.0.1:0")

    assert status == 1
    assert err == f"--{option}: {taken} cannot be bound (Address already in use); name another or free it\n"


def test_an_address_of_the_file_is_named_by_its_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, taken: str
) -> None:
    """Where nothing was given on the command line."""
    status, err = serve(capsys, tmp_path, "--listen", "127.0.0.1:0", config=f"{CONFIG}serve: {{admin: '{taken}'}}\n")

    assert status == 1
    assert err.startswith(f"{tmp_path}/k.yaml: serve.admin: {taken} cannot be bound")


def test_a_host_without_address_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Names are resolved before anything is loaded."""
    status, err = serve(capsys, tmp_path, "--listen", "no-such-host.invalid:1", "--admin", "127.0.0.1:0")

    assert status == 1
    assert err.startswith("--listen: no-such-host.invalid:1 cannot be bound (")
    assert err.count("\n") == 1


def test_workers_need_a_ledger_that_they_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Several processes asked for by hand are judged like those of the file."""
    status, err = serve(capsys, tmp_path, "--workers", "2", config="lanes: {a: {}}\nledger: {url: memory}\n")

    assert (status, err.count("\n")) == (1, 1)
    assert f"{tmp_path}/k.yaml: ledger.url: `memory`" in err


# -- sockets


def test_a_directory_that_cannot_be_made_is_said_with_a_way_out(tmp_path: Path) -> None:
    """The first thing that happens to somebody who is not root."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ConfigError, match=r"^k: serve\.listen: the directory .*/file/sub cannot be made .*--listen unix:"
    ):
        make_way(f"unix:{tmp_path}/file/sub/s", where="k: serve.listen")


def test_a_left_socket_gives_way_and_a_served_one_does_not(tmp_path: Path) -> None:
    """What a killed process left is removed; what somebody serves is not stolen."""
    path = tmp_path / "new" / "s"
    make_way(f"unix:{path}", where="k")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ConfigError, match="another process serves"):
            make_way(f"unix:{path}", where="k")
    assert path.exists()
    make_way(f"unix:{path}", where="k")

    assert not path.exists()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    """A mistyped path must not cost a file."""
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="a file that is no socket is there"):
        make_way(f"unix:{path}", where="k")

    assert path.read_text() == "mine"


# -- workers

READY = "import os, sys, time; os.write(int(sys.argv[1]), b'1'); "


def worker(program: str, *words: str) -> Command:
    """A worker that runs ``program`` with its descriptor as first argument."""

    def command(descriptor: int) -> Sequence[str]:
        return [sys.executable, "-S", "-c", program, str(descriptor), *words]

    return command


def test_a_worker_that_never_serves_ends_them_all(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The others are not even started, so what is wrong with all is said once; status 1."""
    fails = worker("import sys; sys.exit('serve.listen: no')")
    mark = worker(f"open({str(tmp_path / 'started')!r}, 'w')")

    assert supervise([fails, mark]) == 1
    assert capfd.readouterr().err == "serve.listen: no\n"
    assert not (tmp_path / "started").exists()


def test_a_later_worker_that_never_serves_stops_the_first(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half a service is none; a death without a word is told."""
    first = worker(READY + f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    dies = worker("import os; os.kill(os.getpid(), 9)")

    assert supervise([first, dies]) == 1
    assert capfd.readouterr().err == "worker 1 ended before it was ready (signal SIGKILL)\n"
    assert not alive(int((tmp_path / "pid").read_text()))


SUPERVISE = """
import sys
from extproc.local.workers import supervise
program, folder = sys.argv[1:]
make = lambda n: lambda fd: [sys.executable, "-S", "-c", program, str(fd), folder, str(n)]
sys.exit(supervise([make(0), make(1)]))
"""
#: Writes its pid to a file of its own, then serves.
SERVES = READY + "open(f'{sys.argv[2]}/{sys.argv[3]}.{os.getpid()}', 'w'); time.sleep(600)"


def started(folder: Path, number: int, count: int) -> list[int]:
    """Pids of the first ``count`` fillings of a worker's place, in no order."""
    until_s = time.monotonic() + PATIENCE_S
    while len(found := [int(path.suffix[1:]) for path in folder.glob(f"{number}.*")]) < count:
        assert time.monotonic() < until_s, "not started"
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of two workers in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", SUPERVISE, SERVES, str(tmp_path)]) as process:
        yield process
        process.kill()


def test_workers_end_with_a_supervisor_that_was_killed(supervisor: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Else they would hold the sockets that the next start needs."""
    pids = started(tmp_path, 0, 1) + started(tmp_path, 1, 1)
    supervisor.kill()
    supervisor.wait()
    until_s = time.monotonic() + PATIENCE_S
    while any(map(alive, pids)):
        assert time.monotonic() < until_s, "they go on"
        time.sleep(0.05)


def test_a_worker_that_served_is_started_again_and_sigterm_ends_all(
    supervisor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """One death is no outage; an orderly stop is status 0."""
    (old,) = started(tmp_path, 1, 1)
    os.kill(old, signal.SIGKILL)
    pids = [*started(tmp_path, 0, 1), *started(tmp_path, 1, 2)]
    supervisor.terminate()

    assert supervisor.wait(PATIENCE_S) == 0
    assert not any(map(alive, pids))
