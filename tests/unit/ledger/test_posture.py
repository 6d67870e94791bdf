"""The posture ``share``: several sidecars without a ledger stay within what was last free."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from extproc.ledger.base import Reservation
from extproc.ledger.inmemory import InMemoryLedger
from extproc.ledger.posture import MAX_OWED, LocalShare
from extproc.ledger.reference import ReferenceLedger
from tests.support.ledgers import START_S, ask, candidate, need, report

OWED = Reservation("r", "t", "e", "lane", "envoy", "x", "chat:-:-:none", START_S, need(1), 1, 1, None, 1, 30.0)


def shares(count: int, *, reserved: int = 0, **more: object) -> list[LocalShare]:
    """That many sidecars after a snapshot of 100 blocks of which some are reserved."""
    ledger = ReferenceLedger()
    ledger.publish([report(START_S, **more)], [], 60, START_S)
    if reserved:
        ledger.reserve(ask("held", candidate(n=need(reserved))), START_S)
    for number in range(count):
        ledger.heartbeat(str(number), 5, START_S)
    made = [LocalShare() for _ in range(count)]
    for share in made:
        share.observe(ledger.snapshot(START_S))
    return made


def admitted(share: LocalShare, mark: str, place: object) -> int:
    """How many of 100 requests one sidecar admits."""
    return sum(share.admit(f"{mark}{i}", place, 0.0) for i in range(100))  # type: ignore[arg-type]


def test_all_sidecars_together_stay_within_the_last_headroom() -> None:
    """40 of 100 reserved, three sidecars, ten blocks each: two apiece, not the full pool divided."""
    assert [admitted(s, "r", candidate(n=need(10))) for s in shares(3, reserved=40)] == [2, 2, 2]


def test_the_watermark_is_of_the_pool_not_of_the_share() -> None:
    """90 of 100 reserved and 5 % never promised: 5 are left, not 9."""
    (share,) = shares(1, reserved=90)
    assert admitted(share, "r", candidate(n=need(1), watermark=0.05)) == 5


def test_slots_are_shared_too() -> None:
    """Eight slots, two sidecars."""
    assert [admitted(s, "r", candidate(n=need(1))) for s in shares(2, max_sequences=8)] == [4, 4]


def test_reservations_since_the_snapshot_count_against_the_share() -> None:
    """The snapshot is up to a second old when the ledger goes away."""
    (share,) = shares(1)
    share.note("a", 70)
    assert admitted(share, "r", candidate(n=need(10))) == 3


def test_an_end_gives_its_room_back_once() -> None:
    """And a second end of the same rid nothing more."""
    (share,) = shares(1)
    assert share.admit("1", candidate(n=need(100)), 0.0)
    assert not share.admit("2", candidate(n=need(1)), 0.0)
    share.ended("1")
    share.ended("1")
    assert admitted(share, "r", candidate(n=need(1))) == 100


def test_what_was_not_ready_is_not_shared_and_a_remote_always_fits() -> None:
    """Unknown is never empty."""
    share = LocalShare()
    assert not share.admit("1", candidate(), 0.0)
    assert share.admit("1", candidate(remote=True), 0.0)


async def test_the_first_snapshot_after_an_outage_starts_afresh() -> None:
    """What was admitted here is in the ledger by then, through its records."""
    ledger = InMemoryLedger(lambda: START_S)
    await ledger.publish([replace(report(START_S))], [], 60)
    share = LocalShare()
    share.observe(await ledger.snapshot())
    assert share.admit("1", candidate(n=need(100)), 0.0)
    share.observe(await ledger.snapshot())
    assert share.admit("2", candidate(n=need(100)), 0.0)


def test_what_must_have_ended_is_given_back_without_its_end() -> None:
    """Its end record may have gone to another instance; after its longest life the room is free again."""
    (share,) = shares(1)
    assert share.admit("1", structs.replace(candidate(n=need(100)), cap_s=30.0), 0.0)
    assert not share.admit("2", candidate(n=need(1)), 29.0)
    assert share.admit("2", candidate(n=need(1)), 30.0)


def test_what_is_owed_is_bounded_and_paid_in_portions() -> None:
    """An outage of any length keeps a bounded number of reservations to tell; each is told once."""
    (share,) = shares(1)
    for number in range(MAX_OWED + 5):
        share.owe(structs.replace(OWED, rid=str(number)))
    assert len(share.owed) == MAX_OWED
    first = share.owed_first(100)
    assert [reservation.rid for reservation in first] == [str(number) for number in range(100)]
    share.paid(first)
    assert len(share.owed) == MAX_OWED - 100
    assert share.owed_first(1)[0].rid == "100"
