"""``kvgate agent -c FILE``: the node agent, until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extproc.admin import AdminServer
from extproc.agent.admin import routes
from extproc.agent.devices import sources
from extproc.agent.devices.watch import DeviceWatch
from extproc.agent.discovery import Discovery, Dns, WatchedFile
from extproc.agent.loop import Agent, Settings
from extproc.config import Config, load
from extproc.errors import ConfigError
from extproc.runtime import open_ledger
from extproc.telemetry import logs

HELP = "watch this node's engines and devices and tell the ledger"
#: A report outlives the freshness limits, so that an agent's restart is not a loss of state.
TTL_FACTOR = 4.0
#: A name whose server hangs holds one thread for as long as the resolver likes; so many may hang before others wait.
LOOKUP_THREADS = 64


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration, kvgate.yaml")
    parser.add_argument(
        "--node", metavar="NAME", help="name of this host in the ledger (default: agent.node, else its hostname)"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="REPLICA",
        help="watch only this replica or remote target (default: all of the file); may be repeated",
    )
    parser.add_argument(
        "--unified-device",
        action="append",
        default=[],
        metavar="UUID",
        help="this device's memory is the host's, whatever its driver says; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """0 after an orderly stop."""
    config = load(args.config)
    logs.configure()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(config, args.config, args))
    return 0


async def serve(config: Config, path: str | Path, args: argparse.Namespace) -> None:
    """Run the agent and its admin port until SIGTERM or SIGINT."""
    node = args.node or config.agent.node or socket.gethostname()
    ledger = await open_ledger(config)
    devices = DeviceWatch(sources(node, unified=frozenset(args.unified_device)))
    agent = Agent(ledger, discovery(config, path, args.only), devices, settings(config, node))
    admin = AdminServer(routes(agent))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kvgate-lookup"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await admin.start(config.agent.admin)
    except OSError as error:
        await ledger.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            [f"{path}: agent.admin: {config.agent.admin} cannot be bound ({reason}); choose another"]
        ) from error
    running, stopped = asyncio.create_task(agent.run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, stopped):
            task.cancel()
        await asyncio.gather(running, stopped, return_exceptions=True)
        await admin.close()
        devices.close()
        await ledger.close()


def settings(config: Config, node: str) -> Settings:
    """The loop's settings from a configuration; the instance id is new with every start."""
    return Settings(
        node=node,
        instance=f"{os.getpid()}-{secrets.token_hex(4)}",
        interval_s=config.agent.interval_s,
        timeout_s=config.agent.timeout_ms / 1000,
        unknown_s=config.freshness.unknown_s,
        ttl_s=config.freshness.unknown_s * TTL_FACTOR,
    )


def discovery(config: Config, path: str | Path, only: Sequence[str] = ()) -> Discovery:
    """The file, watched, restricted to ``only``, with DNS names expanded where it says so."""
    return Dns(WatchedFile(path, config, only=frozenset(only)))
