"""The fields of STATE.json and a reader that notes every mistake under its path instead of stopping at the first.

Owns the field tables and the judgement of single values; what the fields mean together is ``state``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

_COUNT, _NUMBER, _SIGNED, _TEXT, _FLAG = "count", "number", "signed", "text", "flag"
_TEXTS, _COUNTS, _COUNT_OF, _OBJECTS, _ANY = "texts", "counts", "count_of", "objects", "any"
_MENDS: Final = {
    _COUNT: "write a whole number of 0 or more, or null where it is unknown",
    _NUMBER: "write a finite number of 0 or more, or null where it is unknown",
    _SIGNED: "write a finite number",
    _TEXT: "write text",
    _FLAG: "write true or false",
    _TEXTS: "write a list of texts",
    _COUNTS: "write a list of whole numbers",
    _COUNT_OF: "write an object of whole numbers",
    _OBJECTS: "write a list of objects",
}
TOP: Final = {
    "replicas": _OBJECTS,
    "devices": _OBJECTS,
    "lanes": _OBJECTS,
    "now_s": _NUMBER,
    "epoch": _TEXT,
    "live_sidecars": _COUNT,
    "loss_age_s": _NUMBER,
}
REPLICA: Final = {
    "target": _TEXT,
    "replica": _TEXT,
    "engine": _TEXT,
    "state": _TEXT,
    "age_s": _NUMBER,
    "kv_capacity_blocks": _COUNT,
    "block_tokens": _COUNT,
    "kv_used_blocks": _COUNT,
    "shows_used": _FLAG,
    "running": _COUNT,
    "waiting": _COUNT,
    "max_sequences": _COUNT,
    "max_model_tokens": _COUNT,
    "prefill_tokens_per_s": _NUMBER,
    "decode_tokens_per_s": _NUMBER,
    "prefix_hit_share": _NUMBER,
    "preemptions_total": _NUMBER,
    "engine_age_s": _NUMBER,
    "scrape_s": _NUMBER,
    "node": _TEXT,
    "instance": _TEXT,
    "kv_reserved_blocks": _COUNT,
    "kv_foreign_blocks": _COUNT,
    "sequences": _COUNT,
    "prefill_level_tokens": _NUMBER,
    "bypass": _FLAG,
    "over_admissions": _COUNT,
    "over_adopted": _COUNT,
    "over_grew": _COUNT,
    "over_foreign": _COUNT,
    "lane_blocks": _COUNT_OF,
    "drained": _FLAG,
    "reservations": _OBJECTS,
    # Printed for the reader's eye and computed again on the way in.
    "kv_committed_blocks": _COUNT,
    "kv_headroom_blocks": _ANY,
    "orphaned": _COUNT,
}
RESERVATION: Final = {
    "rid": _TEXT,
    "state": _TEXT,
    "blocks": _COUNT,
    "reserved_blocks": _COUNT,
    "input_blocks": _COUNT,
    "kv_bytes": _COUNT,
    "prefill_tokens": _COUNT,
    "sequences": _COUNT,
    "vram_bytes": _COUNTS,
    "devices": _TEXTS,
    "input_tokens": _COUNT,
    "expected_output_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "cap_blocks": _COUNT,
    "cap_s": _NUMBER,
    "expected_s": _NUMBER,
    "lane": _TEXT,
    "owner": _TEXT,
    "request_id": _TEXT,
    "class": _TEXT,
    "age_s": _NUMBER,
    "lease_s": _SIGNED,
    "first_byte_age_s": _NUMBER,
}
DEVICE: Final = {
    "uuid": _TEXT,
    "name": _TEXT,
    "node": _TEXT,
    "instance": _TEXT,
    "state": _TEXT,
    "age_s": _NUMBER,
    "total_bytes": _COUNT,
    "free_bytes": _COUNT,
    "used_bytes": _COUNT,
    "driver_reserved_bytes": _COUNT,
    "reserved_bytes": _COUNT,
}
LANE: Final = {"lane": _TEXT, "in_flight": _COUNT}
DEVICE_STATES: Final = ("ok", "lost", "unknown", "unified")


@dataclass(slots=True)
class Fields:
    """One object of the file, read field by field; mistakes are noted under their path and a default goes on."""

    data: Any
    path: str
    kinds: Mapping[str, str]
    problems: list[str]

    def __post_init__(self) -> None:
        if not isinstance(self.data, dict):
            self.problems.append(f"{self.path or '(top)'}: must be an object; write {{…}}")
            self.data = {}
            return
        for key, value in self.data.items():
            kind = self.kinds.get(key)
            if kind is None:
                # Later releases add fields, so a stranger passes; a name that is nearly ours is a slip.
                near = get_close_matches(key, self.kinds, n=1, cutoff=0.9)
                if near:
                    self.problem(key, f"unknown key; did you mean {near[0]!r}?")
            elif value is not None and not _fits(value, kind):
                self.problem(key, f"has a value that cannot be used here; {_MENDS[kind]}")
                self.data = {**self.data, key: None}

    def problem(self, key: str, text: str) -> None:
        """Note a mistake at ``key``."""
        self.problems.append(f"{self._at(key)}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, ``default`` where it is absent or null."""
        value = self.data.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key is there, null included."""
        return key in self.data

    def required(self, key: str) -> str:
        """A text that must be there."""
        value = self.data.get(key)
        if not value:
            self.problem(key, "missing; add it")
        return str(value or "")

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        """One of ``allowed``."""
        value = self.get(key, default)
        if value not in allowed:
            self.problem(key, f"must be one of {', '.join(allowed)}; choose one")
            return default
        return str(value)

    def objects(self, key: str, kinds: Mapping[str, str]) -> list[Fields]:
        """The list of objects at ``key``, each with its own fields."""
        return [
            Fields(item, f"{self._at(key)}[{index}]", kinds, self.problems)
            for index, item in enumerate(self.get(key, []))
        ]

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _fits(value: object, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "count":
            return isinstance(value, int) and number and 0 <= value < 2**63
        case "number":
            return isinstance(value, int | float) and number and math.isfinite(value) and value >= 0
        case "signed":
            return isinstance(value, int | float) and number and math.isfinite(value)
        case "text":
            return isinstance(value, str)
        case "flag":
            return isinstance(value, bool)
        case "texts":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "counts":
            return isinstance(value, list) and all(_fits(each, _COUNT) for each in value)
        case "count_of":
            return isinstance(value, dict) and all(_fits(each, _COUNT) for each in value.values())
        case "objects":
            return isinstance(value, list)
    return True
