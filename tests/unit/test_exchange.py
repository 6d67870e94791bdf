"""The exchange table: any chunking gives one decision, broken orders give an error, limits hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.exchange import TRANSITIONS, Action, Event, Exchange, Phase
from extproc.types import RequestHead

HEAD = RequestHead("POST", "/v1/chat/completions", {})


def head(**headers: str) -> RequestHead:
    """A head with these headers."""
    return RequestHead("POST", "/v1/chat/completions", {k.replace("_", "-"): v for k, v in headers.items()})


def test_headers_then_whole_body_decides_once() -> None:
    """The buffered mode: headers are let through, the body is decided on, later messages are neutral."""
    exchange = Exchange(100)
    assert exchange.headers(HEAD, last=False) is Action.CONTINUE
    assert exchange.body_piece(b"abc", last=True) is Action.DECIDE
    assert exchange.body == b"abc"
    assert exchange.response_message() is Action.CONTINUE


def test_request_without_body_decides_on_headers() -> None:
    """A GET ends with its headers."""
    assert Exchange(100).headers(HEAD, last=True) is Action.DECIDE


def test_body_followed_by_trailers_decides_on_the_body_when_buffered() -> None:
    """With trailers the buffered body message has no end of stream, and is complete all the same."""
    exchange = Exchange(100)
    exchange.headers(HEAD, last=False)
    assert exchange.body_piece(b"abc", last=False) is Action.DECIDE
    assert exchange.request_trailers() is Action.CONTINUE


def test_streamed_body_followed_by_trailers_decides_on_the_trailers() -> None:
    """In streamed modes the decision may have to fall on the trailers message."""
    exchange = Exchange(100, buffered=False)
    exchange.headers(HEAD, last=False)
    assert exchange.body_piece(b"abc", last=False) is Action.CONTINUE
    assert exchange.request_trailers() is Action.DECIDE
    assert exchange.body == b"abc"


def test_second_end_of_stream_is_neutral() -> None:
    """A duplicate end of stream (seen with FULL_DUPLEX over 1 MB) never decides twice."""
    exchange = Exchange(100, buffered=False)
    exchange.headers(HEAD, last=False)
    assert exchange.body_piece(b"a", last=True) is Action.DECIDE
    assert exchange.body_piece(b"b", last=True) is Action.CONTINUE
    assert exchange.body == b"a"


def test_declared_length_over_the_limit_is_refused_before_the_body() -> None:
    """content-length alone suffices for the 413."""
    exchange = Exchange(100)
    assert exchange.headers(head(content_length="101"), last=False) is Action.TOO_LARGE


def test_absurd_content_length_is_not_trusted() -> None:
    """A content-length that is no plausible number is left to the body's own size."""
    for value in ("", "-1", "1e9", "9" * 40, "१२"):
        assert Exchange(100).headers(head(content_length=value), last=False) in (Action.CONTINUE, Action.TOO_LARGE)


def test_collected_body_over_the_limit_is_refused() -> None:
    """Pieces that add up to more than the limit are refused and not kept."""
    exchange = Exchange(5, buffered=False)
    exchange.headers(HEAD, last=False)
    assert exchange.body_piece(b"1234", last=False) is Action.CONTINUE
    assert exchange.body_piece(b"56", last=False) is Action.TOO_LARGE
    assert exchange.body == b""


def test_one_piece_is_not_copied() -> None:
    """A body that came in one message is handed on as the same object."""
    exchange, body = Exchange(10**7), b"x" * 2_000_000
    exchange.headers(HEAD, last=False)
    exchange.body_piece(body, last=True)
    assert exchange.body is body


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=8))
def test_any_chunking_gives_the_same_body(pieces: list[bytes]) -> None:
    """Cutting a body differently changes neither the body nor the number of decisions."""
    exchange = Exchange(1000, buffered=False)
    exchange.headers(HEAD, last=False)
    actions = [exchange.body_piece(p, last=i == len(pieces) - 1) for i, p in enumerate(pieces)]
    assert actions.count(Action.DECIDE) == 1
    assert actions[-1] is Action.DECIDE
    assert exchange.body == b"".join(pieces)


@given(st.lists(st.sampled_from(list(Event)), max_size=12))
def test_no_order_of_events_decides_twice(events: list[Event]) -> None:
    """Whatever Envoy sends, at most one decision falls per exchange."""
    phase, decisions = Phase.IDLE, 0
    for event in events:
        phase, action = TRANSITIONS.get((phase, event), (phase, Action.PROTOCOL_ERROR))
        decisions += action is Action.DECIDE
        if action is Action.PROTOCOL_ERROR:
            break
    assert decisions <= 1


def test_body_before_headers_is_a_protocol_error() -> None:
    """A body without a head is not something to guess about."""
    assert Exchange(100).body_piece(b"x", last=True) is Action.PROTOCOL_ERROR
