"""Through a real Envoy: what the client reads when Envoy answers by itself, and that kvgate's refusals pass untouched."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support import gateway as support
from tests.support.extproc import Verdict
from tests.support.upstream import Answer, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.gateway import Gateway, Reply

REFUSAL = b'{"error":{"message":"full","type":"rate_limit_error","param":null,"code":"lane_full"}}'


def kvgate_headers(reply: Reply) -> dict[str, str]:
    """The headers of ours, without their prefix."""
    return {k.removeprefix("x-kvgate-"): v for k, v in reply.headers.items() if k.startswith("x-kvgate-")}


@pytest.mark.parametrize("status", [400, 404, 413, 415, 429, 503])
def test_a_refusal_of_kvgate_passes_untouched(gateway: Gateway, status: int) -> None:
    """Status, body, content type and retry headers are kvgate's; the metadata becomes headers."""
    gateway.verdict = Verdict(
        status=status,
        body=REFUSAL,
        headers={"content-type": "application/json", "retry-after": "7", "x-should-retry": "true"},
        metadata={"decision": "reject", "reason": "lane_full", "lane": "fast"},
    )
    reply = gateway.ask()
    assert (reply.status, reply.body) == (status, REFUSAL)
    assert kvgate_headers(reply) == {"decision": "reject", "reason": "lane_full", "lane": "fast"}
    kept = {name: reply.headers[name] for name in ("content-type", "retry-after", "x-should-retry")}
    assert kept == {"content-type": "application/json", "retry-after": "7", "x-should-retry": "true"}


def too_large(gateway: Gateway) -> Reply:
    """A body over serve.maxBodyBytes."""
    return gateway.ask(body=b"x" * 300_000)


def unreachable(gateway: Gateway) -> Reply:
    """A plan whose only engine is gone."""
    gateway.admit("gone")
    return gateway.ask()


def no_such_cluster(gateway: Gateway) -> Reply:
    """A plan with a cluster this Envoy does not know."""
    gateway.admit("unheard-of")
    return gateway.ask()


def broken_off(gateway: Gateway) -> Reply:
    """An engine that closes the connection without an answer."""
    gateway.admit("gpu-a-0")
    gateway.upstreams["a"].answer = lambda _: Answer(status=0)
    return gateway.ask()


def too_late(gateway: Gateway) -> Reply:
    """An engine slower than the deadline that kvgate set: it answers after the client has been told."""
    told = threading.Event()

    def slow(_: Seen) -> Answer:
        told.wait(60)
        return Answer()

    gateway.admit("gpu-a-0", x_envoy_upstream_rq_timeout_ms="100")
    gateway.upstreams["a"].answer = slow
    try:
        return gateway.ask()
    finally:
        told.set()


def undecided(gateway: Gateway) -> Reply:
    """kvgate answered without a decision."""
    return gateway.ask()


def huge_headers(gateway: Gateway) -> Reply:
    """Request headers over Envoy's limit."""
    return gateway.ask(headers={"x-large": "y" * 70_000})


UNAVAILABLE = {"decision": "unavailable", "reason": "upstream_unavailable", "target": "primary", "lane": "fast"}


