"""A real server for this folder's tests, and ledgers on it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from extproc.ledger.redis import RedisLedger
from tests.support.valkey import ValkeyServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One Valkey for this worker; every test takes a pool of its own and leaves the server as it was."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def pool() -> str:
    """A pool nobody else uses."""
    return uuid.uuid4().hex


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A server of the test's own, to be killed, stopped and filled."""
    with ValkeyServer() as own:
        yield own


@pytest.fixture
async def ledger(valkey: ValkeyServer, pool: str) -> AsyncIterator[RedisLedger]:
    """An empty ledger on the server's own clock."""
    made = await RedisLedger.connect(
        valkey.url, pool, deadline_s=30.0, background_deadline_s=30.0, wait_s=60.0, fresh=True
    )
    yield made
    await made.close()
