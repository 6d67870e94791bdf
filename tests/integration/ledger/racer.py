"""One process of a race: ``python -m tests.integration.ledger.racer URL POOL NUMBER COUNT GO_AT`` prints how many it won."""

from __future__ import annotations

import asyncio
import sys
import time

from extproc.ledger.redis import RedisLedger
from tests.support.ledgers import ask, candidate, need


async def race(url: str, pool: str, number: int, count: int, go_at_s: float) -> int:
    """Ask for ``count`` places at once, all at the agreed moment."""
    ledger = await RedisLedger.connect(url, pool, deadline_s=30.0, background_deadline_s=30.0, wait_s=60.0)
    place = candidate(n=need(10))
    # However long eight interpreters take to start, the one report of the pool is fresh.
    young = {"fresh_s": 3600.0, "unknown_s": 3600.0}
    await asyncio.sleep(go_at_s - time.time())
    answers = await asyncio.gather(*(ledger.reserve(ask(f"{number}-{i}", place, **young)) for i in range(count)))
    await ledger.close()
    return sum(answer.chosen is not None for answer in answers)


if __name__ == "__main__":
    url, pool, number, count, go_at_s = sys.argv[1:]
    print(asyncio.run(race(url, pool, int(number), int(count), float(go_at_s))))
