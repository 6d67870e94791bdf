"""OpenAI-compatible remotes: whether they answer, and what their rate-limit headers say.

Their memory is not ours to schedule, so there is no capacity and nothing is required. The request carries no
credential: Envoy alone holds those, and 401 or 403 is the answer of a healthy API to a stranger. So a limit of the
account is rarely seen here; the answers to real requests tell it (``completion``).
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.agent.engines.base import Answer, Availability, Endpoint, Hints, Reading, dig, ok, whole
from extproc.gateway.quota import HEADERS, SPENT, closed_for_s

#: Statuses by which an API shows that it lives without serving us this list.
ALIVE = frozenset({401, 403, 404, 405})


class OpenAi:
    """The row of a remote API or of any server that speaks its protocol."""

    name = "openai"
    outside = True
    endpoints = (Endpoint("/v1/models"),)

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """One reading: availability, context where the model card has one, limits as notes."""
        answer = answers.get("/v1/models")
        if answer is None or not (ok(answer) or answer.status in ALIVE | SPENT):
            said = () if answer is None else (f"answered: {answer.status}",)
            return Reading(Availability.UNHEALTHY, notes=said)
        cards = dig(answer.json(), "data") if ok(answer) else None
        cards = cards if isinstance(cards, list) else []
        card = next((card for card in cards if dig(card, "id") == hints.served_model), None)
        closed_s = closed_for_s(answer.status, answer.headers)
        notes = [f"{name}: {answer.headers[name]}" for name in HEADERS if name in answer.headers]
        if closed_s is not None:
            notes.append(f"no_more: for {closed_s:g} s ({answer.status})")
        return Reading(
            availability=Availability.SERVING if closed_s is None else Availability.DRAINING,
            max_model_tokens=whole(dig(card, "max_model_len")) or hints.max_model_tokens,
            notes=tuple(notes),
            closed_for_s=closed_s,
        )
