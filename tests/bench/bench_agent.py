"""What the agent costs: ``python -m tests.bench.bench_agent [--rounds N] [--json FILE]``.

CPU and wall time of one round (scrape, read, publish to the in-memory ledger) for 1, 10 and 100 replicas, each a
loopback server in another process that serves vLLM's real 67 kB /metrics body, and the parse time of that body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from extproc.agent.devices.host import Host
from extproc.agent.devices.watch import DeviceWatch
from extproc.agent.discovery import Endpoint, Static
from extproc.agent.engines.vllm import WANTED
from extproc.agent.exposition import parse
from extproc.agent.loop import Agent, Settings
from extproc.ledger.inmemory import InMemoryLedger

BODY = (Path(__file__).parents[1] / "data" / "metrics" / "vllm-0.32-idle" / "metrics.txt").read_bytes()
MODELS = b'{"object":"list","data":[{"id":"tiny","max_model_len":8192}]}'
REPLICAS = (1, 10, 100)


async def _engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of a vLLM look-alike."""
    answers = {b"/health": b"", b"/metrics": BODY, b"/v1/models": MODELS}
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = answers.get(head.split(b" ", 2)[1], b"")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _serve(told: Connection) -> None:
    """The engines' process: one listener is enough, each replica has its own connection."""

    async def main() -> None:
        server = await asyncio.start_server(_engine, "127.0.0.1", 0, backlog=256)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def rounds(port: int, replicas: int, count: int) -> dict[str, Any]:
    """Figures of ``count`` rounds after two warm ones."""
    url = f"http://127.0.0.1:{port}"
    agent = Agent(
        InMemoryLedger(time.monotonic),
        Static([Endpoint(f"r{n}", "t", "vllm", url) for n in range(replicas)]),
        DeviceWatch([Host("bench")]),
        Settings("bench", "one", timeout_s=5.0),
    )
    for _ in range(2):
        await agent.round()
    cpu, wall = [], []
    for _ in range(count):
        begun, used = time.perf_counter(), time.process_time()
        await agent.round()
        wall.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
    ready = sum(report.state == "ready" for report in agent.published)
    await agent.close()
    return {
        "replicas": replicas,
        "ready": ready,
        "cpu_ms": round(statistics.median(cpu) * 1e3, 2),
        "wall_ms": round(statistics.median(wall) * 1e3, 2),
        "cpu_share_at_1_per_s": round(statistics.median(cpu), 4),
    }


def parse_ms() -> dict[str, float]:
    """Best of many parses of the body, whole and with only the names that vLLM's row reads."""
    text, found = BODY.decode(), {}
    for name, wanted in (("whole", None), ("wanted", WANTED)):
        times = []
        for _ in range(200):
            begun = time.perf_counter()
            parse(text, wanted)
            times.append(time.perf_counter() - begun)
        found[name] = round(min(times) * 1e3, 3)
    return found


def main() -> int:
    """Print the figures; 1 where the parse takes more than 3 ms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engines = context.Process(target=_serve, args=(theirs,), daemon=True)
    engines.start()
    try:
        port = ours.recv()
        found = {
            "body_bytes": len(BODY),
            "parse_ms": parse_ms(),
            "rounds": [asyncio.run(rounds(port, n, args.rounds)) for n in REPLICAS],
        }
    finally:
        engines.terminate()
        engines.join()
    for row in found["rounds"]:
        print(f"{row['replicas']:4d} replicas: {row['cpu_ms']:8.2f} ms CPU, {row['wall_ms']:8.2f} ms wall a round")
    print(
        f"parse of {len(BODY)} bytes: {found['parse_ms']['whole']} ms whole, {found['parse_ms']['wanted']} ms as read"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["parse_ms"]["whole"] > 3.0)


if __name__ == "__main__":
    raise SystemExit(main())
