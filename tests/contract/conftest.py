"""Every ledger under one table: in memory, on Valkey, and on Redis where this machine has it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from extproc.ledger.base import Ledger
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.redis import RedisLedger
from tests.support.ledgers import Clock
from tests.support.valkey import ValkeyServer, redis_binary

BACKENDS = ["memory", "valkey", *(["redis"] if redis_binary() else [])]


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One Valkey for this worker; every test takes a pool of its own."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[ValkeyServer]:
    """One Redis for this worker."""
    with ValkeyServer(binary=redis_binary()) as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    """The ledger's clock."""
    return Clock()


@pytest.fixture(params=[True], ids=[""])
def fresh(request: pytest.FixtureRequest) -> bool:
    """Whether an empty ledger is a beginning; tests of data loss say no."""
    return bool(request.param)


@pytest.fixture(params=BACKENDS)
async def ledger(request: pytest.FixtureRequest, clock: Clock, fresh: bool) -> AsyncIterator[Ledger]:
    """An empty ledger of one kind, its audit checked after the test."""
    made: Ledger
    if request.param == "memory":
        made = InMemoryLedger(clock, fresh=fresh)
    else:
        server: ValkeyServer = request.getfixturevalue(request.param)
        made = await RedisLedger.connect(
            server.url,
            uuid.uuid4().hex,
            deadline_s=30.0,
            background_deadline_s=30.0,
            wait_s=60.0,
            fresh=fresh,
            test_clock=clock,
        )
    yield made
    wrong = [line for line in await made.audit() if line.stored != line.recomputed]
    await made.close()
    assert wrong == []
