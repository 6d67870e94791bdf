"""The forms of single words: what a socket, Envoy or a log could not use is refused with an example."""

from __future__ import annotations

import pytest

from extproc.config.forms import Address, FilePath, Header, HttpUrl, LedgerUrl, Printable, TcpAddress, problem

GOOD = [
    (HttpUrl, "http://10.0.0.5:8000"),
    (HttpUrl, "https://api.example.com/v1"),
    (HttpUrl, "http://[::1]:70/base/path"),
    (HttpUrl, "http://engine_0"),
    (HttpUrl, f"http://{'a' * 63}.b-c.{'d' * 63}"),
    (Address, "unix:/" + "a" * 106),
    (Address, "[fd00::1]:9000"),
    (Address, "localhost:0"),
    (TcpAddress, "127.0.0.1:65535"),
    (Header, "x-team-lane"),
    (Header, "Authorization"),
    (Printable, "qwen 2.5 模型"),
    (LedgerUrl, "embedded"),
    (LedgerUrl, "rediss+sentinel://a:1,b:2/S"),
]
BAD = [
    (HttpUrl, "http://[:::::]:70"),
    (HttpUrl, "http://[1.2.3.4]"),
    (HttpUrl, "http://[fe80::1%eth0]"),
    (HttpUrl, "http://1.2.3.999"),
    (HttpUrl, "http://host:0"),
    (HttpUrl, "http://host:65536"),
    (HttpUrl, "http://user@host"),
    (HttpUrl, "http://a..b"),
    (HttpUrl, "http://a."),
    (HttpUrl, "http://-a"),
    (HttpUrl, f"http://{'a' * 64}.b"),
    (HttpUrl, f"http://{'.'.join(['a' * 63] * 4)}"),
    (HttpUrl, "http://host?x=1"),
    (HttpUrl, "http://host/a b"),
    (HttpUrl, "http://host\n"),
    (HttpUrl, "ftp://host"),
    (HttpUrl, "http://"),
    (HttpUrl, "http://" + "a" * 254),
    (Address, "garbage"),
    (Address, "unix:relative"),
    (Address, "unix:/a b"),
    (Address, "unix:/" + "a" * 107),
    (Address, "unix:/" + "ä" * 54),
    (Address, "127.0.0.1:99999"),
    (Address, ":80"),
    (TcpAddress, "unix:/run/x"),
    (TcpAddress, "127.0.0.1"),
    (FilePath, "a" * 256),
    (FilePath, "/models/" + "ä" * 128 + "/tokenizer.json"),
    (FilePath, "a\x00"),
    (Header, "x-kvgate-lane"),
    (Header, "X-Envoy-Retry-On"),
    (Header, "host"),
    (Header, "Content-Length"),
    (Header, "connection"),
    (Header, "a\nb"),
    (Header, ""),
    (Printable, ""),
    (Printable, "a\nb"),
    (Printable, " a"),
    (Printable, "a\x00"),
    (LedgerUrl, "http://host"),
    (LedgerUrl, "redis://"),
]


@pytest.mark.parametrize(("form", "text"), GOOD)
def test_a_usable_word_has_no_problem(form: object, text: str) -> None:
    """What the consumers can use is accepted as it is."""
    assert problem(form, text) is None


@pytest.mark.parametrize(("form", "text"), BAD)
def test_an_unusable_word_is_answered_with_an_example(form: object, text: str) -> None:
    """The line says how to write it and shows no pattern."""
    why = problem(form, text)

    assert why is not None
    assert "write it like" in why
    assert "\\" not in why
