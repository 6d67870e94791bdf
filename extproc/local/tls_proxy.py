"""A TLS front for one local port: what makes the demo's third llama-server look like a remote API.

``python -m extproc.local.tls_proxy --to 8113 --port 8443`` terminates TLS with a certificate that ships with the
package, is the same on every machine and so protects nothing: for loopback and tests only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import ssl
import sys
from pathlib import Path

DEMO = Path(__file__).parent / "demo"
CERTIFICATE = DEMO / "test-only-cert.pem"
KEY = DEMO / "test-only-key.pem"
_PIECE = 65_536


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until its end or until the other side is gone."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy the answers, and say in the first one's head that the connection ends with it.

    llama-server closes idle connections after 5 s without a word, so a client that reuses one now and then sends a
    request into its closing. One request a connection has no such race.
    """
    with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"keep-alive:", b"connection:"))]
        writer.write(b"\r\n".join([lines[0], b"Connection: close", *lines[1:]]))
        await _pump(reader, writer)


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_port: int) -> None:
    """Connect one client with the port behind; whichever side ends ends both."""
    try:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", to_port)
    except OSError:
        writer.close()
        return
    ways = [asyncio.create_task(_pump(reader, inner_writer)), asyncio.create_task(_answer(inner_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for side in (writer, inner_writer):
            side.close()


async def serve(port: int, to_port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    server = await asyncio.start_server(
        lambda reader, writer: _join(reader, writer, to_port), "127.0.0.1", port, ssl=context, backlog=256
    )
    print(f"TLS on https://127.0.0.1:{port} -> http://127.0.0.1:{to_port}", flush=True)
    await stop.wait()
    server.close()


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 where the port cannot be opened."""
    parser = argparse.ArgumentParser(
        prog="python -m extproc.local.tls_proxy", description="TLS front for a local port (test only)."
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, required=True, help="the plain HTTP port behind")
    args = parser.parse_args(argv)
    try:
        asyncio.run(serve(args.port, args.to))
    except OSError as error:
        print(
            f"tls_proxy: cannot listen on 127.0.0.1:{args.port}: {error.strerror}; choose another --port",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
