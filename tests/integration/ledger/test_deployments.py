"""Redis as it is run: passwords and least rights, TLS, replicas, Sentinel failover, Cluster."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import pytest
from msgspec.structs import replace

from extproc.errors import LedgerDown
from extproc.ledger import keys, link, stream
from extproc.ledger.address import parse
from extproc.ledger.lessons import Lesson
from extproc.ledger.redis import RedisLedger
from extproc.ledger.stream import NotRun
from tests.integration.ledger.test_outages import PLACE, blocks, raw, until
from tests.support import certificate
from tests.support.deployments import SERVICE, ValkeyCluster, ValkeySentinels, identity, info, until_replicated
from tests.support.deployments import until as wait
from tests.support.ledgers import ask, candidate, device, end, need, record, report, reservation
from tests.support.valkey import ValkeyServer, command, redis_binary


async def whole_life(ledger: RedisLedger) -> None:
    """Every script once."""
    now = await ledger.time_s()
    await ledger.publish([report(now - 0.2)], [device(now - 0.2)], 60)
    await ledger.reserve(ask("1"))
    await ledger.reserve(ask("2"))
    assert await ledger.renew([record(reservation("1", now)), record(reservation("3", now))]) == [True, True]
    await ledger.end([end("1"), end("3")])
    await ledger.reap(listened_s=20.0, owners=["envoy-1"])
    await ledger.drain("a", True)
    assert await ledger.heartbeat("me", 5) == 1
    assert await blocks(ledger) == 10
    assert [r.reservation.rid for r in await ledger.reservations("a")] == ["2"]
    assert [line for line in await ledger.audit() if line.stored != line.recomputed] == []


async def test_the_documented_acl_user_can_do_everything_and_nothing_else(
    ledger: RedisLedger, valkey: ValkeyServer, pool: str
) -> None:
    """Least rights: this pool's keys, these commands."""
    await raw(ledger, *keys.acl(pool, f"u-{pool}", "s3:c/ret"))
    url = f"redis://u-{pool}:s3%3Ac%2Fret@127.0.0.1:{valkey.port}/0"
    own = await RedisLedger.connect(url, pool, deadline_s=60.0, background_deadline_s=60.0, wait_s=60.0)
    await whole_life(own)
    for forbidden in (["GET", keys.key(pool, "meta")], ["HGETALL", keys.key("other", "meta")], ["KEYS", "*"]):
        with pytest.raises(LedgerDown, match="NOPERM"):
            await raw(own, *forbidden)
    await own.close()
    await raw(ledger, "ACL", "DELUSER", f"u-{pool}")


async def test_a_wrong_password_is_told_and_never_shown(server: ValkeyServer, pool: str) -> None:
    """The status names the server's complaint, not the secret."""
    ledger = await RedisLedger.connect(f"redis://u:wrong@127.0.0.1:{server.port}", pool, wait_s=0.0)
    await until(lambda: (ledger.status.last_error or "").startswith("ledger answered WRONGPASS"))
    assert "wrong@" not in (ledger.status.last_error or "")
    await ledger.close()


@asynccontextmanager
async def tls_in_front_of(port: int, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """A TLS end on a port of its own that passes bytes on."""
    chain, key = certificate.make(folder, "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    writers: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, inner_writer))
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer), return_exceptions=True)

    end_ = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    try:
        yield end_.sockets[0].getsockname()[1], chain
    finally:
        for writer in writers:
            writer.close()
        end_.close()
        await asyncio.sleep(0.05)


async def test_tls_with_a_ca_of_ones_own(valkey: ValkeyServer, pool: str, tmp_path: Path) -> None:
    """rediss:// verifies against the named CA, and without it does not connect."""
    async with tls_in_front_of(valkey.port, tmp_path) as (port, ca):
        ledger = await RedisLedger.connect(
            f"rediss://localhost:{port}/0?ca={ca}", pool, deadline_s=60.0, wait_s=60.0, fresh=True
        )
        assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
        await ledger.close()
        stranger = await RedisLedger.connect(f"rediss://localhost:{port}/0", pool, wait_s=0.0)
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in (stranger.status.last_error or ""))
        await stranger.close()


