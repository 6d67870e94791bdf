"""The listener: what Envoy does to a request before and after its decision."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config import Config
from extproc.gateway import names, quota, replies, usage
from extproc.gateway.pieces import (
    address,
    envoy_grpc,
    extension,
    http_filter,
    remove,
    remove_prefix,
    seconds,
    typed,
)
from extproc.gateway.protos import (
    accesslog,
    core,
    data_accesslog,
    early_mutation,
    ext_proc,
    grpc_accesslog,
    hcm,
    health_check,
    listener,
    matcher,
    mutation_rules,
    route,
    router,
    tls,
    trace,
    tracing,
    type_metadata,
)
from extproc.gateway.routes import route_config
from extproc.gateway.upstream import stash

#: Time a client has to send its headers, and its whole request: bounds what slow senders hold in memory.
HEADERS_TIMEOUT_S = 10
REQUEST_TIMEOUT_S = 300
#: Headers with which a client could steer Envoy's router; dropped before the route is chosen.
CLIENT_STEERING = (
    names.HEADER_MAX_RETRIES,
    "x-envoy-retry-on",
    "x-envoy-retriable-status-codes",
    "x-envoy-retriable-header-names",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-rq-per-try-timeout-ms",
    "x-envoy-hedge-on-per-try-timeout",
    "x-envoy-upstream-alt-stat-name",
    "x-envoy-decorator-operation",
)
MODE = ext_proc.ProcessingModeHeaderSendMode
BODY = ext_proc.ProcessingModeBodySendMode
LOG_TYPE = data_accesslog.AccessLogType
ACCESS_LOG_KEEP_RETRIES = 1000


def make_listener(config: Config) -> listener.Listener:
    """The one listener, plain or TLS."""
    manager = listener.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=typed(_connection_manager(config))
    )
    return listener.Listener(
        name="kvgate",
        address=address(config.envoy.listen),
        # Bodies are held until decided and JSON answers until read: 413 or 500 above it (Envoy's default: 1 MiB).
        per_connection_buffer_limit_bytes=config.serve.max_body_bytes,
        filter_chains=[listener.FilterChain(filters=[manager], transport_socket=_downstream_tls(config))],
    )


def _downstream_tls(config: Config) -> core.TransportSocket | None:
    if config.envoy.tls is None:
        return None
    certificate = tls.TlsCertificate(
        certificate_chain=core.DataSource(filename=config.envoy.tls.cert_file),
        private_key=core.DataSource(filename=config.envoy.tls.key_file),
    )
    context = tls.DownstreamTlsContext(
        common_tls_context=tls.CommonTlsContext(tls_certificates=[certificate], alpn_protocols=["h2", "http/1.1"])
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=typed(context))


def _connection_manager(config: Config) -> hcm.HttpConnectionManager:
    idle = seconds(config.envoy.stream_idle_timeout_s)
    return hcm.HttpConnectionManager(
        stat_prefix="kvgate",
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        use_remote_address=config.envoy.use_remote_address,
        # The client's x-request-id is kept; kvgate's rid is its own and never from a client.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        # One spelling of a path for kvgate and for the engine: an engine that decodes %2F or folds // would
        # otherwise take for a chat completion what kvgate took for an unknown path.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=hcm.HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_FORWARD,
        stream_idle_timeout=idle,
        request_headers_timeout=seconds(HEADERS_TIMEOUT_S),
        request_timeout=seconds(REQUEST_TIMEOUT_S),
        common_http_protocol_options=core.HttpProtocolOptions(
            idle_timeout=idle,
            # Some servers read x_kvgate_rid as x-kvgate-rid.
            headers_with_underscores_action=core.HttpProtocolOptionsHeadersWithUnderscoresAction.DROP_HEADER,
        ),
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                early_mutation.HeaderMutation(mutations=[remove_prefix(names.HEADER_PREFIX), *remove(CLIENT_STEERING)]),
            )
        ],
        access_log_options=hcm.HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=seconds(config.envoy.periodic_s)
        ),
        access_log=[_request_log()],
        local_reply_config=replies.local_reply_config(),
        tracing=_tracing(config),
        http_filters=list(_http_filters(config)),
        route_config=route_config(config),
    )


def _http_filters(config: Config) -> Iterator[hcm.HttpFilter]:
    path = route.HeaderMatcher(name=":path", string_match=matcher.StringMatcher(exact="/healthz"))
    yield http_filter("health_check", health_check.HealthCheck(pass_through_mode=False, headers=[path]))
    yield http_filter("ext_proc", _ext_proc(config))
    yield from stash()
    yield from usage.filters()
    yield http_filter(
        "router",
        router.Router(
            upstream_log=[_attempt_log()],
            # Engines and remote APIs need not know Envoy's own headers (x-envoy-original-host is the client's Host).
            suppress_envoy_headers=True,
            upstream_log_options=router.RouterUpstreamAccessLogOptions(flush_upstream_log_on_upstream_stream=True),
        ),
    )


def _ext_proc(config: Config) -> ext_proc.ExternalProcessor:
    return ext_proc.ExternalProcessor(
        grpc_service=envoy_grpc(names.CLUSTER_EXT_PROC, 0),
        # Always: with false, a crash of `serve` resets every running answer. What happens undecided is the route's.
        failure_mode_allow=True,
        message_timeout=seconds(config.envoy.message_timeout_ms / 1000),
        max_message_timeout=seconds(config.envoy.max_message_timeout_ms / 1000),
        request_attributes=[names.ATTRIBUTE_PEER, names.ATTRIBUTE_NODE, names.ATTRIBUTE_TIME],
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=MODE.SEND,
            request_body_mode=BODY.BUFFERED,
            request_trailer_mode=MODE.SKIP,
            response_header_mode=MODE.SKIP,
            response_body_mode=BODY.NONE,
            # Costs no message (answers have no trailers) and keeps the stream open to the answer's end.
            response_trailer_mode=MODE.SEND,
        ),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(
                untyped=[names.DECISION_NAMESPACE, names.PLAN_NAMESPACE]
            )
        ),
        # For x-envoy-max-retries.
        mutation_rules=mutation_rules.HeaderMutationRules(allow_envoy=True),
    )


def _request_log() -> accesslog.AccessLog:
    # Entries without metadata matter too: the client that left while kvgate was deciding.
    wanted = accesslog.AccessLogFilter(
        and_filter=accesslog.AndFilter(
            filters=[
                accesslog.AccessLogFilter(not_health_check_filter=accesslog.NotHealthCheckFilter()),
                _types(LOG_TYPE.DownstreamPeriodic, LOG_TYPE.DownstreamEnd),
            ]
        )
    )
    return _log(wanted, names.LOG_REQUEST, grpc_accesslog.HttpGrpcAccessLogConfig())


def _attempt_log() -> accesslog.AccessLog:
    return _log(
        _types(LOG_TYPE.UpstreamEnd),
        names.LOG_ATTEMPT,
        grpc_accesslog.HttpGrpcAccessLogConfig(
            additional_request_headers_to_log=[names.HEADER_RID],
            # What a remote API says of its limits.
            additional_response_headers_to_log=list(quota.HEADERS),
        ),
    )


def _types(*types: data_accesslog.AccessLogType) -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(log_type_filter=accesslog.LogTypeFilter(types=list(types)))


def _log(
    wanted: accesslog.AccessLogFilter, name: str, logger: grpc_accesslog.HttpGrpcAccessLogConfig
) -> accesslog.AccessLog:
    logger.common_config = grpc_accesslog.CommonGrpcAccessLogConfig(
        log_name=name,
        transport_api_version=core.ApiVersion.V3,
        grpc_service=envoy_grpc(names.CLUSTER_ACCESS_LOG),
        # An entry releases memory, so it waits 10 ms at most; one message for all of that time costs serve 11 % less
        # CPU than one for each.
        buffer_flush_interval=seconds(0.01),
        buffer_size_bytes=1024 * 1024,
        # Keeps some entries over a restart of `serve`.
        grpc_stream_retry_policy=core.RetryPolicy(
            num_retries=ACCESS_LOG_KEEP_RETRIES,
            retry_back_off=core.BackoffStrategy(base_interval=seconds(0.1), max_interval=seconds(0.5)),
        ),
    )
    return accesslog.AccessLog(name="envoy.access_loggers.http_grpc", filter=wanted, typed_config=typed(logger))


def _tracing(config: Config) -> hcm.HttpConnectionManagerTracing | None:
    if config.telemetry.otlp_endpoint is None:
        return None
    provider = trace.OpenTelemetryConfig(grpc_service=envoy_grpc(names.CLUSTER_OTLP, 1), service_name="kvgate-envoy")
    return hcm.HttpConnectionManagerTracing(
        provider=trace.TracingHttp(name="envoy.tracers.opentelemetry", typed_config=typed(provider)),
        spawn_upstream_span=True,
        custom_tags=[
            _tag(f"kvgate.{key}", key) for key in (names.KEY_RID, names.KEY_DECISION, names.KEY_TARGET, names.KEY_LANE)
        ],
    )


def _tag(name: str, key: str) -> tracing.CustomTag:
    return tracing.CustomTag(
        tag=name,
        metadata=tracing.CustomTagMetadata(
            kind=type_metadata.MetadataKind(request=type_metadata.MetadataKindRequest()),
            metadata_key=type_metadata.MetadataKey(
                key=names.DECISION_NAMESPACE, path=[type_metadata.MetadataKeyPathSegment(key=key)]
            ),
        ),
    )
