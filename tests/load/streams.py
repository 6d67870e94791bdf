"""What a request leaves behind in ``serve`` and in the ledger's server: hundreds of thousands of them, bytes for each.

A soak at the pace of real answers takes hours to show a loss of some bytes per request. Here the engine answers at once
and most requests are refused, so that it shows after a minute.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from extproc.config import load
from extproc.gateway.build import build
from tests.bench.bench_gateway import kvgate, new_pool, server
from tests.bench.closed_loop import Client, Upstream
from tests.load import work
from tests.load.evidence import Report
from tests.load.soak import resident_mib
from tests.support import envoy_process
from tests.support.valkey import ValkeyServer

#: Growth of the second half that counts as none: the smallest loss known, one operation of gRPC's, is 80 bytes.
FLAT_BYTES = 20.0
CLIENTS = 48
#: Tokens of the one pool: about a quarter of what the clients ask for at once.
POOL_TOKENS = 16_000
#: Longest time that an answer takes; it is drawn from nothing up to this.
ANSWER_S = 0.1
#: Longest pause of a client after a refusal.
PAUSE_S = 0.02
#: Memory is read so many times over the requests of one kind.
SAMPLES = 120
#: Envoy asks twice a second whether ``serve`` is healthy.
HEALTHY_S = 2.0
SEED = 7
#: How much of its body a client sends, and when it leaves then: faster than this is an overload, whose queues are what is measured.
LEFT_SHARE, LEFT_S = 0.5, 0.1

#: Name of a process -> its resident bytes by how many requests were sent.
Samples = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Size:
    """``asked`` whole requests, then ``left`` whose clients leave during the upload; ``judged``: enough to say anything."""

    asked: int
    left: int
    judged: bool


FULL = Size(300_000, 60_000, judged=True)
SMALL = Size(10_000, 1_000, judged=False)


class _Engine(Upstream):
    """Answers every request after a moment."""

    def data_received(self, data: bytes) -> None:
        asyncio.get_running_loop().call_later(random.random() * ANSWER_S, super().data_received, data)


@contextmanager
def _gateway(engine: int, valkey: ValkeyServer) -> Iterator[tuple[int, int]]:
    """Envoy and one ``serve`` before an engine on this port; Envoy's port and the pid of ``serve``."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    path, socket = folder / "kvgate.yaml", folder / "s"
    replica = {"name": "engine-0", "url": f"http://127.0.0.1:{engine}", "kvTokens": POOL_TOKENS}
    path.write_text(json.dumps({
        "ledger": {"url": valkey.url, "deadlineMs": 500},
        "serve": {"listen": f"unix:{socket}", "admin": "127.0.0.1:0"},
        "envoy": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "messageTimeoutMs": 4000},
        "targets": {"m": {"engine": "vllm", "servedModel": "m", "ttftBudgetMs": 3_600_000, "replicas": [replica]}},
        "lanes": {"all": {}}, "aliases": {"m": {"lane": "all", "targets": ["m"]}},
        "noAgent": "ledgerOnly", "telemetry": {"decisionLog": 500},
    }))  # fmt: skip
    try:
        with (
            server(kvgate(path, socket), folder / "log") as pid,
            envoy_process.running(build(load(path)), folder, environment=os.environ) as envoy,
        ):
            yield envoy.port, pid
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requests(seed: int) -> Iterator[bytes]:
    """Requests of the trace in random order, for ever."""
    draw = random.Random(seed)
    bodies = [job.body() for job in work.trace(120.0, 3.0)]
    for number in itertools.count():
        body = draw.choice(bodies)
        yield (
            f"POST /v1/completions HTTP/1.1\r\nhost: kvgate\r\ncontent-type: application/json\r\n"
            f"x-request-id: {draw.getrandbits(64):016x}-{number}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body


class _Clients:
    """Clients at Envoy's ``port``; ``sent`` counts their requests, ``seen`` the answers by status."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._requests = _requests(SEED)
        self.sent = 0
        self.seen: Counter[str] = Counter()

    async def _connect(self) -> Client:
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self._port)
        return client

    async def ask(self, until: int) -> None:
        """Ask one after the other on one connection, until ``until`` were sent by all."""
        client = await self._connect()
        while self.sent < until:
            self.sent += 1
            try:
                status = (await client.ask(next(self._requests)))[9:12].decode()
            except ConnectionError:
                status, client = "connection closed", await self._connect()
            self.seen[status] += 1
            if status == "429":
                await asyncio.sleep(random.random() * PAUSE_S)
        client.close()

    async def leave(self, until: int) -> None:
        """Leave in the middle of a body, again and again, until ``until`` were sent by all."""
        while self.sent < until:
            self.sent += 1
            request = next(self._requests)
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(request[: int(len(request) * LEFT_SHARE)])
            await asyncio.sleep(LEFT_S)
            writer.transport.abort()


async def _played(
    clients: _Clients, play: Callable[[int], Coroutine[Any, Any, None]], count: int, pids: Mapping[str, int]
) -> Samples:
    """``count`` more requests, and what they cost."""
    began, reads = clients.sent, 0
    samples: Samples = {name: [] for name in pids}
    playing = asyncio.gather(*(play(began + count) for _ in range(CLIENTS)))
    while not playing.done():
        sent = clients.sent - began
        if sent >= count * reads / SAMPLES:
            reads += 1
            for name, pid in pids.items():
                samples[name].append((sent, resident_mib(pid) * 2**20))
        await asyncio.sleep(0.05)
    await playing
    return samples


async def _measure(size: Size) -> tuple[_Clients, Samples, Samples]:
    engine = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0)
    with ValkeyServer() as valkey:
        await new_pool(valkey.url, "default")
        with _gateway(engine.sockets[0].getsockname()[1], valkey) as (port, pid):
            await asyncio.sleep(HEALTHY_S)
            clients = _Clients(port)
            asked = await _played(clients, clients.ask, size.asked, {"serve": pid, "valkey": valkey.pid})
            left = await _played(clients, clients.leave, size.left, {"serve": pid})
    engine.close()
    return clients, asked, left


def trend(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares slope and twice its standard error; 0 for fewer than three points."""
    if len(points) < 3:
        return 0.0, 0.0
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    below = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / below
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, 2.0 * math.sqrt(left / (len(points) - 2) / below)


def run(size: Size, command: str) -> Report:
    """The whole scenario."""
    began = time.monotonic()
    clients, asked, left = uvloop.run(_measure(size))
    report = Report(
        "streams", "Memory per request",
        f"{CLIENTS} clients ask one after the other for completions of the sizes of the Azure conversation trace, through Envoy, of "
        f"one engine of {POOL_TOKENS} tokens that answers within {ANSWER_S:g} s: {size.asked} requests, then {size.left} whose "
        "clients leave in the middle of their body.",
        command,
    )  # fmt: skip
    report.figure("answers", ", ".join(f"{n} x {status}" for status, n in sorted(clients.seen.items())))
    report.figure("requests a second", f"{clients.sent / (time.monotonic() - began):.0f}")
    for name, samples in asked.items():
        shown = [f"{resident / 2**20:.1f}" for _, resident in samples[:: max(1, len(samples) // 12)]]
        report.figure(f"{name}: resident MiB over the requests", " ".join(shown))
        _judge(report, f"{name}: growth in the second half, bytes per request", samples, size)
    for name, samples in left.items():
        _judge(report, f"{name}: growth where clients leave during the upload, bytes per request", samples, size)
    return report


def _judge(report: Report, what: str, samples: list[tuple[float, float]], size: Size) -> None:
    slope, noise = trend(samples[len(samples) // 2 :])
    report.figure(
        what, f"{slope:+.1f} ± {noise:.1f}", f"<= {FLAT_BYTES:g}" if size.judged else "",
        holds=not size.judged or slope <= FLAT_BYTES,
    )  # fmt: skip
