"""Cross-checks: workers and their addresses, ledgers that cannot be shared, surprises that are only warned of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.config import load_text
from extproc.config.checks import warnings, worker_addresses
from extproc.errors import ConfigError
from extproc.gateway import build

TARGETS = """
targets: {t: {engine: vllm, replicas: [{name: r, url: "http://127.0.0.1:1"}]}}
lanes: {a: {}}
"""


@pytest.mark.parametrize(
    ("serve", "key"),
    [
        ("{admin: '127.0.0.1:65534', workers: 4}", "serve.admin"),
        ("{listen: '127.0.0.1:65534', workers: 4}", "serve.listen"),
        ("{listen: '127.0.0.1:9904', admin: '127.0.0.1:9902', workers: 4}", "serve.admin"),
        ("{listen: '127.0.0.1:9902'}", "serve.admin"),
        (
            "{admin: '127.0.0.1:9912', workers: 2}",
            "serve.admin: its ports 9912 to 9913 meet those of agent.admin, 9913;",
        ),
        ("{admin: '0.0.0.0:9899', workers: 3}", "serve.admin: its ports 9899 to 9901 meet those of envoy.admin, 9901;"),
        (
            "{listen: '127.0.0.1:9999', workers: 2}",
            "serve.listen: its ports 9999 to 10000 meet those of envoy.listen, 10000;",
        ),
        ("{listen: 'unix:/" + "a" * 105 + "', workers: 2}", "serve.listen"),
    ],
)
def test_every_worker_needs_an_address_of_its_own(serve: str, key: str) -> None:
    """The last worker's port or path must exist, and no two may meet."""
    with pytest.raises(ConfigError) as caught:
        load_text(f"lanes: {{a: {{}}}}\nserve: {serve}", where="k")

    (line,) = caught.value.problems
    assert line.startswith(f"k: {key}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "envoy: {listen: '127.0.0.1:9901'}",
            "envoy.admin: its ports 9901 meet those of envoy.listen, 9901; move one of them",
        ),
        (
            "envoy: {admin: 'localhost:9913'}",
            "agent.admin: its ports 9913 meet those of envoy.admin, 9913; move one of them",
        ),
        (
            "envoy: {listen: 'unix:/s'}\nserve: {listen: 'unix:/s'}",
            "serve.listen: its socket unix:/s is that of envoy.listen as well; move one of them",
        ),
        (
            "envoy: {admin: 'unix:/s.1'}\nserve: {listen: 'unix:/s', workers: 2}",
            "serve.listen: its socket unix:/s.1 is that of envoy.admin as well; move one of them",
        ),
    ],
)
def test_no_two_parts_have_one_address(text: str, line: str) -> None:
    """Ports and sockets of all parts, workers' among them."""
    with pytest.raises(ConfigError) as caught:
        load_text(f"lanes: {{a: {{}}}}\n{text}", where="k")

    assert caught.value.problems == [f"k: {line}"]


def test_two_loopbacks_are_two_hosts() -> None:
    """IPv4's and IPv6's have ports of their own."""
    config = load_text("lanes: {a: {}}\nenvoy: {listen: '127.0.0.1:9999', admin: '[::1]:9999'}", where="k")

    assert config.envoy.admin == "[::1]:9999"


@pytest.mark.parametrize(
    ("targets", "replicas"),
    [
        ('t: {engine: vllm, replicas: [{name: r, url: "http://h:1"}, {name: s, url: "http://h:1/"}]}', ["s"]),
        (
            't: {engine: vllm, replicas: [{name: r, url: "http://h:1"}]}, u: {engine: sglang, replicas: [{name: s, url: "http://h:1"}]}',
            ["s"],
        ),
        ('t: {engine: vllm, replicas: [{name: r, url: "http://h:1"}, {name: s, url: "http://h:2"}]}', []),
        (
            """{t: {engine: ollama, servedModel: a, replicas: [{name: r, url: "http://h:1"}]},
                u: {engine: ollama, servedModel: b, replicas: [{name: s, url: "http://h:1"}]}}"""[1:-1],
            [],
        ),
    ],
)
def test_an_engine_named_twice_is_warned_of(targets: str, replicas: list[str]) -> None:
    """One pool would be promised twice; several models of one Ollama are several pools."""
    config = load_text(f"lanes: {{a: {{}}}}\nunknownPaths: reject\ntargets: {{{targets}}}", where="k")

    found = [line for line in warnings(config) if "promised twice" in line]

    assert [line.partition(".url: ")[0].rpartition(".")[2] for line in found] == replicas


def test_several_workers_need_no_other_line() -> None:
    """The default addresses leave room for workers, and the same port of two hosts is two ports."""
    assert load_text("lanes: {a: {}}\nserve: {workers: 8}", where="k").serve.workers == 8
    assert load_text("lanes: {a: {}}\nserve: {admin: '10.0.0.1:9913'}", where="k").serve.admin == "10.0.0.1:9913"


