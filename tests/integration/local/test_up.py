"""``kvgate up`` as a user runs it: real Envoy, Valkey, agent and ext_proc in front of an emulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from extproc.local import stack
from extproc.local.client import Reply, request
from extproc.local.llamacpp import LlamaServer
from extproc.local.supervisor import Supervisor
from tests.support.load import NOT_YET

START_S = 180.0


class Up:
    """A running ``kvgate up``: what it said, and its children."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []

    def wait_ready(self) -> None:
        """Read until it says that everything runs, or fail with what it said."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith("Ctrl-C"):
                return
        assert self.process.stderr is not None
        pytest.fail(f"kvgate up ended: {self.said[-3:]} {self.process.stderr.read()}")

    @property
    def address(self) -> int:
        """Envoy's port."""
        line = next(line for line in self.said if line.startswith("send to"))
        return int(line.split("127.0.0.1:")[1].split("/")[0])

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(next(line for line in self.said if line.startswith("logs")).split()[1]).parent

    def children(self) -> list[int]:
        """Process ids of its children, by /proc."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = (entry / "stat").read_text().rpartition(") ")[2].split()[1]
                except OSError:
                    continue
                if int(parent) == self.process.pid:
                    found.append(int(entry.name))
        return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an emulated llama.cpp."""
    port = stack.free_ports(1)[0]
    server = LlamaServer(Path(), "tiny", port, cells=4096, slots=4, unified=True)
    with Supervisor(tmp_path_factory.mktemp("engine")) as supervisor:
        supervisor.start(stack.emulator("engine", server))
        yield server.url


@contextmanager
def up(tmp_path: Path, *words: str) -> Iterator[Up]:
    """Start it and wait; it is ended in any case."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "extproc.cli", "up", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        running = Up(process)
        try:
            running.wait_ready()
            yield running
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def config_file(directory: Path) -> str:
    """A configuration with ports of its own; its engine is given on the command line."""
    envoy, admin, serve, agent = (f"127.0.0.1:{port}" for port in stack.free_ports(4))
    path = directory / "kvgate.yaml"
    path.write_text(
        json.dumps(
            {
                "ledger": {"url": "embedded"},
                "serve": {"admin": serve},
                "envoy": {"listen": envoy, "admin": admin},
                "agent": {"admin": agent},
                "targets": {
                    "main": {"engine": "llamacpp", "replicas": [{"name": "elsewhere", "url": "http://127.0.0.1:9"}]}
                },
                "lanes": {"all": {}},
                "aliases": {"tiny": {"lane": "all", "targets": ["main"]}},
            }
        )
    )
    return str(path)


def gone(pids: list[int]) -> bool:
    """Whether all of them end soon."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        states = []
        for pid in pids:
            try:
                states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0])
            except OSError:
                continue
        if all(state == "Z" for state in states):
            return True
        time.sleep(0.02)
    return False


async def admitted(port: int, body: bytes) -> Reply:
    """The answer to a request, sent again while a busy machine's ledger or ``serve`` does not answer in time."""
    until_s = time.monotonic() + START_S
    while True:
        reply = await request(port, "POST", "/v1/chat/completions", body=body, timeout_s=START_S)
        if reply.headers.get("x-kvgate-reason") not in NOT_YET or time.monotonic() > until_s:
            return reply
        await asyncio.sleep(0.1)


def test_an_engine_given_by_url_is_served_and_nothing_survives(engine: str, tmp_path: Path) -> None:
    """A request through Envoy is admitted to it; SIGTERM ends everything with status 0 and leaves no file."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "abcd" * 40}], "max_tokens": 8}
    with up(tmp_path, "--engine", engine) as running:
        reply = asyncio.run(admitted(running.address, json.dumps(body).encode()))
        children = running.children()
        running.process.send_signal(signal.SIGTERM)
        status = running.process.wait(START_S)

    assert (reply.status, reply.headers["x-kvgate-decision"], reply.headers["x-kvgate-target"]) == (
        200,
        "admit",
        "engine-0",
    )
    assert f"engines given: llamacpp at {engine}" in running.said[-6]
    assert len(children) == 4
    assert status == 0
    assert gone(children)
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_dies_ends_the_stack_with_one_line(engine: str, tmp_path: Path) -> None:
    """kill -9 of Valkey: exit status 1, one line that names it and its log, and the rest is stopped."""
    with up(tmp_path, "-c", config_file(tmp_path), "--engine", engine) as running:
        children = running.children()
        valkey = next(pid for pid in children if b"valkey" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(valkey, signal.SIGKILL)
        status = running.process.wait(START_S)
        assert running.process.stderr is not None
        said = running.process.stderr.read().strip().splitlines()

    assert status == 1
    assert len(said) == 1
    assert said[0].startswith("kvgate up: valkey ended early (signal SIGKILL);")
    assert str(running.directory) in said[0]
    assert gone(children)


def test_a_killed_stack_takes_its_children_with_it(engine: str, tmp_path: Path) -> None:
    """kill -9 of ``kvgate up`` itself leaves no process."""
    with up(tmp_path, "-c", config_file(tmp_path), "--engine", engine) as running:
        children = running.children()
        running.process.kill()

    assert gone(children)


def test_an_engine_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    """The message names the URL; nothing was started."""
    closed = stack.free_ports(1)[0]
    command = [sys.executable, "-m", "extproc.cli", "up", "--engine", f"http://127.0.0.1:{closed}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_S, env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"kvgate up: --engine http://127.0.0.1:{closed}: no vLLM, SGLang, llama.cpp or Ollama answers there; start it first"
    )
    assert list(tmp_path.iterdir()) == []


def test_nothing_starts_where_a_child_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A geometry, a credential, a port and a ledger that are not there: a line each, with file, key and mend."""
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = tmp_path / "k.yaml"
        path.write_text(
            f"""
ledger: {{url: "redis://127.0.0.1:1/0"}}
envoy: {{listen: "127.0.0.1:{port}", admin: "127.0.0.1:0"}}
serve: {{admin: "127.0.0.1:0"}}
models: {{m: {{geometry: no-such.json}}}}
targets:
  far: {{engine: openai, url: "http://127.0.0.1:1", model: m, auth: {{inject: {{secretEnv: NO_SUCH_KEY}}}}}}
lanes: {{all: {{targets: [far]}}}}
"""
        )
        command = [sys.executable, "-m", "extproc.cli", "up", "-c", str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_S, env={**os.environ, "TMPDIR": str(tmp_path)}
        )

    said = done.stderr.splitlines()
    keys = ("models.m.geometry", "ledger.url", "targets.far.auth.inject.secretEnv", "envoy.listen")
    assert (done.returncode, done.stdout, len(said)) == (1, "", len(keys))
    assert all(line.startswith(f"{path}: {key}: ") for line, key in zip(said, keys, strict=True))
    assert list(tmp_path.iterdir()) == [path]


def test_a_configuration_that_cannot_be_used_is_status_1(tmp_path: Path) -> None:
    """The mistake is printed as ``kvgate check`` prints it."""
    path = tmp_path / "bad.yaml"
    path.write_text("lanes: {a: {maxInputToken: 1}}\n")
    command = [sys.executable, "-m", "extproc.cli", "up", "-c", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)

    assert done.returncode == 1
    assert "maxInputToken" in done.stderr
    assert str(path) in done.stderr
