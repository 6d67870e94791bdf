"""The route table: the model list, the ``decided`` route with its per-request plan, and what happens undecided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from urllib.parse import quote

from extproc.config import Config
from extproc.gateway import names, usage
from extproc.gateway.clusters import upstreams
from extproc.gateway.pieces import APPEND_ACTION, extension, header, metadata_matcher, seconds, typed
from extproc.gateway.protos import (
    Any,
    ClusterWeight,
    PriorityGroup,
    PriorityGroupClusterSpecifier,
    core,
    matcher,
    previous_hosts,
    route,
)
from extproc.gateway.replies import JSON, MODELS_PREFIX, NO_SUCH_MODEL, UNDECIDED, decision_headers

#: Answers that can be larger than any buffer and whose usage teaches nothing: not held back to be read.
UNBUFFERED_PATHS = r"^/(v1/)?(embeddings|rerank|score|pooling|classify)$|^/api/(embed|embeddings)$"
#: Envoy's own limit for a direct response's body; a long list of models needs more.
DEFAULT_DIRECT_BODY_BYTES = 4096
#: Statuses with which an engine or a remote API says "not now".
RETRIABLE = [429, 503]
RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"

#: Characters that clients leave as they are in a path (RFC 3986: pchar and "/").
PLAIN_IN_PATH = "/:@!$&'()*+,;=~"

#: Other replicas an undecided request is tried on, and draws to find one that was not tried yet.
OPEN_RETRIES, OPEN_HOST_DRAWS = 2, 5

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
JSON_FILTER = f"envoy.filters.http.{usage.JSON_FILTER}"


def route_config(config: Config) -> route.RouteConfiguration:
    """The one route table of the listener."""
    routes = list(_routes(config))
    bodies = [
        len((r.direct_response.body.inline_string or "").encode())
        for r in routes
        if r.direct_response and r.direct_response.body
    ]
    return route.RouteConfiguration(
        name="kvgate",
        max_direct_response_body_size_bytes=max([DEFAULT_DIRECT_BODY_BYTES, *bodies]),
        virtual_hosts=[
            route.VirtualHost(
                name="kvgate",
                domains=["*"],
                # Usage is read out of plain answers only.
                request_headers_to_remove=["accept-encoding"],
                response_headers_to_add=decision_headers(),
                routes=routes,
            )
        ],
    )


def _routes(config: Config) -> Iterator[route.Route]:
    yield _no_tunnels()
    yield from _model_routes(config)
    decided = metadata_matcher(names.DECISION_NAMESPACE, names.KEY_RID, matcher.ValueMatcher(present_match=True))
    yield route.Route(
        name=names.ROUTE_DECIDED,
        match=route.RouteMatch(prefix="/", dynamic_metadata=[decided]),
        route=_plan_action(config),
        # An engine cannot speak in kvgate's name.
        response_headers_to_remove=list(names.RESPONSE_HEADERS),
    )
    # The filter chain is made for the first route that matches, before anything is decided, so the filter that
    # would hold back a large answer is left out here.
    unbuffered = route.RouteMatch(safe_regex=matcher.RegexMatcher(regex=UNBUFFERED_PATHS))
    yield _undecided(config, unbuffered, {JSON_FILTER: typed(route.FilterConfig(disabled=True))})
    yield _undecided(config, route.RouteMatch(prefix="/"), {})


def _no_tunnels() -> route.Route:
    """CONNECT is refused by its head, by Envoy itself: a tunnel's body has no end that a decision could wait for."""
    off = typed(route.FilterConfig(disabled=True))
    return route.Route(
        name=names.ROUTE_TUNNEL,
        match=route.RouteMatch(connect_matcher=route.RouteMatchConnectMatcher()),
        direct_response=route.DirectResponseAction(status=403),
        typed_per_filter_config={EXT_PROC_FILTER: off, JSON_FILTER: off},
    )


