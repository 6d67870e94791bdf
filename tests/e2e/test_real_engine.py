"""Real llama.cpp behind the whole stack: the overload that fails running requests, without kvgate and with it.

The small brother of ``tests/engines/test_overload.py``, with a real engine that is a dependency of the suite.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.engines.test_overload import Work, drive, through_kvgate
from tests.integration.agent.engines import llama, tiny

#: 8 x (500 + 250) tokens on a cache for 3,072 of them: four fit, eight do not.
WORK, CELLS, SLOTS = Work(8, 500, 250), 3072, 8


async def test_llamacpp_overflows_without_kvgate_and_not_with_it(tmp_path: Path) -> None:
    """Alone it accepts all and fails some; reserved in front every answer is whole and its log knows no overflow."""
    model = tiny(tmp_path / "model")
    async with llama(model, tmp_path / "bare.log", cells=CELLS, slots=SLOTS) as engine:
        without = await drive(engine.server.port, WORK, "tiny")
    async with llama(model, tmp_path / "log", cells=CELLS, slots=SLOTS) as engine:
        with_kvgate = await asyncio.to_thread(through_kvgate, engine.server.url, "llamacpp", WORK)
        overflows = engine.log.read_text().count("Context size has been exceeded")
    assert sum(without.failed.values()) > 0
    assert (with_kvgate.whole, with_kvgate.failed, overflows) == (WORK.count, {}, 0)
