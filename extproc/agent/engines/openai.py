"""OpenAI-compatible remotes: whether they answer, and what their rate-limit headers say.

Their memory is not ours to schedule, so there is no capacity and nothing is required. The request carries no
credential; 401 and 403 are the answer of a healthy API to a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.agent.engines.base import Answer, Availability, Endpoint, Hints, Reading, dig, number, ok, whole

#: An API may ask not to be asked often; health is looked at twice a minute.
EVERY_ROUNDS = 30
#: Statuses by which an API shows that it lives without serving us this list.
ALIVE = frozenset({401, 403, 404, 405, 429})
#: Header prefixes of the rate limits in use (OpenAI, Azure; Anthropic).
LIMIT_PREFIXES = ("x-ratelimit-remaining-", "anthropic-ratelimit-")


class OpenAi:
    """The row of a remote API or of any server that speaks its protocol."""

    name = "openai"
    endpoints = (Endpoint("/v1/models", every=EVERY_ROUNDS),)

    def read(self, answers: Mapping[str, Answer], hints: Hints) -> Reading:
        """One reading: availability, context where the model card has one, limits as notes."""
        answer = answers.get("/v1/models")
        if answer is None or not (ok(answer) or answer.status in ALIVE):
            return Reading(Availability.UNHEALTHY)
        cards = dig(answer.json(), "data") if ok(answer) else None
        cards = cards if isinstance(cards, list) else []
        card = next((card for card in cards if dig(card, "id") == hints.served_model), None)
        notes = [
            f"{name}: {value}"
            for name, value in sorted(answer.headers.items())
            if name.startswith(LIMIT_PREFIXES) and number(value) is not None
        ]
        if answer.status == 429:
            notes.append(f"rate_limited: retry after {answer.headers.get('retry-after', 'unknown')}")
        return Reading(
            availability=Availability.SERVING,
            capacity_blocks=hints.kv_tokens,
            max_sequences=hints.max_sequences,
            max_model_tokens=whole(dig(card, "max_model_len")) or hints.max_model_tokens,
            notes=tuple(notes),
        )
