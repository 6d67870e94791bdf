"""The whole stack for one test, of real parts: Valkey, emulated engines, agent, serve, Envoy, on ephemeral ports.

Every part runs as the process an operator would start. The test gets handles to ask engines what *they* counted, to
read the ledger, and to kill or stop each part.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from extproc.config import load
from extproc.errors import LedgerDown
from extproc.gateway import protos
from extproc.gateway.build import build
from extproc.ledger.base import SILENCE_S, LedgerSnapshot
from extproc.ledger.redis import RedisLedger
from extproc.local.client import Reply, request
from tests.support import envoy_process
from tests.support.deployments import ValkeyCluster, ValkeySentinels
from tests.support.valkey import ValkeyServer

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 60.0
#: A request that nobody answers fails its test; its client waits longer than Envoy does in any configuration here.
ANSWERED_WITHIN_S = 60.0
#: What the ledger is asked by a test is asked again for this long where it does not answer.
LEDGER_WITHIN_S = 60.0
#: ``serve`` reads the ledger's snapshot every half second; it has read what the ledger shows once so long has passed.
SEEN_AFTER_S = 3.0
#: What an end record releases is gone within this long of it, cooling included. Silence frees nothing before
#: ``SILENCE_S``, so what takes longer was not released by its end.
RELEASED_WITHIN_S = SILENCE_S - 1.0
#: What no end record can release goes by silence: after ``SILENCE_S``, counted anew wherever ``serve`` stood still for
#: two seconds. What leaks stays.
EMPTY_WITHIN_S = 3 * SILENCE_S
#: Deadlines of parts that share a busy machine's cores: where no deadline is the subject, none strikes while a process
#: waits for its turn. The health checks that Envoy makes of ``serve`` wait as long as a request.
PATIENT: dict[str, Any] = {
    "ledger": {"deadlineMs": 5000}, "serve": {"countDeadlineMs": 5000},
    "envoy": {"messageTimeoutMs": 20_000, "maxMessageTimeoutMs": 30_000},
}  # fmt: skip
#: Deadlines about as an operator has them, for tests that judge what is answered when one strikes.
PROMPT: dict[str, Any] = {
    "ledger": {"deadlineMs": 200}, "serve": {"countDeadlineMs": 300}, "envoy": {"messageTimeoutMs": 1000},
}  # fmt: skip

Found = TypeVar("Found")
LedgerServer = ValkeyServer | ValkeyCluster | ValkeySentinels


@dataclass
class Engine:
    """One emulated engine: its process, its port, and what it says of itself."""

    name: str
    arguments: Sequence[str]
    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; a restart keeps the port."""
        arguments = ["--port", str(self.port), *self.arguments]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "extproc.local.emulator", *arguments], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        with self.process.stdout as out:
            line = out.readline().decode()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found is not None, f"{self.name} printed {line!r}"
        self.port = int(found[1])

    def stats(self) -> dict[str, Any]:
        """GET /emulator/stats."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/emulator/stats", timeout=READY_WITHIN_S) as answer:
            return dict(json.load(answer))

    def faults(self, **values: object) -> None:
        """POST /emulator/faults."""
        body = json.dumps(values).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{self.port}/emulator/faults", data=body, method="POST"),
            timeout=READY_WITHIN_S,
        ).close()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What it served, as its own log says."""
        return list(self.stats()["requests"])