async def test_a_replica_is_not_a_ledger_until_it_is_promoted(server: ValkeyServer, pool: str) -> None:
    """READONLY: the ledger stays down and comes by itself after the promotion."""
    with ValkeyServer(extra=["--replicaof", "127.0.0.1", str(server.port)]) as replica:
        ledger = await RedisLedger.connect(replica.url, pool, wait_s=0.0, deadline_s=60.0, fresh=True)
        await until(lambda: "READONLY" in (ledger.status.last_error or ""))
        assert ledger.status.state == "degraded"
        command(replica.port, "REPLICAOF", "NO", "ONE")
        await until(lambda: ledger.status.state == "ok")
        assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
        await ledger.close()


@pytest.fixture(params=["valkey", *(["redis"] if redis_binary() else [])])
def binary(request: pytest.FixtureRequest) -> str | None:
    """Each server that is installed."""
    return redis_binary() if request.param == "redis" else None


@pytest.fixture
def sentinels(binary: str | None) -> Iterator[ValkeySentinels]:
    """A master, its replica, and three Sentinels."""
    with ValkeySentinels(binary=binary) as made:
        yield made


@pytest.fixture
def cluster(binary: str | None) -> Iterator[ValkeyCluster]:
    """Three masters that share the slots."""
    with ValkeyCluster(binary=binary) as made:
        yield made


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a busy machine leaves without a processor for seconds is not given up.

    A call that is sent again leaves the last quarter of its deadline to that answer.
    """
    monkeypatch.setattr(stream, "STALL_S", 60.0)
    monkeypatch.setattr(link, "ANSWER_S", SENT_AGAIN_S / 4)


#: Deadline of calls that are refused for as long as they are sent again.
SENT_AGAIN_S = 4.0


class Connect(Protocol):
    """What ``connected`` gives."""

    async def __call__(self, url: str, pool: str, deadline_s: float = 5.0) -> RedisLedger:
        """A ledger that works."""


@pytest.fixture
async def connected() -> AsyncIterator[Connect]:
    """Makes ledgers that work, and closes them however the test ends."""
    made: list[RedisLedger] = []

    async def connect(url: str, pool: str, deadline_s: float = 5.0) -> RedisLedger:
        ledger = await RedisLedger.connect(
            url, pool, deadline_s=deadline_s, background_deadline_s=60.0, fresh=True, wait_s=60.0
        )
        made.append(ledger)
        await until(lambda: ledger.status.state == "ok", 20)
        return ledger

    yield connect
    for ledger in made:
        await ledger.close()


@pytest.mark.chaos
async def test_a_sentinel_failover_is_followed(sentinels: ValkeySentinels, pool: str, connected: Connect) -> None:
    """The master is killed and one Sentinel does not answer; the ledger is on the promoted replica with its reservations."""
    ledger = await connected(sentinels.url, pool)
    assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
    master, first = sentinels.master(), sentinels.sentinels[0]
    await asyncio.to_thread(until_replicated, master.port, 1)
    master.kill()
    await asyncio.to_thread(wait, lambda: sentinels.master() is not master, 40, "a replica is promoted")
    first.pause()
    await until(lambda: ledger.status.state == "ok", 30)
    assert await blocks(ledger) == 10
    first.resume()


@pytest.mark.chaos
async def test_a_stopped_master_that_goes_on_is_not_believed(
    sentinels: ValkeySentinels, pool: str, connected: Connect
) -> None:
    """It was stopped until another was promoted, and goes on as a master: nothing is admitted there any more."""
    ledger = await connected(sentinels.url, pool, deadline_s=0.2)
    master = sentinels.master()
    await asyncio.to_thread(until_replicated, master.port, 1)
    admitted: list[str] = []

    async def asking() -> None:
        for number in itertools.count():
            with suppress(LedgerDown):
                await ledger.reserve(ask(str(number), candidate(n=need(1), static_capacity_blocks=100_000)))
                admitted.append(str(number))
            await asyncio.sleep(0.02)

    asks = asyncio.create_task(asking())
    master.pause()
    await asyncio.to_thread(wait, lambda: sentinels.master() is not master, 40, "a replica is promoted")
    master.resume()
    await until(lambda: info(master.port, "replication")["role"] == "slave", 40)
    asks.cancel()
    await until(lambda: ledger.status.state == "ok" and ledger.status.kept_ends == 0, 20)
    assert admitted
    assert set(admitted) <= {held.reservation.rid for held in await ledger.reservations("a")}


@pytest.mark.chaos
async def test_the_sentinel_that_knows_of_the_latest_failover_is_believed(
    sentinels: ValkeySentinels, pool: str, connected: Connect
) -> None:
    """One was stopped meanwhile and goes on naming the old master, which goes on too; it is asked first."""
    old, late = sentinels.master(), sentinels.sentinels[2]
    late.pause()
    old.pause()
    await asyncio.to_thread(wait, lambda: sentinels.master() is not old, 40, "a replica is promoted")
    late.resume()
    old.resume()
    hosts = [late, *sentinels.sentinels[:2]]
    url = f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in hosts)}/{SERVICE}"
    ledger = await connected(url, pool)
    assert f"tcp_port:{sentinels.master().port}\r" in (await raw(ledger, "INFO", "server")).decode()


@pytest.mark.chaos
async def test_pools_spread_over_a_cluster_and_every_script_stays_in_one_slot(
    cluster: ValkeyCluster, connected: Connect
) -> None:
    """Whichever node is asked first, MOVED leads to the right one; no CROSSSLOT."""
    holders = set()
    for name in ("p1", "p2", "p3", "p4", "p5", "p6"):
        ledger = await connected(cluster.url, name)
        await whole_life(ledger)
        holders.add(cluster.owner(cluster.slot(keys.key(name, "meta"))))
    assert len(holders) > 1


async def test_a_node_that_does_not_answer_is_asked_last(cluster: ValkeyCluster, connected: Connect) -> None:
    """The first host of the URL is stopped; the pool lives elsewhere."""
    first = cluster.nodes[0]
    pool = next(name for n in range(100) if cluster.owner(cluster.slot(keys.key(name := f"p{n}", "meta"))) is not first)
    first.pause()
    try:
        ledger = await connected(cluster.url, pool)
        assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
    finally:
        first.resume()


@pytest.mark.parametrize(("kind", "hostname"), [("unknown-endpoint", ""), ("hostname", ""), ("hostname", "localhost")])
async def test_nodes_are_found_by_what_they_call_each_other(
    kind: str, hostname: str, cluster: ValkeyCluster, pool: str, connected: Connect
) -> None:
    """MOVED without a host, with ``?`` for one that is not known, and with a name; each node is the only one of a URL."""
    for node in cluster.nodes:
        assert command(node.port, "CONFIG", "SET", "cluster-announce-hostname", hostname) == b"OK"
        assert command(node.port, "CONFIG", "SET", "cluster-preferred-endpoint-type", kind) == b"OK"
    for node in cluster.nodes:
        ledger = await connected(f"redis+cluster://127.0.0.1:{node.port}", pool)
        assert await ledger.time_s() > 0


@pytest.mark.chaos
async def test_a_stopped_owner_that_goes_on_is_outvoted(binary: str | None, pool: str, connected: Connect) -> None:
    """It was stopped until its replica had its slots, and goes on as their owner: nothing is admitted there any more."""
    with ValkeyCluster(binary=binary, replicas=1) as cluster:
        slot = cluster.slot(keys.key(pool, "meta"))
        owner = cluster.serving(slot)
        hosts = [owner, *(node for node in cluster.nodes if node is not owner)]
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in hosts)
        ledger = await connected(url, pool, deadline_s=0.2)
        await asyncio.to_thread(until_replicated, owner.port, 1)
        load = Load(ledger, 4)
        owner.pause()
        await asyncio.to_thread(wait, lambda: cluster.owner(slot, but=owner), 60, "its replica is promoted")
        owner.resume()
        await until(lambda: info(owner.port, "replication")["role"] == "slave")
        before = load.admitted
        await until(lambda: load.admitted > before + 100)
        await load.stop()
        await until(lambda: ledger.status.state == "ok" and ledger.status.kept_ends == 0)
        assert {each.reservation.rid for each in await ledger.reservations("a")} == load.held


async def test_a_call_is_sent_again_where_its_slot_went(cluster: ValkeyCluster, pool: str, connected: Connect) -> None:
    """MOVED within the deadline: one call, one reservation, nobody sees the move."""
    ledger = await connected(cluster.url, pool)
    assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
    with cluster.moving(cluster.slot(keys.key(pool, "meta"))) as (_, new):
        pass
    assert (await ledger.reserve(ask("2", PLACE))).chosen == 0
    assert (await blocks(ledger), ledger.status.unknown_outcomes) == (20, 0)
    assert cluster.owner(cluster.slot(keys.key(pool, "meta"))) is new


class Load:
    """Clients that reserve and end all the time, and know what has to be held at any moment."""

    def __init__(self, ledger: RedisLedger, clients: int) -> None:
        self._ledger = ledger
        self._place = candidate(n=need(1), static_capacity_blocks=1_000_000)
        self._stop = asyncio.Event()
        #: Reservations that were admitted and not ended.
        self.held: set[str] = set()
        self.admitted = 0
        self._clients = [asyncio.create_task(self._client(name)) for name in range(clients)]

    async def _client(self, name: int) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            rid = f"{name}-{turn}"
            while not self._stop.is_set():
                try:
                    assert (await self._ledger.reserve(ask(rid, self._place))).chosen == 0
                except NotRun:
                    await asyncio.sleep(0.01)  # its id is not burnt
                    continue
                except LedgerDown:
                    break  # its end was sent after it
                self.held.add(rid)
                self.admitted += 1
                break
            if turn % 2 and rid in self.held:
                await self._ledger.end([end(rid)])  # at once, or kept and sent later
                self.held.discard(rid)

    async def stop(self) -> None:
        """Let every client come to the end of its turn."""
        self._stop.set()
        await asyncio.gather(*self._clients)

    async def empty(self) -> None:
        """End what is held."""
        for rid in list(self.held):
            await self._ledger.end([end(rid)])
            self.held.discard(rid)
        await until(lambda: self._ledger.status.kept_ends == 0)


def moves(cluster: ValkeyCluster, slot: int, count: int) -> None:
    """The slot goes round the masters without a pause: key by key, and at once where the servers can do that."""
    for number in range(count):
        target = next(node for node in cluster.nodes[number % 3 :] + cluster.nodes if node is not cluster.serving(slot))
        if cluster.hands_over and number % 4 >= 2:
            cluster.hand_over(slot, target)
            continue
        with cluster.moving(slot, target) as (old, new):
            cluster.move_keys(slot, old, new, 3)


@pytest.mark.usefixtures("unhurried")
async def test_back_to_back_moves_strand_nobody_and_lose_nothing(
    cluster: ValkeyCluster, pool: str, connected: Connect
) -> None:
    """Two dozen moves under load: then every call is served, and what is held is what was admitted and not ended."""
    ledger = await connected(cluster.url, pool, deadline_s=30.0)
    slot = cluster.slot(keys.key(pool, "meta"))
    load = Load(ledger, 32)
    await asyncio.to_thread(moves, cluster, slot, 24)
    before = load.admitted
    await until(lambda: load.admitted > before + 200)
    await load.stop()
    await until(lambda: ledger.status.kept_ends == 0)
    assert {each.reservation.rid for each in await ledger.reservations("a")} == load.held
    assert await blocks(ledger) == len(load.held)
    await load.empty()
    assert await blocks(ledger) == 0
    assert [line for line in await ledger.audit() if line.stored != line.recomputed] == []


async def until_down(ledger: RedisLedger) -> None:
    """Reserve and end until the cluster says that it is down."""
    for number in range(3000):
        try:
            await ledger.reserve(ask(f"probe-{number}", PLACE))
        except LedgerDown as e:
            if "CLUSTERDOWN" in str(e):
                return
        await ledger.end([end(f"probe-{number}")])
        await asyncio.sleep(0.02)
    raise AssertionError("the cluster is not down")


async def until_reserved(ledger: RedisLedger, rid: str) -> None:
    """Reserve, each time under another id, until it is served."""
    for number in range(3000):
        with suppress(LedgerDown):
            assert (await ledger.reserve(ask(f"{rid}-{number}", PLACE))).chosen == 0
            return
        await asyncio.sleep(0.02)
    raise AssertionError("no reserve was served")


@pytest.mark.usefixtures("unhurried")
async def test_a_cluster_that_is_down_comes_back_and_other_slots_move_unnoticed(
    cluster: ValkeyCluster, pool: str, connected: Connect
) -> None:
    """CLUSTERDOWN while one slot is nobody's; then other slots move, and the connection stays."""
    ledger = await connected(cluster.url, pool, deadline_s=SENT_AGAIN_S)
    slot = cluster.slot(keys.key(pool, "meta"))
    assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
    other = next(number for number in range(16384) if number != slot)
    holder = cluster.serving(other)
    for node in cluster.nodes:
        assert command(node.port, "CLUSTER", "DELSLOTS", other) == b"OK"
    await until_down(ledger)
    assert command(holder.port, "CLUSTER", "ADDSLOTS", other) == b"OK"
    await until_reserved(ledger, "2")
    connection = ledger._link._stream
    for _ in range(3):
        with cluster.moving(other):
            pass
    await until(lambda: ledger.status.kept_ends == 0)
    assert await blocks(ledger) == 20
    assert ledger._link._stream is connection


