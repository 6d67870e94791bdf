"""What sidecars learned from past answers, known to all of a pool: the reference of ``lua/lessons.lua``.

An answer's end is heard by the one sidecar that holds its Envoy's log stream. Without this the others would reserve for
caps for ever, and so would each that starts anew. Pure: time is an argument, in microseconds on the ledger's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: A lesson last told so long ago gives way to one of less weight; one that nobody told for a month is forgotten.
FADES_US, FORGOTTEN_US = 60_000_000, 30 * 86_400_000_000
#: Names remembered; beyond it new ones are not.
MAX_LESSONS = 1000


@dataclass(frozen=True, slots=True)
class Lesson:
    """What was learned from ``weight`` answers under ``name``; what the figures are is the learner's matter."""

    name: str
    weight: int
    figures: tuple[float, ...]


class Lessons:
    """The lessons of one pool."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, tuple[Lesson, int]] = {}

    def tell(self, told: Sequence[Lesson], now_us: int) -> list[Lesson]:
        """See ``Ledger.lessons``."""
        self._known = {name: known for name, known in self._known.items() if now_us - known[1] <= FORGOTTEN_US}
        for lesson in told:
            known = self._known.get(lesson.name)
            if known is None:
                if len(self._known) < MAX_LESSONS:
                    self._known[lesson.name] = (lesson, now_us)
            elif lesson.weight >= known[0].weight or now_us - known[1] > FADES_US:
                self._known[lesson.name] = (lesson, now_us)
        return [lesson for lesson, _ in self._known.values()]
