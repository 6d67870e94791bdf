"""A bounded HTTP/1.1 client for the demo's load: one request per connection, answers read whole or as SSE.

Owns sockets and their time limits; knows nothing of kvgate. Loopback only: it refuses any other address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

#: A line of an answer; SSE chunks of the demo's engines stay far below.
LIMIT_BYTES = 1 << 20
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. ``status`` 0 means that the connection broke or the time ran out, and ``error`` says how."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    first_byte_s: float | None
    took_s: float
    error: str | None = None

    def json(self) -> object:
        """The body as JSON, or None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def events(self) -> list[str]:
        """The data of every server-sent event in the body."""
        return [line[6:] for line in self.body.decode(errors="replace").split("\n") if line.startswith("data: ")]


async def request(
    port: int, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None, timeout_s: float
) -> Reply:
    """Send one request to ``port`` on this machine and read the whole answer; never raises for what the peer does."""
    start_s = time.monotonic()
    writer: asyncio.StreamWriter | None = None
    status, first_s = 0, None
    answer: dict[str, str] = {}
    parts: list[bytes] = []
    error = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=LIMIT_BYTES)
            lines = [
                f"{method} {path} HTTP/1.1",
                f"host: {LOOPBACK}:{port}",
                "connection: close",
                f"content-length: {len(body)}",
            ]
            lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            status, answer = _head(await reader.readuntil(b"\r\n\r\n"))
            if "chunked" in answer.get("transfer-encoding", ""):
                while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
                    first_s = first_s or time.monotonic()
                    parts.append(await reader.readexactly(size))
                    await reader.readexactly(2)
            else:
                parts.append(await reader.readexactly(int(answer.get("content-length", "0"))))
                first_s = time.monotonic()
    except TimeoutError:
        error = f"no complete answer in {timeout_s:g} s"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as broken:
        error = f"connection broke ({type(broken).__name__})"
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):  # a reset is no news here
                await writer.wait_closed()
    took_s = time.monotonic() - start_s
    first = None if first_s is None else first_s - start_s
    return Reply(0 if error else status, answer, b"".join(parts), first, took_s, error)


def _head(raw: bytes) -> tuple[int, dict[str, str]]:
    lines = raw.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:]) if name
    }
    return int(lines[0].split(" ")[1]), headers
