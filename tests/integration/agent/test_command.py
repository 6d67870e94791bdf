"""``kvgate agent`` as an operator starts it: its port, its stop, its mistakes in one line."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from extproc.agent.http import Client, Unreachable
from extproc.ledger.redis import RedisLedger
from tests.integration.agent.engines import free_port
from tests.support.valkey import ValkeyServer

CONFIG = """
ledger: {{url: "{ledger}"}}
agent: {{node: here, intervalS: 0.1, admin: "127.0.0.1:{admin}"}}
lanes: {{l: {{maxInputTokens: 4000, maxOutputTokens: 400}}}}
targets:
  t: {{engine: vllm, replicas: [{{name: r0, url: "http://127.0.0.1:{engine}"}}]}}
"""


async def start(path: Path) -> asyncio.subprocess.Process:
    """The command as a process."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc.cli", "agent", "-c", str(path), stderr=asyncio.subprocess.PIPE
    )


async def test_it_publishes_tells_its_health_and_stops_when_told(tmp_path: Path) -> None:
    """One process, real Valkey, no engine: the replica is lost, the agent is ready, SIGTERM ends it with 0."""
    admin = free_port()
    with ValkeyServer() as valkey:
        path = tmp_path / "kvgate.yaml"
        path.write_text(CONFIG.format(ledger=valkey.url, admin=admin, engine=free_port()))
        process = await start(path)
        client = Client(f"http://127.0.0.1:{admin}")
        async with asyncio.timeout(120):
            while True:
                try:
                    if (await client.get("/readyz", 30.0)).status == 200:
                        break
                except Unreachable:
                    await asyncio.sleep(0.05)
        state = json.loads((await client.get("/state", 30.0)).body)
        await client.close()
        ledger = await RedisLedger.connect(
            valkey.url, "default", deadline_s=30.0, background_deadline_s=30.0, wait_s=30.0
        )
        snapshot = await ledger.snapshot()
        await ledger.close()
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0
    assert [(r["replica"], r["state"], r["cause"]) for r in state["replicas"]] == [("r0", "lost", "refused")]
    report = snapshot.replicas["r0"].report
    assert report is not None
    assert (report.state, report.node, report.capacity_blocks) == ("lost", "here", None)
    assert snapshot.devices["cpu:here"].state == "unified"


@pytest.mark.parametrize("mistake", ["port", "file"])
async def test_mistakes_are_one_line(tmp_path: Path, mistake: str) -> None:
    """A port that is taken and a file that is not there: one line with the mend, exit status 1, no traceback."""
    path = tmp_path / "kvgate.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if mistake == "port":
            port = taken.getsockname()[1]
            path.write_text(CONFIG.format(ledger="redis://127.0.0.1:1/0", admin=port, engine=1))
        process = await start(path)
        async with asyncio.timeout(120):
            _, said = await process.communicate()
    lines = [line for line in said.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}: ")
