"""The local stack as a list of children: embedded Valkey, engines, agent, ext_proc, Envoy, in the order they need.

Owns how each is started and when it is ready; ``supervisor`` runs them. Commands of kvgate run as processes of their
own, exactly as an operator would start them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from extproc.config import Config
from extproc.gateway.build import as_json, build
from extproc.local import binaries, llamacpp
from extproc.local.supervisor import Child, Ready

#: One probe of a child's readiness.
PROBE_TIMEOUT_S = 1.0
#: ``serve`` loads tokenizers before it is ready.
SERVE_READY_S = 60.0
#: ``serve`` and Envoy end what they have begun within this; the demo's streams are short.
DRAIN_S = 10.0
LOOPBACK = "127.0.0.1"


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago, all different; held open together while they are chosen."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def preferred(port: int) -> int:
    """``port`` if nothing listens there, else a free one."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((LOOPBACK, port))
        except OSError:
            return free_ports(1)[0]
    return port


def answers(address: str, path: str) -> Ready:
    """Ready when ``path`` on ``address`` (host:port) answers 200."""

    def ready() -> str | None:
        status, _ = get(address, path)
        return None if status == 200 else f"http://{address}{path} answers {status or 'nothing'}"

    return ready


def get(address: str, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nothing answers in time."""
    connection = http.client.HTTPConnection(address, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def listens(port: int) -> Ready:
    """Ready when something accepts connections on ``port``."""

    def ready() -> str | None:
        try:
            socket.create_connection((LOOPBACK, port), PROBE_TIMEOUT_S).close()
        except OSError as error:
            return f"{LOOPBACK}:{port}: {error.strerror or 'no answer'}"
        return None

    return ready


def valkey(port: int, directory: Path) -> Child:
    """An embedded Valkey that keeps nothing on disk."""
    command = [str(binaries.valkey()), "--port", str(port), "--bind", LOOPBACK, "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
    return Child("valkey", command, listens(port))


def llama_server(name: str, server: llamacpp.LlamaServer) -> Child:
    """One real llama.cpp."""
    return Child(
        name,
        server.command(),
        answers(f"{LOOPBACK}:{server.port}", "/health"),
        environment=llamacpp.environment(os.environ),
    )


def emulator(name: str, server: llamacpp.LlamaServer) -> Child:
    """The emulated engine in the place of a llama-server of the same size."""
    command = [sys.executable, "-m", "extproc.local.emulator", "--port", str(server.port), "--personality", "llamacpp"]
    command += ["--served-model", server.alias, "--blocks", str(server.cells), "--max-sequences", str(server.slots)]
    if not server.unified:
        command += ["--max-model-tokens", str(server.cells // server.slots)]
    return Child(name, command, answers(f"{LOOPBACK}:{server.port}", "/health"))


def tls_front(name: str, port: int, to_port: int) -> Child:
    """TLS in front of a plain port."""
    return Child(
        name,
        [sys.executable, "-m", "extproc.local.tls_proxy", "--port", str(port), "--to", str(to_port)],
        listens(port),
    )


def kvgate(command: str, config_file: Path, admin: str, *, ready_within_s: float) -> Child:
    """``kvgate serve`` or ``kvgate agent`` with the given configuration."""
    return Child(
        command,
        [sys.executable, "-m", "extproc.cli", command, "-c", str(config_file)],
        answers(admin, "/readyz"),
        ready_within_s=ready_within_s,
        stop_within_s=DRAIN_S,
        orphan_signal=signal.SIGTERM,  # it may have workers of its own to end
    )


def envoy(name: str, bootstrap: Path, admin: str) -> Child:
    """Envoy with a bootstrap file."""
    command = [str(binaries.envoy()), "-c", str(bootstrap), "--use-dynamic-base-id", "--concurrency", "1"]
    command += ["--log-level", "warning", "--drain-time-s", "1"]
    return Child(name, command, answers(admin, "/ready"), stop_within_s=DRAIN_S)


@dataclass(frozen=True, slots=True)
class KvgateStack:
    """What stands between clients and engines, for one configuration; ``valkey_port`` None: the ledger is elsewhere."""

    config: Config
    config_file: Path
    directory: Path
    valkey_port: int | None
    node_id: str = "kvgate-local"

    def children(self) -> Sequence[Child]:
        """Ledger, agent, ext_proc and Envoy, in order of start; engines must run before."""
        bootstrap = self.directory / "envoy.json"
        bootstrap.write_text(as_json(build(self.config, node_id=self.node_id)), encoding="utf-8")
        children = [] if self.valkey_port is None else [valkey(self.valkey_port, self.directory)]
        if self.config.local_replicas():
            children.append(kvgate("agent", self.config_file, self.config.agent.admin, ready_within_s=30.0))
        children.append(kvgate("serve", self.config_file, self.config.serve.admin, ready_within_s=SERVE_READY_S))
        children.append(envoy("envoy", bootstrap, self.config.envoy.admin))
        return children


@dataclass(frozen=True, slots=True)
class Probe:
    """What an engine's URL turned out to be."""

    engine: str
    served_model: str


def probe(url: str) -> Probe | None:
    """Which engine answers at ``url`` and under which model name; None where none that kvgate knows does."""
    address = urlsplit(url).netloc
    _, raw = get(address, "/metrics")
    text = raw.decode(errors="replace")
    engine = next((name for name in ("vllm", "sglang", "llamacpp") if f"\n{name}:" in f"\n{text}"), None)
    if engine is None and get(address, "/props")[0] == 200:
        engine = "llamacpp"
    if engine is None and get(address, "/api/version")[0] == 200:
        engine = "ollama"
    _, models = get(address, "/v1/models")
    try:
        served = json.loads(models)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        return None
    return Probe(engine, str(served)) if engine is not None else None
