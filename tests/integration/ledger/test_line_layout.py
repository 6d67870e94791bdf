"""What stands in the pool's line while releases that know no runs and others are on one ledger."""

from __future__ import annotations

from extproc.ledger import keys
from extproc.ledger.line import Due
from extproc.ledger.redis import RedisLedger
from tests.integration.ledger.test_outages import raw

#: Kept promises that settle what is believed of clients.
MANY = 30


async def test_entries_without_a_run_are_read(ledger: RedisLedger, pool: str) -> None:
    """They are taken up, and left room for as if they ran as long as the asker."""
    for number in range(MANY):
        await ledger.promise(f"seen{number}", "a", 1, 0.0, None, 1.0)
        assert (await ledger.turn(f"seen{number}")).replica == "a"
    far_us = 4_102_444_800_000_000
    for token, since in (("older", 1_000), ("mine", 2_000)):
        entry = f"{token}\x1fa\x1f10\x1f{since:016d}\x1f{far_us}"
        await raw(ledger, "ZADD", keys.key(pool, "line"), str(far_us), entry)
    mine = await ledger.turn("mine")
    assert (mine.since_at_s, mine.replica, mine.promised("a").before) == (0.002, "a", (Due(far_us, 10, -1),))


async def test_entries_have_five_parts(ledger: RedisLedger, pool: str) -> None:
    """Releases that know no runs read just these, the token with its run as one; a run that is not known is left out."""
    await ledger.promise("known", "a", 10, 3600.0, 0.001, 2.5)
    await ledger.promise("unknown", "a", 20, 7200.0, 0.002)
    line = await raw(ledger, "ZRANGE", keys.key(pool, "line"), "0", "-1")
    assert [entry.decode().split("\x1f")[:4] for entry in line] == [
        ["known\x1e2500000", "a", "10", "0000000000001000"],
        ["unknown", "a", "20", "0000000000002000"],
    ]
    assert {entry.count(b"\x1f") for entry in line} == {4}
