"""What can go wrong in a chaos run: each fault breaks one part, waits, and mends it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.chaos.proxy import Proxy
from tests.support.load import over_capacity
from tests.support.stack import STOP_WITHIN_S, Stack


@dataclass
class Scene:
    """The parts that faults act on, and what they leave behind for the final account."""

    stack: Stack
    rng: random.Random
    #: The way to the ledger, where it is one server.
    proxy: Proxy | None = None
    #: Engine -> when it was killed (monotonic): streams on it then are the engine's victims, not kvgate's.
    killed: dict[str, list[float]] = field(default_factory=dict)
    #: What the engines counted before a kill took their counts along.
    signs: list[str] = field(default_factory=list)


async def serve_killed(scene: Scene) -> None:
    """SIGKILL, back within 4 s."""
    scene.stack.kill_serve()
    await asyncio.sleep(scene.rng.uniform(0.2, 3.0))
    await asyncio.to_thread(scene.stack.start_serve)


async def serve_told_to_go(scene: Scene) -> None:
    """SIGTERM and a new one."""
    process = scene.stack.serves[0]
    process.terminate()
    await asyncio.to_thread(process.wait, STOP_WITHIN_S)
    await asyncio.to_thread(scene.stack.start_serve)


async def serve_stopped(scene: Scene) -> None:
    """SIGSTOP for up to 9 s."""
    await _stopped(scene, scene.stack.serves[0].send_signal, 9.0)


async def agent_killed(scene: Scene) -> None:
    """SIGKILL, back within 6 s."""
    scene.stack.kill_agent()
    await asyncio.sleep(scene.rng.uniform(0.5, 6.0))
    scene.stack.start_agent()


async def agent_stopped(scene: Scene) -> None:
    """SIGSTOP for up to 6 s: its reports grow old."""
    assert scene.stack.agent is not None
    await _stopped(scene, scene.stack.agent.send_signal, 6.0)


async def engine_killed(scene: Scene) -> None:
    """SIGKILL of one engine, back within 3 s."""
    name = scene.rng.choice(["primary-0", "small-0"])
    scene.signs += over_capacity(scene.stack, name)
    scene.killed.setdefault(name, []).append(time.monotonic())
    scene.stack.kill_engine(name)
    await asyncio.sleep(scene.rng.uniform(0.5, 3.0))
    await asyncio.to_thread(scene.stack.engines[name].start)


async def ledger_killed(scene: Scene) -> None:
    """SIGKILL of Valkey; its data survives."""
    scene.stack.valkey.kill()
    await asyncio.sleep(scene.rng.uniform(0.2, 3.0))
    await asyncio.to_thread(scene.stack.valkey.start)


async def ledger_lost(scene: Scene) -> None:
    """SIGKILL of Valkey, and its data is gone."""
    scene.stack.valkey.kill()
    await asyncio.to_thread(scene.stack.valkey.lose_data)
    await asyncio.sleep(scene.rng.uniform(0.2, 3.0))
    await asyncio.to_thread(scene.stack.valkey.start)


async def ledger_stopped(scene: Scene) -> None:
    """SIGSTOP of Valkey, for longer than a lease at times."""
    scene.stack.valkey.pause()
    await asyncio.sleep(scene.rng.uniform(0.3, 12.0))
    scene.stack.valkey.resume()


async def ledger_slow(scene: Scene) -> None:
    """500 ms each way to the ledger."""
    proxy = _proxy(scene)
    proxy.delay_s = 0.5
    await asyncio.sleep(scene.rng.uniform(2.0, 5.0))
    proxy.delay_s = 0.0


async def ledger_cut(scene: Scene) -> None:
    """Connections to the ledger break, a few times."""
    for _ in range(scene.rng.randint(1, 4)):
        _proxy(scene).cut()
        await asyncio.sleep(scene.rng.uniform(0.1, 0.7))


async def ledger_unreachable(scene: Scene) -> None:
    """No way to the ledger, which lives."""
    proxy = _proxy(scene)
    proxy.closed = True
    proxy.cut()
    await asyncio.sleep(scene.rng.uniform(0.5, 6.0))
    proxy.closed = False


def _proxy(scene: Scene) -> Proxy:
    assert scene.proxy is not None
    return scene.proxy


Fault = Callable[[Scene], Awaitable[None]]
#: Faults of kvgate's own parts and of the engines.
COMMON: tuple[Fault, ...] = (
    serve_killed, serve_told_to_go, serve_stopped, agent_killed, agent_stopped, engine_killed,
)  # fmt: skip
#: The deck where the ledger is one server.
SINGLE_DECK: tuple[Fault, ...] = (
    *COMMON, ledger_killed, ledger_lost, ledger_stopped, ledger_slow, ledger_cut, ledger_unreachable,
)  # fmt: skip


async def _stopped(scene: Scene, send: Callable[[int], None], longest_s: float) -> None:
    send(signal.SIGSTOP)
    await asyncio.sleep(scene.rng.uniform(1.0, longest_s))
    send(signal.SIGCONT)
