"""Where a request goes: its places in order of preference, the reservation at the first that fits, and without a ledger.

Owns the talk with the ledger on a request's way in; what a request needs at a place, ``candidates`` knows, and
``decisions`` words the outcome.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from extproc.candidates import Ask, Forecast, Place, Planner
from extproc.config.models import Config
from extproc.decisions import NOT_TRIED, Decisions, Identity, Understood, considered, soonest
from extproc.dialects import Parsed
from extproc.errors import LedgerDown
from extproc.fleet import Fleet
from extproc.learning import Learning
from extproc.ledger.base import (
    Candidate,
    End,
    Ended,
    Ledger,
    ReplicaState,
    ReserveRequest,
    ReserveResult,
    Upsert,
    Verdict,
)
from extproc.ledger.line import Turn
from extproc.ledger.posture import LocalShare
from extproc.metadata import reservation_from
from extproc.types import Decision, Reason, RequestHead

#: Reservations told to a ledger that is back in one call: a few milliseconds of it.
PAY_AT_ONCE = 100
#: Nobody is before it.
NEWCOMER = Turn()


@dataclass(slots=True)
class Pending:
    """One request on its way to a decision; ``touched_ledger`` says that a reservation may exist under its rid.

    ``parsed`` and ``what`` are what is understood of it so far; ``soonest`` is where a refused one will fit first.
    """

    who: Identity
    head: RequestHead
    parsed: Parsed | None = None
    what: Understood | None = None
    touched_ledger: bool = False
    soonest: Candidate | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)


class Placing:
    """Places and reservations of one process; ``clock_s`` is any steady clock."""

    def __init__(
        self,
        config: Config,
        decisions: Decisions,
        *,
        planner: Planner,
        ledger: Ledger,
        fleet: Fleet,
        learning: Learning,
        share: LocalShare,
        clock_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._decisions = decisions
        self._planner = planner
        self._ledger = ledger
        self._fleet = fleet
        self._learning = learning
        self._share = share
        self._clock_s = clock_s
        # A chain of many replicas is asked about in rounds; the last begins before half of Envoy's patience is gone.
        self._patience_s = config.envoy.message_timeout_ms / 2000.0
        self._paying: asyncio.Task[None] | None = None

    async def place(self, pending: Pending, what: Understood, turn: Turn = NEWCOMER) -> Decision:
        """Find places, reserve the first that fits, and say what came of it; ``turn`` is its place in line."""
        rounds = self._rounds(what, turn)
        places: list[Place] = []
        usable: list[Place] = []
        verdicts: list[Verdict] = []
        result: ReserveResult | None = None
        tried = 0
        started = self._clock_s()
        try:
            for these in rounds:
                places += these
                open_ = [place for place in these if place.candidate is not None]
                if not open_:
                    continue
                usable += open_
                result = self._outside(open_) or await self._reserve(pending, what, open_)
                tried, verdicts = len(verdicts), [*verdicts, *result.verdicts]
                if result.chosen is not None or result.ended or self._clock_s() - started > self._patience_s:
                    break
        except LedgerDown:
            places += [place for these in rounds for place in these]
            usable = [place for place in places if place.candidate is not None]
            return self._without_ledger(pending, what, places, usable)
        finally:
            pending.timings_ms["ledger"] = (self._clock_s() - started) * 1000.0
        if result is None:
            return self._decisions.nowhere_ever(pending.who, what, places, considered(what, places, None))
        chosen = None if result.chosen is None else usable[tried + result.chosen]
        return self._settle(pending, what, places, usable, result, chosen, verdicts)

    async def at_any_rate(self, pending: Pending, what: Understood, chain: tuple[str, ...]) -> Decision:
        """On its way to the first target of ``chain``, reserved there whatever the room."""
        places = [place for these in self._rounds(replace(what, chain=chain), NEWCOMER) for place in these]
        place = next((place for place in places if place.candidate is not None), None)
        if place is None or place.candidate is None:
            return self.onward(pending, what.parsed, chain)
        at_s = None
        if not place.candidate.remote:
            try:
                at_s = (await self._reserve(pending, what, [place], force=True)).now_s
            except LedgerDown:
                at_s = self._fleet.ledger_now_s()
            self._fleet.note(place.replica, place.candidate.need.kv_blocks)
        return self._decisions.admitted(pending.who, what, place, (), at_s)

    def onward(self, pending: Pending, parsed: Parsed | None, chain: Sequence[str]) -> Decision:
        """To the best replica of the first target, without a reservation."""
        target = self._config.targets[chain[0]]
        names = [n for r in target.replicas for n in ((r.name,) if r.discover is None else self._fleet.members(r.name))]
        if not names and not target.remote:
            return self._decisions.refused(pending.who, Reason.NOT_READY)  # nothing was found there yet
        return self._decisions.passed(
            pending.who, parsed, chain[0], min(names, key=self._fleet.rank) if names else chain[0]
        )

    async def abandon(self, pending: Pending) -> None:
        """Give back what a request holds whose answer never left; harmless when it holds nothing."""
        if not pending.touched_ledger:
            return
        pending.touched_ledger = False
        who = pending.who
        self._share.ended(who.rid)
        try:
            await self._ledger.end([End(who.rid, who.owner, who.exchange_id, Ended.UNSENT, cool_s=0.0)])
        except LedgerDown:
            # The adapter keeps ends that fall into an outage and sends them on return.
            return

    def _outside(self, places: Sequence[Place]) -> ReserveResult | None:
        """The result where the first place takes nothing of ours, so that the ledger need not be asked; else None."""
        if places[0].candidate is None or not places[0].candidate.remote:
            return None
        later = Verdict(NOT_TRIED, ReplicaState.READY)
        verdicts = (Verdict(None, ReplicaState.READY), *(later for _ in places[1:]))
        return ReserveResult(0, verdicts, self._fleet.ledger_now_s() or 0.0)

    def _rounds(self, what: Understood, turn: Turn) -> Iterator[list[Place]]:
        request, lane = what.request, what.route.lane_name
        asks = {
            name: Ask(
                count=what.count(name),
                sequences=request.sequences,
                client_cap=request.max_output_tokens,
                min_tokens=request.min_output_tokens,
                runs_to_cap=request.runs_to_cap,
                generates=request.generates,
                context_tokens=request.context_tokens,
            )
            for name in what.chain
        }
        return self._planner.rounds(
            what.chain,
            what.route.lane,
            asks,
            lambda target: Forecast(
                self._learning.expected_output((lane, target, what.klass)),
                self._learning.typical_run_s((lane, target, what.klass)),
                self._learning.token_s(target),
            ),
            self._fleet.view,
            # Where it was told to come to, before it takes what was promised to others elsewhere.
            lambda replica: (replica != turn.replica, *self._fleet.rank(replica)),
            promised=turn.promised,
            members=self._fleet.members,
        )

    async def _reserve(
        self, pending: Pending, what: Understood, usable: Sequence[Place], *, force: bool = False
    ) -> ReserveResult:
        first = usable[0]
        if self._share.owed:
            # Until it is paid the ledger does not know the true load, and the posture goes on.
            if self._paying is None or self._paying.done():
                self._paying = asyncio.create_task(self._pay(), name="kvgate-pay")
            raise LedgerDown("it is being told what was admitted without it")
        pending.touched_ledger = True
        return await self._ledger.reserve(
            ReserveRequest(
                rid=pending.who.rid,
                lane=what.route.lane_name,
                owner=pending.who.owner,
                request_id=pending.who.exchange_id,
                klass=what.klass,
                input_tokens=what.count(first.target).input_tokens,
                expected_output_tokens=first.limits.expected_tokens if first.limits else 0,
                max_output_tokens=what.request.max_output_tokens,
                candidates=[place.candidate for place in usable if place.candidate is not None],
                lane_concurrency=what.route.lane.concurrency,
                lease_s=self._config.ledger.lease_s,
                fresh_s=self._config.freshness.fresh_s,
                unknown_s=self._config.freshness.unknown_s,
                force=force,
            )
        )

    async def _pay(self) -> None:
        """Tell a ledger that is back what was admitted without it, so that no room is given away twice."""
        lease_s = self._config.ledger.lease_s
        try:
            while owed := self._share.owed_first(PAY_AT_ONCE):
                await self._ledger.renew([Upsert(reservation, lease_s) for reservation in owed])
                self._share.paid(owed)
        except LedgerDown:
            # It went away again; the next request tries anew.
            return

    def _settle(
        self,
        pending: Pending,
        what: Understood,
        places: Sequence[Place],
        usable: Sequence[Place],
        result: ReserveResult,
        chosen: Place | None,
        verdicts: Sequence[Verdict],
    ) -> Decision:
        who = pending.who
        if result.ended:
            # Its end came before its reservation: the client is gone, and nobody will read this answer.
            pending.touched_ledger = False
            return self._decisions.refused(who, Reason.INTERNAL, what=what)
        shown = considered(what, places, verdicts)
        if chosen is None:
            pending.touched_ledger = False
            pending.soonest = soonest(usable, verdicts)
            return self._decisions.nowhere_now(who, what, verdicts, shown)
        if chosen.candidate is not None and not chosen.candidate.remote:
            self._fleet.note(chosen.replica, chosen.candidate.need.kv_blocks)
            need = chosen.candidate.need
            self._share.note(chosen.replica, need.kv_blocks, need.sequences)
        return self._decisions.admitted(who, what, chosen, shown, result.now_s)

    def _without_ledger(
        self, pending: Pending, what: Understood, places: Sequence[Place], usable: Sequence[Place]
    ) -> Decision:
        """The operator's posture for a ledger that does not answer."""
        shown = considered(what, places, None, refused_by=Reason.LEDGER_DOWN)
        posture = what.route.lane.when_down or self._config.ledger.when_down
        # The call that got no answer is compensated by an end of its id, so what goes on now goes on under another.
        pending.who = replace(pending.who, rid=secrets.token_hex(12))
        chosen: Place | None = None
        if posture == "share":
            rid, now_s = pending.who.rid, self._clock_s()
            chosen = next((p for p in usable if p.candidate and self._share.admit(rid, p.candidate, now_s)), None)
        elif posture == "remote":
            chosen = next((p for p in usable if p.candidate is not None and p.candidate.remote), None)
        if chosen is None:
            return self._decisions.refused(pending.who, Reason.LEDGER_DOWN, what=what, shown=shown, ledger="degraded")
        # With a time of reservation its periodic records rebuild it in the ledger as soon as that is back.
        at_s = self._fleet.ledger_now_s()
        admitted = self._decisions.admitted(pending.who, what, chosen, shown, at_s, ledger="degraded")
        reservation = reservation_from(admitted.metadata, self._config.ledger.pool)
        if reservation is not None:
            self._share.owe(reservation)
        return admitted
