"""Shadow mode: decides as if it counted, and serves as if kvgate were not there.

Nothing that a client can send is refused, changed or rerouted: the first target of its chain gets its bytes, reserved
there whatever the room, so that the ledger shows what is true.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from msgspec import structs

from extproc.decisions import Decisions
from extproc.placing import Pending, Placing
from extproc.types import Decision


class Shadow:
    """``anywhere`` is where a request goes that names no target of its own."""

    def __init__(self, decisions: Decisions, placing: Placing, anywhere: Sequence[str]) -> None:
        self._decisions = decisions
        self._placing = placing
        self._anywhere = anywhere

    async def decide(self, pending: Pending, enforced: Callable[[Pending], Awaitable[Decision]]) -> Decision:
        """The decision that ``enforced`` would make, under an id that is given back at once, and the way of the request."""
        trial = replace(
            pending, who=structs.replace(pending.who, rid=secrets.token_hex(12)), timings_ms=pending.timings_ms
        )
        would = await enforced(trial)
        await self._placing.abandon(trial)
        if would.decision == "pass":
            return structs.replace(would, rid=pending.who.rid)
        if trial.what is None:
            return self._shown(would, self._placing.onward(pending, trial.parsed, self._anywhere))
        first = trial.what.route.chain[:1]
        return self._shown(would, await self._placing.at_any_rate(pending, trial.what, first))

    def instead_of(self, refused: Decision, pending: Pending) -> Decision:
        """A refusal of our own making refuses nothing: the request goes on."""
        return self._shown(refused, self._placing.onward(pending, None, self._anywhere))

    def _shown(self, would: Decision, served: Decision) -> Decision:
        # Without a place to go there is nothing to serve, and the client has to hear of that.
        return served if served.refusal is not None else self._decisions.shadowed(would, served)
