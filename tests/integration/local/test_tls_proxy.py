"""The TLS front in front of a local port, with the certificate that ships with the package."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from extproc.local import stack
from extproc.local.supervisor import Supervisor
from extproc.local.tls_proxy import CERTIFICATE


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every line in capitals until the client ends."""
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()


async def talk(port: int, inner: int) -> tuple[bytes, bytes]:
    """One line through TLS with the name checked, then what is read after the far side is gone."""
    server = await asyncio.start_server(echo, "127.0.0.1", inner)
    trust = ssl.create_default_context(cafile=str(CERTIFICATE))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(b"hello\n")
    answer = await asyncio.wait_for(reader.readline(), 10)
    server.close()
    writer.close()
    await writer.wait_closed()
    late_reader, late = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    nothing = await asyncio.wait_for(late_reader.read(), 10)
    late.close()
    return answer, nothing


def test_bytes_go_through_and_an_absent_backend_closes(tmp_path: Path) -> None:
    """A verified client talks to the port behind; with nothing there the connection ends at once."""
    port, inner = stack.free_ports(2)
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(stack.tls_front("front", port, inner))
        answer, nothing = asyncio.run(talk(port, inner))

    assert (answer, nothing) == (b"HELLO\n", b"")
