"""Client processes: ``python -m tests.load.clients`` reads its jobs from stdin and prints one JSON line per attempt.

A refused job comes back after exactly the given ``retry-after-ms`` while it has tries left. Times are wall-clock
seconds, which the emulated engines' logs use too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from extproc.local.client import Reply, request
from tests.load.work import Job

#: Longest wait for one answer.
TIMEOUT_S = 90.0
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request as its client saw it; ``tries`` counts those of the same job before it. Status 0: it broke."""

    id: str
    tries: int
    sent_s: float
    over_s: float
    status: int
    decision: str
    reason: str
    retry_ms: int | None
    first_s: float | None
    whole: bool
    aborted: bool = False
    error: str | None = None

    @property
    def refused(self) -> bool:
        """Whether kvgate said no."""
        return self.decision == "reject"


@dataclass(frozen=True, slots=True)
class Order:
    """What one process has to do: ``jobs`` at their times, ``loops`` each one after the other until ``stop_s``."""

    jobs: Sequence[Job] = ()
    loops: Sequence[Sequence[Job]] = ()
    stop_s: float = float("inf")
    retries: int = 0


async def drive(port: int, orders: Sequence[Order], lead_s: float = 2.0) -> list[Attempt]:
    """Run one process per order, all on the same start; every attempt of all of them, in the order they were sent."""
    start_s = time.time() + lead_s
    found = await asyncio.gather(*(_process(port, order, start_s) for order in orders))
    return sorted((attempt for mine in found for attempt in mine), key=lambda attempt: attempt.sent_s)


async def _process(port: int, order: Order, start_s: float) -> list[Attempt]:
    spec = {
        "port": port, "start_s": start_s, "stop_s": None if order.stop_s == float("inf") else order.stop_s,
        "retries": order.retries, "jobs": [job.plain() for job in order.jobs],
        "loops": [[job.plain() for job in loop] for loop in order.loops],
    }  # fmt: skip
    # A file, not a pipe: a client that has much to tell must not wait for its reader.
    with tempfile.TemporaryFile() as found:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.load.clients", stdin=asyncio.subprocess.PIPE, stdout=found
        )
        try:
            await process.communicate(json.dumps(spec).encode())
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            raise RuntimeError(f"a client process ended with {process.returncode}")
        found.seek(0)
        return [Attempt(**json.loads(line)) for line in found]


class _Client:
    """The jobs of one process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._port = int(spec["port"])
        self._start_s = float(spec["start_s"])
        self._stop_s = float("inf") if spec["stop_s"] is None else self._start_s + float(spec["stop_s"])
        self._retries = int(spec["retries"])
        self._jobs = [Job(**job) for job in spec["jobs"]]
        self._loops = [[Job(**job) for job in loop] for loop in spec["loops"]]
        self.attempts: list[Attempt] = []

    async def run(self) -> None:
        await asyncio.sleep(self._start_s - time.time())
        await asyncio.gather(*map(self._at_its_time, self._jobs), *map(self._loop, self._loops))

    async def _at_its_time(self, job: Job) -> None:
        await asyncio.sleep(self._start_s + job.at_s - time.time())
        await self._job(job)

    async def _loop(self, jobs: Sequence[Job]) -> None:
        # Clients that all begin in the same instant would be refused and come back together for a while.
        await asyncio.sleep(jobs[0].at_s)
        for job in jobs:
            if time.time() >= self._stop_s:
                return
            await self._job(job)

    async def _job(self, job: Job) -> None:
        for tries in range(self._retries + 1):
            attempt = await self._attempt(job, tries)
            self.attempts.append(attempt)
            if attempt.status not in (429, 503) or attempt.retry_ms is None or time.time() >= self._stop_s:
                return
            if tries < self._retries:
                await asyncio.sleep(attempt.retry_ms / 1000)

    async def _attempt(self, job: Job, tries: int) -> Attempt:
        sent_s = time.time()
        asked = request(
            self._port, "POST", PATH, body=job.body(), timeout_s=TIMEOUT_S, headers={
                "content-type": "application/json", "x-request-id": job.id, "x-emulator-output-tokens": str(job.output),
            },
        )  # fmt: skip
        try:
            reply = await (asked if job.abort_s is None else asyncio.wait_for(asked, job.abort_s))
        except TimeoutError:
            return Attempt(job.id, tries, sent_s, time.time(), 0, "admit", "", None, None, False, aborted=True)
        return _seen(job, tries, sent_s, reply)


def _seen(job: Job, tries: int, sent_s: float, reply: Reply) -> Attempt:
    retry = reply.headers.get("retry-after-ms", "")
    whole = reply.status == 200 and (not job.stream or reply.events[-1:] == ["[DONE]"])
    return Attempt(
        job.id, tries, sent_s, time.time(), reply.status, reply.headers.get("x-kvgate-decision", ""),
        reply.headers.get("x-kvgate-reason", ""), int(retry) if retry.isdigit() else None, reply.first_byte_s, whole,
        error=reply.error,
    )  # fmt: skip


def main() -> int:
    """Read the order, do it, print the attempts."""
    client = _Client(json.load(sys.stdin))
    uvloop.run(client.run())
    sys.stdout.write("".join(json.dumps(asdict(attempt)) + "\n" for attempt in client.attempts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
