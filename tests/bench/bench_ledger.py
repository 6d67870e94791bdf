"""What the ledger costs: ``python -m tests.bench.bench_ledger [--seconds S] [--json FILE]``.

Prints reserve+release pairs per second of one Valkey core (several client processes keep the server busy), p50/p99 of
one call inside one process at 1, 32 and 256 concurrent, and how both grow with replicas and live reservations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import time
import uuid
from pathlib import Path
from typing import Any

from extproc.ledger.redis import RedisLedger
from tests.support.ledgers import ask, candidate, end, need, record, report, reservation
from tests.support.valkey import ValkeyServer

#: A pool that is never full: refusals are measured on their own.
BLOCKS = 10_000_000


def server_cpu_s(pid: int) -> float:
    """CPU seconds the server has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def prepared(url: str, pool: str, replicas: int, live: int) -> RedisLedger:
    """A pool with that many reported replicas and live reservations."""
    ledger = await RedisLedger.connect(url, pool, deadline_s=30.0, background_deadline_s=30.0, fresh=True)
    now = await ledger.time_s()
    await ledger.publish([report(now - 0.2, f"r{i}", capacity_blocks=BLOCKS) for i in range(replicas)], [], 3600)
    for first in range(0, live, 500):
        ups = [
            record(
                reservation(f"live-{i}", now, f"r{i % replicas}", need(1), cap_s=7200.0, expected_s=3600.0),
                lease_s=3600.0,
            )
            for i in range(first, min(live, first + 500))
        ]
        await ledger.renew(ups)
    return ledger


async def pairs(ledger: RedisLedger, replica: str, concurrent: int, seconds: float) -> tuple[int, list[float]]:
    """Reserve and release as fast as they go; (pairs, seconds of each reserve call)."""
    place, times, done = candidate(replica, n=need(1)), [], 0
    stop_at = time.perf_counter() + seconds
    mark = uuid.uuid4().hex[:8]

    async def worker(number: int) -> None:
        nonlocal done
        turn = 0
        while time.perf_counter() < stop_at:
            rid = f"{mark}-{number}-{turn}"
            began = time.perf_counter()
            answer = await ledger.reserve(ask(rid, place, unknown_s=3600.0, fresh_s=3600.0))
            times.append(time.perf_counter() - began)
            assert answer.chosen == 0
            await ledger.end([end(rid)])
            done += 1
            turn += 1

    await asyncio.gather(*(worker(i) for i in range(concurrent)))
    return done, sorted(times)


def client(url: str, pool: str, concurrent: int, seconds: float, out: Any) -> None:
    """One process of the throughput run."""

    async def main() -> int:
        ledger = await RedisLedger.connect(url, pool, deadline_s=30.0, background_deadline_s=30.0)
        done, _ = await pairs(ledger, "r0", concurrent, seconds)
        await ledger.close()
        return done

    out.put(asyncio.run(main()))


def throughput(server: ValkeyServer, seconds: float) -> dict[str, float]:
    """Pairs per second of wall time and per second of the server's CPU, with several processes pushing."""
    pool = uuid.uuid4().hex
    asyncio.run(_close(prepared(server.url, pool, 1, 0)))
    context = multiprocessing.get_context("spawn")
    out, processes = context.Queue(), max(2, (os.cpu_count() or 2))
    running = [context.Process(target=client, args=(server.url, pool, 32, seconds, out)) for _ in range(processes)]
    cpu_s = server_cpu_s(server.pid)
    for process in running:
        process.start()
    done = sum(out.get() for _ in running)
    for process in running:
        process.join()
    cpu_s = server_cpu_s(server.pid) - cpu_s
    return {"pairs_per_s_wall": done / seconds, "pairs_per_s_of_server_cpu": done / cpu_s, "server_cpu_s": cpu_s}


async def _close(making: Any) -> None:
    await (await making).close()


async def latency(server: ValkeyServer, concurrent: int, replicas: int, live: int, seconds: float) -> dict[str, float]:
    """One process: p50 and p99 of a reserve call in ms, pairs per second, server CPU per pair in microseconds."""
    ledger = await prepared(server.url, uuid.uuid4().hex, replicas, live)
    await pairs(ledger, "r0", concurrent, 0.2)
    cpu_s = server_cpu_s(server.pid)
    done, times = await pairs(ledger, "r0", concurrent, seconds)
    cpu_s = server_cpu_s(server.pid) - cpu_s
    await ledger.close()
    return {
        "concurrent": concurrent, "replicas": replicas, "live": live, "pairs_per_s": done / seconds,
        "p50_ms": times[len(times) // 2] * 1000, "p99_ms": times[int(len(times) * 0.99)] * 1000,
        "server_us_per_pair": cpu_s / done * 1e6,
    }  # fmt: skip


async def others(server: ValkeyServer) -> dict[str, float]:
    """Milliseconds of the calls that are not on a request's way, with 100 replicas and 10,000 live reservations."""
    ledger = await prepared(server.url, uuid.uuid4().hex, 100, 10_000)
    now = await ledger.time_s()
    ups = [record(reservation(f"live-{i}", now, f"r{i % 100}", need(1)), lease_s=3600.0) for i in range(100)]
    full = candidate("r0", n=need(BLOCKS))
    calls = {
        "snapshot": lambda: ledger.snapshot(),
        "publish one replica": lambda: ledger.publish(
            [report(time.time(), "r0", capacity_blocks=BLOCKS, running=100)], [], 3600
        ),
        "renew 100": lambda: ledger.renew(ups),
        "reap": lambda: ledger.reap(listened_s=20.0, owners=["envoy-1"]),
        "refused reserve": lambda: ledger.reserve(ask(uuid.uuid4().hex, full, unknown_s=3600.0)),
    }
    figures = {}
    for name, call in calls.items():
        began = time.perf_counter()
        for _ in range(20):
            await call()
        figures[name] = (time.perf_counter() - began) / 20 * 1000
    await ledger.close()
    return figures


def main() -> None:
    """Measure and print; ``--json`` also writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [(1, 1, 0), (32, 1, 0), (256, 1, 0), (32, 10, 0), (32, 100, 0), (32, 1000, 0), (32, 10, 10), (32, 10, 1000),
            (32, 10, 100_000)]  # fmt: skip
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "at": time.strftime("%Y-%m-%d"),
    }
    with ValkeyServer() as server:
        result["throughput"] = throughput(server, args.seconds * 2)
        print("throughput", {k: round(v) for k, v in result["throughput"].items()})
        result["latency"] = []
        for concurrent, replicas, live in rows:
            row = asyncio.run(latency(server, concurrent, replicas, live, args.seconds))
            result["latency"].append(row)
            print({k: round(v, 3) for k, v in row.items()}, flush=True)
        result["others_ms"] = asyncio.run(others(server))
        print({k: round(v, 3) for k, v in result["others_ms"].items()})
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
