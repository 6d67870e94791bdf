"""Redis as it is run: passwords and least rights, TLS, replicas, Sentinel failover, Cluster."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from extproc.errors import LedgerDown
from extproc.ledger import keys
from extproc.ledger.address import parse
from extproc.ledger.link import pack
from extproc.ledger.redis import RedisLedger
from tests.integration.ledger.test_outages import PLACE, blocks, raw, until
from tests.support import certificate
from tests.support.ledgers import ask, device, end, record, report, reservation
from tests.support.valkey import ValkeyServer, free_port, redis_binary


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
    own = await RedisLedger.connect(url, pool, deadline_s=5.0)
    await whole_life(own)
    for command in (["GET", keys.key(pool, "meta")], ["HGETALL", keys.key("other", "meta")], ["KEYS", "*"]):
        with pytest.raises(LedgerDown, match="NOPERM"):
            await raw(own, *command)
    await own.close()
    await raw(ledger, "ACL", "DELUSER", f"u-{pool}")


async def test_a_wrong_password_is_told_and_never_shown(server: ValkeyServer, pool: str) -> None:
    """The status names the server's complaint, not the secret."""
    ledger = await RedisLedger.connect(f"redis://u:wrong@127.0.0.1:{server.port}", pool, wait_s=0.2)
    error = ledger.status.last_error or ""
    assert error.startswith("ledger answered WRONGPASS")
    assert "wrong@" not in error
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
        ledger = await RedisLedger.connect(f"rediss://localhost:{port}/0?ca={ca}", pool, deadline_s=5.0, fresh=True)
        assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
        await ledger.close()
        stranger = await RedisLedger.connect(f"rediss://localhost:{port}/0", pool, wait_s=0.5)
        assert "CERTIFICATE_VERIFY_FAILED" in (stranger.status.last_error or "")
        await stranger.close()


async def test_a_replica_is_not_a_ledger_until_it_is_promoted(server: ValkeyServer, pool: str) -> None:
    """READONLY: the ledger stays down and comes by itself after the promotion."""
    with ValkeyServer(extra=["--replicaof", "127.0.0.1", str(server.port)]) as replica:
        ledger = await RedisLedger.connect(replica.url, pool, wait_s=0.3, fresh=True)
        assert (ledger.status.state, "READONLY" in (ledger.status.last_error or "")) == ("degraded", True)
        command(replica.port, "REPLICAOF", "NO", "ONE")
        await until(lambda: ledger.status.state == "ok")
        assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
        await ledger.close()


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    """A process of the test's own."""
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL)


def command(port: int, *parts: str) -> bytes:
    """One command on a connection of its own; the raw reply."""
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
        s.sendall(pack(*parts))
        return s.recv(65536)


@pytest.mark.chaos
async def test_a_sentinel_failover_is_followed(pool: str, tmp_path: Path) -> None:
    """The master is killed; the ledger is on the promoted replica within seconds, with its reservations."""
    with ValkeyServer() as master, ValkeyServer(extra=["--replicaof", "127.0.0.1", str(master.port)]) as replica:
        port = free_port()
        conf = tmp_path / "sentinel.conf"
        conf.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
        )
        sentinel = started([master.binary, str(conf), "--sentinel"])
        try:
            await asyncio.sleep(0.5)
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main"
            ledger = await RedisLedger.connect(url, pool, fresh=True)
            await until(lambda: ledger.status.state == "ok")
            assert (await ledger.reserve(ask("1", PLACE))).chosen == 0
            await until(lambda: b"slave0" in command(port, "INFO") or b"slaves=1" in command(port, "INFO"), 15)
            await until(lambda: b"state=online" in command(master.port, "INFO", "replication"))
            await asyncio.sleep(0.2)
            master.kill()
            began = time.monotonic()
            await until(lambda: ledger.status.state == "degraded")
            await until(lambda: ledger.status.state == "ok", 30)
            assert time.monotonic() - began < 20
            assert await blocks(ledger) == 10
            assert b"role:master" in command(replica.port, "INFO", "replication")
            await ledger.close()
        finally:
            sentinel.terminate()
            sentinel.wait(5)


@pytest.fixture(params=["valkey", *(["redis"] if redis_binary() else [])])
def cluster(request: pytest.FixtureRequest) -> Iterator[list[ValkeyServer]]:
    """Three masters that share the slots."""
    binary = redis_binary() if request.param == "redis" else None
    nodes = [
        ValkeyServer(binary=binary, extra=["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]).start()
        for _ in range(3)
    ]
    try:
        for node, (first, last) in zip(nodes, ((0, 5460), (5461, 10922), (10923, 16383)), strict=True):
            command(node.port, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        for node in nodes[1:]:
            command(node.port, "CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        deadline = time.monotonic() + 20
        while not all(b"cluster_state:ok" in command(n.port, "CLUSTER", "INFO") for n in nodes):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield nodes
    finally:
        for node in nodes:
            node.close()


async def test_pools_spread_over_a_cluster_and_every_script_stays_in_one_slot(cluster: list[ValkeyServer]) -> None:
    """Whichever node is asked first, MOVED leads to the right one; no CROSSSLOT."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in cluster)
    holders = set()
    for name in ("p1", "p2", "p3", "p4", "p5", "p6"):
        ledger = await RedisLedger.connect(f"redis+cluster://{hosts}", name, deadline_s=2.0, fresh=True, wait_s=5.0)
        await whole_life(ledger)
        await ledger.close()
        holders |= {n.port for n in cluster if b"kvgate:{%b}" % name.encode() in command(n.port, "KEYS", "*")}
    assert len(holders) > 1


async def test_a_slot_that_moves_is_followed(cluster: list[ValkeyServer]) -> None:
    """After a reshard the old node answers MOVED: the call fails as not run, and the next ones find the new node."""
    hosts = f"127.0.0.1:{cluster[0].port}"
    ledger = await RedisLedger.connect(f"redis+cluster://{hosts}", "p1", deadline_s=2.0, fresh=True, wait_s=5.0)
    await ledger.reserve(ask("1", PLACE))
    slot = command(cluster[0].port, "CLUSTER", "KEYSLOT", keys.key("p1", "meta")).strip()[1:].decode()
    new = next(n for n in cluster if b"kvgate:{p1}" not in command(n.port, "KEYS", "*"))
    identity = command(new.port, "CLUSTER", "MYID").split(b"\r\n")[1].decode()
    old = next(n for n in cluster if b"kvgate:{p1}" in command(n.port, "KEYS", "*"))
    owner = command(old.port, "CLUSTER", "MYID").split(b"\r\n")[1].decode()
    command(old.port, "FLUSHALL")  # the data stays behind, as after a failover that lost it
    assert command(new.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", owner) == b"+OK\r\n"
    assert command(old.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", identity) == b"+OK\r\n"
    for node in (new, old, *(n for n in cluster if n not in (new, old))):
        assert command(node.port, "CLUSTER", "SETSLOT", slot, "NODE", identity) == b"+OK\r\n"
    with pytest.raises(LedgerDown):
        await ledger.reserve(ask("2", PLACE))
    await until(lambda: ledger.status.state == "ok")
    assert (await ledger.snapshot()).epoch != ""
    assert b"kvgate:{p1}" in command(new.port, "KEYS", "*")
    await ledger.close()


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
