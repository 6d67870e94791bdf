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

from extproc.candidates import Ask, Forecast, Place, Planner
from extproc.config.models import Config
from extproc.counting import Counting
from extproc.decisions import Decisions, Identity, Understood, considered
from extproc.dialects import BodyLimits, InferenceRequest, Parsed, parse
from extproc.errors import BadRequest, LedgerDown
from extproc.fleet import Fleet
from extproc.holding import Holding, NoPlace
from extproc.learning import Learning
from extproc.ledger.base import End, Ended, Ledger, ReserveRequest, ReserveResult, Upsert, Verdict
from extproc.ledger.posture import LocalShare
from extproc.metadata import exchange_id, reservation_from
from extproc.policy.lanes import LaneTable, Route
from extproc.promises import Promises
from extproc.types import Decision, Reason, RequestHead

#: Asks Envoy to wait this many milliseconds for the answer.
Extend = Callable[[int], Awaitable[None]]
#: Output caps fall into classes of requests that behave alike: none, short, medium, long.
CAP_CLASSES = (256, 2048)


@dataclass(slots=True)
class Pending:
    """One request on its way to a decision; ``touched_ledger`` says that a reservation may exist under its rid.

    ``soonest`` is where a refused one will fit first, and the blocks it needs there.
    """

    who: Identity
    head: RequestHead
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
        self._promises = Promises()
        self._digest_key = secrets.token_bytes(16)

    def begin(self, head: RequestHead, owner: str) -> Pending:
        """Start a request under a fresh random id that no client can choose."""
        who = Identity(secrets.token_hex(12), owner, head.request_id, exchange_id(head.request_id, head.began_us))
        return Pending(who, head)

    async def decide(self, pending: Pending, body: bytes, extend: Extend | None = None) -> Decision:
        """The decision for one complete request; never raises for anything a client can send.

        ``extend(ms)`` asks Envoy to wait longer, once, for lanes that may be held at the gate; None: nothing is held.
        """
        started = self._clock_s()
        try:
            parsed = parse(pending.head, body, self._limits)
        except BadRequest as error:
            return self._decisions.bad_request(pending.who, error)
        pending.timings_ms["parse"] = (self._clock_s() - started) * 1000.0
        request = parsed.request
        if request is None or not request.reserve:
            return self._pass(pending, parsed)
        route = self._lanes.classify(pending.head, request.model or "")
        if route is None or not route.chain:
            return self._decisions.refused(pending.who, Reason.UNKNOWN_MODEL, parsed=parsed)
        queue = route.lane.queue if extend is not None and self._config.mode == "enforce" else None
        if queue is None or extend is None:
            return await self._place_in_turn(pending, await self._understand(pending, parsed, request, route), body)
        until_s = started + queue.max_wait_ms / 1000.0
        await extend(
            min(queue.max_wait_ms + self._config.envoy.message_timeout_ms, self._config.envoy.max_message_timeout_ms)
        )
        what = await self._understand(pending, parsed, request, route)
        return await self._place_or_hold(pending, what, len(body), until_s)

    async def _place_in_turn(self, pending: Pending, what: Understood, body: bytes) -> Decision:
        """The same behind those who were refused earlier and told to come back; a refusal joins their line."""
        now_s = self._clock_s()
        mine = self._promises.came(self._digest(body), now_s) if self._promises else None
        decision = await self._place(pending, what, self._promises.ahead(now_s, mine))
        wait_ms = decision.refusal.retry_after_ms if decision.refusal is not None else None
        if decision.reason == Reason.INSUFFICIENT_HEADROOM and wait_ms is not None and pending.soonest is not None:
            replica, blocks = pending.soonest
            since_s = mine.since_s if mine is not None else None
            self._promises.give(self._digest(body), replica, blocks, self._clock_s(), wait_ms / 1000.0, since_s)
        return decision

    def _digest(self, body: bytes) -> bytes:
        """What a retry is known by; the key is this process's own, so it says nothing about the text."""
        return hashlib.blake2b(body, digest_size=16, key=self._digest_key).digest()

    async def _place(
        self, pending: Pending, what: Understood, promised: Callable[[str], int] = lambda _replica: 0
    ) -> Decision:
        """Find places, reserve the first that fits, and say what came of it."""
        rounds = self._rounds(what, promised)
        places: list[Place] = []
        usable: list[Place] = []
        verdicts: list[Verdict] = []
        result: ReserveResult | None = None
        started = self._clock_s()
        try:
            for these in rounds:
                places += these
                open_ = [place for place in these if place.candidate is not None]
                if not open_:
                    continue
                usable += open_
                result = await self._reserve(pending, what, open_)
                if result.chosen is not None:
                    result = replace(result, chosen=len(verdicts) + result.chosen)
                verdicts += result.verdicts
                if result.chosen is not None or result.ended:
                    break
        except LedgerDown:
            places += [place for these in rounds for place in these]
            usable = [place for place in places if place.candidate is not None]
            return self._without_ledger(pending, what, places, usable)
        finally:
            pending.timings_ms["ledger"] = (self._clock_s() - started) * 1000.0
        if result is None:
            return self._decisions.nowhere_ever(pending.who, what, places, considered(what, places, None))
        return self._settle(pending, what, places, usable, replace(result, verdicts=tuple(verdicts)))

    async def _place_or_hold(self, pending: Pending, what: Understood, size: int, until_s: float) -> Decision:
        """The same, waiting in the lane's line until ``until_s`` (our clock) where there is no room now."""
        lane = what.route.lane_name
        if not self._holding.busy(lane):
            decision = await self._place(pending, what)
            if not _full_for_now(decision):
                return decision

        async def attempt() -> Decision | None:
            decision = await self._place(pending, what)
            return None if _full_for_now(decision) else decision

        began_s = self._clock_s()
        answer = await self._holding.hold(lane, size, attempt, until_s - began_s)
        if isinstance(answer, NoPlace):
            reason = Reason.QUEUE_FULL if answer is NoPlace.FULL else Reason.QUEUE_TIMEOUT
            answer = self._decisions.refused(pending.who, reason, what=what)
        return replace(answer, waited_ms=round((self._clock_s() - began_s) * 1000.0))

    def too_large(self, pending: Pending) -> Decision:
        """The refusal of a body over the limit, seen before it was parsed."""
        message = f"The body is larger than {self._limits.max_bytes} bytes."
        return self._decisions.bad_request(pending.who, BadRequest(413, "request_too_large", message))

    def failed(self, pending: Pending) -> Decision:
        """The answer after a fault of our own."""
        return self._decisions.refused(pending.who, Reason.INTERNAL)

    def not_ready(self, pending: Pending) -> Decision:
        """The answer of an instance that is starting or going away."""
        return self._decisions.refused(pending.who, Reason.NOT_READY)

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
        if budget is not None:
            over = tuple(t for t in chain if t != route.fallback and counts[t].input_tokens > budget)
        if over:
            chain = (route.fallback,) if route.fallback is not None else ()
        return Understood(parsed, request, route, chain, counts, over, request_class(request))

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
            # Shadow mode reserves on the first place whatever its room, so it is asked about all of them at once.
            together=self._config.mode == "shadow",
        )

    async def _pay(self) -> None:
        """Tell a ledger that is back what was admitted without it, so that no room is given away twice."""
        owed = dict(self._share.owed)
        lease_s, deadline_s = self._config.ledger.lease_s, self._config.ledger.deadline_ms / 1000.0
        try:
            async with asyncio.timeout(deadline_s):
                await self._ledger.renew([Upsert(reservation, lease_s) for reservation in owed.values()])
        except TimeoutError:
            raise LedgerDown(f"no answer within {deadline_s} s") from None
        for rid in owed:
            self._share.owed.pop(rid, None)

    async def _reserve(self, pending: Pending, what: Understood, usable: Sequence[Place]) -> ReserveResult:
        first = usable[0]
        pending.touched_ledger = True
        if self._share.owed:
            await self._pay()
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
                force=self._config.mode == "shadow",
            )
        )

    def _settle(
        self,
        pending: Pending,
        what: Understood,
        places: Sequence[Place],
        usable: Sequence[Place],
        result: ReserveResult,
    ) -> Decision:
        who = pending.who
        if result.ended:
            # Its end came before its reservation: the client is gone, and nobody will read this answer.
            pending.touched_ledger = False
            return self._decisions.refused(who, Reason.INTERNAL, what=what)
        shown = considered(what, places, result.verdicts)
        if self._config.mode == "shadow":
            fits = next((p for p, v in zip(usable, result.verdicts, strict=True) if v.refused_by is None), None)
            would = (
                self._decisions.nowhere_now(who, what, result.verdicts, shown)
                if fits is None
                else self._decisions.admitted(who, what, fits, shown, result.now_s)
            )
            served = usable[result.chosen if result.chosen is not None else 0]
            return self._decisions.shadowed(would, self._decisions.admitted(who, what, served, shown, result.now_s))
        if result.chosen is None:
            pending.touched_ledger = False
            pending.soonest = _soonest(usable, result.verdicts)
            return self._decisions.nowhere_now(who, what, result.verdicts, shown)
        chosen = usable[result.chosen]
        if chosen.candidate is not None and not chosen.candidate.remote:
            self._fleet.note(chosen.replica, chosen.candidate.need.kv_blocks)
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
        if self._config.mode == "shadow":
            chosen = usable[0]
        elif posture == "share":
            chosen = next((p for p in usable if p.candidate and self._share.admit(pending.who.rid, p.candidate)), None)
        elif posture == "remote":
            chosen = next((p for p in usable if p.candidate is not None and p.candidate.remote), None)
        if chosen is None:
            return self._decisions.refused(pending.who, Reason.LEDGER_DOWN, what=what, shown=shown, ledger="degraded")
        # With a time of reservation its periodic records rebuild it in the ledger as soon as that is back.
        at_s = self._fleet.ledger_now_s()
        admitted = self._decisions.admitted(pending.who, what, chosen, shown, at_s, ledger="degraded")
        reservation = reservation_from(admitted.metadata, self._config.ledger.pool)
        if reservation is not None:
            self._share.owed[reservation.rid] = reservation
        return admitted if self._config.mode == "enforce" else self._decisions.shadowed(admitted, admitted)

    def _pass(self, pending: Pending, parsed: Parsed) -> Decision:
        """Anything that takes no memory: control calls and, by rule, paths that are not understood."""
        if parsed.unknown and self._config.unknown_paths == "reject":
            error = BadRequest(404, "unknown_path", "This path is not served here.")
            return self._decisions.bad_request(pending.who, error)
        route = self._lanes.classify(pending.head, parsed.model) if parsed.model else None
        chain = route.chain if route is not None else self._lanes.any_target()
        if not chain:
            return self._decisions.refused(pending.who, Reason.UNKNOWN_MODEL, parsed=parsed)
        replicas = sorted((replica.name for replica in self._config.targets[chain[0]].replicas), key=self._fleet.rank)
        return self._decisions.passed(pending.who, parsed, chain[0], replicas[0] if replicas else chain[0])


def request_class(request: InferenceRequest) -> str:
    """The learning class: operation, stream, tools and the size of the cap, as ``operation:s:t:cap``."""
    cap = request.max_output_tokens
    size = "none" if cap is None else next((f"le{bound}" for bound in CAP_CLASSES if cap <= bound), "long")
    return f"{request.operation}:{'s' if request.stream else '-'}:{'t' if request.has_tools else '-'}:{size}"


def _soonest(usable: Sequence[Place], verdicts: Sequence[Verdict]) -> tuple[str, int] | None:
    """The place with the earliest known room, and the blocks that are needed there."""
    known = [
        (verdict.retry_after_s, place.replica, place.candidate.need.kv_blocks)
        for place, verdict in zip(usable, verdicts, strict=True)
        if verdict.retry_after_s is not None and place.candidate is not None
    ]
    return min(known)[1:] if known else None


def _full_for_now(decision: Decision) -> bool:
    """Whether waiting can help: every place was full, and none was unknown or away."""
    return decision.refusal is not None and decision.refusal.status == 429