@pytest.mark.chaos
async def test_a_url_with_one_node_outlives_that_node(binary: str | None, pool: str, connected: Connect) -> None:
    """The rest of the cluster was learned from it: it dies with the slot, its replica has it, and it is forgotten."""
    with ValkeyCluster(binary=binary, replicas=1) as cluster:
        slot = cluster.slot(keys.key(pool, "meta"))
        owner = cluster.serving(slot)
        ledger = await connected(f"redis+cluster://127.0.0.1:{owner.port}", pool)
        assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
        await asyncio.to_thread(until_replicated, owner.port, 1)
        gone = identity(owner)
        owner.kill()
        cluster.nodes.remove(owner)
        try:
            await until_reserved(ledger, "2")
            await until(lambda: ledger.status.kept_ends == 0)
            for node in cluster.nodes:
                command(node.port, "CLUSTER", "FORGET", gone)
            await until_reserved(ledger, "3")
            assert await blocks(ledger) == 30
        finally:
            owner.close()


@pytest.mark.usefixtures("unhurried")
async def test_while_a_slot_moves_nothing_runs_and_calls_wait_for_their_deadline(
    cluster: ValkeyCluster, pool: str, connected: Connect
) -> None:
    """TRYAGAIN, then ASK: a short call fails as not run, a patient one is served when the slot has arrived."""
    ledger = await connected(cluster.url, pool, deadline_s=SENT_AGAIN_S)
    patient = await connected(cluster.url, pool, deadline_s=60.0)
    slot = cluster.slot(keys.key(pool, "meta"))
    assert (await patient.reserve(ask("1", PLACE))).chosen == 0
    with cluster.moving(slot) as (old, new):
        waiting = asyncio.create_task(patient.reserve(ask("2", PLACE)))
        with pytest.raises(LedgerDown, match="TRYAGAIN"):
            await ledger.reserve(ask("3", PLACE))
        while cluster.move_keys(slot, old, new, 3):
            with pytest.raises(LedgerDown, match=r"TRYAGAIN|ASK"):
                await ledger.reserve(ask("3", PLACE))
        (kept,) = await ledger.end([end("1")])
        assert (kept.kept, kept.released) == (True, False)
        assert not waiting.done()
    assert (await waiting).chosen == 0
    await until(lambda: ledger.status.kept_ends == 0)
    assert (await ledger.reserve(ask("3", PLACE))).chosen == 0  # the id was not burnt: it never ran
    assert (await blocks(patient), ledger.status.unknown_outcomes) == (20, 0)
    assert [line for line in await patient.audit() if line.stored != line.recomputed] == []


