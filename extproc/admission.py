"""The whole story of one decision on one page: understand, classify, count, find places, reserve, answer.

Owns the order of the stages; what each stage knows lives in its package, and ``decisions`` words the outcome.
The only waits are counting (bounded by its deadline) and a ledger call (bounded by its own), rarely two.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from extproc.candidates import Ask, Forecast, Place, Planner
from extproc.config.models import Config
from extproc.counting import Counting
from extproc.decisions import (
    NOT_TRIED,
    Decisions,
    Identity,
    Understood,
    considered,
    denied,
    full_for_now,
    judged,
    request_class,
    soonest,
)
from extproc.dialects import BodyLimits, InferenceRequest, Parsed
from extproc.errors import BadRequest, LedgerDown
from extproc.fleet import Fleet
from extproc.holding import Holding, NoPlace
from extproc.learning import Learning
from extproc.ledger.base import End, Ended, Ledger, ReplicaState, ReserveRequest, ReserveResult, Upsert, Verdict
from extproc.ledger.line import Turn
from extproc.ledger.posture import LocalShare
from extproc.metadata import exchange_id, reservation_from
from extproc.policy.lanes import LaneTable, Route
from extproc.types import Decision, Reason, RequestHead

#: Asks Envoy to wait this many milliseconds for the answer.
Extend = Callable[[int], Awaitable[None]]
#: Reservations told to a ledger that is back in one call: a few milliseconds of it.
PAY_AT_ONCE = 100
#: Bytes at each end of a body that its digest takes in.
DIGEST_BYTES = 8192
#: After a refusal for want of room the line of those who will come back is asked for this long.
CROWDED_S = 60.0
NO_TURN = Turn()

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Pending:
    """One request on its way to a decision; ``touched_ledger`` says that a reservation may exist under its rid.

    ``parsed`` and ``what`` are what is understood of it so far; ``soonest`` is where a refused one will fit first, and
    the blocks it needs there.
    """

    who: Identity
    head: RequestHead
    parsed: Parsed | None = None
    what: Understood | None = None
    touched_ledger: bool = False
    soonest: tuple[str, int] | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)


class Admission:
    """Decides; holds the compiled configuration and the connections, and no state of any request."""

    def __init__(
        self,
        config: Config,
        *,
        planner: Planner,
        counting: Counting,
        ledger: Ledger,
        fleet: Fleet,
        learning: Learning,
        share: LocalShare,
        holding: Holding[Decision],
        clock_s: Callable[[], float],
        spread: Callable[[], float],
    ) -> None:
        self._config = config
        self._lanes = LaneTable(config)
        self._decisions = Decisions(config, spread)
        self._planner = planner
        self._counting = counting
        self._ledger = ledger
        self._fleet = fleet
        self._learning = learning
        self._share = share
        self._holding = holding
        self._clock_s = clock_s
        self._limits = BodyLimits(max_bytes=config.serve.max_body_bytes)
        self._crowded_until_s = -1.0
        # A chain of many replicas is asked about in rounds; the last begins before half of Envoy's patience is gone.
        self._patience_s = config.envoy.message_timeout_ms / 2000.0
        self._digest_key = hashlib.blake2b(config.ledger.pool.encode(), digest_size=16).digest()
        self._paying: asyncio.Task[None] | None = None

    def begin(self, head: RequestHead, owner: str) -> Pending:
        """Start a request under a fresh random id that no client can choose."""
        who = Identity(secrets.token_hex(12), owner, head.request_id, exchange_id(head.request_id, head.began_us))
        return Pending(who, head)

    async def decide(self, pending: Pending, body: bytes, extend: Extend | None = None) -> Decision:
        """The decision for one complete request; never raises for anything a client can send.

        ``extend(ms)`` asks Envoy to wait longer, once, for lanes that may be held at the gate; None: nothing is held.
        """
        if self._config.mode == "shadow":
            return await self._decide_in_shadow(pending, body)
        return await self._decide(pending, body, extend)

    async def _decide(self, pending: Pending, body: bytes, extend: Extend | None) -> Decision:
        started = self._clock_s()
        try:
            parsed = pending.parsed = await self._counting.parse(pending.head, body, self._limits)
        except BadRequest as error:
            return self._decisions.bad_request(pending.who, error)
        pending.timings_ms["parse"] = (self._clock_s() - started) * 1000.0
        request = parsed.request
        if request is None or not request.reserve:
            return self._pass(pending, parsed)
        route = self._lanes.classify(pending.head, request.model or "")
        if route is None or not route.chain:
            return self._decisions.refused(pending.who, Reason.UNKNOWN_MODEL, parsed=parsed)
        if (unserved := denied(route.lane, request)) is not None:
            return self._decisions.bad_request(pending.who, unserved)
        queue = route.lane.queue if extend is not None else None
        if queue is None or extend is None:
            what = await self._understand(pending, parsed, request, route)
            if self._config.mode == "shadow":
                return await self._place(pending, what)
            return await self._place_in_turn(pending, what, body)
        until_s = started + queue.max_wait_ms / 1000.0
        await extend(
            min(queue.max_wait_ms + self._config.envoy.message_timeout_ms, self._config.envoy.max_message_timeout_ms)
        )
        what = await self._understand(pending, parsed, request, route)
        return await self._place_or_hold(pending, what, len(body), until_s)

    async def _decide_in_shadow(self, pending: Pending, body: bytes) -> Decision:
        """Decide as if it counted, under an id that is given back at once; then reserve at the primary and go there.

        Nothing that a client can send is refused, changed or rerouted: the primary gets its bytes.
        """
        trial = replace(pending, who=replace(pending.who, rid=secrets.token_hex(12)), timings_ms=pending.timings_ms)
        would = await self._decide(trial, body, None)
        await self.abandon(trial)
        if would.decision == "pass":
            return replace(would, rid=pending.who.rid)
        return self._decisions.shadowed(would, await self._primary(pending, trial))

    async def _primary(self, pending: Pending, trial: Pending) -> Decision:
        """The request on its way to the first target of its chain, reserved there whatever the room."""
        what = trial.what
        if what is None:
            return self._onward(pending, trial.parsed, self._lanes.any_target())
        first = what.route.chain[:1]
        places = [place for these in self._rounds(replace(what, chain=first), _nothing) for place in these]
        place = next((place for place in places if place.candidate is not None), None)
        if place is None or place.candidate is None:
            return self._onward(pending, trial.parsed, first)
        at_s = None
        if not place.candidate.remote:
            try:
                at_s = (await self._reserve(pending, what, [place], force=True)).now_s
            except LedgerDown:
                at_s = self._fleet.ledger_now_s()
            self._fleet.note(place.replica, place.candidate.need.kv_blocks)
        return self._decisions.admitted(pending.who, what, place, (), at_s)

    async def _place_in_turn(self, pending: Pending, what: Understood, body: bytes) -> Decision:
        """The same behind those who were refused earlier and told to come back; a refusal joins their line."""
        turn = NO_TURN
        if self._clock_s() < self._crowded_until_s:
            turn = await _unless_down(self._ledger.turn(self._digest(body))) or NO_TURN
        decision = await self._place(pending, what, turn.promised)
        wait_ms = decision.refusal.retry_after_ms if decision.refusal is not None else None
        if decision.reason == Reason.INSUFFICIENT_HEADROOM and wait_ms is not None and pending.soonest is not None:
            self._crowded_until_s = self._clock_s() + CROWDED_S
            replica, blocks = pending.soonest
            token = self._digest(body)
            await _unless_down(self._ledger.promise(token, replica, blocks, wait_ms / 1000.0, turn.since_at_s))
        return decision

    def _digest(self, body: bytes) -> str:
        """What a retry is known by in every process of the pool; it is kept for seconds and says nothing of the text.

        Length, head and tail tell requests apart as well as the whole would, and a large body costs no more.
        """
        known = b"%d:%b:%b" % (len(body), body[:DIGEST_BYTES], body[-DIGEST_BYTES:])
        return hashlib.blake2b(known, digest_size=16, key=self._digest_key).hexdigest()

    async def _place(
        self, pending: Pending, what: Understood, promised: Callable[[str], int] | None = None
    ) -> Decision:
        """Find places, reserve the first that fits, and say what came of it."""
        rounds = self._rounds(what, promised or _nothing)
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

    def _outside(self, places: Sequence[Place]) -> ReserveResult | None:
        """The result where the first place takes nothing of ours, so that the ledger need not be asked; else None."""
        if places[0].candidate is None or not places[0].candidate.remote:
            return None
        later = Verdict(NOT_TRIED, ReplicaState.READY)
        verdicts = (Verdict(None, ReplicaState.READY), *(later for _ in places[1:]))
        return ReserveResult(0, verdicts, self._fleet.ledger_now_s() or 0.0)

    async def _place_or_hold(self, pending: Pending, what: Understood, size: int, until_s: float) -> Decision:
        """The same, waiting in the lane's line until ``until_s`` (our clock) where there is no room now."""
        lane = what.route.lane_name
        last: Decision | None = None

        async def attempt() -> Decision | None:
            nonlocal last
            last = await self._place(pending, what)
            return None if full_for_now(last) else last

        if not self._holding.busy(lane) and (answer := await attempt()) is not None:
            return answer

        began_s = self._clock_s()
        found = await self._holding.hold(lane, size, attempt, until_s - began_s)
        if isinstance(found, NoPlace):
            reason = Reason.QUEUE_FULL if found is NoPlace.FULL else Reason.QUEUE_TIMEOUT
            shown = last.candidates if last is not None else ()
            wait_ms = last.refusal.retry_after_ms if last is not None and last.refusal is not None else None
            earliest_s = None if wait_ms is None else wait_ms / 1000.0
            found = self._decisions.refused(pending.who, reason, what=what, shown=shown, earliest_s=earliest_s)
        return replace(found, waited_ms=round((self._clock_s() - began_s) * 1000.0))

    def too_large(self, pending: Pending) -> Decision:
        """The refusal of a body over the limit, seen before it was parsed."""
        message = f"The body is larger than {self._limits.max_bytes} bytes."
        return self._decisions.bad_request(pending.who, BadRequest(413, "request_too_large", message))

    def failed(self, pending: Pending) -> Decision:
        """The answer after a fault of our own."""
        return self._ours(pending, Reason.INTERNAL)

    def not_ready(self, pending: Pending) -> Decision:
        """The answer of an instance that is starting or going away."""
        return self._ours(pending, Reason.NOT_READY)

    def _ours(self, pending: Pending, reason: Reason) -> Decision:
        refused = self._decisions.refused(pending.who, reason)
        if self._config.mode == "enforce" or not self._config.targets:
            return refused
        return self._decisions.shadowed(refused, self._onward(pending, None, self._lanes.any_target()))

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

    async def _understand(
        self, pending: Pending, parsed: Parsed, request: InferenceRequest, route: Route
    ) -> Understood:
        started = self._clock_s()
        budget = route.lane.max_input_tokens
        counts = await self._counting.per_target(
            route.chain, request, budget_tokens=budget if route.fallback is None else None
        )
        pending.timings_ms["count"] = (self._clock_s() - started) * 1000.0
        chain = route.chain
        over: tuple[str, ...] = ()
        if budget is not None and judged(chain, counts).input_tokens > budget:
            over = tuple(target for target in chain if target != route.fallback)
            chain = (route.fallback,) if route.fallback is not None else ()
        pending.what = Understood(parsed, request, route, chain, counts, over, request_class(request))
        return pending.what

    def _rounds(self, what: Understood, promised: Callable[[str], int]) -> Iterator[list[Place]]:
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
                self._learning.typical_output((lane, target, what.klass)),
                self._learning.token_s(target),
            ),
            self._fleet.view,
            self._fleet.rank,
            promised=promised,
            members=self._fleet.members,
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
            self._share.note(chosen.replica, chosen.candidate.need.kv_blocks)
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

    def _pass(self, pending: Pending, parsed: Parsed) -> Decision:
        """Anything that takes no memory: control calls and, by rule, paths that are not understood."""
        if parsed.unknown and self._config.unknown_paths == "reject":
            error = BadRequest(404, "unknown_path", "This path is not served here.")
            return self._decisions.bad_request(pending.who, error)
        route = self._lanes.classify(pending.head, parsed.model) if parsed.model else None
        chain = route.chain if route is not None else self._lanes.any_target()
        if not chain:
            return self._decisions.refused(pending.who, Reason.UNKNOWN_MODEL, parsed=parsed)
        return self._onward(pending, parsed, chain)

    def _onward(self, pending: Pending, parsed: Parsed | None, chain: Sequence[str]) -> Decision:
        """To the best replica of the first target, without a reservation."""
        target = self._config.targets[chain[0]]
        names = [n for r in target.replicas for n in ((r.name,) if r.discover is None else self._fleet.members(r.name))]
        if not names and not target.remote:
            return self._ours(pending, Reason.NOT_READY)  # nothing was found there yet
        return self._decisions.passed(
            pending.who, parsed, chain[0], min(names, key=self._fleet.rank) if names else chain[0]
        )


async def _unless_down(call: Awaitable[Answer]) -> Answer | None:
    """What the ledger says; nothing where it does not answer, since the line is a courtesy and no limit."""
    try:
        return await call
    except LedgerDown:
        return None


def _nothing(_replica: str) -> int:
    """No blocks are kept for anybody."""
    return 0
