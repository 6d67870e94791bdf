"""What the agent's admin port answers: /livez, /readyz, /metrics and /state, for probes and for people.

Owns the answers, not the connections (``extproc.admin``). /livez fails only when the loop stands still; /readyz
names each component.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from extproc.admin import Answer, Handler
from extproc.agent import metrics
from extproc.agent.loop import Agent

#: A round normally takes milliseconds; this long without one means that the loop hangs.
STUCK_S = 60.0
JSON = "application/json"


def routes(agent: Agent) -> dict[str, Handler]:
    """The paths of one agent's admin port."""
    return {
        "/livez": _handler(lambda: _livez(agent)),
        "/readyz": _handler(lambda: _readyz(agent)),
        "/metrics": _handler(lambda: (200, metrics.CONTENT_TYPE, metrics.render(agent))),
        "/state": _handler(lambda: (200, JSON, _json(state(agent)))),
    }


def state(agent: Agent) -> dict[str, Any]:
    """Everything the agent believes now."""
    mono_s = time.monotonic()
    return {
        "node": agent.settings.node,
        "instance": agent.settings.instance,
        "replicas": [
            {
                "target": watch.origin.target,
                "replica": watch.origin.replica,
                "engine": watch.engine.name,
                "state": watch.state(mono_s).value,
                "age_s": watch.age_s(mono_s),
                "cause": watch.cause,
                "reading": None if watch.reading is None else asdict(watch.reading),
                "rates": asdict(watch.rates()),
            }
            for watch in agent.watches
        ],
        "devices": [asdict(device) for device in agent.devices.readings(mono_s)],
        "alarms": [asdict(alarm) for alarm in agent.alarms],
    }


def _livez(agent: Agent) -> Answer:
    health = agent.health
    idle_s = time.monotonic() - (health.last_round_mono_s or health.began_mono_s)
    alive = idle_s < STUCK_S
    return (200 if alive else 503), JSON, _json({"ok": alive, "last_round_age_s": round(idle_s, 3)})


def _readyz(agent: Agent) -> Answer:
    health = agent.health
    components = dict(health.components) or {"agent": "no round yet"}
    return (200 if health.ready() else 503), JSON, _json({"ok": health.ready(), "components": components})


def _handler(answer: Callable[[], Answer]) -> Handler:
    async def handle(_accept: str) -> Answer:
        return answer()

    return handle


def _json(value: object) -> bytes:
    return json.dumps(value, default=str).encode()
