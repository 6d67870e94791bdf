"""How many output tokens one request may and probably will produce on one target.

Owns the arithmetic of caps; knows no engine by name, only whether its overflow is fatal. A cap is a ceiling,
not a forecast: the forecast comes in as ``learned``.
"""

from __future__ import annotations

from msgspec import Struct

from extproc.types import Reason


class OutputLimits(Struct, frozen=True):
    """``cap_tokens`` per sequence bounds what the request can produce; ``expected_tokens`` is what is reserved.

    ``write_cap`` says that the cap must be written into the body, because the engine would otherwise allow more.
    """

    cap_tokens: int
    expected_tokens: int
    write_cap: bool


class OutputRequest(Struct, frozen=True):
    """What bounds the output: the client's cap (None: absent), the lane's ceiling, the room of context and pool.

    ``input_tokens`` is the longest prompt; ``pool_tokens`` the replica's whole pool or None; ``sequences`` how
    many outputs share it. ``fatal`` marks engines whose overflow kills running requests; ``clamp`` the lane's
    wish to shorten instead of refusing; ``learned`` the quantile of past outputs or None; ``runs_to_cap`` that
    the client forbade an early stop. ``generates`` is False for embeddings and scoring.
    """

    input_tokens: int
    total_input_tokens: int
    sequences: int
    client_cap: int | None
    lane_cap: int | None
    context_tokens: int | None
    pool_tokens: int | None
    fatal: bool
    clamp: bool
    learned: int | None
    runs_to_cap: bool
    min_tokens: int = 0
    generates: bool = True


def output_limits(request: OutputRequest) -> OutputLimits | Reason:
    """The limits, or the permanent reason why the request can never run there.

    The engine's own refusal is predicted: input + cap beyond the context is refused unless the cap may be
    written down to the room left. A request must fit into the pool alone, at its full cap.
    """
    if not request.generates:
        return _without_output(request)
    context_room = None if request.context_tokens is None else request.context_tokens - request.input_tokens
    pool_room = (
        None
        if request.pool_tokens is None
        else (request.pool_tokens - request.total_input_tokens) // max(1, request.sequences)
    )
    least = 0 if request.client_cap == 0 else 1
    if context_room is not None and context_room < least:
        return Reason.EXCEEDS_CONTEXT
    if pool_room is not None and pool_room < least:
        return Reason.EXCEEDS_POOL
    room = min(r for r in (context_room, pool_room, _UNBOUNDED) if r is not None)
    may_write = request.clamp or request.fatal
    wanted = request.client_cap
    lane_cap = request.lane_cap if request.lane_cap is not None else DEFAULT_OUTPUT_TOKENS
    if wanted is None:
        ceiling = min(lane_cap, room)
    elif may_write:
        ceiling = min(wanted, request.lane_cap or wanted, room)
    elif wanted > room:
        return Reason.EXCEEDS_CONTEXT if context_room == room else Reason.EXCEEDS_POOL
    else:
        ceiling = wanted
    if ceiling < request.min_tokens:
        return Reason.EXCEEDS_CONTEXT
    write = may_write and ceiling != wanted
    bounded = ceiling if write or wanted is not None or room == _UNBOUNDED else room
    return OutputLimits(bounded, _expected(request, ceiling), write)


#: Output reserved where neither the client, the lane nor past answers say anything.
DEFAULT_OUTPUT_TOKENS = 4096
#: Stands for "no bound known" (2^31 - 1, what engines themselves take as the largest cap).
_UNBOUNDED = 2**31 - 1


def _expected(request: OutputRequest, ceiling: int) -> int:
    if request.fatal or request.runs_to_cap:
        return ceiling
    bounds = [ceiling, *([request.lane_cap] if request.lane_cap is not None else [])]
    if request.learned is not None:
        bounds.append(max(request.learned, request.min_tokens, 1 if ceiling else 0))
    return min(bounds)


def _without_output(request: OutputRequest) -> OutputLimits | Reason:
    if request.context_tokens is not None and request.input_tokens > request.context_tokens:
        return Reason.EXCEEDS_CONTEXT
    if request.pool_tokens is not None and request.input_tokens > request.pool_tokens:
        return Reason.EXCEEDS_POOL
    return OutputLimits(0, 0, write_cap=False)
