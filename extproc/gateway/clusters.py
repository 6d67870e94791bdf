"""Envoy clusters: one per local replica, one per remote target, and kvgate's own service.

Owns connection pools, TLS towards engines, circuit breakers and health of the ext_proc endpoints. What
happens to a request on its way into an engine is ``upstream``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from extproc.config import Config, Target
from extproc.config.checks import worker_addresses
from extproc.config.forms import literal
from extproc.gateway import names
from extproc.gateway.pieces import Origin, address, assignment, seconds, socket, typed
from extproc.gateway.protos import cluster, core, endpoint, envoy_type, matcher, tls, type_metadata, upstream_http
from extproc.gateway.upstream import attempt_filters

HTTP_OPTIONS_KEY = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

#: Streams the ext_proc cluster may hold: every request in flight keeps one until its answer ends (Envoy's default: 1024).
EXT_PROC_STREAMS = 20_000
#: Access-log streams are one per worker and logger; their retries keep entries over a restart of `serve` (default: 3).
ACCESS_LOG_RETRIES = 1000
#: Concurrency towards one engine is kvgate's to decide, so Envoy's own breaker must never be the limit.
ENGINE_REQUESTS = 4096
ENGINE_RETRIES = 256
#: The same for all engines found under one name.
FOUND_REQUESTS = 65_536
#: A dead peer is noticed within interval + timeout.
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 5, 2
HEALTH_INTERVAL_S, HEALTH_TIMEOUT_S = 0.5, 0.5


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How long an idle connection to an engine is kept, and for how many requests (None: any number)."""

    idle_s: float
    max_requests: int | None


#: uvicorn (vLLM, SGLang, TensorRT-LLM) and cpp-httplib (llama.cpp) close after 5 s idle, cpp-httplib after 100
#: requests too; Envoy must close first, else a request meets a closing connection. Measured with both.
FIVE_SECONDS = Keepalive(idle_s=4, max_requests=90)
KEEPALIVE: dict[str, Keepalive] = {
    "vllm": FIVE_SECONDS,
    "sglang": FIVE_SECONDS,
    "trtllm": FIVE_SECONDS,
    "llamacpp": FIVE_SECONDS,
    "tgi": Keepalive(idle_s=30, max_requests=None),
    "ollama": Keepalive(idle_s=30, max_requests=None),
    "openai": Keepalive(idle_s=30, max_requests=None),
}
CONNECT_TIMEOUT_LOCAL_S = 1
CONNECT_TIMEOUT_REMOTE_S = 3


@dataclass(frozen=True, slots=True)
class Upstream:
    """One engine cluster to be: its name, the target whose rules it follows, where it listens, its cap."""

    cluster: str
    target_name: str
    target: Target
    urls: tuple[str, ...]
    max_requests: int = ENGINE_REQUESTS
    chosen: bool = False  # kvgate names the endpoint of each request: the replicas are found, not configured


def upstreams(config: Config) -> tuple[Upstream, ...]:
    """Every engine cluster in the order of the file, local replicas first."""
    local = [
        Upstream(
            names.replica_cluster(replica.name),
            name,
            target,
            (replica.url,),
            ENGINE_REQUESTS if replica.discover is None else FOUND_REQUESTS,
            replica.discover is not None,
        )
        for name, target, replica in config.local_replicas()
    ]
    remote = [
        Upstream(names.remote_cluster(name), name, target, (str(target.url),))
        for name, target in config.targets.items()
        if target.remote
    ]
    return (*local, *remote)


def open_upstream(config: Config) -> Upstream | None:
    """The capped cluster of undecided requests, or None where they are refused."""
    posture = config.envoy.open_posture
    if posture is None:
        return None
    mine = [u for u in upstreams(config) if u.target_name == posture.target]
    urls = tuple(url for u in mine for url in u.urls)
    return replace(mine[0], cluster=names.CLUSTER_OPEN, urls=urls, max_requests=posture.max_requests, chosen=False)


def clusters(config: Config) -> Iterator[cluster.Cluster]:
    """Every cluster of the bootstrap."""
    engines = upstreams(config)
    opened = open_upstream(config)
    for upstream in (*engines, *([opened] if opened else [])):
        yield engine_cluster(config, upstream)
    yield _ext_proc(config)
    yield _access_log(config)
    if config.telemetry.otlp_endpoint is not None:
        yield _grpc_cluster(names.CLUSTER_OTLP, (config.telemetry.otlp_endpoint,), cluster.CircuitBreakersThresholds())


def engine_cluster(config: Config, upstream: Upstream) -> cluster.Cluster:
    """The cluster of one replica or remote target with all that its requests go through."""
    origins = [Origin.parse(url) for url in upstream.urls]
    target, first = upstream.target, origins[0]
    keepalive = KEEPALIVE[target.engine]
    options = upstream_http.HttpProtocolOptions(
        common_http_protocol_options=core.HttpProtocolOptions(
            idle_timeout=seconds(keepalive.idle_s), max_requests_per_connection=keepalive.max_requests
        ),
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=core.Http1ProtocolOptions()
        ),
        http_filters=attempt_filters(config, target, prefix=first.prefix),
    )
    made = cluster.Cluster(
        name=upstream.cluster,
        type=_discovery([o.host for o in origins], one=target.remote),
        connect_timeout=seconds(CONNECT_TIMEOUT_REMOTE_S if target.remote else CONNECT_TIMEOUT_LOCAL_S),
        per_connection_buffer_limit_bytes=config.serve.max_body_bytes,
        lb_policy=cluster.ClusterLbPolicy.LEAST_REQUEST if len(origins) > 1 else cluster.ClusterLbPolicy.ROUND_ROBIN,
        circuit_breakers=cluster.CircuitBreakers(
            thresholds=[
                cluster.CircuitBreakersThresholds(
                    max_requests=upstream.max_requests,
                    max_pending_requests=upstream.max_requests,
                    max_connections=upstream.max_requests,
                    max_retries=ENGINE_RETRIES,
                )
            ]
        ),
        dns_lookup_family=cluster.ClusterDnsLookupFamily.V4_PREFERRED,
        load_assignment=assignment(
            upstream.cluster,
            [endpoint.Endpoint(address=socket(o.host, o.port), hostname=o.authority) for o in origins],
        ),
        transport_socket=_tls(target, first) if first.tls else None,
        typed_extension_protocol_options={HTTP_OPTIONS_KEY: typed(options)},
    )
    return _at_the_chosen_endpoint(made) if upstream.chosen else made


