"""Visits one engine: the due paths over one connection, within a deadline, failures as values.

Owns the network side of a replica. A visit that is late goes on in the background up to ``LATE_S``, because a
saturated vLLM answers /metrics seconds late and cutting it off each time would make it unknown for good.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from extproc.agent.engines.base import Answer
from extproc.agent.http import Cause, Client, Unreachable
from extproc.agent.watch import Scrape

#: Longest one visit may last; measured: scrapes of a saturated vLLM 0.32 came 1-4 s late.
LATE_S = 5.0


class Scraper:
    """One replica's clients; visits never overlap (the loop keeps one task per replica).

    ``elsewhere`` maps paths to the client of another origin (metrics under a port of their own).
    """

    def __init__(self, client: Client, elsewhere: Mapping[str, Client] | None = None) -> None:
        self._client = client
        self._elsewhere = elsewhere or {}

    async def visit(self, paths: list[str]) -> Scrape:
        """Read the paths in order; never raises for what an engine or the network does."""
        answers: dict[str, Answer] = {}
        failures: dict[str, Cause] = {}
        start = time.monotonic()
        for path in paths:
            left_s = LATE_S - (time.monotonic() - start)
            try:
                if left_s <= 0:
                    raise Unreachable(Cause.TIMEOUT)
                response = await self._elsewhere.get(path, self._client).get(path, left_s)
            except Unreachable as error:
                # The engine is away or hangs: asking it for more would only add to its load.
                failures.update(dict.fromkeys(paths[paths.index(path) :], error.cause))
                break
            answers[path] = Answer(response.status, response.body, response.headers)
        return Scrape(start, time.monotonic(), answers, failures)

    async def close(self) -> None:
        """Give the connections back."""
        for client in {self._client, *self._elsewhere.values()}:
            await client.close()
