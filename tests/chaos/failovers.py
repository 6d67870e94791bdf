"""What can go wrong where the ledger has more than one server: masters die or stop, replicas take over, slots move.

A fault waits until the deployment is whole before it breaks it, not until it is whole again: kvgate's own parts fail
in between.
"""

from __future__ import annotations

import asyncio
import time

from extproc.ledger import keys
from tests.chaos.faults import COMMON, Fault, Scene
from tests.support.deployments import WHOLE_WITHIN_S, Sentinel, ValkeyCluster, ValkeySentinels, identity, until
from tests.support.valkey import ValkeyServer, command

POOL = "default"


def _cluster(scene: Scene) -> tuple[ValkeyCluster, int]:
    """The whole cluster, and the slot of the ledger's keys."""
    cluster = scene.stack.server
    assert isinstance(cluster, ValkeyCluster)
    cluster.until_whole()
    return cluster, cluster.slot(keys.key(POOL, "meta"))


def _promoted(cluster: ValkeyCluster, slot: int, gone: ValkeyServer) -> None:
    until(lambda: cluster.owner(slot, but=gone), WHOLE_WITHIN_S, "a replica is promoted")


async def owner_killed(scene: Scene) -> None:
    """SIGKILL of the slot's owner; its replica takes over, and it comes back as a replica."""

    def play() -> None:
        cluster, slot = _cluster(scene)
        owner = cluster.owner(slot)
        assert owner is not None
        owner.kill()
        try:
            _promoted(cluster, slot, owner)
        finally:
            owner.start()

    await asyncio.to_thread(play)


async def owner_stopped(scene: Scene) -> None:
    """SIGSTOP of the slot's owner, shorter than a failover or until after one: it then goes on as if nothing were."""
    seconds = scene.rng.uniform(0.5, 2.5) if scene.rng.random() < 0.4 else None

    def play() -> None:
        cluster, slot = _cluster(scene)
        owner = cluster.owner(slot)
        assert owner is not None
        owner.pause()
        try:
            if seconds is None:
                _promoted(cluster, slot, owner)
            else:
                time.sleep(seconds)
        finally:
            owner.resume()

    await asyncio.to_thread(play)


async def slot_moved(scene: Scene) -> None:
    """The slot moves to another master key by key, as older servers do it, for up to two seconds."""
    pauses = [scene.rng.uniform(0.0, 0.2) for _ in range(10)]

    def play() -> None:
        cluster, slot = _cluster(scene)
        with cluster.moving(slot) as (old, new):
            for pause in pauses:
                time.sleep(pause)
                cluster.move_keys(slot, old, new, 1)

    await asyncio.to_thread(play)


async def slot_handed_over(scene: Scene) -> None:
    """The slot moves to another master at once, as newer servers do it."""

    def play() -> None:
        cluster, slot = _cluster(scene)
        owner = cluster.owner(slot)
        new = next(node for node in cluster.masters() if node is not owner)
        assert owner is not None
        reply = command(owner.port, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", identity(new))
        assert reply == b"OK", reply
        until(lambda: cluster.owner(slot) is new, WHOLE_WITHIN_S, "the slot is handed over")

    await asyncio.to_thread(play)


def _sentinels(scene: Scene) -> tuple[ValkeySentinels, ValkeyServer]:
    """The whole deployment and its master."""
    deployment = scene.stack.server
    assert isinstance(deployment, ValkeySentinels)
    deployment.until_whole()
    return deployment, deployment.master()


async def master_killed(scene: Scene) -> None:
    """SIGKILL of the master; its replica is promoted, and the Sentinels make it a replica when it is back."""

    def play() -> None:
        deployment, master = _sentinels(scene)
        master.kill()
        try:
            until(lambda: deployment.master() is not master, WHOLE_WITHIN_S, "the replica is promoted")
        finally:
            master.start()

    await asyncio.to_thread(play)


async def master_stopped(scene: Scene) -> None:
    """SIGSTOP of the master, shorter than a failover or until after one: for a while there are then two."""
    seconds = scene.rng.uniform(0.5, 2.5) if scene.rng.random() < 0.4 else None

    def play() -> None:
        deployment, master = _sentinels(scene)
        master.pause()
        try:
            if seconds is None:
                until(lambda: deployment.master() is not master, WHOLE_WITHIN_S, "the replica is promoted")
            else:
                time.sleep(seconds)
        finally:
            master.resume()

    await asyncio.to_thread(play)


async def sentinel_stopped(scene: Scene) -> None:
    """SIGSTOP of one Sentinel, and the connections to the master break: the others have to be asked."""
    seconds = scene.rng.uniform(1.0, 4.0)

    def play() -> None:
        deployment, master = _sentinels(scene)
        sentinel: Sentinel = scene.rng.choice(deployment.sentinels)
        sentinel.pause()
        try:
            command(master.port, "CLIENT", "KILL", "TYPE", "normal")
            time.sleep(seconds)
        finally:
            sentinel.resume()

    await asyncio.to_thread(play)


CLUSTER: tuple[Fault, ...] = (owner_killed, owner_stopped, slot_moved, slot_handed_over)
SENTINELS: tuple[Fault, ...] = (master_killed, master_stopped, sentinel_stopped)
#: Decks: the deployment's own faults come twice for each of kvgate's.
CLUSTER_DECK = (*COMMON, *CLUSTER, *CLUSTER)
SENTINELS_DECK = (*COMMON, *SENTINELS, *SENTINELS)
