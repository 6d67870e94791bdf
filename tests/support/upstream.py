"""A small real HTTP upstream that records what reached it and answers as told."""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Seen:
    """One request as the upstream received it; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What the upstream answers; ``status`` 0 closes the connection without an answer."""

    status: int = 200
    body: bytes = b'{"ok":true}'
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


def naming(name: str) -> Callable[[Seen], Answer]:
    """An upstream that answers with its own name."""
    return lambda _: Answer(body=json.dumps({"served_by": name}).encode())


class Upstream:
    """A listening server with the requests it has seen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Seen] = []
        self.answer: Callable[[Seen], Answer] = naming(name)
        self.port = 0
        self.tls = False

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"


def _handler(upstream: Upstream) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = (
                self.rfile.read(length)
                if "chunked" not in self.headers.get("transfer-encoding", "")
                else self._chunks()
            )
            headers = {k.lower(): v for k, v in self.headers.items()}
            seen = Seen(self.command, self.path, headers, body)
            upstream.seen.append(seen)
            answer = upstream.answer(seen)
            if answer.status == 0:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in {**answer.headers, "content-length": str(len(answer.body))}.items():
                self.send_header(key, value)
            self.end_headers()
            with suppress(OSError):  # a client that gave up
                self.wfile.write(answer.body)

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def serving(name: str, *, certificate: tuple[Path, Path] | None = None) -> Iterator[Upstream]:
    """Serve on an ephemeral port; with ``certificate`` (chain, key) over TLS."""
    upstream = Upstream(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(upstream))
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        upstream.tls = True
    upstream.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield upstream
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
