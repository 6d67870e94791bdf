"""Configuration to bootstrap, without Envoy: clusters, addresses, plans, secrets, and the command."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from extproc.commands import envoy_config
from extproc.config import load_text
from extproc.errors import ConfigError
from extproc.gateway import names
from extproc.gateway.build import as_dict, as_yaml, build
from extproc.gateway.pieces import Origin
from extproc.gateway.routes import longest_plan
from extproc.gateway.upstream import lua_string

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = """
targets:
  primary:
    engine: vllm
    replicas: [{name: gpu-a-0, url: "http://10.0.0.5:8000"}, {name: gpu-b-0, url: "http://gpu-b.internal:8000"}]
  small: {engine: llamacpp, replicas: [{name: gpu-c-0, url: "http://[fd00::7]:8080"}]}
  ollama: {engine: ollama, replicas: [{name: o, url: "http://127.0.0.1:11434"}]}
  remote: {engine: openai, url: "https://api.example.com/v1", auth: {inject: {secretEnv: REMOTE_KEY}}}
  spare: {engine: openai, url: "https://10.9.9.9:8443", tls: {serverName: spare.internal}}
"""
LANES = "lanes: {a: {fallback: remote}}\naliases: {coder: {lane: a, targets: [primary, small]}}\n"


@cache
def bootstrap(more: str = "") -> dict[str, Any]:
    """The bootstrap of the configuration above with some more of it; read only."""
    return as_dict(build(load_text(TARGETS + LANES + more, where="test")))


def clusters(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The clusters by name."""
    return {each["name"]: each for each in made["static_resources"]["clusters"]}


def manager(made: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of the one listener."""
    filters = made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    return dict(filters[0]["typed_config"])


def endpoints(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The endpoints of one cluster."""
    return [each["endpoint"] for each in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]


def test_one_cluster_per_replica_and_per_remote_target() -> None:
    """Clusters carry the replica's or the remote target's name; kvgate's own start with kvgate-."""
    expected = [
        "gpu-a-0",
        "gpu-b-0",
        "gpu-c-0",
        "o",
        "remote",
        "spare",
        names.CLUSTER_EXT_PROC,
        names.CLUSTER_ACCESS_LOG,
    ]
    assert list(clusters(bootstrap())) == expected


@pytest.mark.parametrize(
    ("name", "discovery"),
    [
        ("gpu-a-0", "STATIC"),
        ("gpu-b-0", "STRICT_DNS"),
        ("gpu-c-0", "STATIC"),
        ("remote", "LOGICAL_DNS"),
        ("spare", "STATIC"),
    ],
)
def test_discovery_follows_the_host(name: str, discovery: str) -> None:
    """Addresses are static; names are resolved, an API's as one logical host."""
    assert clusters(bootstrap())[name].get("type", "STATIC") == discovery


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://10.0.0.5:8000", Origin(False, "10.0.0.5", 8000, "10.0.0.5:8000", "")),
        ("https://api.example.com/v1", Origin(True, "api.example.com", 443, "api.example.com", "")),
        ("https://api.example.com/openai/v1/", Origin(True, "api.example.com", 443, "api.example.com", "/openai")),
        ("http://host/base", Origin(False, "host", 80, "host", "/base")),
        ("http://[fd00::7]:8080/", Origin(False, "fd00::7", 8080, "[fd00::7]:8080", "")),
    ],
)
def test_urls_are_taken_apart(url: str, origin: Origin) -> None:
    """Scheme, host, port, Host header and the path that goes before the client's; an SDK's /v1 is not doubled."""
    assert Origin.parse(url) == origin


def test_tls_proves_the_name() -> None:
    """SNI and SAN are the URL's host, or the configured name."""
    contexts = {name: clusters(bootstrap())[name]["transport_socket"]["typed_config"] for name in ("remote", "spare")}
    sans = {
        name: each["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"][0]
        for name, each in contexts.items()
    }
    assert {name: (contexts[name]["sni"], sans[name]["matcher"]["exact"], sans[name]["san_type"]) for name in sans} == {
        "remote": ("api.example.com", "api.example.com", "DNS"),
        "spare": ("spare.internal", "spare.internal", "DNS"),
    }


