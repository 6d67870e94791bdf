"""Every key name of the ledger, built here and nowhere else.

All keys of one pool carry the hash tag ``{pool}``, so that they share one slot of a Redis Cluster; several pools
spread over its nodes. Lua scripts take the whole list, in this order, through KEYS.
"""

from __future__ import annotations

PREFIX = "kvgate"

#: The scripts' keys in the order of KEYS[1..16]; the head of ``lua/_lib.lua`` says what each holds.
SCRIPT_KEYS = (
    "meta", "res", "idx", "due", "join", "sum", "lane", "rep", "dev", "devx", "devp", "ended", "orph", "alive",
    "line", "lessons",
)  # fmt: skip


def key(pool: str, name: str) -> str:
    """One key of a pool; ValueError for a pool name that would break the hash tag."""
    if not pool or "{" in pool or "}" in pool:
        raise ValueError(f"ledger pool {pool!r}: a pool name is not empty and holds no braces")
    return f"{PREFIX}:{{{pool}}}:{name}"


#: A key that never exists, last in KEYS on a cluster. A node whose slot is on its way to another runs a script while all
#: of its keys are there; one that then removed the last entry of one of them would be cut off half way through.
ABSENT = "absent"


def script_keys(pool: str, *, cluster: bool = False) -> list[str]:
    """The KEYS of every script of one pool; with ``ABSENT`` on a cluster."""
    return [key(pool, name) for name in (*SCRIPT_KEYS, *((ABSENT,) if cluster else ()))]


def decisions_key(pool: str) -> str:
    """The capped stream of decision records."""
    return key(pool, "decisions")


def pattern(pool: str) -> str:
    """The key pattern of an ACL rule that covers exactly one pool."""
    return key(pool, "*")


#: What the ledger and the decision log run, alone or inside scripts; nothing else is needed. A cluster's other nodes are
#: learned by ``cluster|slots``: a user without it knows those of the URL, and where it was sent.
COMMANDS = (
    "evalsha", "script|load", "cluster|slots", "time", "hget", "hmget", "hset", "hdel", "hincrby", "hgetall", "hlen",
    "zadd", "zrem", "zcard", "zcount", "zrangebyscore", "zrangebylex", "zremrangebyscore", "xadd", "xrevrange", "xread",
)  # fmt: skip


def acl(pool: str, user: str, password: str) -> list[str]:
    """The ACL SETUSER command (as parts) of a user who may do what one pool's ledger needs, and nothing else."""
    allowed = [f"+{command}" for command in COMMANDS]
    return ["ACL", "SETUSER", user, "reset", "on", f">{password}", f"~{pattern(pool)}", "-@all", *allowed]
