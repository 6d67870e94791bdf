"""What a decision adds to a request: ``python -m tests.bench.bench_gateway [--seconds S] [--json FILE]``.

Five arms with the same client, upstream and Envoy, in short alternating rounds: Envoy alone, a no-op ext_proc server
(``tests.bench.noop``), the same with kvgate's own calls of gRPC, ``kvgate serve`` that counts by the bound, and ``kvgate serve`` that counts with a real
tokenizer text it has never seen. Latency is the client's; CPU is the server process's own clock.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from extproc.config import load
from extproc.gateway.build import as_dict, build
from extproc.gateway.protos import bootstrap
from extproc.ledger.redis import RedisLedger
from tests.bench.closed_loop import Upstream, drive
from tests.payloads.tokenizers import tokenizer_dir
from tests.support import envoy_process
from tests.support.valkey import ValkeyServer

ALONE, NOOP, LEAN, BOUND, COUNTED = "envoy alone", "no-op", "no-op, lean", "kvgate, bound", "kvgate, counted"
ARMS = (ALONE, NOOP, LEAN, BOUND, COUNTED)
#: Name -> bytes of the request body.
BODIES = {"1 KB": 1_000, "20 KB": 20_000}
CONCURRENT = (1, 8)
#: The aim for the decision without counting, in Python CPU per request over the no-op server's.
AIM_RATIO = 2.0
CLUSTER = "engine-0"
WARM_S = 1.0
START_S = 30.0


@dataclass
class Cell:
    """What one arm did for one body size and concurrency, over all rounds."""

    latencies_s: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    #: Answers other than 200.
    others: int = 0

    def figures(self) -> dict[str, float]:
        """Milliseconds of latency (median over rounds of each round's quantile), microseconds of CPU per request."""
        rounds = [sorted(round_) for round_ in self.latencies_s]
        every = sorted(itertools.chain.from_iterable(rounds))
        return {
            "requests": len(every),
            "others": self.others,
            "p50_ms": statistics.median(quantile(r, 0.5) for r in rounds) * 1e3,
            "p99_ms": quantile(every, 0.99) * 1e3,
            "cpu_us": statistics.median(c / len(r) for c, r in zip(self.cpu_s, rounds, strict=True)) * 1e6,
        }


@dataclass(frozen=True)
class Arm:
    """One way through: Envoy's port and the Python process behind it, if any."""

    name: str
    port: int
    pid: int | None

    def cpu_s(self) -> float:
        """CPU seconds the Python process has used so far, to the nanosecond (Linux: the clock of another process)."""
        return 0.0 if self.pid is None else time.clock_gettime((~self.pid << 3) | 2)


def quantile(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of ``ordered`` lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def requests_of(size: int) -> Callable[[], bytes]:
    """Requests with a body of about ``size`` bytes, each with text of its own in every message."""
    source = (Path(__file__).parents[2] / "extproc" / "decisions.py").read_text("utf-8")
    messages = max(1, size // 5_000)
    text = source[: size // messages - 120]
    numbers = itertools.count(10_000)

    def make() -> bytes:
        number = next(numbers)
        body = json.dumps({
            "model": "coder", "max_tokens": 64,
            "messages": [{"role": "user", "content": f"{number} {i} {text}"} for i in range(messages)],
        }).encode()  # fmt: skip
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer secret\r\nuser-agent: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    return make


def config_text(socket: Path, upstream_port: int, ledger_url: str, pool: str, tokenizer: Path | None) -> str:
    """kvgate.yaml of one arm: one replica with a pool that never fills, no agent."""
    return json.dumps({
        "ledger": {"url": ledger_url, "pool": pool, "deadlineMs": 500},
        "serve": {"listen": f"unix:{socket}", "admin": "127.0.0.1:0"},
        "envoy": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "messageTimeoutMs": 2000},
        "models": {"m": {"geometry": "Qwen2.5-Coder-32B", **({"tokenizer": str(tokenizer)} if tokenizer else {})}},
        "targets": {"engine": {"model": "m", "engine": "vllm", "replicas": [
            {"name": CLUSTER, "url": f"http://127.0.0.1:{upstream_port}", "kvTokens": 1_000_000_000}
        ]}},
        "lanes": {"edit": {"maxOutputTokens": 400}},
        "aliases": {"coder": {"lane": "edit", "targets": ["engine"]}},
        "noAgent": "ledgerOnly",
    })  # fmt: skip


def alone(made: bootstrap.Bootstrap) -> bootstrap.Bootstrap:
    """The same Envoy without kvgate: no ext_proc filter, no access log to it, every request to the one engine."""
    tree: Any = as_dict(made)
    resources = tree["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] != "envoy.filters.http.ext_proc"]
    del manager["access_log"]
    del manager["http_filters"][-1]["typed_config"]["upstream_log"]
    host = manager["route_config"]["virtual_hosts"][0]
    host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": CLUSTER, "timeout": "0s"}}]
    del host["response_headers_to_add"]
    resources["clusters"] = [c for c in resources["clusters"] if c["name"] == CLUSTER]
    return _Tree(tree)  # type: ignore[return-value]  # what ``envoy_process.running`` asks of a bootstrap


@dataclass(frozen=True)
class _Tree:
    """A bootstrap that is already plain data."""

    tree: dict[str, Any]

    def to_dict(self, *, casing: Any) -> dict[str, Any]:
        """As betterproto's."""
        return self.tree


@contextmanager
def server(arguments: list[str], log: Path) -> Iterator[int]:
    """A Python server process that prints a line when it is ready; its pid."""
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        with process.stdout as out:
            if b"ready" not in out.readline():
                raise RuntimeError(f"{arguments[0]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
        yield process.pid
    finally:
        process.terminate()
        process.wait(15)


def noop(config: Path, socket: Path) -> list[str]:
    """Arguments of the no-op server."""
    return ["tests.bench.noop", f"unix:{socket}", CLUSTER]


def lean(config: Path, socket: Path) -> list[str]:
    """Arguments of the no-op server that calls gRPC as kvgate does."""
    return [*noop(config, socket), "--lean"]


def kvgate(config: Path, socket: Path) -> list[str]:
    """Arguments of ``kvgate serve``."""
    return ["extproc.cli", "serve", "-c", str(config), "--workers", "1"]


@asynccontextmanager
async def arms(upstream_port: int) -> AsyncIterator[list[Arm]]:
    """All arms, running."""
    tokenizer = tokenizer_dir("qwen-2.5") / "tokenizer.json"
    plans: list[tuple[str, Callable[[Path, Path], list[str]] | None, Path | None]] = [
        (ALONE, None, None), (NOOP, noop, None), (LEAN, lean, None), (BOUND, kvgate, None), (COUNTED, kvgate, tokenizer)
    ]  # fmt: skip
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer())
        top = Path(tempfile.mkdtemp(prefix="kvb-"))
        stack.callback(shutil.rmtree, top, ignore_errors=True)
        running = []
        for number, (name, launch, tokens) in enumerate(plans):
            folder = top / str(number)
            folder.mkdir()
            config, socket = folder / "kvgate.yaml", folder / "s"
            await new_pool(valkey.url, f"bench-{number}")
            config.write_text(config_text(socket, upstream_port, valkey.url, f"bench-{number}", tokens))
            pid = stack.enter_context(server(launch(config, socket), folder / "log")) if launch else None
            made = build(load(config))
            gateway = stack.enter_context(
                envoy_process.running(made if launch else alone(made), folder, environment=os.environ)
            )
            running.append(Arm(name, gateway.port, pid))
        yield running


async def new_pool(url: str, pool: str) -> None:
    """Tell the ledger that this pool begins empty, so that serve does not take it for a loss of data."""
    ledger = await RedisLedger.connect(url, pool, deadline_s=5.0, fresh=True)
    await ledger.time_s()
    await ledger.close()


async def ready(arm: Arm) -> None:
    """Wait until the arm answers 200."""
    until = time.monotonic() + START_S
    while True:
        took, _ = await drive(arm.port, requests_of(200), 1, 0.01)
        if took:
            return
        if time.monotonic() > until:
            raise TimeoutError(f"{arm.name} did not answer 200 within {START_S} s")
        await asyncio.sleep(0.1)


async def measure(seconds: float, slice_s: float) -> dict[tuple[str, str, int], Cell]:
    """Alternate over all arms, bodies and concurrencies in slices until ``seconds`` have passed."""
    listening = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    cells: dict[tuple[str, str, int], Cell] = {}
    makers = {name: requests_of(size) for name, size in BODIES.items()}
    async with arms(listening.sockets[0].getsockname()[1]) as running:
        for arm in running:
            await ready(arm)
            for make in makers.values():
                await drive(arm.port, make, max(CONCURRENT), WARM_S)
        stop_at = time.monotonic() + seconds
        while time.monotonic() < stop_at:
            for (body, make), concurrent, arm in itertools.product(makers.items(), CONCURRENT, running):
                cell = cells.setdefault((arm.name, body, concurrent), Cell())
                cpu_s = arm.cpu_s()
                took, others = await drive(arm.port, make, concurrent, slice_s)
                cell.others += others
                if took:
                    cell.latencies_s.append(took)
                    cell.cpu_s.append(arm.cpu_s() - cpu_s)
    listening.close()
    return cells


def table(cells: dict[tuple[str, str, int], Cell]) -> list[dict[str, Any]]:
    """One row per arm, body and concurrency; what it adds to Envoy alone, and as a ratio over the no-op server."""
    rows = []
    for (name, body, concurrent), cell in sorted(cells.items(), key=lambda item: (item[0][1:], ARMS.index(item[0][0]))):
        mine = cell.figures()
        base = cells[(ALONE, body, concurrent)].figures()
        floor = cells[(NOOP, body, concurrent)].figures()
        rows.append({
            "arm": name, "body": body, "concurrent": concurrent, **mine,
            "added_p50_ms": mine["p50_ms"] - base["p50_ms"],
            "added_p99_ms": mine["p99_ms"] - base["p99_ms"],
            "added_p50_over_noop": (mine["p50_ms"] - base["p50_ms"]) / (floor["p50_ms"] - base["p50_ms"]),
            "cpu_over_noop": mine["cpu_us"] / floor["cpu_us"],
        })  # fmt: skip
    return rows


def main() -> int:
    """Print the figures; 1 where the decision without counting costs more than ``AIM_RATIO`` no-op servers of CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--slice", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = table(uvloop.run(measure(args.seconds, args.slice)))
    for row in rows:
        print(
            f"{row['body']:>6} x{row['concurrent']}  {row['arm']:<16} p50 {row['p50_ms']:7.3f} ms  p99 {row['p99_ms']:7.3f} ms"
            f"  added {row['added_p50_ms']:7.3f} / {row['added_p99_ms']:7.3f} ms ({row['added_p50_over_noop']:5.2f} x no-op)"
            f"  CPU {row['cpu_us']:7.1f} us ({row['cpu_over_noop']:5.2f} x)  n={row['requests']}"
        )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "aim": AIM_RATIO}, indent=1) + "\n")
    return int(any(row["cpu_over_noop"] > AIM_RATIO for row in rows if row["arm"] == BOUND))


if __name__ == "__main__":
    sys.exit(main())