def _plan_action(config: Config) -> route.RouteAction:
    """Attempt n goes to the n-th cluster of the request's plan."""
    every = [u.cluster for u in upstreams(config)]
    specifier = PriorityGroupClusterSpecifier(
        override_metadata_namespace=names.PLAN_NAMESPACE,
        priority_groups=[
            PriorityGroup(name=name, clusters=[ClusterWeight(cluster_name=name, weight=1)]) for name in every
        ],
    )
    action = _action(config)
    action.inline_cluster_specifier_plugin = route.ClusterSpecifierPlugin(
        extension=extension("envoy.router.cluster_specifier_plugin.priority_group", specifier)
    )
    action.retry_policy = route.RetryPolicy(
        retry_on=RETRY_ON,
        retriable_status_codes=RETRIABLE,
        num_retries=longest_plan(config) - 1,
        refresh_cluster_on_retry=True,
        retry_back_off=route.RetryPolicyRetryBackOff(base_interval=seconds(0.025), max_interval=seconds(0.1)),
    )
    return action


def longest_plan(config: Config) -> int:
    """Clusters in the longest plan kvgate can give: one reserved, then every remote target of the chain."""
    chains = [(*alias.targets, *_fallback(config, alias.lane)) for alias in config.aliases.values()]
    chains += [(*lane.targets, *_fallback(config, name)) for name, lane in config.lanes.items()]
    remotes = [len({t for t in chain if t in config.targets and config.targets[t].remote}) for chain in chains]
    return 1 + max([0, *remotes])


def _fallback(config: Config, lane: str) -> tuple[str, ...]:
    fallback = config.lanes[lane].fallback if lane in config.lanes else None
    return (fallback,) if fallback else ()


def _action(config: Config) -> route.RouteAction:
    return route.RouteAction(
        timeout=seconds(0),
        idle_timeout=seconds(config.envoy.stream_idle_timeout_s),
        auto_host_rewrite=True,
    )


def _undecided(config: Config, match: route.RouteMatch, per_filter: dict[str, Any]) -> route.Route:
    posture = config.envoy.open_posture
    make = partial(route.Route, name=names.ROUTE_UNDECIDED, match=match, typed_per_filter_config=per_filter)
    if posture is None:
        # The body is replies.UNDECIDED's.
        return make(direct_response=route.DirectResponseAction(status=UNDECIDED.status))
    action = _action(config)
    action.cluster = names.CLUSTER_OPEN
    # One dead replica must not cost undecided requests; nobody chose theirs.
    action.retry_policy = route.RetryPolicy(
        retry_on="connect-failure,refused-stream",
        num_retries=OPEN_RETRIES,
        retry_host_predicate=[
            route.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=typed(previous_hosts.PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=OPEN_HOST_DRAWS,
    )
    return make(
        route=action, response_headers_to_add=[header("x-kvgate-decision", "bypass", APPEND_ACTION.ADD_IF_ABSENT)]
    )


def _model_routes(config: Config) -> Iterator[route.Route]:
    models = {alias: _model(alias) for alias in sorted(config.aliases)}
    listing = {
        "object": "list",
        "data": list(models.values()),
        "has_more": False,
        "first_id": next(iter(models), None),
        "last_id": next(reversed(models), None),
    }
    yield _json_route(route.RouteMatch(path="/v1/models"), 200, json.dumps(listing))
    for alias, model in models.items():
        yield _json_route(
            route.RouteMatch(path=MODELS_PREFIX + quote(alias, safe=PLAIN_IN_PATH)), 200, json.dumps(model)
        )
    yield _json_route(route.RouteMatch(prefix=MODELS_PREFIX), NO_SUCH_MODEL.status, None)


def _model(alias: str) -> dict[str, object]:
    """One model in OpenAI's and Anthropic's shape at once."""
    return {
        "id": alias,
        "object": "model",
        "created": 0,
        "owned_by": "kvgate",
        "type": "model",
        "display_name": alias,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _json_route(match: route.RouteMatch, status: int, text: str | None) -> route.Route:
    match.headers = [
        route.HeaderMatcher(
            name=":method", string_match=matcher.StringMatcher(safe_regex=matcher.RegexMatcher(regex="GET|HEAD"))
        )
    ]
    off = typed(route.FilterConfig(disabled=True))
    return route.Route(
        name=names.ROUTE_MODELS,
        match=match,
        direct_response=route.DirectResponseAction(
            status=status, body=None if text is None else core.DataSource(inline_string=text)
        ),
        response_headers_to_add=[
            header("content-type", JSON),
            header("x-kvgate-decision", "pass", APPEND_ACTION.ADD_IF_ABSENT),
        ],
        typed_per_filter_config={EXT_PROC_FILTER: off, JSON_FILTER: off},
    )
