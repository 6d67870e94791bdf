"""One real Envoy per test module, clean before each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import gateway as support

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[support.Gateway]:
    """Envoy with posture closed."""
    with support.running() as running:
        yield running


@pytest.fixture
def gateway(shared_gateway: support.Gateway) -> support.Gateway:
    """The module's Envoy, with nothing seen yet."""
    shared_gateway.reset()
    return shared_gateway