@dataclass
class Stack:
    """A running stack."""

    folder: Path
    config_path: Path
    server: LedgerServer
    engines: dict[str, Engine]
    envoy: envoy_process.Envoy
    agent: subprocess.Popen[bytes] | None
    serves: list[subprocess.Popen[bytes]]
    listens: list[str]
    _stack: ExitStack = field(repr=False, default_factory=ExitStack)

    @property
    def valkey(self) -> ValkeyServer:
        """The ledger's one server."""
        assert isinstance(self.server, ValkeyServer)
        return self.server

    async def send(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        path: str = "/v1/chat/completions",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ANSWERED_WITHIN_S,
        method: str = "POST",
    ) -> Reply:
        """One request through Envoy."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await request(
            self.envoy.port, method, path, body=data,
            headers={"content-type": "application/json", **(headers or {})}, timeout_s=timeout_s,
        )  # fmt: skip

    async def ledger(self) -> RedisLedger:
        """A ledger client of the test's own, with more patience than a busy machine takes; the caller closes it."""
        return await RedisLedger.connect(
            self.server.url, load(self.config_path).ledger.pool, deadline_s=LEDGER_WITHIN_S, wait_s=LEDGER_WITHIN_S,
            background_deadline_s=LEDGER_WITHIN_S,
        )  # fmt: skip

    async def read(self, ask: Callable[[RedisLedger], Awaitable[Found]]) -> Found:
        """What the ledger says, asked again while it does not answer."""
        until = time.monotonic() + LEDGER_WITHIN_S
        ledger = await self.ledger()
        try:
            while True:
                try:
                    return await ask(ledger)
                except LedgerDown:
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(0.05)
        finally:
            await ledger.close()

    async def snapshot(self) -> LedgerSnapshot:
        """The ledger as it is now."""
        return await self.read(lambda ledger: ledger.snapshot())

    async def reservations(self) -> int:
        """Live reservations of the whole pool."""
        return sum(view.reservations for view in (await self.snapshot()).replicas.values())

    async def until_empty(self, within_s: float = EMPTY_WITHIN_S) -> float:
        """Wait until nothing is reserved; returns how long it took, fails when it takes longer."""
        began = time.monotonic()
        while (left := await self.reservations()) > 0:
            if time.monotonic() - began > within_s:
                raise AssertionError(f"{left} reservations are left after {within_s} s")
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def until_reserved(self, wanted: int, within_s: float = READY_WITHIN_S) -> None:
        """Wait until exactly this many reservations are live."""
        until = time.monotonic() + within_s
        while (found := await self.reservations()) != wanted:
            if time.monotonic() > until:
                raise AssertionError(f"{found} reservations, not {wanted}, after {within_s} s")
            await asyncio.sleep(0.05)

    async def until_ready(self, *replicas: str, within_s: float = READY_WITHIN_S) -> None:
        """Wait until the ledger knows these replicas (default: all engines) as ready."""
        wanted = replicas or tuple(replica.name for _, _, replica in load(self.config_path).local_replicas())
        until = time.monotonic() + within_s
        while True:
            views = (await self.snapshot()).replicas
            if all(name in views and views[name].state == "ready" for name in wanted):
                return
            if time.monotonic() > until:
                states = {name: views[name].state if name in views else None for name in wanted}
                raise AssertionError(f"not ready within {within_s} s: {states}\n{self.logs()}")
            await asyncio.sleep(0.1)

    def start_serve(self, number: int = 0) -> None:
        """Start (again) one serve process and wait until it listens."""
        with (self.folder / f"serve{number}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "extproc.cli", "serve", "-c", str(self.config_path), "--listen",
                 self.listens[number], "--admin", "127.0.0.1:0", "--workers", "1"],
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        if number < len(self.serves):
            self.serves[number] = process
        else:
            self.serves.append(process)
        assert process.stdout is not None
        with process.stdout as out:
            line = out.readline()
        if b"ready" not in line:
            raise AssertionError(f"serve did not start:\n{self.logs()}")

    def start_agent(self) -> None:
        """Start (again) the agent."""
        with (self.folder / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "extproc.cli", "agent", "-c", str(self.config_path)],
                stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def kill_serve(self, number: int = 0) -> None:
        """SIGKILL one serve process and wait until it is gone."""
        _kill(self.serves[number])

    def kill_agent(self) -> None:
        """SIGKILL the agent and wait until it is gone."""
        assert self.agent is not None
        _kill(self.agent)

    def kill_engine(self, name: str) -> None:
        """SIGKILL one engine and wait until it is gone; its ``start`` brings it back on the same port."""
        process = self.engines[name].process
        assert process is not None
        _kill(process)

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.log")
        )


