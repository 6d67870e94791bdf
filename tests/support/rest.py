"""A stack that several tests share, put to rest before each of them: whatever ran before, in whatever order, left nothing.

Owns what rest is. A test that failed may have left parts dead, stopped or faulty: those are brought back, so that it fails
alone. Everything else has to come to rest by itself, and what does not is named.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator

from extproc.candidates import REMOTE_CLOSED
from extproc.config import load
from extproc.ledger.base import LedgerSnapshot
from extproc.ledger.keys import key
from extproc.ledger.posture import BEAT_S, BEAT_TTL_S
from tests.support.stack import SEEN_AFTER_S, Stack, unhealthy
from tests.support.valkey import command

#: Longer than anything that ends by itself: bypass is remembered for 30 s, silence frees after 10 s that may have to be
#: counted anew, a remote is visited every 10 s, lost data is unknown for 60 s.
RESTS_WITHIN_S = 150.0
#: A ``serve`` whose last heartbeat is younger reaches the ledger now.
FRESH_BEAT_S = BEAT_S + 0.5


async def put_to_rest(stack: Stack) -> None:
    """Wait until ``stack`` is as it was after its start: whole, ready, without work, faults or memory that decides.

    What past answers taught ``serve`` stays: tests whose outcome hangs on a length say ``min_tokens``.
    """
    brought_back = await asyncio.to_thread(_bring_back, stack)
    _forget_promises(stack)
    until = time.monotonic() + RESTS_WITHIN_S
    unsettled = brought_back
    while found := await _unrest(stack):
        if time.monotonic() > until:
            raise AssertionError(f"no rest after {RESTS_WITHIN_S:g} s: {found}\n{stack.logs()}")
        print(f"not at rest: {found}")
        unsettled = unsettled or any(line.startswith(STATE) for line in found)
        await asyncio.sleep(0.1)
    if unsettled:
        await asyncio.sleep(SEEN_AFTER_S)  # `serve` reads for itself what is ready


def _bring_back(stack: Stack) -> bool:
    """Start what is dead, wake what is stopped, mend what is faulty; whether anything was dead."""
    dead = stack.valkey.wake()
    for engine in stack.engines.values():
        if _dead(engine.process):
            dead = True
            engine.start()
        engine.faults(clear=True)
    for number, serve in enumerate(stack.serves):
        if _dead(serve):
            dead = True
            stack.start_serve(number)
    if _dead(stack.agent):
        dead = True
        stack.start_agent()
    return dead


def _dead(process: subprocess.Popen[bytes] | None) -> bool:
    """Whether it has to be started again; a stopped one is woken."""
    if process is None or process.poll() is not None:
        return True
    process.send_signal(signal.SIGCONT)
    return False


def _forget_promises(stack: Stack) -> None:
    """Empty the line of refused requests: their clients went with their test, and their time may be a minute away."""
    pool = load(stack.config_path).ledger.pool
    command(stack.valkey.port, "DEL", key(pool, "line"))
    command(stack.valkey.port, "HDEL", key(pool, "meta"), "kept")


#: Begins what `serve` has to have read, too, before a test may count on it.
STATE = "state"


async def _unrest(stack: Stack) -> list[str]:
    """What is not at rest, one line each."""
    snapshot = await stack.snapshot()
    return [*_in_ledger(stack, snapshot), *_in_engines(stack), *_in_serves(stack, snapshot), *unhealthy(stack.envoy)]


def _in_ledger(stack: Stack, snapshot: LedgerSnapshot) -> Iterator[str]:
    config = load(stack.config_path)
    for name in (name for name, target in config.targets.items() if target.remote):
        view = snapshot.replicas.get(name)
        if view is not None and view.state in REMOTE_CLOSED:
            yield f"{STATE} of {name}: {view.state}"
    for name in (replica.name for _, _, replica in config.local_replicas()):
        view = snapshot.replicas.get(name)
        if view is None or view.report is None or view.state != "ready":
            yield f"{STATE} of {name}: {view.state if view else None}"
            continue
        inside = (view.report.running, view.report.waiting)
        if view.reservations or view.committed_blocks != 0 or view.prefill_level_tokens or inside != (0, 0):
            yield f"{name}: {view}"
        if view.bypass:
            yield f"{name}: bypass is remembered"
    yield from (f"lane {lane}: {live} live" for lane, live in snapshot.lanes.items() if live)


def _in_engines(stack: Stack) -> Iterator[str]:
    for name, engine in stack.engines.items():
        stats = engine.stats()
        if stats["open_requests"] or stats["used_blocks"]:
            yield f"{name}: {stats['open_requests']} requests, {stats['used_blocks']} blocks"


def _in_serves(stack: Stack, snapshot: LedgerSnapshot) -> Iterator[str]:
    """Each reaches the ledger, and nobody else is counted as alive."""
    beats = command(stack.valkey.port, "ZRANGE", key(load(stack.config_path).ledger.pool, "alive"), 0, -1, "WITHSCORES")
    ages = {
        int(name.decode().split(".")[-2]): snapshot.now_s - (int(score) / 1e6 - BEAT_TTL_S)
        for name, score in zip(beats[::2], beats[1::2], strict=True)
    }
    if set(ages) != {serve.pid for serve in stack.serves} or max(ages.values()) > FRESH_BEAT_S:
        yield f"serve: beats {ages}"
