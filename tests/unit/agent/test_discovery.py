"""Discovery: the watched file and DNS, with sources that fail."""

from __future__ import annotations

from pathlib import Path

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


async def names(discovery: WatchedFile | Dns) -> list[str]:
    """The replicas' names now."""
    return [endpoint.replica for endpoint in await discovery.endpoints()]


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
