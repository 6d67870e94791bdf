"""One request over HTTP/2 with prior knowledge."""

from __future__ import annotations

import socket

from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded


def ask_http2(port: int, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, dict[str, str], bytes]:
    """POST ``body``; (status, headers, body)."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        client = H2Connection()
        client.initiate_connection()
        head = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "test")]
        client.send_headers(1, head)
        client.send_data(1, body, end_stream=True)
        link.sendall(client.data_to_send())
        headers: dict[str, str] = {}
        received = b""
        while True:
            for event in client.receive_data(link.recv(65536)):
                if isinstance(event, ResponseReceived):
                    headers = {bytes(k).decode(): bytes(v).decode() for k, v in event.headers}
                elif isinstance(event, DataReceived):
                    received += event.data
                elif isinstance(event, StreamEnded):
                    return int(headers[":status"]), headers, received
            link.sendall(client.data_to_send())
