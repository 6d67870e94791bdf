"""The whole story of one decision on one page: understand, classify, count, find places, reserve, answer.

Owns the order of the stages; what each stage knows lives in its package, and ``decisions`` words the outcome.
The only waits are counting (bounded by its deadline) and a ledger call (bounded by its own), rarely two.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from extproc.candidates import Planner
from extproc.config.models import Config
from extproc.counting import Counting
from extproc.decisions import Decisions, Identity, Understood, denied, full_for_now, judged, request_class
from extproc.dialects import BodyLimits, InferenceRequest, Parsed
from extproc.errors import BadRequest, LedgerDown
from extproc.fleet import Fleet
from extproc.holding import Holding, NoPlace
from extproc.learning import Learning
from extproc.ledger.base import Ledger
from extproc.ledger.posture import LocalShare
from extproc.metadata import exchange_id
from extproc.placing import NEWCOMER, Pending, Placing
from extproc.policy.lanes import LaneTable, Route
from extproc.shadow import Shadow
from extproc.types import Decision, Reason, RequestHead

#: Asks Envoy to wait this many milliseconds for the answer.
Extend = Callable[[int], Awaitable[None]]
#: Bytes at each end of a body that its digest takes in.
DIGEST_BYTES = 8192
#: After a refusal for want of room the line of those who will come back is asked for this long.
CROWDED_S = 60.0

Answer = TypeVar("Answer")


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
        self._placing = Placing(
            config,
            self._decisions,
            planner=planner,
            ledger=ledger,
            fleet=fleet,
            learning=learning,
            share=share,
            clock_s=clock_s,
        )
        anywhere = self._lanes.any_target()
        self._shadow = Shadow(self._decisions, self._placing, anywhere) if config.mode == "shadow" else None
        self._counting = counting
        self._ledger = ledger
        self._holding = holding
        self._clock_s = clock_s
        self._limits = BodyLimits(max_bytes=config.serve.max_body_bytes, max_values=config.serve.max_body_values)
        self._crowded_until_s = -1.0
        self._digest_key = hashlib.blake2b(config.ledger.pool.encode(), digest_size=16).digest()

    def begin(self, head: RequestHead, owner: str) -> Pending:
        """Start a request under a fresh random id that no client can choose."""
        who = Identity(secrets.token_hex(12), owner, head.request_id, exchange_id(head.request_id, head.began_us))
        return Pending(who, head)

    async def decide(self, pending: Pending, body: bytes, extend: Extend | None = None) -> Decision:
        """The decision for one complete request; never raises for anything a client can send.

        ``extend(ms)`` asks Envoy to wait longer, once, for lanes that may be held at the gate; None: nothing is held.
        """
        if self._shadow is not None:
            return await self._shadow.decide(pending, lambda trial: self._decide(trial, body, None))
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
            if self._shadow is not None:
                return await self._placing.place(pending, what)
            return await self._place_in_turn(pending, what, body)
        until_s = started + queue.max_wait_ms / 1000.0
        await extend(
            min(queue.max_wait_ms + self._config.envoy.message_timeout_ms, self._config.envoy.max_message_timeout_ms)
        )
        what = await self._understand(pending, parsed, request, route)
        return await self._place_or_hold(pending, what, len(body), until_s)

    async def _place_in_turn(self, pending: Pending, what: Understood, body: bytes) -> Decision:
        """``Placing.place`` behind those who were refused earlier and told to come back; a refusal joins their line."""
        turn = NEWCOMER
        if self._clock_s() < self._crowded_until_s:
            turn = await _unless_down(self._ledger.turn(self._digest(body))) or NEWCOMER
        decision = await self._placing.place(pending, what, turn)
        wait_ms = decision.refusal.retry_after_ms if decision.refusal is not None else None
        if decision.reason == Reason.INSUFFICIENT_HEADROOM and wait_ms is not None and pending.soonest is not None:
            self._crowded_until_s = self._clock_s() + CROWDED_S
            there = pending.soonest
            promise = self._ledger.promise(
                self._digest(body),
                there.replica,
                there.need.kv_blocks,
                wait_ms / 1000.0,
                turn.since_at_s,
                there.expected_s,
            )
            await _unless_down(promise)
        return decision

    def _digest(self, body: bytes) -> str:
        """What a retry is known by in every process of the pool; it is kept for seconds and says nothing of the text.

        Length, head and tail tell requests apart as well as the whole would, and a large body costs no more.
        """
        known = b"%d:%b:%b" % (len(body), body[:DIGEST_BYTES], body[-DIGEST_BYTES:])
        return hashlib.blake2b(known, digest_size=16, key=self._digest_key).hexdigest()

    async def _place_or_hold(self, pending: Pending, what: Understood, size: int, until_s: float) -> Decision:
        """The same, waiting in the lane's line until ``until_s`` (our clock) where there is no room now."""
        lane = what.route.lane_name
        last: Decision | None = None

        async def attempt() -> Decision | None:
            nonlocal last
            last = await self._placing.place(pending, what)
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

    async def abandon(self, pending: Pending) -> None:
        """See ``Placing.abandon``."""
        await self._placing.abandon(pending)

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
        if self._shadow is None or not self._config.targets:
            return refused
        return self._shadow.instead_of(refused, pending)

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

    def _pass(self, pending: Pending, parsed: Parsed) -> Decision:
        """Anything that takes no memory: control calls and, by rule, paths that are not understood."""
        if parsed.unknown and self._config.unknown_paths == "reject":
            error = BadRequest(404, "unknown_path", "This path is not served here.")
            return self._decisions.bad_request(pending.who, error)
        route = self._lanes.classify(pending.head, parsed.model) if parsed.model else None
        chain = route.chain if route is not None else self._lanes.any_target()
        if not chain:
            return self._decisions.refused(pending.who, Reason.UNKNOWN_MODEL, parsed=parsed)
        return self._placing.onward(pending, parsed, chain)


async def _unless_down(call: Awaitable[Answer]) -> Answer | None:
    """What the ledger says; nothing where it does not answer, since the line is a courtesy and no limit."""
    try:
        return await call
    except LedgerDown:
        return None