def _at_the_chosen_endpoint(made: cluster.Cluster) -> cluster.Cluster:
    """The cluster without endpoints of its own: each request goes to the address in kvgate's metadata, or nowhere.

    Envoy resolves nothing here, so what it reaches can never differ from what the agent measured and kvgate chose.
    """
    made.type = cluster.ClusterDiscoveryType.ORIGINAL_DST
    made.lb_policy = cluster.ClusterLbPolicy.CLUSTER_PROVIDED
    made.load_assignment = None
    made.original_dst_lb_config = cluster.ClusterOriginalDstLbConfig(
        metadata_key=type_metadata.MetadataKey(
            key=names.DECISION_NAMESPACE, path=[type_metadata.MetadataKeyPathSegment(key=names.KEY_ENDPOINT)]
        )
    )
    return made


def _discovery(hosts: list[str], *, one: bool) -> cluster.ClusterDiscoveryType:
    """STATIC for addresses; for names STRICT_DNS, and LOGICAL_DNS where one connection target is meant (an API)."""
    if all(literal(host) for host in hosts):
        return cluster.ClusterDiscoveryType.STATIC
    return cluster.ClusterDiscoveryType.LOGICAL_DNS if one else cluster.ClusterDiscoveryType.STRICT_DNS


def _tls(target: Target, origin: Origin) -> core.TransportSocket:
    """TLS that proves the server's name: SNI and a SAN match, against the target's CA bundle."""
    name = target.tls.server_name or origin.host
    kind = tls.SubjectAltNameMatcherSanType.IP_ADDRESS if literal(name) else tls.SubjectAltNameMatcherSanType.DNS
    context = tls.UpstreamTlsContext(
        sni="" if literal(name) else name,
        common_tls_context=tls.CommonTlsContext(
            validation_context=tls.CertificateValidationContext(
                trusted_ca=core.DataSource(filename=target.tls.ca_file),
                match_typed_subject_alt_names=[
                    tls.SubjectAltNameMatcher(san_type=kind, matcher=matcher.StringMatcher(exact=name))
                ],
            )
        ),
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=typed(context))


def serve_addresses(config: Config) -> tuple[str, ...]:
    """Where `kvgate serve` listens: one address per worker, sockets or ports."""
    return worker_addresses(config.serve.listen, config.serve.workers)


def _ext_proc(config: Config) -> cluster.Cluster:
    made = _grpc_cluster(
        names.CLUSTER_EXT_PROC,
        serve_addresses(config),
        cluster.CircuitBreakersThresholds(
            max_requests=EXT_PROC_STREAMS, max_pending_requests=EXT_PROC_STREAMS, max_connections=EXT_PROC_STREAMS
        ),
    )
    made.lb_policy = cluster.ClusterLbPolicy.LEAST_REQUEST
    made.health_checks = [
        core.HealthCheck(
            timeout=seconds(HEALTH_TIMEOUT_S),
            interval=seconds(HEALTH_INTERVAL_S),
            no_traffic_interval=seconds(HEALTH_INTERVAL_S),
            unhealthy_threshold=2,
            healthy_threshold=1,
            grpc_health_check=core.HealthCheckGrpcHealthCheck(),
        )
    ]
    # Without this Envoy sends to unhealthy endpoints when all are unhealthy, and each request waits for the timeout.
    made.common_lb_config = cluster.ClusterCommonLbConfig(healthy_panic_threshold=envoy_type.Percent(value=0))
    return made


def _access_log(config: Config) -> cluster.Cluster:
    # A cluster of its own: ext_proc streams must not use up its breaker, nor its retries theirs.
    return _grpc_cluster(
        names.CLUSTER_ACCESS_LOG,
        serve_addresses(config),
        cluster.CircuitBreakersThresholds(
            max_retries=ACCESS_LOG_RETRIES, max_requests=10_000, max_pending_requests=10_000
        ),
    )


def _grpc_cluster(
    name: str, addresses: tuple[str, ...], thresholds: cluster.CircuitBreakersThresholds
) -> cluster.Cluster:
    keepalive = core.KeepaliveSettings(interval=seconds(KEEPALIVE_S), timeout=seconds(KEEPALIVE_TIMEOUT_S))
    options = upstream_http.HttpProtocolOptions(
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions(connection_keepalive=keepalive)
        )
    )
    hosts = [a.rpartition(":")[0].strip("[]") for a in addresses if not a.startswith("unix:")]
    return cluster.Cluster(
        name=name,
        type=_discovery(hosts, one=False),
        connect_timeout=seconds(0.25),
        circuit_breakers=cluster.CircuitBreakers(thresholds=[thresholds]),
        load_assignment=assignment(name, [endpoint.Endpoint(address=address(a)) for a in addresses]),
        typed_extension_protocol_options={HTTP_OPTIONS_KEY: typed(options)},
    )
