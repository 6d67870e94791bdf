"""A real Valkey for the telemetry tests, one per worker; every test uses a pool of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.support.valkey import ValkeyServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """A server that tests share and none stops."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def redis(valkey: ValkeyServer) -> AsyncIterator[Redis]:
    """A client."""
    client = Redis.from_url(valkey.url, socket_timeout=60.0, socket_connect_timeout=60.0)
    yield client
    await client.aclose()


@pytest.fixture
def pool() -> str:
    """A pool that no other test uses."""
    return f"t{secrets.token_hex(6)}"