def config_of(
    engines: Mapping[str, Engine],
    targets: Mapping[str, Any],
    rest: Mapping[str, Any],
    ledger_url: str,
    folder: Path,
) -> dict[str, Any]:
    """kvgate.yaml for these engines: a replica's ``url``, where it has none, is filled in by its name.

    ``rest`` is laid over it, section by section; its deadlines are ``PATIENT`` ones.
    """
    filled = json.loads(json.dumps(targets))
    for target in filled.values():
        for replica in target.get("replicas", ()):
            if "url" not in replica:  # a real engine brings its own
                replica.setdefault("url", f"http://127.0.0.1:{engines[replica['name']].port}")
        if "engineName" in target:
            target["url"] = f"http://127.0.0.1:{engines[target.pop('engineName')].port}"
    made: dict[str, Any] = {
        "ledger": {"url": ledger_url},
        "serve": {"listen": f"unix:{folder}/x.sock", "admin": "127.0.0.1:0"},
        "envoy": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "agent": {"intervalS": 0.3, "admin": "127.0.0.1:0", "node": "test"},
        "targets": filled,
    }
    return merged(merged(made, PATIENT), rest)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``under``, and their sections likewise."""
    both = {key: {**under[key], **value} for key, value in over.items() if isinstance(under.get(key), dict)}
    return {**under, **over, **both}


def bootstrap(path: Path) -> protos.bootstrap.Bootstrap:
    """Envoy's configuration for a kvgate.yaml; a health check of ``serve`` may take as long as a request."""
    config = load(path)
    return envoy_process.unhurried(build(config), config.envoy.message_timeout_ms / 1000)


@contextmanager
def running(
    engines: Mapping[str, Sequence[str]],
    targets: Mapping[str, Any],
    *,
    serves: int = 1,
    environment: Mapping[str, str] | None = None,
    on_engines: Callable[[Mapping[str, int]], None] = lambda _: None,
    ledger_url: Callable[[ValkeyServer], str] = lambda valkey: valkey.url,
    durable: bool = False,
    server: LedgerServer | None = None,
    **rest: Any,
) -> Iterator[Stack]:
    """A stack of ``engines`` (name -> the emulator's arguments) behind ``targets`` and the configuration ``rest``.

    ``on_engines`` hears every engine's port as soon as they listen; ``ledger_url`` is the way from kvgate to Valkey.
    ``durable``: Valkey's data survives its own death. ``server``: the ledger's, started and ended by the caller.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if server is None:
            server = ValkeyServer(appendonly=durable).start()
            stack.callback(server.close)
        made = {name: Engine(name, arguments, folder) for name, arguments in engines.items()}
        for engine in made.values():
            engine.start()
            stack.callback(_stop, lambda engine=engine: engine.process)
        on_engines({name: engine.port for name, engine in made.items()})
        url = ledger_url(server) if isinstance(server, ValkeyServer) else server.url
        config = config_of(made, targets, rest, url, folder)
        if serves > 1:
            config["serve"]["workers"] = serves
        path = folder / "kvgate.yaml"
        path.write_text(json.dumps(config))
        listen = config["serve"]["listen"]
        listens = [f"{listen}.{n}" for n in range(serves)] if serves > 1 else [listen]
        running_envoy = stack.enter_context(
            envoy_process.running(bootstrap(path), folder, environment={**os.environ, **(environment or {})})
        )
        made_stack = Stack(folder, path, server, made, running_envoy, None, [], listens, stack)
        made_stack.start_agent()
        stack.callback(_stop, lambda: made_stack.agent)
        for number in range(serves):
            made_stack.start_serve(number)
            stack.callback(_stop, lambda number=number: made_stack.serves[number])
        asyncio.run(made_stack.until_ready())
        # Envoy's first health check of serve may come before serve listens; the next one is a second later.
        _until_healthy(running_envoy)
        stack.callback(_tell_to_go, made_stack)
        yield made_stack


def unhealthy(envoy: envoy_process.Envoy) -> list[str]:
    """The addresses of ``serve`` that Envoy does not see healthy, and a line where it knows none at all."""
    flags = re.findall(r"^kvgate-extproc::(.+)::health_flags::(.*)$", envoy.admin("/clusters"), re.MULTILINE)
    return [f"Envoy: serve at {address} is {flag}" for address, flag in flags if flag != "healthy"] + (
        [] if flags else ["Envoy: no serve"]
    )


def _until_healthy(envoy: envoy_process.Envoy) -> None:
    until = time.monotonic() + READY_WITHIN_S
    while found := unhealthy(envoy):
        if time.monotonic() > until:
            raise AssertionError(f"not healthy within {READY_WITHIN_S} s: {found}")
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(STOP_WITHIN_S)


def _tell_to_go(stack: Stack) -> None:
    """All hear of the end at once, so that their times to leave pass together; Envoy's streams would be waited for."""
    stack.envoy.process.kill()
    for process in (*stack.serves, stack.agent):
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()


def _stop(process: Any) -> None:
    found = process()
    if found is None or found.poll() is not None:
        return
    found.send_signal(signal.SIGCONT)
    found.terminate()
    try:
        found.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        found.kill()
        found.wait(STOP_WITHIN_S)
        raise