@pytest.mark.usefixtures("unhurried")
async def test_a_slot_that_moves_cuts_no_script_off_half_way(
    cluster: ValkeyCluster, pool: str, connected: Connect
) -> None:
    """All keys are there, and an end would remove the last entry of one: who is losing the slot must not begin it."""
    ledger = await connected(cluster.url, pool, deadline_s=SENT_AGAIN_S)
    slot = cluster.slot(keys.key(pool, "meta"))
    now = await ledger.time_s()
    await ledger.publish([report(now - 0.2)], [device(now - 0.2)], 60)
    card = candidate(n=need(10, vram_bytes=(100,)), devices=("GPU-1",))
    for rid in ("lives", "done", "orphan"):
        assert (await ledger.reserve(ask(rid, card))).chosen == 0
    await ledger.end([end("done"), replace(end("orphan"), rid=None)])
    await ledger.heartbeat("me", 60)
    await ledger.promise("token", "a", 10, 30.0, None)
    await ledger.lessons([Lesson("output", 20, (100.0,))])
    owner = cluster.owner(slot)
    assert owner is not None
    assert command(owner.port, "EXISTS", *keys.script_keys(pool)) == len(keys.SCRIPT_KEYS)
    with cluster.moving(slot):
        (kept,) = await ledger.end([end("orphan")])
        assert (kept.kept, kept.released) == (True, False)
    await until(lambda: ledger.status.kept_ends == 0)
    assert await blocks(ledger) == 10
    assert [line for line in await ledger.audit() if line.stored != line.recomputed] == []