def test_addresses_of_workers() -> None:
    """Sockets get numbers, ports follow each other, a free port stays free, and one worker has the address as it is."""
    assert worker_addresses("unix:/s", 2) == ("unix:/s.0", "unix:/s.1")
    assert worker_addresses("[::1]:70", 2) == ("[::1]:70", "[::1]:71")
    assert worker_addresses("127.0.0.1:0", 2) == ("127.0.0.1:0", "127.0.0.1:0")
    assert worker_addresses("unix:/s", 1) == ("unix:/s",)


def test_a_ledger_of_one_process_is_not_shared_by_workers() -> None:
    """Each would admit as if it were alone."""
    with pytest.raises(ConfigError, match=r"ledger\.url: `memory`"):
        load_text("lanes: {a: {}}\nledger: {url: memory}\nserve: {workers: 2}", where="k")


@pytest.mark.parametrize(
    ("more", "start"),
    [
        ("ledger: {url: embedded}", "ledger.url: `embedded`"),
        ("serve: {listen: '127.0.0.1:0'}", "serve.listen: with port 0"),
        ("", "unknownPaths: `pass`"),
    ],
)
def test_what_surprises_is_warned_of(more: str, start: str) -> None:
    """It loads, and ``check`` says so."""
    assert [line for line in warnings(load_text(TARGETS + more, where="k")) if line.startswith(start)]


@pytest.mark.parametrize(
    "text",
    [
        TARGETS + "unknownPaths: reject",
        "lanes: {a: {}}",
        "targets: {o: {engine: openai, url: 'http://h'}}\nlanes: {a: {}}",
    ],
)
def test_other_paths_are_warned_of_only_where_they_reach_our_engines(text: str) -> None:
    """Refused paths and files without local engines are no danger to them."""
    assert not [line for line in warnings(load_text(text, where="k")) if line.startswith("unknownPaths")]


def test_the_largest_accepted_figures_make_a_bootstrap() -> None:
    """What ``check`` accepts, ``kvgate envoy`` can write: every bound at once."""
    config = load_text(
        """
ledger: {deadlineMs: 1000, leaseS: 3600}
agent: {admin: "127.0.0.1:9000"}
serve: {countDeadlineMs: 86000000, maxBodyBytes: 1073741824, listen: "127.0.0.1:65472", workers: 64}
envoy:
  messageTimeoutMs: 86400000
  maxMessageTimeoutMs: 86400000
  streamIdleTimeoutS: 604800
  periodicS: 60
  undecided: {open: {target: t, maxRequests: 1000000}}
targets:
  t: {engine: vllm, servedModel: "模型 x", adapters: ["a b"], replicas: [{name: r, url: "http://[::1]:65535/p"}]}
  o: {engine: openai, url: "https://h", auth: {inject: {secretEnv: K, header: x-key, prefix: ""}}}
lanes: {a: {fallback: o, maxInputTokens: 2147483647}}
aliases: {"x y": {lane: a, targets: [t]}}
""",
        where="k",
    )
    made: dict[str, Any] = json.loads(build.as_json(build.build(config, node_id="n")))

    (ext_proc,) = [c for c in made["static_resources"]["clusters"] if c["name"] == "kvgate-extproc"]
    endpoints = ext_proc["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len({e["endpoint"]["address"]["socket_address"]["port_value"] for e in endpoints}) == 64


@pytest.mark.parametrize(
    ("replicas", "line"),
    [
        ('{name: p, url: "http://10.0.0.1:1", discover: dns}', "t.replicas.p.discover: the URL has an address"),
        ('{name: p, url: "http://[fd00::1]:1", discover: dns}', "t.replicas.p.discover: the URL has an address"),
        ('{name: p, url: "http://e:1", discover: dns, devices: [GPU-a]}', "t.replicas.p.devices: belong to one engine"),
        (
            '{name: p, url: "http://e:1", discover: dns}, {name: p@x, url: "http://e:1"}',
            "t.replicas.p@x.name: 'p@x' is",
        ),
        ('{name: p, url: "http://e:1", discover: kubernetes}', "t.replicas.0.discover: must be one of 'dns'"),
    ],
)
def test_what_contradicts_discovery(replicas: str, line: str) -> None:
    """Each is one line with key and mend; a plain name with `discover` is none."""
    with pytest.raises(ConfigError) as caught:
        load_text(f"targets: {{t: {{engine: vllm, replicas: [{replicas}]}}}}\nlanes: {{a: {{}}}}", where="k")
    (problem,) = caught.value.problems
    assert problem.startswith(f"k: targets.{line}")


def test_without_an_agent_nothing_is_discovered() -> None:
    """ledgerOnly has no replicas to admit by there, which is said."""
    text = 'targets: {t: {engine: vllm, replicas: [{name: p, url: "http://e:1", discover: dns}]}}\nlanes: {a: {}}\n'
    assert not [line for line in warnings(load_text(text, where="k")) if line.startswith("noAgent")]
    (line,) = [line for line in warnings(load_text(text + "noAgent: ledgerOnly", where="k")) if "noAgent" in line]
    assert line == "noAgent: `ledgerOnly` has no meaning for p: without an agent nothing is discovered"
