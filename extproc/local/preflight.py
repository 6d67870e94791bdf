"""What ``kvgate up`` makes sure of before it starts anything: every mistake at once, with file, key and mend.

Owns the trial of what its children would each find out alone and late: files, credentials, ports, the ledger.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing

from extproc.config import Config
from extproc.config.checks import worker_addresses
from extproc.counting import Counting
from extproc.errors import ConfigError
from extproc.gateway.build import build
from extproc.local.reach import PRIVATE, reached
from extproc.modelset import ModelSet


def make_sure(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """``ConfigError`` with one line for everything that would end a child of this configuration."""
    problems: list[str] = []
    for attempt in (_models, _tokenizers, _bootstrap, _ledger):
        try:
            attempt(config)
        except ConfigError as error:
            problems += [
                line if line.startswith(config.where) else f"{config.where}: {line}" for line in error.problems
            ]
    problems += [f"{config.where}: {line}" for line in (*_credentials(config, environment), *_ports(config))]
    if problems:
        raise ConfigError(problems)


def _models(config: Config) -> None:
    ModelSet.load(config, where=config.where)


def _tokenizers(config: Config) -> None:
    Counting.from_config(config).close()


def _bootstrap(config: Config) -> None:
    build(config, node_id="kvgate-local")


def _ledger(config: Config) -> None:
    # Nobody asks a private ledger where there is no replica to wait for.
    if config.ledger.url == "embedded" or (config.ledger.url in PRIVATE and not config.local_replicas()):
        return

    async def ask() -> None:
        async with reached(config):
            pass

    asyncio.run(ask())


def _credentials(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    for name, target in config.targets.items():
        inject = target.auth.inject
        if inject is not None and not environment.get(inject.secret_env):
            path = f"targets.{name}.auth.inject.secretEnv"
            yield f"{path}: the environment variable {inject.secret_env} is not set; export it before `kvgate up`"


def _ports(config: Config) -> Iterator[str]:
    """What listens on an address that ours want; the ext_proc service has a socket of the run's own."""
    wanted = [
        ("envoy.listen", config.envoy.listen),
        ("envoy.admin", config.envoy.admin),
        *(("serve.admin", address) for address in worker_addresses(config.serve.admin, config.serve.workers)),
    ]
    if config.local_replicas():
        wanted.append(("agent.admin", config.agent.admin))
    for path, address in wanted:
        if not address.startswith("unix:") and (reason := _cannot_bind(address)):
            yield f"{path}: {address} cannot be bound ({reason}); stop what listens there or choose another port"


def _cannot_bind(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind)) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return None