@pytest.mark.parametrize(
    ("trouble", "status", "headers"),
    [
        (too_large, 413, {"decision": "reject", "reason": "body_too_large"}),
        (unreachable, 503, UNAVAILABLE),
        (no_such_cluster, 503, UNAVAILABLE),
        (broken_off, 503, UNAVAILABLE),
        (too_late, 504, UNAVAILABLE | {"reason": "upstream_timeout"}),
        (undecided, 503, {"decision": "unavailable", "reason": "not_ready"}),
        (huge_headers, 431, {"decision": "reject", "reason": "bad_request"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_envoys_own_answers_are_json(
    gateway: Gateway, trouble: Callable[[Gateway], Reply], status: int, headers: dict[str, str]
) -> None:
    """Each carries a decision, a reason, retry advice and an error body for OpenAI's and Anthropic's clients."""
    reply = trouble(gateway)
    body = json.loads(reply.body)
    retry = headers["decision"] == "unavailable"
    assert (reply.status, kvgate_headers(reply)) == (status, headers)
    assert (body["type"], body["error"]["code"], set(body["error"])) == (
        "error",
        headers["reason"],
        {"type", "message", "param", "code"},
    )
    assert (reply.headers["content-type"], reply.headers["x-should-retry"]) == ("application/json", str(retry).lower())
    assert ("retry-after" in reply.headers, "retry-after-ms" in reply.headers) == (retry, retry)


def test_models_are_listed_by_envoy(gateway: Gateway) -> None:
    """GET /v1/models lists the aliases in OpenAI's and Anthropic's shape, without asking kvgate or an engine."""
    reply = gateway.ask("/v1/models?limit=5", None, method="GET")
    listed = json.loads(reply.body)
    assert (reply.status, reply.headers["content-type"], kvgate_headers(reply)) == (
        200,
        "application/json",
        {"decision": "pass"},
    )
    assert [(m["id"], m["object"], m["type"]) for m in listed["data"]] == [
        ("coder", "model", "model"),
        ("org/big", "model", "model"),
    ]
    assert (listed["object"], listed["first_id"], listed["last_id"], listed["has_more"]) == (
        "list",
        "coder",
        "org/big",
        False,
    )
    assert (gateway.decider.asked, gateway.served_by()) == ([], [])


@pytest.mark.parametrize("path", ["/v1/models/org/big", "/v1/models/org%2Fbig"])
def test_one_model_is_shown(gateway: Gateway, path: str) -> None:
    """An alias with a slash is found in both spellings that clients use."""
    reply = gateway.ask(path, None, method="GET")
    assert (reply.status, json.loads(reply.body)["id"]) == (200, "org/big")


def test_an_unknown_model_is_404(gateway: Gateway) -> None:
    """In the words of the API, not of the router."""
    reply = gateway.ask("/v1/models/none", None, method="GET")
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "unknown_model")
    assert kvgate_headers(reply) == {"decision": "reject", "reason": "unknown_model"}


def test_other_methods_on_models_are_decided(gateway: Gateway) -> None:
    """DELETE /v1/models/x is no listing: kvgate is asked."""
    gateway.admit("gpu-a-0")
    reply = gateway.ask("/v1/models/coder", None, method="DELETE")
    assert (reply.status, gateway.served_by()) == (200, ["a"])


def test_health_is_envoys_own(gateway: Gateway) -> None:
    """/healthz answers without a decision and leaves no access-log entry."""
    assert gateway.ask("/healthz", None, method="GET").status == 200
    gateway.admit("gpu-a-0", rid="rid-after-health")
    gateway.ask()
    gateway.ends("rid-after-health")
    paths = {entry.request.path for _, entry in gateway.decider.entries}
    assert (gateway.decider.asked[0].headers[":path"], "/healthz" in paths) == ("/v1/chat/completions", False)


@pytest.fixture(scope="module")
def shared_open_gateway() -> Iterator[Gateway]:
    """Envoy with posture open."""
    with support.running(undecided="{open: {target: primary, maxRequests: 1}}") as running:
        yield running


@pytest.fixture
def open_gateway(shared_open_gateway: Gateway) -> Gateway:
    """The same, with nothing seen yet."""
    shared_open_gateway.reset()
    return shared_open_gateway


def test_open_posture_serves_what_is_undecided(open_gateway: Gateway) -> None:
    """Without a decision any living replica of the target serves, with its own credentials; the answer says bypass."""
    replies = [open_gateway.ask(headers={"authorization": "Bearer client"}) for _ in range(6)]
    assert {(reply.status, kvgate_headers(reply)["decision"]) for reply in replies} == {(200, "bypass")}
    served = [name for name in open_gateway.served_by() if name in ("a", "b")]
    assert open_gateway.seen(served[0])[0].headers["authorization"] == f"Bearer {support.LOCAL_KEY}"


def test_open_posture_still_refuses_what_kvgate_refuses(open_gateway: Gateway) -> None:
    """A refusal is not turned into a bypass."""
    open_gateway.verdict = Verdict(
        status=429, body=REFUSAL, metadata={"decision": "reject", "reason": "lane_full", "lane": "fast"}
    )
    reply = open_gateway.ask()
    assert (reply.status, reply.body) == (429, REFUSAL)
    assert kvgate_headers(reply) == {"decision": "reject", "reason": "lane_full", "lane": "fast"}
    assert open_gateway.served_by() == []
