"""The agent's admin port: /livez, /readyz, /metrics and /state, for probes and for people.

Owns a GET-only HTTP/1.1 answer per connection. /livez fails only when the loop stands still or a device library
needs a new process; /readyz names each component.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import asdict
from typing import Any

from extproc.agent import metrics
from extproc.agent.loop import Agent

#: A round normally takes milliseconds; this long without one means that the loop hangs.
STUCK_S = 60.0
#: Longest a client may take to send its request.
REQUEST_TIMEOUT_S = 5.0
PHRASES = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
JSON = "application/json"


class Admin:
    """Serves one agent's health and figures."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._server: asyncio.Server | None = None
        self._begun = time.monotonic()

    async def listen(self, host: str, port: int) -> int:
        """Bind and serve; returns the port (for port 0)."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body of one path."""
        if path == "/metrics":
            return 200, metrics.CONTENT_TYPE, metrics.render(self._agent)
        if path == "/livez":
            rounds = self._agent.health.last_round_mono_s or self._begun
            idle_s = time.monotonic() - rounds
            alive = idle_s < STUCK_S
            return (200 if alive else 503), JSON, _json({"ok": alive, "last_round_age_s": round(idle_s, 3)})
        if path == "/readyz":
            health = self._agent.health
            components = dict(health.components) or {"agent": "no round yet"}
            ready = health.ready()
            return (200 if ready else 503), JSON, _json({"ok": ready, "components": components})
        if path == "/state":
            return 200, JSON, _json(self.state())
        return 404, JSON, _json({"error": "paths: /livez /readyz /metrics /state"})

    def state(self) -> dict[str, Any]:
        """Everything the agent believes now, for people."""
        mono_s = time.monotonic()
        return {
            "node": self._agent.settings.node,
            "instance": self._agent.settings.instance,
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
                for watch in self._agent.watches
            ],
            "devices": [asdict(device) for device in self._agent.devices.readings(mono_s)],
            "alarms": [asdict(alarm) for alarm in self._agent.alarms],
        }

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, _, rest = head.partition(" ")
            path = rest.partition(" ")[0].partition("?")[0]
            status, kind, body = (
                self.answer(path) if method in ("GET", "HEAD") else (405, JSON, _json({"error": "GET only"}))
            )
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            method, status, kind, body = "GET", 400, JSON, _json({"error": "not an HTTP request"})
        head_out = (
            f"HTTP/1.1 {status} {PHRASES[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            writer.write(head_out.encode("latin-1") + (b"" if method == "HEAD" else body))
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _json(value: object) -> bytes:
    return json.dumps(value, default=str).encode()
