"""Discovery: the watched file and DNS, with sources that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from extproc.agent import discovery
from extproc.agent.discovery import Dns, Endpoint, Static, WatchedFile, endpoints_of, resolve
from extproc.agent.engines.base import Hints
from extproc.agent.http import Trust
from extproc.config import load

BASE = """
lanes: {l: {maxInputTokens: 4000, maxOutputTokens: 400}}
models: {m: {contextTokens: 8192}}
targets:
  t:
    model: m
    engine: vllm
    servedModel: served
    replicas:
      - {name: r0, url: "http://10.0.0.5:8000", devices: [GPU-a], kvTokens: 640000, maxSequences: 64}
"""
SECOND = BASE + '      - {name: r1, url: "http://10.0.0.6:8000"}\n'


def write(path: Path, text: str) -> None:
    """Replace a file as an editor does."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


async def names(source: WatchedFile | Dns) -> list[str]:
    """The replicas' names now."""
    return [endpoint.replica for endpoint in await source.endpoints()]


def test_a_replica_brings_what_the_configuration_says(tmp_path: Path) -> None:
    """Hints, devices and the engine come with the endpoint."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(BASE)
    assert endpoints_of(load(path)) == (
        Endpoint(
            "r0",
            "t",
            "vllm",
            "http://10.0.0.5:8000",
            Hints("served", 640000, 64, 8192),
            ("GPU-a",),
            trust=Trust("/etc/ssl/certs/ca-certificates.crt"),
        ),
    )


async def test_the_file_is_followed_and_a_broken_edit_changes_nothing(tmp_path: Path) -> None:
    """New replicas come without a restart; a mistake keeps the last list and is told."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(BASE)
    discovery = WatchedFile(path)
    assert (await names(discovery), discovery.health()) == (["r0"], "ok")
    write(path, SECOND)
    assert await names(discovery) == ["r0", "r1"]
    write(path, SECOND + "nonsense: 1\n")
    assert await names(discovery) == ["r0", "r1"]
    assert "nonsense" in discovery.health()
    path.unlink()
    assert await names(discovery) == ["r0", "r1"]
    assert "cannot be read" in discovery.health()
    write(path, BASE)
    assert (await names(discovery), discovery.health()) == (["r0"], "ok")


async def test_only_the_named_replicas_are_watched(tmp_path: Path) -> None:
    """One agent per host watches its own."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(SECOND)
    assert await names(WatchedFile(path, only=frozenset({"r1"}))) == ["r1"]


class Zone:
    """A name server on paper."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.broken = False
        self.asked = 0

    async def lookup(self, _host: str, _port: int) -> list[str]:
        """The addresses, or an error."""
        self.asked += 1
        if self.broken:
            raise OSError("no such name")
        return self.addresses


async def test_every_address_of_a_name_is_a_replica() -> None:
    """All A records, resolved again every 10 s; a name server's outage keeps the last ones."""
    zone, now = Zone("10.0.0.1", "10.0.0.2"), [0.0]
    pool = Endpoint("r", "t", "vllm", "http://engines:8000", discover=True)
    dns = Dns(Static([pool, Endpoint("x", "t", "vllm", "http://other:1")]), lookup=zone.lookup, now_s=lambda: now[0])
    assert await names(dns) == ["r@10.0.0.1", "r@10.0.0.2", "x"]
    zone.addresses = ["10.0.0.2"]
    now[0] = 9.0
    assert await names(dns) == ["r@10.0.0.1", "r@10.0.0.2", "x"]
    now[0] = 11.0
    assert next((e.replica, e.address, e.url, e.discover) for e in await dns.endpoints()) == (
        "r@10.0.0.2", "10.0.0.2", "http://engines:8000", False,
    )  # fmt: skip
    zone.broken, now[0] = True, 30.0
    assert await names(dns) == ["r@10.0.0.2", "x"]
    assert dns.health() == "engines does not resolve; its last addresses stay in use"


async def test_a_name_that_never_resolved_is_no_replica() -> None:
    """Nothing is invented for it, and the health says which name it is."""
    zone = Zone()
    zone.broken = True
    dns = Dns(Static([Endpoint("r", "t", "vllm", "http://engines:8000", discover=True)]), lookup=zone.lookup)
    assert await names(dns) == []
    assert dns.health() == "engines does not resolve; nothing is known of it"


async def test_real_resolution_counts_a_dual_stack_host_once() -> None:
    """localhost has an address of each family on most hosts; one of them is the engine."""
    assert await resolve("localhost", 80) in (["127.0.0.1"], ["::1"])


