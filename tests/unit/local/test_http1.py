"""The small HTTP server's parsing, without sockets: every body arrives whole, byte by byte and with bytes behind it."""

from __future__ import annotations

import pytest

from extproc.local.http1 import BodyReader, HttpFault, parse_head

CASES = [
    ({"content-length": "5"}, b"hello", b"hello"),
    ({}, b"", b""),
    ({"transfer-encoding": "chunked"}, b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n", b"hello"),
    ({"transfer-encoding": "chunked"}, b"A\r\n0123456789\r\n0\r\ntrailer: yes\r\n\r\n", b"0123456789"),
]


@pytest.mark.parametrize(("headers", "wire", "body"), CASES)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_body_is_read_however_it_is_cut(headers: dict[str, str], wire: bytes, body: bytes, step: int) -> None:
    """The body is complete at its last byte, and the next request's bytes stay in the buffer."""
    reader, buffer, got = BodyReader(headers), bytearray(), None
    for at in range(0, max(len(wire), 1), step):
        assert got is None
        buffer += wire[at : at + step]
        got = reader.feed(buffer)
    buffer += b"GET /"

    assert got == body
    assert bytes(buffer) == b"GET /"


@pytest.mark.parametrize("headers", [{"content-length": "-1"}, {"content-length": "x"}])
def test_a_bad_length_is_refused(headers: dict[str, str]) -> None:
    """A length that is no whole number is answered 400."""
    with pytest.raises(HttpFault) as fault:
        BodyReader(headers)
    assert fault.value.status == 400


def test_a_bad_chunk_size_is_refused() -> None:
    """A size line that is not hexadecimal is answered 400."""
    with pytest.raises(HttpFault) as fault:
        BodyReader({"transfer-encoding": "chunked"}).feed(bytearray(b"zz\r\n"))
    assert fault.value.status == 400


def test_a_head_is_read_without_its_query() -> None:
    """Names are lower case, repeated headers are joined, the query is no part of the path."""
    head = parse_head(b"POST /v1/x?a=b HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nx-a:2")

    assert head == ("POST", "/v1/x", {"host": "a", "x-a": "1, 2"})


@pytest.mark.parametrize(
    "head", [b"GET /", b"GET / HTTP/2\r\na: b", b"GET / HTTP/1.1\r\nno colon", b"GET / HTTP/1.1\r\n a: b"]
)
def test_a_broken_head_is_refused(head: bytes) -> None:
    """What is no HTTP/1 head is answered 400."""
    with pytest.raises(HttpFault) as fault:
        parse_head(head)
    assert fault.value.status == 400
