"""Which series stand at 0 from the start, so that a missing series never means that nobody asked.

Owns the choice of label sets that a configuration can produce; autoscalers take an empty result for "no demand"
(KEDA ignores it by default), and ``increase()`` misses what a new series begins with.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config import Config
from extproc.config.checks import lane_targets
from extproc.telemetry.names import NONE
from extproc.types import Reason

#: Refusals before a lane is known, or of what is none of any lane's.
WITHOUT_LANE = (
    Reason.BODY_TOO_LARGE,
    Reason.BAD_REQUEST,
    Reason.UNSUPPORTED_CONTENT_ENCODING,
    Reason.UNKNOWN_MODEL,
    Reason.NOT_READY,
    Reason.INTERNAL,
)
WITH_LANE = tuple(reason for reason in Reason if reason not in WITHOUT_LANE)


def decisions(config: Config) -> Iterator[tuple[str, str, str, str, str]]:
    """(mode, decision, lane, target, reason) of every refusal and of every admission to a first choice.

    Fallbacks are left out: reason x target would be most of the exposition.
    """
    for reason in WITHOUT_LANE:
        yield config.mode, "reject", NONE, NONE, str(reason)
    for lane in config.lanes:
        for reason in WITH_LANE:
            yield config.mode, "reject", lane, NONE, str(reason)
        for target in lane_targets(config, lane) or tuple(config.targets):
            if target in config.targets:
                yield config.mode, "admit", lane, target, NONE


def models(config: Config) -> Iterator[tuple[str, str]]:
    """(model, decision) of every alias; one without a single replica is asked for as well."""
    for alias in config.aliases:
        for decision in ("admit", "fallback", "reject"):
            yield alias, decision


def queues(config: Config) -> Iterator[str]:
    """Lanes whose requests may be held."""
    return (name for name, lane in config.lanes.items() if lane.queue is not None)
