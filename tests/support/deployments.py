"""A ledger's server as it is run where one process is not enough: a cluster, and masters watched by Sentinels.

Both are made of real ``ValkeyServer`` processes, know who owns the ledger's keys at the moment, and are whole again
when ``until_whole`` returns: every master is known, and has its replicas in step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.valkey import ValkeyServer, command

#: Failovers begin after this long: more than kvgate needs to give up a silent connection (``link.STALL_S``).
FAILOVER_AFTER_MS = 3000
WHOLE_WITHIN_S = 120.0
#: Who has not answered for this long is away, or was stopped by the test.
ASKED_S = 3.0
SLOTS = 16384
SERVICE = "main"


def until(true: Callable[[], Any], within_s: float, what: str) -> None:
    """Wait for a condition; what cannot be asked yet is not true yet."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if true():
                return
        except OSError:
            pass  # a process that is down, or comes back
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s:g} s")
        time.sleep(0.05)


def info(port: int, section: str) -> dict[str, str]:
    """One section of INFO."""
    text = command(port, "INFO", section, timeout_s=ASKED_S)
    assert isinstance(text, bytes), text
    return dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)


def in_step(port: int, replicas: int, upto: int = 1) -> bool:
    """Whether this server is a master with so many replicas that have all of its first ``upto`` bytes.

    A replica is called online before it has loaded what it was sent; it has acknowledged nothing until then.
    """
    found = info(port, "replication")
    slaves = [line for name, line in found.items() if name.startswith("slave") and name[5:].isdigit()]
    views = [dict(field.split("=", 1) for field in line.split(",")) for line in slaves]
    there = sum(view["state"] == "online" and int(view["offset"]) >= upto for view in views)
    return found["role"] == "master" and there >= replicas


def until_replicated(port: int, replicas: int) -> None:
    """Wait until so many replicas have all that this master has now."""
    upto = int(info(port, "replication")["master_repl_offset"])
    until(lambda: in_step(port, replicas, upto), WHOLE_WITHIN_S, "the replicas have it all")