async def test_a_slot_that_lost_its_data_on_the_way_is_told_from_an_empty_fleet(
    cluster: ValkeyCluster, pool: str, connected: Connect
) -> None:
    """As after a failover to a replica that had nothing: the epoch changes, replicas are unknown."""
    ledger = await connected(cluster.url, pool)
    await ledger.reserve(ask("1", PLACE))
    before = (await ledger.snapshot()).epoch
    with cluster.moving(cluster.slot(keys.key(pool, "meta"))) as (old, _):
        command(old.port, "FLUSHALL")
    assert (await ledger.reserve(ask("2", PLACE))).verdicts[0].refused_by == "unknown_state"
    assert (await ledger.snapshot()).epoch > before


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "db", "service"),
    [
        ("redis://h", "single", (("h", 6379),), 0, ""),
        ("redis://u:p%40x@h:7/3", "single", (("h", 7),), 3, ""),
        ("redis://[::1]:7/1", "single", (("::1", 7),), 1, ""),
        ("redis+sentinel://a,b:2/main/4", "sentinel", (("a", 26379), ("b", 2)), 4, "main"),
        ("redis+cluster://a:1,b:2", "cluster", (("a", 1), ("b", 2)), 0, ""),
        ("unix:///run/x.sock?db=2", "single", (), 2, ""),
    ],
)
def test_addresses(url: str, kind: str, hosts: object, db: int, service: str) -> None:
    """What a ledger URL means."""
    a = parse(url)
    assert (a.kind, a.hosts, a.db, a.service) == (kind, hosts, db, service)


@pytest.mark.parametrize("url", ["http://h", "redis+foo://h", "redis+sentinel://h:1", "redis://h:x", "redis://h/x"])
def test_addresses_that_cannot_be_used_are_told(url: str) -> None:
    """ValueError says what is wrong."""
    with pytest.raises(ValueError, match=r"ledger URL|redis\+sentinel"):
        parse(url)
