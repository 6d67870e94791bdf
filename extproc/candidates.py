"""From counted tokens to ledger candidates: what the request would take at each place it may go.

Owns the translation of target, lane and replica facts into ``ledger.base.Candidate``; pure, no I/O. A place where
the request can never run is not a candidate but a permanent refusal that the decision shows; a remote API that was
seen to be away or out of quota is a transient one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from extproc.config.models import PREALLOCATING, Config, Lane, Replica, Target
from extproc.ledger.base import Candidate, ReplicaReport, ReplicaState, ReplicaView
from extproc.ledger.line import NOTHING, Promised
from extproc.memory import KvModel, Projection, project
from extproc.policy.limits import OutputLimits, OutputRequest, output_limits
from extproc.types import Need, Reason, TokenCount

MIB = 1024 * 1024
#: Replicas of one target that the ledger is asked about first, and in all where those have no room.
FIRST_PER_TARGET = 4
MAX_PER_TARGET = 16
#: Found replicas remembered; addresses change over the life of a process.
MAX_FOUND = 4096
#: At most this share of a pool is kept free for a lane's kvReserveMb.
MAX_KEEP_FREE = 0.25
#: Decode rate assumed for the longest life of a request where none was measured, tokens per second.
SLOWEST_DECODE_TOKENS_PER_S = 5.0
#: The same for how long a request is expected to run, which only retry times depend on: a common speed for one stream.
USUAL_DECODE_TOKENS_PER_S = 30.0
#: Shortest and longest life assumed for an orphan.
CAP_S_MIN, CAP_S_MAX = 30.0, 3600.0
REMOTE_NEED = Need(0, 0, 0, 0, 0)
#: What was seen of a remote API that closes it for now; anything else, and nothing, leaves it open.
REMOTE_CLOSED: Mapping[str, Reason] = {
    ReplicaState.LOST: Reason.UNKNOWN_STATE,
    ReplicaState.DRAINING: Reason.NOT_READY,
}
#: An engine that embeds with an encoder keeps no KV and reports a pool without blocks (vLLM: the null block alone).
NO_KV = Projection(0, 0, 0, (), 0)


class Ask(Struct, frozen=True):
    """What the request wants, counted: one figure per prompt, sequences, and how long it may answer.

    ``context_tokens`` is a context that the request asks its engine for (Ollama's num_ctx), None otherwise.
    """

    count: TokenCount
    sequences: int
    client_cap: int | None
    min_tokens: int
    runs_to_cap: bool
    generates: bool
    context_tokens: int | None = None


class Forecast(Struct, frozen=True):
    """What past answers say of a request on one target, None where nothing is known yet.

    ``output_tokens`` covers nine of ten; most were over within ``run_s``; ``token_s`` is the time one token takes in the
    mean over whole answers.
    """

    output_tokens: int | None = None
    run_s: float | None = None
    token_s: float | None = None


class Place(Struct, frozen=True):
    """One place considered: a candidate for the ledger, or the reason why it is none.

    The reason is permanent, but for a remote API that was seen to be away or out of quota, and for a target of which no
    replica has been found (its own name stands for the replica then).
    """

    target: str
    replica: str
    limits: OutputLimits | None
    candidate: Candidate | None
    refused_by: Reason | None
    #: What the request is too long for, where it is: the context, or the whole pool.
    limit_tokens: int | None = None


class _Seen(Struct, frozen=True):
    """What is known of one replica: its report, its cost model, and the blocks that a lane may use of it (None: unknown)."""

    report: ReplicaReport | None
    kv: KvModel
    static_blocks: int | None
    keep_free: int
    usable: int | None
    context: int | None

    @property
    def pool_tokens(self) -> int | None:
        """The usable blocks in tokens."""
        return None if self.usable is None else self.usable * self.kv.block_tokens


class Planner:
    """The configuration compiled for one translation per request; ``kv_models`` builds a target's cost model."""

    __slots__ = ("_config", "_finding", "_found", "_kv", "_kv_models")

    def __init__(self, config: Config, kv_models: Callable[[str, int | None], KvModel]) -> None:
        self._config = config
        self._kv_models = kv_models
        self._kv: dict[tuple[str, int | None], KvModel] = {}
        self._finding = frozenset(
            name for name, target in config.targets.items() if any(replica.discover for replica in target.replicas)
        )
        #: Found replicas as if they stood in the file, kept from request to request.
        self._found: dict[str, Replica] = {}

    def rounds(
        self,
        chain: Sequence[str],
        lane: Lane,
        ask_for: Mapping[str, Ask],
        learned: Callable[[str], Forecast],
        view: Callable[[str], ReplicaView | None],
        rank: Callable[[str], tuple[float, ...]],
        *,
        promised: Callable[[str], Promised] = lambda _replica: NOTHING,
        members: Callable[[str], Sequence[str]] = lambda _replica: (),
        together: bool = False,
    ) -> Iterator[list[Place]]:
        """Every place of ``chain`` in order of preference, in lists that the ledger is asked about one after another.

        A target's replicas come best first. What ranks them may be half a second old, so where a target's first few
        have no room its others are asked before the next target and before a refusal; ``together`` makes one list.
        ``promised`` says what of a replica was promised to others, ``members`` what was found under one with
        `discover`.
        """
        places: list[Place] = []
        for name in chain:
            target = self._config.targets[name]
            if target.remote:
                places.append(self._remote(name, lane, ask_for[name], view(name)))
                continue
            known = self._with_found(target, members) if name in self._finding else target.replicas
            if not known:
                places.append(Place(name, name, None, None, Reason.UNKNOWN_STATE))
            replicas = sorted(known, key=lambda replica: rank(replica.name))[:MAX_PER_TARGET]
            forecast = learned(name)
            for at, replica in enumerate(replicas):
                if at == FIRST_PER_TARGET and not together:
                    yield places
                    places = []
                seen, kept = view(replica.name), promised(replica.name)
                places.append(self._local(name, target, replica, lane, ask_for[name], forecast, seen, kept))
        yield places

    def _with_found(self, target: Target, members: Callable[[str], Sequence[str]]) -> Sequence[Replica]:
        """The target's replicas, those with `discover` replaced by what was found under them."""
        known: list[Replica] = []
        for replica in target.replicas:
            if replica.discover is None:
                known.append(replica)
                continue
            for name in members(replica.name):
                found = self._found.get(name)
                if found is None:
                    found = self._found[name] = replica.model_copy(update={"name": name})
                known.append(found)
        if len(self._found) > MAX_FOUND:
            self._found.clear()
        return known

    def _remote(self, name: str, lane: Lane, ask: Ask, view: ReplicaView | None) -> Place:
        context = self._context(self._config.targets[name], None)
        ask = _within(ask, context)
        limits = output_limits(_output_request(ask, lane, context, None, self._config.targets[name], None))
        if isinstance(limits, Reason):
            return Place(name, name, None, None, limits, context)
        closed = REMOTE_CLOSED.get(view.state) if view is not None else None
        if closed is not None:
            return Place(name, name, limits, None, closed)
        return Place(name, name, limits, Candidate(name, name, True, REMOTE_NEED), None)

    def _local(
        self,
        name: str,
        target: Target,
        replica: Replica,
        lane: Lane,
        ask: Ask,
        learned: Forecast,
        view: ReplicaView | None,
        promised: Promised,
    ) -> Place:
        seen = self._seen(name, target, replica, lane, view.report if view is not None else None, ask)
        ask = _within(ask, seen.context)
        limits = output_limits(
            _output_request(ask, lane, seen.context, seen.pool_tokens, target, learned.output_tokens)
        )
        if isinstance(limits, Reason):
            limit = seen.context if limits is Reason.EXCEEDS_CONTEXT else seen.pool_tokens
            return Place(name, replica.name, None, None, limits, limit)
        need = NO_KV
        if ask.generates or seen.report is None or seen.report.capacity_blocks != 0:
            need = project(seen.kv, ask.count.per_prompt, limits.expected_tokens, ask.sequences)
        cap_blocks = need.kv_blocks
        if limits.cap_tokens > limits.expected_tokens:
            cap_blocks = project(seen.kv, ask.count.per_prompt, limits.cap_tokens, ask.sequences).kv_blocks
        if seen.usable is not None and (cap_blocks if target.fatal_overflow else need.kv_blocks) > seen.usable:
            return Place(name, replica.name, limits, None, Reason.EXCEEDS_POOL, seen.pool_tokens)
        candidate = self._candidate(name, target, replica, lane, ask, learned, seen, limits, need, cap_blocks, promised)
        return Place(name, replica.name, limits, candidate, None)

    def _seen(
        self, name: str, target: Target, replica: Replica, lane: Lane, report: ReplicaReport | None, ask: Ask
    ) -> _Seen:
        kv = self._kv_model(name, report.block_tokens if report is not None else None)
        static = self._static_capacity(replica, kv) if report is None else None
        # A pool of no blocks is an engine that is still loading: unknown, not full for ever.
        capacity = (report.capacity_blocks or None) if report is not None else static
        keep_free = self._keep_free(lane, target, kv, capacity)
        return _Seen(
            report=report,
            kv=kv,
            static_blocks=static,
            keep_free=keep_free,
            usable=None if capacity is None else capacity - math.ceil(capacity * target.watermark) - keep_free,
            context=self._context(target, report.max_model_tokens if report is not None else None, ask.context_tokens),
        )

    def _candidate(
        self,
        name: str,
        target: Target,
        replica: Replica,
        lane: Lane,
        ask: Ask,
        learned: Forecast,
        seen: _Seen,
        limits: OutputLimits,
        need: Projection,
        cap_blocks: int,
        promised: Promised,
    ) -> Candidate:
        report = seen.report
        rate, bucket = _prefill(target, report.prefill_tokens_per_s if report is not None else None)
        hit_share = report.prefix_hit_share if report is not None and report.prefix_hit_share is not None else 0.0
        decode = report.decode_tokens_per_s if report is not None else None
        reloaded = _reloaded_bytes(target, seen.kv, ask.context_tokens, seen.context)
        return Candidate(
            target=name,
            replica=replica.name,
            remote=False,
            need=Need(
                kv_blocks=need.kv_blocks,
                input_blocks=need.input_blocks,
                kv_bytes=need.kv_bytes,
                prefill_tokens=math.ceil(ask.count.input_tokens * (1.0 - min(max(hit_share, 0.0), 1.0))),
                sequences=ask.sequences,
                vram_bytes=self._vram(target, lane, max(need.kv_bytes, reloaded), len(replica.devices)),
            ),
            cap_blocks=cap_blocks,
            cap_s=min(CAP_S_MAX, max(CAP_S_MIN, limits.cap_tokens / (decode or SLOWEST_DECODE_TOKENS_PER_S))),
            devices=replica.devices,
            device_guard_bytes=self._guard_mb(target, lane) * MIB,
            static_capacity_blocks=seen.static_blocks,
            static_max_sequences=replica.max_sequences,
            watermark=target.watermark,
            keep_free_blocks=seen.keep_free,
            prefill_rate=rate,
            prefill_capacity_tokens=bucket,
            max_waiting=target.max_waiting,
            lane_share=lane.share,
            lane_yields_at=lane.yields_at,
            expected_s=_expected_s(ask, limits, learned, rate, decode),
            promised=promised,
        )

    def _kv_model(self, target: str, block_tokens: int | None) -> KvModel:
        key = (target, block_tokens)
        model = self._kv.get(key)
        if model is None:
            model = self._kv[key] = self._kv_models(target, block_tokens)
        return model

    def _static_capacity(self, replica: Replica, kv: KvModel) -> int | None:
        if self._config.no_agent != "ledgerOnly" or replica.kv_tokens is None:
            return None
        return replica.kv_tokens // kv.block_tokens

    def _keep_free(self, lane: Lane, target: Target, kv: KvModel, capacity: int | None) -> int:
        if not lane.kv_reserve_mb or target.engine not in PREALLOCATING or not kv.bytes_per_block:
            return 0
        wanted = math.ceil(lane.kv_reserve_mb * MIB / kv.bytes_per_block)
        return wanted if capacity is None else min(wanted, int(capacity * MAX_KEEP_FREE))

    def _context(self, target: Target, reported: int | None, asked: int | None = None) -> int | None:
        """The longest input plus output: Ollama cuts what is longer than the request asked for, with status 200."""
        model = self._config.models.get(target.model) if target.model is not None else None
        asked = asked if target.engine == "ollama" and asked else None
        return min((b for b in (reported, model.context_tokens if model else None, asked) if b and b > 0), default=None)

    def _guard_mb(self, target: Target, lane: Lane) -> int:
        """What must stay free on each device; where the pool is allocated at start, minFreeVramMb says nothing."""
        guard = self._config.devices.guard_mb
        return guard if target.engine in PREALLOCATING else max(lane.min_free_vram_mb, guard)

    def _vram(self, target: Target, lane: Lane, kv_bytes: int, shards: int) -> tuple[int, ...]:
        if target.engine in PREALLOCATING or not shards:
            return ()
        return (math.ceil((kv_bytes + lane.kv_reserve_mb * MIB) / shards),) * shards


def _reloaded_bytes(target: Target, kv: KvModel, asked: int | None, context: int | None) -> int:
    """What Ollama allocates for a request that asks for a longer context than the loaded one: all of that context."""
    if target.engine != "ollama" or asked is None or context is None or asked <= context:
        return 0
    return project(kv, (asked,), 0, 1).kv_bytes


def _within(ask: Ask, context: int | None) -> Ask:
    """The ask with what is charged for unseen text cut to the room that the context leaves it: the engine takes no more."""
    hidden = ask.count.hidden_tokens
    if not hidden or context is None:
        return ask
    first, *others = ask.count.per_prompt
    room = context - max(ask.client_cap or 1, ask.min_tokens)
    cut = max(first - hidden, min(first, room))
    return replace(ask, count=replace(ask.count, per_prompt=(cut, *others)))


def _output_request(
    ask: Ask, lane: Lane, context: int | None, pool_tokens: int | None, target: Target, learned: int | None
) -> OutputRequest:
    return OutputRequest(
        input_tokens=max(ask.count.per_prompt, default=0),
        total_input_tokens=ask.count.input_tokens,
        sequences=ask.sequences,
        client_cap=ask.client_cap,
        lane_cap=lane.max_output_tokens,
        context_tokens=context,
        pool_tokens=pool_tokens,
        fatal=target.fatal_overflow,
        clamp=lane.clamp_output,
        learned=learned,
        runs_to_cap=ask.runs_to_cap,
        min_tokens=ask.min_tokens,
        generates=ask.generates,
    )


def _expected_s(ask: Ask, limits: OutputLimits, learned: Forecast, rate: float | None, decode: float | None) -> float:
    """How long it will probably run: as long as past answers of its kind, and no longer than its output would take.

    The latter is at the pace of past answers, else at the engine's rates.
    """
    tokens = limits.expected_tokens
    if learned.token_s is not None and tokens:
        longest_s = tokens * learned.token_s
    else:
        longest_s = (ask.count.input_tokens / rate if rate else 0.0) + tokens / (decode or USUAL_DECODE_TOKENS_PER_S)
    return longest_s if ask.runs_to_cap or learned.run_s is None else min(longest_s, learned.run_s)


def _prefill(target: Target, measured: float | None) -> tuple[float | None, float | None]:
    bounds = target.prefill_tokens_per_s
    rate = measured if measured is not None else (float(bounds.cold_start) if bounds else None)
    if rate is None:
        return None, None
    if bounds is not None:
        rate = max(rate, float(bounds.floor))
    return rate, rate * target.ttft_budget_ms / 1000.0
