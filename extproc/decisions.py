"""Builds the finished ``Decision`` of every outcome: admitted, rerouted, refused, passed through, shadowed.

Pure: no clock, no I/O; the spread of Retry-After comes in as a function. ``admission`` finds out what is to be
done, this module says it to Envoy and to the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from extproc.candidates import Place
from extproc.config.models import Config, Lane
from extproc.dialects import InferenceRequest, Parsed, edit
from extproc.errors import BadRequest
from extproc.gateway.names import (
    HEADER_ADAPTER,
    HEADER_MAX_RETRIES,
    HEADER_MODEL_AT,
    HEADER_RID,
    KEY_ENDPOINT,
    member_endpoint,
    model_at,
    port_of,
    replica_cluster,
)
from extproc.ledger.base import Candidate, Reservation, Verdict
from extproc.metadata import Value, reservation_fields
from extproc.policy.lanes import Route
from extproc.policy.refusals import PERMANENT, refuse
from extproc.types import ConsideredCandidate, Decision, Figures, Reason, Refusal, TokenCount

#: Output caps fall into classes of requests that behave alike: none, short, medium, long.
CAP_CLASSES = (256, 2048)
#: Log-probabilities of one input token that engines give by default (vLLM's --max-logprobs).
USUAL_LOGPROBS = 20
#: ``Verdict.refused_by`` of a candidate behind the one that was taken.
NOT_TRIED = "not_tried"
#: Reasons of input that is at fault by itself, by status.
_REASON_OF_STATUS = {
    413: Reason.BODY_TOO_LARGE,
    415: Reason.UNSUPPORTED_CONTENT_ENCODING,
    404: Reason.UNKNOWN_MODEL,
}


class Identity(Struct, frozen=True):
    """Who asks: our random id, the Envoy that carries the request, and the request id that Envoy knows it by.

    ``exchange_id`` names the one exchange, also where a client sends one request id with everything.
    """

    rid: str
    owner: str
    request_id: str
    exchange_id: str


class Understood(Struct, frozen=True):
    """A parsed request with its route, the targets it may still use, and its input counted for each of them.

    ``over_budget`` names the targets that the lane's input budget closed for it; ``klass`` is its learning class.
    """

    parsed: Parsed
    request: InferenceRequest
    route: Route
    chain: tuple[str, ...]
    counts: Mapping[str, TokenCount]
    over_budget: tuple[str, ...]
    klass: str

    def count(self, target: str | None = None) -> TokenCount:
        """The count for ``target``, or for the first target of the route."""
        return self.counts[target if target is not None else self.route.chain[0]]


class Decisions:
    """Builder of decisions for one configuration; ``spread`` yields numbers in [0, 1)."""

    __slots__ = ("_config", "_ports", "_shadow", "_spread")

    def __init__(self, config: Config, spread: Callable[[], float]) -> None:
        self._config = config
        self._shadow = config.mode == "shadow"
        self._spread = spread
        #: Replicas with `discover` -> the port that what is found there listens on.
        self._ports = {name: port_of(replica.url) for name, replica in config.discovered().items()}

    def admitted(
        self,
        who: Identity,
        what: Understood,
        chosen: Place,
        shown: tuple[ConsideredCandidate, ...],
        reserved_at_s: float | None,
        ledger: str = "ok",
    ) -> Decision:
        """The request goes to ``chosen``; without ``reserved_at_s`` no record of it will ever renew a reservation."""
        fallback = chosen.target != what.route.chain[0]
        first = shown[0].refused_by if shown else None
        reason = first if fallback and first not in (None, NOT_TRIED) else None
        plan = self._plan(what, chosen, shown)
        body, headers = self._forward(who, what, chosen, plan)
        count = what.count(chosen.target)
        kind = "fallback" if fallback else "admit"
        return Decision(
            decision=kind,
            mode=self._config.mode,
            rid=who.rid,
            lane=what.route.lane_name,
            model=what.request.model,
            target=chosen.target,
            replica=chosen.replica,
            reason=reason,
            refusal=None,
            plan=plan,
            candidates=shown,
            input_tokens=count.input_tokens,
            count_source=count.source,
            expected_output_tokens=chosen.limits.expected_tokens if chosen.limits else None,
            max_output_tokens=what.request.max_output_tokens,
            ledger=ledger,
            headers=headers,
            metadata=self._metadata(who, what, chosen, reserved_at_s, kind, reason, plan),
            body=body,
            dialect=what.request.dialect,
            warnings=what.request.warnings,
        )

    def shadowed(self, would: Decision, served: Decision) -> Decision:
        """Shadow mode: what would have been, while the request goes where ``served`` says, byte for byte."""
        fields = {key: value for key, value in served.metadata.items() if key != "reason"}
        fields["decision"] = f"shadow-{would.decision}"
        if would.reason is not None:
            fields["reason"] = would.reason
        return replace(
            would, rid=served.rid, plan=served.plan, headers=served.headers, metadata=fields, body=None, refusal=None,
            replica=served.replica, target=would.target or served.target,
        )  # fmt: skip

    def nowhere_now(
        self, who: Identity, what: Understood, verdicts: Sequence[Verdict], shown: tuple[ConsideredCandidate, ...]
    ) -> Decision:
        """Every candidate was refused by the ledger; the first transient reason counts, the earliest room is the wait."""
        transient = [v for v in verdicts if v.refused_by is not None and Reason(v.refused_by) not in PERMANENT]
        waits = [v.retry_after_s for v in transient if v.retry_after_s is not None]
        first = (transient or list(verdicts))[0].refused_by
        reason = Reason(first) if first is not None else Reason.UNKNOWN_STATE
        return self.refused(who, reason, what=what, shown=shown, earliest_s=min(waits) if waits else None)

    def nowhere_ever(
        self, who: Identity, what: Understood, places: Sequence[Place], shown: tuple[ConsideredCandidate, ...]
    ) -> Decision:
        """No place could ever take it: over its lane's budget, its context, or the whole pool.

        A remote API that is closed only for now makes the refusal one for now.
        """
        refused = [place for place in places if place.refused_by is not None]
        closed = next((place for place in refused if place.refused_by not in PERMANENT), None)
        if closed is not None:
            return self.refused(who, closed.refused_by or Reason.UNKNOWN_STATE, what=what, shown=shown)
        reason, limit = (refused[0].refused_by, refused[0].limit_tokens) if refused else (None, None)
        if what.over_budget:
            reason, limit = Reason.PROMPT_BUDGET_EXCEEDED, what.route.lane.max_input_tokens
        return self.refused(who, reason or Reason.UNKNOWN_STATE, what=what, shown=shown, limit_tokens=limit)

    def refused(
        self,
        who: Identity,
        reason: Reason,
        *,
        what: Understood | None = None,
        parsed: Parsed | None = None,
        shown: tuple[ConsideredCandidate, ...] = (),
        earliest_s: float | None = None,
        limit_tokens: int | None = None,
        ledger: str = "ok",
    ) -> Decision:
        """A refusal with its Retry-After and the sentence that tells the client what to do."""
        refusal = refuse(
            reason,
            earliest_s=earliest_s,
            spread=self._spread(),
            message=_sentence(reason, what),
            param="model" if reason is Reason.UNKNOWN_MODEL else None,
        )
        refusal = replace(refusal, limit_tokens=limit_tokens)
        decision = self._rejection(who, refusal, parsed if what is None else what.parsed)
        if what is None:
            return replace(decision, ledger=ledger)
        count = what.count()
        lane = what.route.lane_name
        return replace(
            decision, lane=lane, metadata=dict(decision.metadata) | {"lane": lane}, candidates=shown, ledger=ledger,
            input_tokens=count.input_tokens, count_source=count.source, max_output_tokens=what.request.max_output_tokens,
        )  # fmt: skip

    def bad_request(self, who: Identity, error: BadRequest) -> Decision:
        """Input that is at fault by itself."""
        reason = _REASON_OF_STATUS.get(error.status, Reason.BAD_REQUEST)
        return self._rejection(who, Refusal(reason, error.status, error.message, None, error.code, error.param), None)

    def passed(self, who: Identity, parsed: Parsed | None, target: str, replica: str) -> Decision:
        """A request that takes no memory goes on without a reservation, and is never retried elsewhere."""
        span = self._span(parsed)
        headers = [(HEADER_RID, who.rid), (HEADER_MAX_RETRIES, "0")]
        if span is not None:
            headers.append((HEADER_MODEL_AT, model_at(*span)))
        return Decision(
            decision="pass",
            mode=self._config.mode,
            rid=who.rid,
            lane=None,
            model=parsed.model if parsed is not None else None,
            target=target,
            replica=replica,
            reason=None,
            refusal=None,
            plan=(replica_cluster(replica, self._ports),),
            headers=tuple(headers),
            metadata={
                "rid": who.rid,
                "decision": "pass",
                "target": target,
                "replica": replica,
                KEY_ENDPOINT: self._endpoint(replica),
            },
            body=parsed.body if parsed is not None and parsed.decoded and not self._shadow else None,
            dialect=parsed.dialect if parsed is not None else None,
        )

    def _span(self, parsed: Parsed | None) -> tuple[int, int] | None:
        """Where the model's name lies in the bytes that go on; shadow mode forwards what the client encoded."""
        if parsed is None or (self._shadow and parsed.decoded):
            return None
        return parsed.model_span

    def _rejection(self, who: Identity, refusal: Refusal, parsed: Parsed | None) -> Decision:
        return Decision(
            decision="reject",
            mode=self._config.mode,
            rid=who.rid,
            lane=None,
            model=parsed.model if parsed is not None else None,
            target=None,
            replica=None,
            reason=str(refusal.reason),
            refusal=refusal,
            metadata={"rid": who.rid, "decision": "reject", "reason": str(refusal.reason)},
            dialect=parsed.dialect if parsed is not None else None,
        )

    def _forward(
        self, who: Identity, what: Understood, chosen: Place, plan: tuple[str, ...]
    ) -> tuple[bytes | None, tuple[tuple[str, str], ...]]:
        """The body to forward (None: the client's own bytes go on) and the headers that go with it."""
        request = what.request
        cap = chosen.limits.cap_tokens if chosen.limits and chosen.limits.write_cap else None
        usage = what.route.lane.include_usage and request.stream and not request.include_usage_asked
        body, changed, span = what.parsed.body, what.parsed.decoded, self._span(what.parsed)
        if self._shadow:
            changed = False
        elif cap is not None or usage:
            edited = edit(body, request, cap=cap, include_usage=usage)
            body, changed, span = edited.body, edited.body is not body or changed, edited.model_span
        headers = [(HEADER_RID, who.rid), (HEADER_MAX_RETRIES, str(len(plan) - 1))]
        if span is not None:
            headers.append((HEADER_MODEL_AT, model_at(*span)))
        if what.route.adapter is not None:
            headers.append((HEADER_ADAPTER, what.route.adapter))
        return (body if changed else None), tuple(headers)

    def _plan(self, what: Understood, chosen: Place, shown: Sequence[ConsideredCandidate]) -> tuple[str, ...]:
        """The reserved place, then remote targets only: a retry onto a local one would be unreserved.

        A place's cluster bears its name: the replica's, or the remote target's. Remotes that were refused are left out.
        """
        targets = self._config.targets
        shut = {chosen.target, *(place.target for place in shown if place.refused_by not in (None, NOT_TRIED))}
        remotes = [name for name in what.chain if targets[name].remote and name not in shut and not self._shadow]
        return (replica_cluster(chosen.replica, self._ports), *remotes)

    def _endpoint(self, replica: str) -> str:
        """Where a found replica listens; another's name, since its cluster has one endpoint."""
        port = self._ports.get(replica_cluster(replica, self._ports))
        return replica if port is None else member_endpoint(replica, port)

    def _metadata(
        self,
        who: Identity,
        what: Understood,
        chosen: Place,
        reserved_at_s: float | None,
        kind: str,
        reason: str | None,
        plan: tuple[str, ...],
    ) -> dict[str, Value]:
        expected = chosen.limits.expected_tokens if chosen.limits else 0
        fields: dict[str, Value] = {
            "rid": who.rid,
            "decision": kind,
            "target": chosen.target,
            "replica": chosen.replica,
            KEY_ENDPOINT: self._endpoint(chosen.replica),
            "lane": what.route.lane_name,
            "class": what.klass,
            "input_tokens": float(what.count(chosen.target).input_tokens),
            "expected_output_tokens": float(expected),
            "sequences": float(what.request.sequences),
        }
        if reason is not None:
            fields["reason"] = reason
        if len(plan) > 1:
            fields["plan"] = ",".join(plan)
        candidate = chosen.candidate
        if candidate is None or candidate.remote or reserved_at_s is None:
            return fields
        reservation = Reservation(
            rid=who.rid,
            target=chosen.target,
            replica=chosen.replica,
            lane=what.route.lane_name,
            owner=who.owner,
            request_id=who.exchange_id,
            klass=what.klass,
            reserved_at_s=reserved_at_s,
            need=candidate.need,
            input_tokens=what.count(chosen.target).input_tokens,
            expected_output_tokens=expected,
            max_output_tokens=what.request.max_output_tokens,
            cap_blocks=candidate.cap_blocks,
            cap_s=candidate.cap_s,
            devices=candidate.devices,
            expected_s=candidate.expected_s or 0.0,
        )
        return fields | reservation_fields(reservation, self._config.ledger.pool)


def considered(
    what: Understood, places: Sequence[Place], verdicts: Sequence[Verdict] | None, *, refused_by: Reason | None = None
) -> tuple[ConsideredCandidate, ...]:
    """Every place as the record shows it, in order; ``verdicts`` belong to the places that are candidates.

    ``refused_by`` stands for the verdict of all candidates where the ledger gave none.
    """
    closed = tuple(
        ConsideredCandidate(name, None, None, Figures(None, None), str(Reason.PROMPT_BUDGET_EXCEEDED))
        for name in what.over_budget
    )
    remaining = iter(verdicts or ())
    return (*closed, *(_shown(place, remaining, refused_by) for place in places))


def _shown(place: Place, verdicts: object, refused_by: Reason | None) -> ConsideredCandidate:
    candidate = place.candidate
    if candidate is None:
        return ConsideredCandidate(place.target, place.replica, None, Figures(None, None), str(place.refused_by))
    verdict = next(verdicts, None)  # type: ignore[call-overload]  # an iterator over the verdicts, in the places' order
    if verdict is None:
        return ConsideredCandidate(
            place.target, place.replica, candidate.need, Figures(None, None), str(refused_by) if refused_by else None
        )
    before, need = verdict.headroom_blocks, candidate.need
    after = None if before is None else before - need.kv_blocks
    per_block = need.kv_bytes // need.kv_blocks if need.kv_blocks else 0
    figures = Figures(
        before,
        after,
        before * per_block if before is not None and per_block else None,
        after * per_block if after is not None and per_block else None,
    )
    return ConsideredCandidate(place.target, place.replica, need, figures, verdict.refused_by)


def _sentence(reason: Reason, what: Understood | None) -> str | None:
    """The sentence with this request's own figures, or None for the table's."""
    if what is None:
        return None
    count = what.count()
    tokens = f"{count.input_tokens} tokens"
    if count.source == "bound":
        tokens = f"at most {tokens} (an upper bound, not counted)"
    if reason is Reason.PROMPT_BUDGET_EXCEEDED:
        budget = what.route.lane.max_input_tokens
        return f"The input has {tokens}, the lane {what.route.lane_name} takes at most {budget}."
    if reason in (Reason.EXCEEDS_CONTEXT, Reason.EXCEEDS_POOL):
        cap = what.request.max_output_tokens
        asked = f" and asks for up to {cap} more" if cap else ""
        return f"The input has {tokens}{asked}; no engine of this model can hold that."
    return None


def denied(lane: Lane, request: InferenceRequest) -> BadRequest | None:
    """What the lane does not serve, whatever the room.

    Log-probabilities of the whole vocabulary for each input token take input x vocabulary x 8 bytes of the engine's host
    memory, 62 GB at 100,000 x 155,000 (vLLM); no ledger counts that.
    """
    if lane.prompt_logprobs == "allow" or 0 <= request.prompt_logprobs <= USUAL_LOGPROBS:
        return None
    message = f"The lane serves at most {USUAL_LOGPROBS} log-probabilities for each input token."
    return BadRequest(400, "prompt_logprobs_not_allowed", message, "prompt_logprobs")


def request_class(request: InferenceRequest) -> str:
    """The learning class: operation, stream, tools and the size of the cap, as ``operation:s:t:cap``."""
    cap = request.max_output_tokens
    size = "none" if cap is None else next((f"le{bound}" for bound in CAP_CLASSES if cap <= bound), "long")
    return f"{request.operation}:{'s' if request.stream else '-'}:{'t' if request.has_tools else '-'}:{size}"


def soonest(usable: Sequence[Place], verdicts: Sequence[Verdict]) -> Candidate | None:
    """The place with the earliest known room."""
    known = [
        (verdict.retry_after_s, place.candidate)
        for place, verdict in zip(usable, verdicts, strict=True)
        if verdict.retry_after_s is not None and place.candidate is not None
    ]
    return min(known, key=lambda place: place[0])[1] if known else None


def judged(chain: Sequence[str], counts: Mapping[str, TokenCount]) -> TokenCount:
    """The count that a lane's budget is held against: the first exact one, for a bound proves no excess; else the first."""
    return next((counts[target] for target in chain if counts[target].source != "bound"), counts[chain[0]])


def full_for_now(decision: Decision) -> bool:
    """Whether waiting can help: every place was full, and none was unknown or away."""
    return decision.refusal is not None and decision.refusal.status == 429
