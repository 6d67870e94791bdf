"""The posture ``share`` when sidecars join, restart and stand still: no more is promised than was free."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from extproc.ledger.posture import BEAT_S, BEAT_TTL_S, LocalShare
from extproc.ledger.reference import ReferenceLedger
from tests.support.ledgers import START_S, ask, candidate, need, report, reservation

ONE = candidate(n=need(1))
#: As ``fleet.REFRESH_S``.
REFRESH_S = 0.5
#: Time passes in steps of this.
STEP_S = 0.1


@dataclass
class Sidecar:
    """One process: beats and looks at its times, and reserves in between."""

    name: str
    beat_at_s: float
    look_at_s: float
    share: LocalShare = field(default_factory=lambda: LocalShare(known=False))
    standing_until_s: float = 0.0


class Fleet:
    """Sidecars on one ledger of 1,000 blocks and 600 sequences, and what becomes of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = START_S
        self.ledger = ReferenceLedger()
        self.ledger.publish([report(START_S, capacity_blocks=1000, max_sequences=600)], [], 60, START_S)
        self.sidecars: list[Sidecar] = []
        self.made = 0
        self.join()

    def join(self) -> None:
        """A new process; it looks and beats at once."""
        self.sidecars.append(Sidecar(f"s{self.made}", self.now_s, self.now_s))
        self.made += 1

    def step(self) -> None:
        """A moment in which each does what is due."""
        self.now_s += STEP_S
        self.ledger.publish(
            [report(self.now_s, capacity_blocks=1000, max_sequences=600)], [], 60, self.now_s
        )  # fmt: skip
        for sidecar in self.sidecars:
            if self.now_s < sidecar.standing_until_s:
                continue
            if self.now_s >= sidecar.look_at_s:
                sidecar.share.observe(self.ledger.snapshot(self.now_s))
                sidecar.look_at_s = self.now_s + REFRESH_S
            if self.now_s >= sidecar.beat_at_s:
                live = self.ledger.heartbeat(sidecar.name, BEAT_TTL_S, self.now_s)
                sidecar.share.beat(live, self.now_s, self.now_s)
                sidecar.beat_at_s = self.now_s + BEAT_S
            for _ in range(self.rng.choice([0, 0, 0, 1, 3])):
                self.made += 1
                if self.ledger.reserve(ask(f"r{self.made}", ONE), self.now_s).chosen == 0:
                    sidecar.share.note("a", 1)

    def change(self) -> None:
        """One joins, restarts or stands still for a while."""
        what = self.rng.choice(["join", "restart", "stand"])
        one = self.rng.choice(self.sidecars)
        if what == "stand":
            one.standing_until_s = self.now_s + self.rng.uniform(0.0, 2 * BEAT_TTL_S)
            return
        if what == "restart":  # its heartbeat goes on counting until it lapses
            self.sidecars.remove(one)
        self.join()

    def free(self) -> tuple[int, int]:
        """Blocks and sequences that nobody holds."""
        view = self.ledger.snapshot(self.now_s).replicas["a"]
        assert view.headroom_blocks is not None
        return view.headroom_blocks, 600 - view.sequences

    def admitted(self) -> int:
        """What all of them admit by themselves when the ledger has gone: those that stood still have noticed that."""
        for sidecar in self.sidecars:
            sidecar.share.beat(
                None, max(self.now_s, sidecar.standing_until_s), max(self.now_s, sidecar.standing_until_s)
            )
        return sum(
            sidecar.share.admit(f"{sidecar.name}-{number}", ONE, 0.0)
            for sidecar in self.sidecars
            for number in range(1000)
        )


@pytest.mark.parametrize("seed", range(60))
def test_all_together_never_promise_more_than_was_free(seed: int) -> None:
    """However many joined, restarted or stood still before the ledger went away."""
    fleet = Fleet(seed)
    for moment in range(fleet.rng.randint(1, 150)):
        if moment % 10 == 9 and fleet.rng.random() < 0.3:
            fleet.change()
        fleet.step()
    assert fleet.admitted() <= min(fleet.free())


def test_a_fleet_in_peace_uses_nearly_all_that_was_free() -> None:
    """Three that know each other: what each reserved of late is left out, and no more."""
    fleet = Fleet(1)
    fleet.join()
    fleet.join()
    for _ in range(100):
        fleet.step()
    assert fleet.admitted() > 0.6 * min(fleet.free())


def test_a_newcomer_takes_no_part_until_the_others_have_counted_it() -> None:
    """They would go on with parts of their own that are too large."""
    fleet = Fleet(2)
    fleet.step()
    fleet.join()
    fleet.step()
    first, second = (sidecar.share for sidecar in fleet.sidecars)
    assert (first.live_sidecars, second.live_sidecars) == (1, 2)
    assert first.admit("1", ONE, 0.0)
    assert not second.admit("2", ONE, 0.0)


def test_who_is_alone_takes_its_part_at_once() -> None:
    """Nobody else can have one."""
    fleet = Fleet(3)
    fleet.step()
    assert fleet.sidecars[0].share.admit("1", ONE, 0.0)


def test_a_restart_leaves_its_old_heartbeat_and_the_parts_stay_small() -> None:
    """Two of which one restarts: for a heartbeat's life three are counted and one takes half; nothing is doubled."""
    fleet = Fleet(4)
    fleet.join()
    for _ in range(80):
        fleet.step()
    fleet.sidecars.pop()
    fleet.join()
    fleet.step()
    assert fleet.sidecars[1].share.live_sidecars == 3
    assert not fleet.sidecars[1].share.admit("new", ONE, 0.0)
    assert fleet.admitted() <= min(fleet.free()) / 2


def test_what_the_ledger_has_not_been_told_is_not_given_away_again() -> None:
    """It is back and shows none of it; until it was told, and a snapshot after that, the room stays taken."""
    ledger, share = ReferenceLedger(), LocalShare()
    ledger.publish([report(START_S)], [], 60, START_S)
    share.observe(ledger.snapshot(START_S))
    held = reservation("1", START_S, n=need(70))
    assert share.admit("1", candidate(n=need(70)), 0.0)
    share.owe(held)
    share.observe(ledger.snapshot(START_S))
    assert not share.admit("2", candidate(n=need(31)), 0.0)
    share.paid([held])
    share.observe(ledger.snapshot(START_S))  # may have been asked for before it was told
    assert not share.admit("2", candidate(n=need(31)), 0.0)
    share.observe(ledger.snapshot(START_S))
    assert share.admit("2", candidate(n=need(31)), 0.0)
