"""Small builders that every part of the bootstrap uses: durations, addresses, extensions, header rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

from extproc.gateway import names
from extproc.gateway.protos import (
    Any,
    betterproto2,
    core,
    endpoint,
    hcm,
    matcher,
    mutation_rules,
)

APPEND_ACTION = core.HeaderValueOptionHeaderAppendAction


def seconds(value: float) -> timedelta:
    """A duration of ``value`` seconds."""
    return timedelta(seconds=value)


def typed(message: betterproto2.Message) -> Any:
    """``message`` as google.protobuf.Any, with its type URL."""
    return Any.pack(message)


def http_filter(name: str, message: betterproto2.Message) -> hcm.HttpFilter:
    """One HTTP filter, ``name`` without its common prefix."""
    return hcm.HttpFilter(name=f"envoy.filters.http.{name}", typed_config=typed(message))


def extension(name: str, message: betterproto2.Message) -> core.TypedExtensionConfig:
    """One extension by its full name."""
    return core.TypedExtensionConfig(name=name, typed_config=typed(message))


def header(
    key: str, value: str, action: APPEND_ACTION = APPEND_ACTION.OVERWRITE_IF_EXISTS_OR_ADD
) -> core.HeaderValueOption:
    """A header to set; by default it replaces what is there."""
    return core.HeaderValueOption(header=core.HeaderValue(key=key, value=value), append_action=action)


def remove(names: Iterable[str]) -> list[mutation_rules.HeaderMutation]:
    """Mutations that remove headers by name."""
    return [mutation_rules.HeaderMutation(remove=name) for name in names]


def remove_prefix(prefix: str) -> mutation_rules.HeaderMutation:
    """A mutation that removes every header whose name starts with ``prefix``."""
    on_match = mutation_rules.HeaderMutationRemoveOnMatch(key_matcher=matcher.StringMatcher(prefix=prefix))
    return mutation_rules.HeaderMutation(remove_on_match=on_match)


def metadata_matcher(namespace: str, key: str, value: matcher.ValueMatcher) -> matcher.MetadataMatcher:
    """Matches one key of one namespace of dynamic metadata."""
    return matcher.MetadataMatcher(filter=namespace, path=[matcher.MetadataMatcherPathSegment(key=key)], value=value)


def envoy_grpc(cluster: str, timeout_s: float | None = None) -> core.GrpcService:
    """A gRPC service behind one of our own clusters."""
    return core.GrpcService(
        envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=cluster),
        timeout=None if timeout_s is None else seconds(timeout_s),
    )


def socket(host: str, port: int) -> core.Address:
    """A TCP address."""
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def address(text: str) -> core.Address:
    """An address as the configuration writes it: ``unix:PATH`` or host:port, IPv6 in brackets."""
    if text.startswith("unix:"):
        return core.Address(pipe=core.Pipe(path=text.removeprefix("unix:")))
    host, _, port = text.rpartition(":")
    return socket(host.strip("[]"), int(port))


def assignment(cluster: str, endpoints: Sequence[endpoint.Endpoint]) -> endpoint.ClusterLoadAssignment:
    """One locality with these endpoints."""
    return endpoint.ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=[endpoint.LbEndpoint(endpoint=e) for e in endpoints])],
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """An engine's base URL taken apart; ``prefix`` is what goes before the client's path, "" for none."""

    tls: bool
    host: str
    port: int
    authority: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Split ``url``; a path that ends in ``/v1`` (an SDK's base URL) ends before it, clients send it themselves."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(
            tls=tls,
            host=parts.hostname or "",
            port=names.port_of(url),
            authority=parts.netloc.rpartition("@")[2],
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )
