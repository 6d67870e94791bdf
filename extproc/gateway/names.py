"""Every name that Envoy's configuration and kvgate's answers share: metadata, headers, clusters, routes.

Pure constants and functions; imports nothing of the package, so that ``serve`` can use them without the
typed Envoy configuration. docs/protocol.md describes each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

# ---- dynamic metadata ------------------------------------------------------------------------------------

#: What was decided, and all that completion needs. ``rid`` present makes the ``decided`` route match.
DECISION_NAMESPACE = "kvgate"
#: The ordered clusters of this request, in the shape of Envoy's priority_group cluster specifier.
PLAN_NAMESPACE = "kvgate.plan"
#: Token usage that Envoy read out of the answer: input_tokens, output_tokens, cached_tokens, and the model's cache writes.
USAGE_NAMESPACE = "kvgate.usage"

KEY_RID = "rid"
KEY_DECISION = "decision"
KEY_TARGET = "target"
KEY_LANE = "lane"
KEY_REASON = "reason"
#: Where the chosen replica listens, if it was found (``discover``); else its name.
KEY_ENDPOINT = "endpoint"
#: Value of ``decision`` that marks an answer as kvgate's own, so that Envoy's local-reply rules leave it alone.
DECISION_REJECT = "reject"

USAGE_INPUT = "input_tokens"
USAGE_OUTPUT = "output_tokens"
USAGE_CACHED = "cached_tokens"
#: Anthropic's counts beside ``input_tokens``, which there leaves out what came from the cache.
USAGE_CACHE_READ = "cache_read_input_tokens"
USAGE_CACHE_WRITE = "cache_creation_input_tokens"

# ---- headers ---------------------------------------------------------------------------------------------

#: Whatever a client sends with this prefix is removed before the route is chosen.
HEADER_PREFIX = "x-kvgate-"
#: Response headers, written by Envoy from the metadata key of the same name.
RESPONSE_HEADERS: Mapping[str, str] = {
    "x-kvgate-decision": KEY_DECISION,
    "x-kvgate-target": KEY_TARGET,
    "x-kvgate-lane": KEY_LANE,
    "x-kvgate-reason": KEY_REASON,
}
#: Request header that puts the rid into the per-attempt access log (``request.request_headers``), which can show
#: nothing else of it. Set with every answer that carries a plan; the one header of ours that engines see.
HEADER_RID = "x-kvgate-rid"
#: ``START-END``: byte span of the value of the top-level ``model`` in the forwarded body, quotes included, END exclusive.
HEADER_MODEL_AT = "x-kvgate-model-at"
#: Name of a LoRA adapter the client asked for; a target that lists it keeps the client's model name.
HEADER_ADAPTER = "x-kvgate-adapter"
#: Envoy's own: bounds the attempts of this request. kvgate sets it to the plan's length - 1.
HEADER_MAX_RETRIES = "x-envoy-max-retries"

#: Envoy filter state in which those two outlive the headers: no engine sees the headers.
STATE_MODEL_AT = "kvgate.model-at"
STATE_ADAPTER = "kvgate.adapter"

# ---- ext_proc --------------------------------------------------------------------------------------------

#: Key of ``ProcessingRequest.attributes`` under which the request attributes below arrive.
ATTRIBUTES_KEY = "envoy.filters.http.ext_proc"
#: The client's address as Envoy believes it (``ip:port``): decides whether the lane header is trusted.
ATTRIBUTE_PEER = "source.address"
#: Envoy's ``node.id``: the owner in the metadata; equals ``identifier.node.id`` of its access-log streams.
ATTRIBUTE_NODE = "xds.node.id"
#: When the request's first byte came, to the microsecond: the ``start_time`` of its access-log entries, so that a
#: request id that a client sends with everything still names one exchange.
ATTRIBUTE_TIME = "request.time"

# ---- access log ------------------------------------------------------------------------------------------

#: ``identifier.log_name`` of the two loggers: one entry per request (and per period), one per attempt.
LOG_REQUEST = "kvgate-request"
LOG_ATTEMPT = "kvgate-attempt"

# ---- clusters and routes ---------------------------------------------------------------------------------

CLUSTER_EXT_PROC = "kvgate-extproc"
CLUSTER_ACCESS_LOG = "kvgate-als"
CLUSTER_OTLP = "kvgate-otlp"
CLUSTER_OPEN = "kvgate-open"

ROUTE_DECIDED = "decided"
ROUTE_UNDECIDED = "undecided"
ROUTE_MODELS = "models"
ROUTE_TUNNEL = "tunnel"


def member(replica: str, address: str) -> str:
    """The name of the engine at ``address`` that was found under a replica with `discover`."""
    return f"{replica}@{address}"


def replica_cluster(replica: str, discovered: Collection[str] = ()) -> str:
    """The Envoy cluster of a local replica: its name, or the name in ``discovered`` that it was found under."""
    base, at, _ = replica.rpartition("@")
    return base if at and base in discovered else replica


def port_of(url: str) -> int:
    """The port of an engine's URL, that of its scheme where none is written."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def member_endpoint(replica: str, port: int) -> str:
    """Where a found replica listens, ``ADDRESS:PORT``: the value of ``endpoint`` by which Envoy reaches exactly it."""
    address = replica.rpartition("@")[2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def remote_cluster(target: str) -> str:
    """The Envoy cluster of a remote target: its name."""
    return target


def plan(clusters: Iterable[str]) -> dict[str, object]:
    """The value of ``kvgate.plan`` for an ordered choice of clusters: attempt n goes to the n-th."""
    return {
        "priority_groups": [
            {"name": cluster, "clusters": [{"cluster_name": cluster, "weight": 1}]} for cluster in clusters
        ]
    }


def model_at(start: int, end: int) -> str:
    """The value of ``x-kvgate-model-at`` for the bytes ``body[start:end]``."""
    return f"{start}-{end}"