class ValkeyCluster:
    """Three masters that share the slots, each with ``replicas`` replicas of its own."""

    def __init__(self, *, replicas: int = 0, binary: str | None = None, durable: bool = False) -> None:
        self.replicas = replicas
        self.nodes = [
            ValkeyServer(
                binary=binary, appendonly=durable, extra=[
                    "--cluster-enabled", "yes", "--cluster-node-timeout", str(FAILOVER_AFTER_MS), "--cluster-replica-validity-factor", "0",
                ],
            )
            for _ in range(3 * (1 + replicas))
        ]  # fmt: skip

    @property
    def url(self) -> str:
        """Every node is named, as an operator would."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> ValkeyCluster:
        """Start all nodes and make them one cluster."""
        for node in self.nodes:
            node.start()
        masters, others = self.nodes[:3], self.nodes[3:]
        bounds = [SLOTS * number // 3 for number in range(4)]
        for node, first, last in zip(masters, bounds, bounds[1:], strict=False):
            _ok(node, "CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        for node in self.nodes[1:]:
            _ok(node, "CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for number, node in enumerate(others):
            master = identity(masters[number % 3])
            until(
                lambda node=node, master=master: command(node.port, "CLUSTER", "REPLICATE", master) == b"OK",
                WHOLE_WITHIN_S,
                "known",
            )
        self.until_whole()
        return self

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.close()

    def until_whole(self) -> None:
        """Wait until every slot is served and every master has its replicas."""
        until(self._whole, WHOLE_WITHIN_S, "the cluster is whole")

    def _whole(self) -> bool:
        states = [info_of_cluster(node) for node in self.nodes]
        masters = self.masters()
        return (
            all(state["cluster_state"] == "ok" for state in states)
            and all(state["cluster_known_nodes"] == str(len(self.nodes)) for state in states)
            and len(masters) == 3
            and all(in_step(node.port, self.replicas) for node in masters)
        )

    def masters(self) -> list[ValkeyServer]:
        """The nodes that hold themselves for masters."""
        return [node for node in self.nodes if info(node.port, "replication")["role"] == "master"]

    def slot(self, key: str) -> int:
        """The slot of a key."""
        return int(command(self.nodes[0].port, "CLUSTER", "KEYSLOT", key))

    def owner(self, slot: int, *, but: ValkeyServer | None = None) -> ValkeyServer | None:
        """Who serves the slot, as the nodes other than ``but`` say; None while they name nobody who is there."""
        for node in self.nodes:
            if node is but:
                continue
            try:
                ranges = command(node.port, "CLUSTER", "SLOTS", timeout_s=ASKED_S)
            except OSError:
                continue
            ports = [int(master[1]) for first, last, master, *_ in ranges if first <= slot <= last]
            return next((one for one in self.nodes if one.port in ports and one is not but), None)
        return None

    def serving(self, slot: int) -> ValkeyServer:
        """Who serves the slot by its own word, once exactly one node says so and all have heard of each other's epochs.

        A slot that is moved by a node which has not heard of the last move's epoch can end up as nobody's for good:
        its old and its new owner then each name the other.
        """
        found: list[ValkeyServer] = []

        def one() -> bool:
            found[:] = [node for node in self.nodes if self._holds(node, slot)]
            return len(found) == 1 and len({self._epochs(node) for node in self.nodes}) == 1

        until(one, WHOLE_WITHIN_S, "one node serves the slot")
        return found[0]

    @staticmethod
    def _holds(node: ValkeyServer, slot: int) -> bool:
        ranges = command(node.port, "CLUSTER", "SLOTS")
        return any(first <= slot <= last and master[1] == node.port for first, last, master, *_ in ranges)

    @staticmethod
    def _epochs(node: ValkeyServer) -> frozenset[tuple[str, str]]:
        """Every node's configuration epoch, as this one knows it."""
        lines = [line.split() for line in command(node.port, "CLUSTER", "NODES").decode().splitlines()]
        return frozenset((words[0], words[6]) for words in lines)

    @contextmanager
    def moving(self, slot: int, to: ValkeyServer | None = None) -> Iterator[tuple[ValkeyServer, ValkeyServer]]:
        """The slot is on its way from its owner to ``to`` or another master while the block runs, and there afterwards.

        The block may move its keys with ``move_keys``; those that are left are moved at the end.
        """
        old = self.serving(slot)
        masters = self.masters()
        new = to or next(node for node in masters if node is not old)
        _ok(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", identity(old))
        _ok(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", identity(new))
        yield old, new
        while self.move_keys(slot, old, new):
            pass
        for node in (new, old, *(node for node in masters if node not in (old, new))):
            _ok(node, "CLUSTER", "SETSLOT", slot, "NODE", identity(new))

    @property
    def hands_over(self) -> bool:
        """Whether the servers can move a slot at once, as Valkey 9 does."""
        return b"migrateslots" in b" ".join(command(self.nodes[0].port, "CLUSTER", "HELP")).lower()

    def hand_over(self, slot: int, to: ValkeyServer) -> None:
        """Move the slot at once; returns when ``to`` serves it and nobody else says that it does."""
        move = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", identity(to))
        until(lambda: command(self.serving(slot).port, *move) == b"OK", WHOLE_WITHIN_S, "the slot may be handed over")
        until(lambda: self.serving(slot) is to, WHOLE_WITHIN_S, "the slot is handed over")

    @staticmethod
    def move_keys(slot: int, old: ValkeyServer, new: ValkeyServer, count: int = 100) -> int:
        """Move up to ``count`` keys of the slot; returns how many there were."""
        names = command(old.port, "CLUSTER", "GETKEYSINSLOT", slot, count)
        if names:
            _ok(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *(name.decode() for name in names))
        return len(names)

    def __enter__(self) -> ValkeyCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def identity(node: ValkeyServer) -> str:
    """The node's id in its cluster."""
    return str(command(node.port, "CLUSTER", "MYID").decode())


def info_of_cluster(node: ValkeyServer) -> dict[str, str]:
    """CLUSTER INFO."""
    return dict(
        line.split(":", 1) for line in command(node.port, "CLUSTER", "INFO").decode().splitlines() if ":" in line
    )


def _ok(node: ValkeyServer, *parts: str | int) -> None:
    reply = command(node.port, *parts, timeout_s=WHOLE_WITHIN_S)
    if reply != b"OK":
        raise AssertionError(f"{parts}: {reply!r}")


class Sentinel(ValkeyServer):
    """One Sentinel process that watches ``SERVICE``."""

    def __init__(self, master: int, quorum: int, *, binary: str | None = None) -> None:
        super().__init__(binary=binary)
        self._master, self._quorum = master, quorum

    def _command(self) -> list[str]:
        conf: Path = self._folder / "sentinel.conf"
        if not conf.exists():  # it writes what it learned into its file
            conf.write_text(
                f"port {self.port}\nbind 127.0.0.1\ndir {self._folder}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self._master} {self._quorum}\n"
                f"sentinel down-after-milliseconds {SERVICE} {FAILOVER_AFTER_MS}\n"
                f"sentinel failover-timeout {SERVICE} {2 * FAILOVER_AFTER_MS}\n"
            )
        return [self.binary, str(conf), "--sentinel"]


class ValkeySentinels:
    """Two servers, a master and its replica, and three Sentinels of which two have to agree."""

    def __init__(self, *, binary: str | None = None, durable: bool = False) -> None:
        self._binary = binary
        self._durable = durable
        self.servers: list[ValkeyServer] = []
        self.sentinels: list[Sentinel] = []
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Every Sentinel is named."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/{SERVICE}"

    def start(self) -> ValkeySentinels:
        """Start all five."""
        master = ValkeyServer(binary=self._binary, appendonly=self._durable).start()
        self._stack.callback(master.close)
        extra = ["--replicaof", "127.0.0.1", str(master.port)]
        replica = ValkeyServer(binary=self._binary, appendonly=self._durable, extra=extra).start()
        self._stack.callback(replica.close)
        self.servers = [master, replica]
        for _ in range(3):
            sentinel = Sentinel(master.port, 2, binary=self._binary)
            sentinel.start()
            self._stack.callback(sentinel.close)
            self.sentinels.append(sentinel)
        self.until_whole()
        return self

    def close(self) -> None:
        """End all."""
        self._stack.close()

    def until_whole(self) -> None:
        """Wait until all Sentinels name the same master, know each other, and the master has its replica."""
        until(self._whole, WHOLE_WITHIN_S, "the Sentinels agree")

    def _whole(self) -> bool:
        views = [self._view(one) for one in self.sentinels]
        return (
            len({view["port"] for view in views}) == 1
            and all(view["flags"] == "master" for view in views)
            and all((view["num-slaves"], view["num-other-sentinels"]) == ("1", "2") for view in views)
            and in_step(int(views[0]["port"]), 1)
        )

    @staticmethod
    def _view(sentinel: Sentinel) -> dict[str, str]:
        words = [word.decode() for word in command(sentinel.port, "SENTINEL", "MASTER", SERVICE, timeout_s=ASKED_S)]
        return dict(zip(words[::2], words[1::2], strict=True))

    def master(self) -> ValkeyServer:
        """The server that the first Sentinel that answers names."""
        for sentinel in self.sentinels:
            try:
                _, port = command(sentinel.port, "SENTINEL", "get-master-addr-by-name", SERVICE, timeout_s=ASKED_S)
            except OSError:
                continue
            return next(one for one in self.servers if one.port == int(port))
        raise AssertionError("no Sentinel answers")

    def __enter__(self) -> ValkeySentinels:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
