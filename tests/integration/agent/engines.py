"""Real engine processes for the agent's tests: a llama-server on a free port, started, killed, started again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from extproc.agent.http import Client, Unreachable
from extproc.local import llamacpp, tiny_model

START_S = 120.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tiny(directory: Path) -> Path:
    """A GGUF file of a few MB."""
    return tiny_model.make(directory).gguf("F16")


class Llama:
    """One llama-server that can be killed and started again on the same port."""

    def __init__(self, server: llamacpp.LlamaServer, log: Path) -> None:
        self.server = server
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, **changes: object) -> None:
        """Start it, with other settings where given, and wait until it answers."""
        self.server = replace(self.server, **changes)  # type: ignore[arg-type]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.server.command(), "-lv", "4", env=llamacpp.environment(os.environ), stdout=log, stderr=log
            )
        client = Client(self.server.url)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    if (await client.get("/health", 30.0)).status == 200:
                        break
                except Unreachable:
                    pass
                await asyncio.sleep(0.02)
        await client.close()

    async def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None


@asynccontextmanager
async def llama(
    model: Path, log: Path, *, cells: int = 8192, slots: int = 4, unified: bool = True
) -> AsyncIterator[Llama]:
    """A running llama-server, killed at the end."""
    server = llamacpp.LlamaServer(model, "tiny", free_port(), cells, slots, unified)
    engine = Llama(server, log)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.kill()