@pytest.mark.parametrize(
    ("name", "idle", "requests"), [("gpu-a-0", "4s", 90), ("gpu-c-0", "4s", 90), ("o", "30s", None)]
)
def test_connections_end_before_the_engine_ends_them(name: str, idle: str, requests: int | None) -> None:
    """Engines with a keep-alive of 5 s get an idle timeout below it."""
    options = next(iter(clusters(bootstrap())[name]["typed_extension_protocol_options"].values()))
    common = options["common_http_protocol_options"]
    assert (common["idle_timeout"], common.get("max_requests_per_connection")) == (idle, requests)


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        ('serve: {listen: "unix:/run/k.sock"}', [{"pipe": {"path": "/run/k.sock"}}]),
        (
            'serve: {listen: "unix:/run/k.sock", workers: 2}',
            [{"pipe": {"path": "/run/k.sock.0"}}, {"pipe": {"path": "/run/k.sock.1"}}],
        ),
        (
            'serve: {listen: "[::1]:9000", workers: 2}',
            [{"socket_address": {"address": "::1", "port_value": port}} for port in (9000, 9001)],
        ),
    ],
)
def test_one_endpoint_per_worker(serve: str, expected: list[dict[str, Any]]) -> None:
    """Both services of every worker are known to Envoy."""
    made = clusters(bootstrap(serve))
    for name in (names.CLUSTER_EXT_PROC, names.CLUSTER_ACCESS_LOG):
        assert [each["address"] for each in endpoints(made[name])] == expected


def test_ext_proc_cluster_holds_every_stream() -> None:
    """Breaker, health check and panic threshold as measured; the access log has a cluster of its own."""
    made = clusters(bootstrap())[names.CLUSTER_EXT_PROC]
    threshold = made["circuit_breakers"]["thresholds"][0]
    assert (threshold["max_requests"], threshold["max_pending_requests"]) == (20_000, 20_000)
    assert made["lb_policy"] == "LEAST_REQUEST"
    assert made["health_checks"][0]["grpc_health_check"] == {}
    assert made["common_lb_config"] == {"healthy_panic_threshold": {}}


