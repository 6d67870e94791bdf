"""What kvgate wrote down: when each request was decided, where it went, and when its end became known to any process.

Read from the decision log of a finished run. This is kvgate's own word, so it never decides whether an engine was idle
(``truth`` does, from the engines' logs); it only says what could have been known of an engine at the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import redis

from extproc.ledger.keys import decisions_key


@dataclass(frozen=True, slots=True)
class Told:
    """One decision: taken between ``began_s`` and ``over_s``; ``heard_s`` is when a process heard of the end.

    ``free_blocks`` are the blocks that the ledger saw free at each replica it was asked about, ``refused_by`` why each
    refused.
    """

    id: str
    replica: str | None
    began_s: float
    over_s: float
    heard_s: float | None
    free_blocks: Mapping[str, int | None]
    refused_by: Mapping[str, str | None]


def decisions(url: str, pool: str) -> dict[str, Told]:
    """Every decision that the log of ``pool`` still holds, by the client's request id."""
    with redis.Redis.from_url(url) as server:
        entries = server.xrange(decisions_key(pool))
    return told((field.decode(), json.loads(line)) for _, fields in entries for field, line in fields.items())


def told(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Told]:
    """The log's entries (``decision`` or ``end``, and its record), joined by rid."""
    records: list[Mapping[str, Any]] = []
    heard: dict[str, float] = {}
    for kind, record in entries:
        if kind == "end":
            heard.setdefault(record["rid"], _unix_s(record["at"]))
        else:
            records.append(record)
    return {record["request_id"]: _told(record, heard.get(record["rid"])) for record in records}


def _told(record: Mapping[str, Any], heard_s: float | None) -> Told:
    over_s, candidates = _unix_s(record["at"]), record["candidates"]
    return Told(
        record["request_id"], record["replica"], over_s - record["decision_ms"] / 1000, over_s, heard_s,
        {one["replica"]: one["free_before"]["kv_blocks"] for one in candidates},
        {one["replica"]: one["refused_by"] for one in candidates},
    )  # fmt: skip


def _unix_s(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an idle engine was not used by a refusal: the blocks that had to be taken for held there.

    ``unheard_blocks`` are of requests whose engine was done with them but whose end no process had heard of,
    ``coming_blocks`` of requests that had been admitted and had not reached the engine yet. ``excused``: with them there
    was no room.
    """

    id: str
    engine: str
    unheard_blocks: int
    coming_blocks: int
    excused: bool

    @property
    def why(self) -> str:
        """The larger part, in words."""
        if not self.excused:
            return "it could have been known"
        return (
            "its last end was not known yet" if self.unheard_blocks > self.coming_blocks else "others were on their way"
        )


def judge(
    refused: Told,
    engine: str,
    need_blocks: int,
    usable_blocks: int,
    admitted: Sequence[Told],
    blocks: Mapping[str, int],
    ended_s: Mapping[str, float],
) -> Verdict:
    """What could be known of an ``engine`` that was idle while ``refused`` was decided.

    A request held its ``blocks`` there if it was admitted before the refusal was out, and no process had heard of its
    end before the refusal's decision began. ``ended_s`` are the ends in the engine's own log.
    """
    unheard = coming = 0
    for one in admitted:
        if one.replica != engine or one.began_s > refused.over_s:
            continue
        if one.heard_s is not None and one.heard_s <= refused.began_s:
            continue
        if ended_s[one.id] <= refused.began_s:
            unheard += blocks[one.id]
        else:
            coming += blocks[one.id]
    return Verdict(refused.id, engine, unheard, coming, unheard + coming + need_blocks > usable_blocks)
