"""The Lua operations as the server gets them: shebang, the shared part, the operation's own file, constants written out.

Owns reading and hashing; knows no connection. ``allow-oom`` stands on the scripts that give room back or keep what
is there, so that a server out of memory refuses new reservations and nothing else.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: Operations in which reservations end; reserve makes the functions for it only when something is due.
KEEPERS = frozenset({"renew", "end", "reap", "publish"})
LAZY_KEEPERS = frozenset({"reserve"})

#: Every operation and the flags of its shebang line.
FLAGS = {
    "init": "",
    "reserve": "",
    "renew": "allow-oom",
    "end": "allow-oom",
    "reap": "allow-oom",
    "publish": "allow-oom",
    "heartbeat": "allow-oom",
    "line": "",
    "lessons": "",
    "drain": "allow-oom",
    "snapshot": "no-writes",
    "reservations": "no-writes",
    "audit": "no-writes",
}

#: ``local NAME, NAME = value, value`` with names in capitals, and values that are the same wherever they stand.
_CONSTANTS = re.compile(
    r"^local ([A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*) = ((?:[-\d. /]+|'[^']*'|KEYS\[\d+\]|, )+)\n", re.MULTILINE
)
#: What a name can be mistaken for, then names.
_TOKENS = re.compile(r"--[^\n]*|'[^'\n]*'|\b[A-Z][A-Z0-9_]*\b")


@dataclass(frozen=True, slots=True)
class Script:
    """One operation: its text and the SHA-1 by which EVALSHA calls it."""

    name: str
    text: bytes
    sha: bytes


@cache
def load(name: str) -> Script:
    """Assemble one operation; KeyError for a name that is none."""
    folder = files("extproc.ledger").joinpath("lua")
    flags = FLAGS[name]
    head = f"#!lua flags={flags}\n" if flags else "#!lua\n"
    keep = folder.joinpath("_keep.lua").read_text(encoding="utf-8")
    if name in LAZY_KEEPERS:
        keep = f"local function keeper()\n{keep}return sweep\nend\n"
    elif name not in KEEPERS:
        keep = ""
    own = folder.joinpath(f"{name}.lua").read_text(encoding="utf-8")
    lib = folder.joinpath("_lib.lua").read_text(encoding="utf-8")
    text = (head + written_out(lib + keep + own)).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


def written_out(lua: str) -> str:
    """``lua`` with the values of its constants in their places, and without comments.

    A script's functions are made anew in every call, and each costs time for every local of the chunk that it uses.
    """
    values: dict[str, str] = {}
    for names, given in _CONSTANTS.findall(lua):
        for name, value in zip(names.split(", "), given.split(", "), strict=True):
            values[name] = f"({value})" if "/" in value else value

    def value_of(token: re.Match[str]) -> str:
        found = token[0]
        return "" if found.startswith("--") else values.get(found, found)

    return _TOKENS.sub(value_of, _CONSTANTS.sub("", lua))


def load_all() -> dict[str, Script]:
    """Every operation by name."""
    return {name: load(name) for name in FLAGS}
