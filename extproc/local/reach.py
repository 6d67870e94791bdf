"""The shared ledger as an operator's command reaches it: patiently, quietly, and with one line where it cannot.

Owns the refusal of ledgers that no other process can look into, and the words for one that is away.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from extproc.config import Config
from extproc.errors import ConfigError, LedgerDown
from extproc.ledger.redis import RedisLedger

#: Nobody waits with a request in hand, and a busy server may be what is looked for.
DEADLINE_S = 1.0
#: Ledgers that no other process can look into -> what to do instead.
PRIVATE = {
    "memory": "its ledger lives inside `kvgate serve`; use a redis:// address to reach it from outside",
    "embedded": "its address is known to `kvgate up` alone; use the configuration that `up` names",
}


@asynccontextmanager
async def reached(
    config: Config, *, url: str | None = None, where: str | None = None, wait: bool = True
) -> AsyncIterator[RedisLedger]:
    """The ledger at ``url`` (default: ``ledger.url``), closed afterwards.

    ``ConfigError`` with one line that begins with ``where`` if it cannot be reached from here or does not answer,
    within the block as well. Without ``wait`` one that is away is no mistake until something is asked of it.
    """
    url = url or config.ledger.url
    where = where or f"{config.where}: ledger.url"
    if url in PRIVATE:
        raise ConfigError([f"{where}: {url!r} cannot be read from here: {PRIVATE[url]}"])
    # What the connection logs while it retries is said once, by us.
    logging.getLogger("kvgate").addHandler(logging.NullHandler())
    try:
        ledger = await RedisLedger.connect(
            url, config.ledger.pool, deadline_s=DEADLINE_S, periodic_s=config.envoy.periodic_s
        )
    except (ValueError, OSError) as error:
        raise ConfigError([f"{where}: {error}; correct the address"]) from error
    try:
        if wait:
            await ledger.time_s()  # an end would be kept for its return, which nobody here waits for
        yield ledger
    except LedgerDown as error:
        raise away(where, error) from error
    finally:
        await ledger.close()


def away(where: str, error: LedgerDown) -> ConfigError:
    """The line for a ledger that does not answer."""
    return ConfigError([f"{where}: {error}; start the ledger or correct its address"])