def test_remote_targets_are_watched_under_their_own_name(tmp_path: Path) -> None:
    """Their URL without the /v1 that SDKs want, their trust, and nothing that says memory."""
    path = tmp_path / "kvgate.yaml"
    remote = (
        "{engine: openai, url: 'https://api.example.com/v1', servedModel: gpt, tls: {caFile: /ca.pem, serverName: api}}"
    )
    path.write_text(f"{BASE}  far: {remote}\n")
    assert endpoints_of(load(path))[-1] == Endpoint(
        "far", "far", "openai", "https://api.example.com", Hints("gpt"), trust=Trust("/ca.pem", "api")
    )


class Slow(Zone):
    """A zone whose names hang until they are released, one by one."""

    def __init__(self, *hanging: str) -> None:
        super().__init__("10.0.0.1")
        self.released = {name: asyncio.Event() for name in hanging}
        self.hosts: list[str] = []

    async def lookup(self, host: str, port: int) -> list[str]:
        """The addresses, once the name is released."""
        self.hosts.append(host)
        if host in self.released:
            await self.released[host].wait()
        return await super().lookup(host, port)


async def test_names_that_hang_hold_up_nobody_and_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on for the others; one lookup a name is under way at a time, and its answer is taken when it comes."""
    monkeypatch.setattr(discovery, "RESOLVE_TIMEOUT_S", 0.05)
    hanging = [f"dead{n}" for n in range(20)]
    zone = Slow(*hanging)
    pools = [Endpoint(name, "t", "vllm", f"http://{name}:8000", discover=True) for name in [*hanging, "alive"]]
    dns = Dns(Static(pools), lookup=zone.lookup, now_s=lambda: 0.0)

    seen = [await names(dns) for _ in range(3)]
    health = dns.health()
    zone.released["dead7"].set()
    released: list[str] = []
    async with asyncio.timeout(60.0):
        while "dead7@10.0.0.1" not in released:
            released = await names(dns)
    await dns.close()

    assert seen == [["alive@10.0.0.1"]] * 3
    assert sorted(zone.hosts) == sorted([*hanging, "alive"])
    assert health.count("does not resolve; nothing is known of it") == 20


async def test_a_name_without_addresses_keeps_its_last_ones() -> None:
    """An empty answer is a fault of the zone, not a pool without engines; one given twice is one."""
    zone, now = Zone("10.0.0.1", "10.0.0.1"), [0.0]
    dns = Dns(
        Static([Endpoint("r", "t", "vllm", "http://engines:8000", discover=True)]),
        lookup=zone.lookup,
        now_s=lambda: now[0],
    )
    assert await names(dns) == ["r@10.0.0.1"]
    zone.addresses, now[0] = [], 30.0
    assert await names(dns) == ["r@10.0.0.1"]
    assert dns.health() == "engines does not resolve; its last addresses stay in use"
    zone.addresses = ["10.0.0.9"]
    assert await names(dns) == ["r@10.0.0.9"]
    assert dns.health() == "ok"


async def test_a_file_that_went_and_came_back_is_in_order(tmp_path: Path) -> None:
    """Moved away and back as it was, as some editors and mounts do."""
    path = tmp_path / "kvgate.yaml"
    write(path, BASE)
    watched = WatchedFile(path)
    path.rename(tmp_path / "away")
    assert await names(watched) == ["r0"]
    assert "cannot be read" in watched.health()
    (tmp_path / "away").rename(path)
    assert await names(watched) == ["r0"]
    assert watched.health() == "ok"


async def test_an_edit_while_the_agent_starts_is_seen(tmp_path: Path) -> None:
    """The configuration was read before the ledger was reached; what the file says now counts."""
    path = tmp_path / "kvgate.yaml"
    write(path, BASE)
    first = load(path)
    write(path, SECOND)
    assert await names(WatchedFile(path, first)) == ["r0", "r1"]


async def test_a_swapped_symlink_and_a_cut_file_are_seen(tmp_path: Path) -> None:
    """As Kubernetes swaps a ConfigMap; a file caught half written changes nothing."""
    for name, text in (("one", BASE), ("two", SECOND), ("cut", SECOND[: SECOND.index("replicas")])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kvgate.yaml").write_text(text)
    data = tmp_path / "..data"
    data.symlink_to("one")
    path = tmp_path / "kvgate.yaml"
    path.symlink_to("..data/kvgate.yaml")
    watched = WatchedFile(path)

    def swap(to: str) -> None:
        (tmp_path / "..tmp").symlink_to(to)
        (tmp_path / "..tmp").replace(data)

    swap("two")
    assert await names(watched) == ["r0", "r1"]
    swap("cut")
    assert await names(watched) == ["r0", "r1"]
    assert "the last list stays in use" in watched.health()
    swap("one")
    assert await names(watched) == ["r0"]
    assert watched.health() == "ok"
