"""The TLS front in front of a local port, with the certificate that ships with the package."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from extproc.local import stack
from extproc.local.supervisor import Supervisor
from extproc.local.tls_proxy import CERTIFICATE


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request as an engine that keeps connections would."""
    request = await reader.readuntil(b"\r\n\r\n")
    assert request.startswith(b"GET /x")
    writer.write(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def talk(port: int, inner: int) -> tuple[bytes, bytes]:
    """One request through TLS with the name checked, then what is read once nothing listens behind."""
    server = await asyncio.start_server(answer, "127.0.0.1", inner)
    trust = ssl.create_default_context(cafile=str(CERTIFICATE))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
    got = await asyncio.wait_for(reader.readuntil(b"ok"), 60)
    server.close()
    writer.close()
    await writer.wait_closed()
    late_reader, late = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    nothing = await asyncio.wait_for(late_reader.read(), 60)
    late.close()
    await late.wait_closed()
    return got, nothing


def test_an_answer_goes_through_and_ends_its_connection(tmp_path: Path) -> None:
    """A verified client is answered and told that the connection closes; with nothing behind it ends at once."""
    port, inner = stack.free_ports(2)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(stack.tls_front("front", port, inner))
        got, nothing = asyncio.run(talk(port, inner))

    assert got == b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    assert nothing == b""
