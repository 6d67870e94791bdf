"""``kvgate serve``: the ext_proc and access-log service, one process per worker, one socket each."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from extproc.config import load
from extproc.errors import ConfigError
from extproc.runtime import serve
from extproc.telemetry.logs import configure as configure_logs

HELP = "run the ext_proc and access-log service"
#: A worker that dies is started again, at most this often per second and worker.
RESTART_EVERY_S = 1.0
#: A living server accepts at once.
PROBE_S = 1.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")
    parser.add_argument("--listen", metavar="ADDRESS", help="unix:PATH or host:port (default: serve.listen)")
    parser.add_argument(
        "--admin", metavar="ADDRESS", help="host:port for /metrics, /livez, /readyz (default: serve.admin)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes, one socket each: PATH.0 .. PATH.N-1")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM; 1 where the configuration cannot be used."""
    config = load(args.config)
    listen, admin = args.listen or config.serve.listen, args.admin or config.serve.admin
    workers = args.workers if args.workers is not None else config.serve.workers
    if workers < 1:
        print(f"--workers: {workers} is not a number of processes; give at least 1", file=sys.stderr)
        return 2
    if workers > 1:
        return _supervise(args.config, listen, admin, workers)
    configure_logs()
    if listen.startswith("unix:"):
        _make_way(Path(listen.removeprefix("unix:")))

    def ready(bound: str) -> None:
        print(json.dumps({"ready": bound, "pid": os.getpid()}), flush=True)

    uvloop.run(serve(config, where=args.config, listen=listen, admin=admin, ready=ready))
    return 0


def _make_way(path: Path) -> None:
    """Remove a socket that a killed process left; refuse one that somebody still serves, for it would be stolen silently."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError([f"{path}: cannot be used as a socket ({error.strerror}); name another path"]) from error
    raise ConfigError([f"{path}: another process serves this socket; stop it or name another path"])


def _supervise(config: str, listen: str, admin: str, workers: int) -> int:
    """Run ``workers`` processes, restart those that die, stop all of them with us."""
    host, _, port = admin.rpartition(":")

    def launch(number: int) -> subprocess.Popen[bytes]:
        own = f"{listen}.{number}" if listen.startswith("unix:") else _next_port(listen, number)
        own_admin = f"{host}:{int(port) + number if int(port) else 0}"
        arguments = ["serve", "-c", config, "--listen", own, "--admin", own_admin, "--workers", "1"]
        return subprocess.Popen([sys.executable, "-m", "extproc.cli", *arguments])

    stopping = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    for caught in (signal.SIGTERM, signal.SIGINT):
        signal.signal(caught, stop)
    processes = [launch(number) for number in range(workers)]
    started = [time.monotonic()] * workers
    while not stopping:
        time.sleep(0.1)
        for number, process in enumerate(processes):
            if process.poll() is not None and time.monotonic() - started[number] > RESTART_EVERY_S and not stopping:
                processes[number], started[number] = launch(number), time.monotonic()
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
    return 0


def _next_port(listen: str, number: int) -> str:
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + number}"
