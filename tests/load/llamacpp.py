"""The race against real llama.cpp with a unified cache, whose overflow ends every running request; judged by its log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from extproc.local import llamacpp, tiny_model
from tests.load import work
from tests.load.clients import Attempt, Order, drive
from tests.load.evidence import Report, share
from tests.support.stack import Stack, running
from tests.support.valkey import free_port

#: What llama.cpp logs when the cells run out.
OVERFLOW = b"Context size has been exceeded"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """``requests`` from ``processes`` clients in ``rounds`` at a cache of ``cells`` with more ``slots`` than fit."""

    requests: int
    processes: int
    rounds: int
    round_s: float
    cells: int
    slots: int
    bare: bool = True


FULL = Size(800, 8, 5, 8.0, 4096, 48)
SMALL = Size(120, 4, 1, 8.0, 4096, 48)
TEST = Size(80, 4, 1, 4.0, 2560, 32, bare=False)


@contextmanager
def _engine(folder: Path, model: Path, size: Size, log: Path) -> Iterator[llamacpp.LlamaServer]:
    server = llamacpp.LlamaServer(model, "m", free_port(), size.cells, size.slots, unified=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*server.command(), "-lv", "4"], cwd=folder, env=llamacpp.environment(os.environ), stdout=out, stderr=out
        )
    try:
        _await(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _await(server: llamacpp.LlamaServer, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"llama-server was not ready within {START_S} s (exit status {process.poll()})")


async def _through(stack: Stack, jobs: list[list[work.Job]]) -> list[Attempt]:
    attempts = await drive(stack.envoy.port, [Order(jobs=mine) for mine in jobs])
    await stack.until_empty(15)
    return attempts


def run(size: Size, command: str) -> Report:
    """Straight at the engine first, then through kvgate."""
    jobs = work.racing(size.requests, size.processes, size.rounds, size.round_s, seed=6)
    report = Report(
        "llamacpp", "The race against real llama.cpp",
        f"{size.requests} requests from {size.processes} client processes at one real llama-server (`--kv-unified`, "
        f"{size.cells} cells, {size.slots} slots, a tiny model), through one Envoy and two `serve` processes. Overflows are "
        f"counted in llama.cpp's own log (\"{OVERFLOW.decode()}\").",
        command,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvg-llama-") as name:
        folder = Path(name)
        model = tiny_model.make(folder / "model").gguf("F16")
        if size.bare:
            with _engine(folder, model, size, folder / "bare.log") as server:
                bare = asyncio.run(drive(server.port, [Order(jobs=mine) for mine in jobs]))
            lost = (folder / "bare.log").read_bytes().count(OVERFLOW)
            report.figure("without kvgate: overflows logged", lost)
            report.figure("without kvgate: served whole", share(sum(a.whole for a in bare), len(bare)))
        with _engine(folder, model, size, folder / "gated.log") as server:
            replica = {"name": "llama-0", "url": server.url}
            target = {"engine": "llamacpp", "servedModel": "m", "maxWaiting": None, "ttftBudgetMs": 3_600_000}
            rest = {"lanes": {"all": {}}, "aliases": {"m": {"lane": "all", "targets": ["t"]}}}
            with running({}, {"t": target | {"replicas": [replica]}}, serves=2, **rest) as stack:
                gated = asyncio.run(_through(stack, jobs))
        lost = (folder / "gated.log").read_bytes().count(OVERFLOW)
    total = len(gated)
    report.figure("overflows logged", f"{lost} of {total} requests", "0", holds=lost == 0)
    kinds = Counter(f"{a.status} {a.reason}".strip() for a in gated)
    report.figure("answers", ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())))
    strange = sum(not a.whole and not (a.status == 429 and a.retry_ms) for a in gated)
    report.figure("neither whole nor a well-formed 429", strange, "0", holds=strange == 0)
    return report
