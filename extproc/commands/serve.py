"""``kvgate serve``: the ext_proc and access-log service, one process per worker, one address each."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import uvloop

from extproc import heap
from extproc.config import Config, load
from extproc.config.checks import worker_addresses, worker_problems
from extproc.config.forms import Address, TcpAddress, problem
from extproc.errors import ConfigError
from extproc.listening import make_way
from extproc.local.workers import Command, supervise
from extproc.runtime import serve
from extproc.telemetry.logs import configure as configure_logs

HELP = "run the ext_proc and access-log service"
#: As many as ``serve.workers`` may be.
MAX_WORKERS = 64


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")
    parser.add_argument("--listen", metavar="ADDRESS", help="unix:PATH or host:port (default: serve.listen)")
    parser.add_argument(
        "--admin", metavar="ADDRESS", help="host:port for /metrics, /livez, /readyz (default: serve.admin)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes, one address each: PATH.0, PATH.1 or successive ports"
    )
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM; 1 where the configuration or an address cannot be used, 2 wrong usage."""
    wrong = _usage(args)
    if wrong is not None:
        print(f"kvgate serve: {wrong}", file=sys.stderr)
        return 2
    config = load(args.config)
    listen, admin = args.listen or config.serve.listen, args.admin or config.serve.admin
    workers = args.workers if args.workers is not None else config.serve.workers
    problems = worker_problems(config, listen, admin, workers)
    if problems:
        raise ConfigError([f"{args.config}: {line}" for line in problems])
    if workers > 1:
        return supervise(_commands(args.config, listen, admin, workers))
    configure_logs()
    for address, option, given in ((admin, "admin", args.admin), (listen, "listen", args.listen)):
        by_hand = given is not None and args.ready_fd is None  # a worker's were given by its supervisor
        make_way(address, where=f"--{option}" if by_hand else f"{args.config}: serve.{option}")
    _serve(config, args, listen, admin)
    return 0


def _usage(args: argparse.Namespace) -> str | None:
    """What is wrong with the command line, in the words of the configuration."""
    for option, form in (("listen", Address), ("admin", TcpAddress)):
        text = getattr(args, option)
        if text is not None and (why := problem(form, text)) is not None:
            return f"--{option}: {text!r} {why}"
    if args.workers is not None and not 1 <= args.workers <= MAX_WORKERS:
        return f"--workers: {args.workers} is not a number of processes; give 1 to {MAX_WORKERS}"
    return None


def _serve(config: Config, args: argparse.Namespace, listen: str, admin: str) -> None:
    def ready(bound: str) -> None:
        heap.settle()
        print(json.dumps({"ready": bound, "pid": os.getpid()}), flush=True)
        if args.ready_fd is not None:
            os.write(args.ready_fd, b"1")
            os.close(args.ready_fd)

    heap.share_heaps()
    uvloop.run(serve(config, where=args.config, listen=listen, admin=admin, ready=ready))


def _commands(config: str, listen: str, admin: str, workers: int) -> list[Command]:
    """How to start each worker on its own addresses."""

    def command(own: str, own_admin: str) -> Command:
        def words(descriptor: int) -> Sequence[str]:
            addresses = ["--listen", own, "--admin", own_admin, "--workers", "1", "--ready-fd", str(descriptor)]
            return [sys.executable, "-m", "extproc.cli", "serve", "-c", config, *addresses]

        return words

    pairs = zip(worker_addresses(listen, workers), worker_addresses(admin, workers), strict=True)
    return [command(*pair) for pair in pairs]
