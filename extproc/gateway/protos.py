"""The one place that imports envoy-data-plane: its modules under short names, and the type it lacks.

Its generated classes use a pydantic decorator in a form that today's pydantic deprecates, once per class, at
import; those warnings are of no use to anybody who runs a command, so they are dropped here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using `@model_validator`", category=DeprecationWarning)
    import betterproto2
    from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
    from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap
    from envoy_data_plane.envoy.config.cluster import v3 as cluster
    from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
    from envoy_data_plane.envoy.config.listener import v3 as listener
    from envoy_data_plane.envoy.config.overload import v3 as overload
    from envoy_data_plane.envoy.config.route import v3 as route
    from envoy_data_plane.envoy.config.trace import v3 as trace
    from envoy_data_plane.envoy.data.accesslog import v3 as data_accesslog
    from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_accesslog
    from envoy_data_plane.envoy.extensions.content_parsers.json import v3 as json_parser
    from envoy_data_plane.envoy.extensions.filters.common.set_filter_state import v3 as filter_state
    from envoy_data_plane.envoy.extensions.filters.http.credential_injector import v3 as credential_injector
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation
    from envoy_data_plane.envoy.extensions.filters.http.health_check import v3 as health_check
    from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata import v3 as json_to_metadata
    from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua
    from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
    from envoy_data_plane.envoy.extensions.filters.http.set_filter_state import v3 as set_filter_state
    from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata import v3 as sse_to_metadata
    from envoy_data_plane.envoy.extensions.filters.http.upstream_codec import v3 as upstream_codec
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early_mutation
    from envoy_data_plane.envoy.extensions.http.injected_credentials.generic import v3 as generic_credential
    from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import v3 as downstream_connections
    from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
    from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
    from envoy_data_plane.envoy.type import v3 as envoy_type
    from envoy_data_plane.envoy.type.matcher import v3 as matcher
    from envoy_data_plane.envoy.type.metadata import v3 as type_metadata
    from envoy_data_plane.envoy.type.tracing import v3 as tracing
    from envoy_data_plane.google.protobuf import Any, UInt32Value
    from envoy_data_plane.message_pool import default_message_pool

PRIORITY_GROUP_PACKAGE = "envoy.extensions.router.cluster_specifiers.priority_group.v3"


@dataclass(eq=False, repr=False)
class ClusterWeight(betterproto2.Message):
    """One cluster of a priority group and its share of the group."""

    cluster_name: str = betterproto2.field(1, betterproto2.TYPE_STRING)
    weight: int | None = betterproto2.field(2, betterproto2.TYPE_MESSAGE, unwrap=lambda: UInt32Value, optional=True)


@dataclass(eq=False, repr=False)
class PriorityGroup(betterproto2.Message):
    """Clusters that one attempt chooses among; metadata names the group by ``name``."""

    name: str = betterproto2.field(1, betterproto2.TYPE_STRING)
    clusters: list[ClusterWeight] = betterproto2.field(2, betterproto2.TYPE_MESSAGE, repeated=True)  # noqa: RUF009


@dataclass(eq=False, repr=False)
class PriorityGroupClusterSpecifier(betterproto2.Message):
    """Attempt n goes to the n-th group; metadata in ``override_metadata_namespace`` replaces the list per request.

    Envoy 1.40 has it, envoy-data-plane has not. Field numbers are those in the descriptor inside Envoy's binary.
    """

    priority_groups: list[PriorityGroup] = betterproto2.field(1, betterproto2.TYPE_MESSAGE, repeated=True)  # noqa: RUF009
    override_metadata_namespace: str = betterproto2.field(2, betterproto2.TYPE_STRING)


for _class in (ClusterWeight, PriorityGroup, PriorityGroupClusterSpecifier):
    default_message_pool.register_message(PRIORITY_GROUP_PACKAGE, _class.__name__, _class)

__all__ = [
    "Any",
    "ClusterWeight",
    "PriorityGroup",
    "PriorityGroupClusterSpecifier",
    "accesslog",
    "betterproto2",
    "bootstrap",
    "cluster",
    "core",
    "credential_injector",
    "data_accesslog",
    "downstream_connections",
    "early_mutation",
    "endpoint",
    "envoy_type",
    "ext_proc",
    "filter_state",
    "generic_credential",
    "grpc_accesslog",
    "hcm",
    "header_mutation",
    "health_check",
    "json_parser",
    "json_to_metadata",
    "listener",
    "lua",
    "matcher",
    "mutation_rules",
    "overload",
    "previous_hosts",
    "route",
    "router",
    "set_filter_state",
    "sse_to_metadata",
    "tls",
    "trace",
    "tracing",
    "type_metadata",
    "upstream_codec",
    "upstream_http",
]
