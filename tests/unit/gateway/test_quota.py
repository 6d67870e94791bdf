"""What an API's answer says of its limits."""

from __future__ import annotations

import pytest

from extproc.gateway.quota import DEFAULT_S, HEADERS, MOST_S, closed_for_s

LEFT = {"x-ratelimit-remaining-requests": "59", "x-ratelimit-remaining-tokens": "149984"}
NO_TOKENS = LEFT | {"x-ratelimit-remaining-tokens": "0"}


@pytest.mark.parametrize(
    ("status", "headers", "closed"),
    [
        (200, {}, None),
        (200, LEFT, None),
        (500, {"retry-after": "7"}, None),
        (503, {}, None),
        (401, {}, None),
        (429, {}, DEFAULT_S),
        (402, {}, DEFAULT_S),
        (529, {"retry-after": "3"}, 3.0),
        (429, {"retry-after": "20"}, 20.0),
        (429, {"retry-after-ms": "2500", "retry-after": "3"}, 2.5),
        (429, {"retry-after": "0"}, 1.0),
        (429, {"retry-after": "86400"}, MOST_S),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, DEFAULT_S),
        (429, {"retry-after": "nan"}, DEFAULT_S),
        (429, NO_TOKENS | {"x-ratelimit-reset-tokens": "6s"}, 6.0),
        (200, NO_TOKENS | {"x-ratelimit-reset-tokens": "17.5s"}, 17.5),
        (200, NO_TOKENS | {"x-ratelimit-reset-tokens": "1m30s"}, MOST_S),
        (200, NO_TOKENS | {"x-ratelimit-reset-tokens": "1200ms"}, 1.2),
        (200, NO_TOKENS | {"x-ratelimit-reset-tokens": "20ms"}, 1.0),
        (200, NO_TOKENS | {"x-ratelimit-reset-tokens": "soon"}, DEFAULT_S),
        (200, NO_TOKENS, DEFAULT_S),
        (200, {"anthropic-ratelimit-requests-remaining": "0"}, DEFAULT_S),
        (None, {}, None),
    ],
)
def test_how_long_an_api_wants_no_more(status: int | None, headers: dict[str, str], closed: float | None) -> None:
    """A refusal or a limit at zero closes it, for as long as it says, within a second and a minute."""
    assert closed_for_s(status, headers) == closed


def test_the_headers_to_ask_for_are_those_that_are_read() -> None:
    """Envoy logs headers by name, so the list must hold every one."""
    assert {"retry-after", "retry-after-ms", *NO_TOKENS, "x-ratelimit-reset-tokens"} <= set(HEADERS)