def test_limits_are_explicit() -> None:
    """Body limit, timeouts and the periodic interval come from the configuration."""
    more = "serve: {maxBodyBytes: 4096}\nenvoy: {messageTimeoutMs: 900, maxMessageTimeoutMs: 5000, streamIdleTimeoutS: 60, periodicS: 0.5}"
    made = bootstrap(more)
    connection = manager(made)
    ext_proc = next(f["typed_config"] for f in connection["http_filters"] if f["name"] == "envoy.filters.http.ext_proc")
    assert made["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] == 4096
    assert {
        each.get("per_connection_buffer_limit_bytes") for n, each in clusters(made).items() if "kvgate-" not in n
    } == {4096}
    assert (ext_proc["message_timeout"], ext_proc["max_message_timeout"]) == ("0.900s", "5s")
    assert (connection["stream_idle_timeout"], connection["access_log_options"]["access_log_flush_interval"]) == (
        "60s",
        "0.500s",
    )


def test_open_posture_is_a_capped_cluster_of_all_replicas() -> None:
    """Undecided requests share the cap over every replica of the target."""
    made = bootstrap("envoy: {undecided: {open: {target: primary, maxRequests: 5}}}")
    opened = clusters(made)[names.CLUSTER_OPEN]
    assert [each["hostname"] for each in endpoints(opened)] == ["10.0.0.5:8000", "gpu-b.internal:8000"]
    assert opened["circuit_breakers"]["thresholds"][0]["max_requests"] == 5


def test_spans_only_where_a_collector_is_named() -> None:
    """Tracing appears with telemetry.otlpEndpoint, tagged with the rid."""
    with_tracing = bootstrap("telemetry: {otlpEndpoint: 'otel:4317'}")
    tags = [tag["tag"] for tag in manager(with_tracing)["tracing"]["custom_tags"]]
    assert "kvgate.rid" in tags
    assert names.CLUSTER_OTLP in clusters(with_tracing)
    assert "tracing" not in manager(bootstrap())


@pytest.mark.parametrize(
    ("lanes", "longest"),
    [
        ("lanes: {a: {}}\naliases: {c: {lane: a, targets: [primary, small]}}", 1),
        ("lanes: {a: {fallback: remote}}\naliases: {c: {lane: a, targets: [primary]}}", 2),
        ("lanes: {a: {fallback: remote}}\naliases: {c: {lane: a, targets: [primary, remote, spare]}}", 3),
        ("lanes: {a: {targets: [remote, spare], fallback: remote}}", 3),
    ],
)
def test_longest_plan(lanes: str, longest: int) -> None:
    """One reserved cluster and every different remote target of one chain."""
    assert longest_plan(load_text(TARGETS + lanes, where="test")) == longest


def test_a_plan_is_what_the_specifier_reads() -> None:
    """Ordered groups of one cluster each."""
    assert names.plan(["gpu-a-0", "remote"]) == {
        "priority_groups": [
            {"name": "gpu-a-0", "clusters": [{"cluster_name": "gpu-a-0", "weight": 1}]},
            {"name": "remote", "clusters": [{"cluster_name": "remote", "weight": 1}]},
        ]
    }


def test_secrets_are_named_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file tells Envoy which environment variable to read; its value does not appear."""
    monkeypatch.setenv("REMOTE_KEY", "top-secret")
    text = as_yaml(build(load_text(TARGETS + LANES, where="test")))
    assert ("environment_variable: REMOTE_KEY" in text, "top-secret" in text) == (True, False)


def test_lua_strings_hold_any_text() -> None:
    """Quotes, backslashes, line breaks and non-ASCII become escapes of exactly three digits."""
    assert lua_string('a"\\\n]]é1') == '"a\\034\\092\\010\\093\\093\\195\\1691"'


def test_the_same_configuration_gives_the_same_text() -> None:
    """Generated files can be compared."""
    config = load_text(TARGETS + LANES, where="test")
    assert as_yaml(build(config)) == as_yaml(build(config))


def test_names_cost_nothing_to_import() -> None:
    """What `serve` shares with the generator does not load the typed Envoy configuration."""
    code = "import sys, extproc.gateway.names; sys.exit(any('betterproto2' in m or 'envoy' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_to_route_to_is_an_error() -> None:
    """A lanes file alone cannot make an Envoy configuration."""
    with pytest.raises(ConfigError, match="targets: missing"):
        build(load_text("lanes: {a: {}}", where="test"))


def run(path: Path, *arguments: str) -> int:
    """The command as the command line calls it."""
    parser = argparse.ArgumentParser()
    envoy_config.configure(parser)
    return envoy_config.run(parser.parse_args([str(path), *arguments]))


def test_command_prints_yaml_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are the bootstrap; --node-id names this Envoy."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(TARGETS + LANES)
    assert (run(path), run(path, "--json", "--node-id", "edge-7")) == (0, 0)
    head, _, text = capsys.readouterr().out.partition("\n{")
    assert head == as_yaml(build(load_text(TARGETS + LANES, where="test"))).rstrip("\n")
    assert json.loads("{" + text)["node"]["id"] == "edge-7"


@pytest.mark.parametrize("text", ["lanes: {a: {}}", "targets: {x: {engine: vllm}}", "nonsense: 1"])
def test_command_names_file_and_mend(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that cannot be used is one line per mistake on stderr and exit status 1."""
    path = tmp_path / "kvgate.yaml"
    path.write_text(text)
    assert run(path) == 1
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert (shown.out, [line.startswith(f"{path}: ") for line in lines]) == ("", [True] * len(lines))
    assert lines


def test_found_replicas_have_one_cluster_that_goes_where_kvgate_says() -> None:
    """`discover`: no endpoints of its own, the address comes from our metadata; undecided requests resolve the name."""
    text = (
        'targets: {t: {engine: vllm, replicas: [{name: pool, url: "http://engines:8000", discover: dns}]}}\n'
        "lanes: {a: {}}\nenvoy: {undecided: {open: {target: t}}}"
    )
    made = clusters(as_dict(build(load_text(text, where="test"))))
    found, opened = made["pool"], made[names.CLUSTER_OPEN]
    assert (found["type"], found["lb_policy"]) == ("ORIGINAL_DST", "CLUSTER_PROVIDED")
    assert found["original_dst_lb_config"] == {"metadata_key": {"key": "kvgate", "path": [{"key": "endpoint"}]}}
    assert "load_assignment" not in found
    assert (opened["type"], endpoints(opened)[0]["hostname"]) == ("STRICT_DNS", "engines:8000")


@pytest.mark.parametrize(
    ("replica", "cluster", "endpoint"),
    [
        ("pool@10.0.0.7", "pool", "10.0.0.7:8000"),
        ("pool@fd00::7", "pool", "[fd00::7]:8000"),
        ("own@rack", "own@rack", None),
        ("pool", "pool", None),
    ],
)
def test_names_of_found_replicas(replica: str, cluster: str, endpoint: str | None) -> None:
    """Only what was found under a name with `discover` shares its cluster."""
    assert names.replica_cluster(replica, {"pool"}) == cluster
    if endpoint is not None:
        assert names.member_endpoint(replica, 8000) == endpoint
        assert names.member("pool", replica.partition("@")[2]) == replica
