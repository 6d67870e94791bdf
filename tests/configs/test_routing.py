"""Through a real Envoy: which upstream serves, in what order, and what a client cannot steer."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from extproc.gateway import names
from tests.support.extproc import Verdict
from tests.support.gateway import ANSWERED_WITHIN_S, BODY, MODEL_AT
from tests.support.http2 import ask_http2
from tests.support.upstream import Answer

if TYPE_CHECKING:
    from tests.support.gateway import Gateway

UPSTREAM_END = 9


def test_the_plan_chooses_the_cluster(gateway: Gateway) -> None:
    """The cluster named by the metadata serves, not the first of the file."""
    gateway.admit("gpu-a-1")
    assert gateway.ask().status == 200
    assert gateway.served_by() == ["b"]


def test_response_headers_come_from_the_metadata(gateway: Gateway) -> None:
    """Decision, target and lane reach the client; an engine cannot speak in kvgate's name."""
    gateway.admit("gpu-a-0")
    lie = {"content-type": "application/json", "x-kvgate-decision": "reject", "x-kvgate-reason": "lie"}
    gateway.upstreams["a"].answer = lambda _: Answer(headers=lie)
    headers = gateway.ask(headers={"x-request-id": "mine"}).headers
    assert {k: v for k, v in headers.items() if k.startswith("x-")} == {
        "x-kvgate-decision": "admit",
        "x-kvgate-target": "primary",
        "x-kvgate-lane": "fast",
        "x-request-id": "mine",
    }


def test_client_headers_of_ours_are_removed(gateway: Gateway) -> None:
    """kvgate and the engine see none of the client's x-kvgate-* headers nor those that steer Envoy's router."""
    gateway.admit("gpu-b-0", rid="rid-spoof")
    spoofed = {
        "X-Kvgate-Rid": "evil",
        "x_kvgate_rid": "evil",
        "x-kvgate-model-at": "0-2",
        "x-kvgate-anything": "1",
        "x-envoy-max-retries": "9",
    }
    gateway.ask(headers=spoofed)
    asked = [k for k in gateway.decider.asked[0].headers if "kvgate" in k or k == "x-envoy-max-retries"]
    arrived = {k: v for k, v in gateway.seen("small")[0].headers.items() if "kvgate" in k}
    assert (asked, arrived) == ([], {names.HEADER_RID: "rid-spoof"})


def test_a_decision_header_from_the_client_does_not_route(gateway: Gateway) -> None:
    """Without a decision nothing reaches an engine, whatever headers the client sends."""
    gateway.verdict = Verdict(headers={"x-kvgate-rid": "only-a-header"})
    reply = gateway.ask(headers={"x-kvgate-rid": "evil", "x-kvgate-decision": "admit"})
    assert (reply.status, gateway.served_by()) == (503, [])


def test_kvgate_learns_peer_and_node(gateway: Gateway) -> None:
    """The client's address and Envoy's node arrive as attributes; the access log names the same node."""
    gateway.admit("gpu-a-0", rid="rid-node")
    gateway.ask()
    attributes = gateway.decider.asked[0].attributes
    gateway.ends("rid-node")
    assert attributes[names.ATTRIBUTE_PEER].startswith("127.0.0.1:")
    assert attributes[names.ATTRIBUTE_NODE] == "envoy-under-test"
    assert gateway.decider.nodes == {"envoy-under-test"}


@pytest.mark.parametrize(
    "trouble", [Answer(status=503), Answer(status=429), Answer(status=0)], ids=["503", "429", "reset"]
)
def test_an_attempt_that_fails_goes_to_the_next_of_the_plan(gateway: Gateway, trouble: Answer) -> None:
    """503, 429 and a reset before the answer are retried on the plan's next cluster."""
    gateway.admit("gpu-a-0", "remote-tls", rid=f"rid-retry-{trouble.status}")
    gateway.upstreams["a"].answer = lambda _: trouble
    reply = gateway.ask()
    assert (reply.status, json.loads(reply.body)) == (200, {"served_by": "tls"})
    ended = gateway.ends(f"rid-retry-{trouble.status}", log=names.LOG_ATTEMPT, log_type=UPSTREAM_END, count=2)
    assert [e.common_properties.upstream_cluster for e in ended] == ["gpu-a-0", "remote-tls"]


def test_a_refused_connection_goes_to_the_next_of_the_plan(gateway: Gateway) -> None:
    """A dead engine is no error to the client while the plan goes on."""
    gateway.admit("gone", "remote-own-key")
    assert json.loads(gateway.ask().body) == {"served_by": "own"}


def test_a_plan_of_one_is_tried_once(gateway: Gateway) -> None:
    """With x-envoy-max-retries 0 the engine's own refusal reaches the client and no other cluster is asked."""
    gateway.admit("gpu-a-0")
    gateway.upstreams["a"].answer = lambda _: Answer(status=503, body=b"engine says no")
    reply = gateway.ask()
    assert (reply.status, reply.body, len(gateway.seen("a"))) == (503, b"engine says no", 1)
    assert gateway.served_by() == ["a"]


def test_the_plan_order_is_the_attempt_order(gateway: Gateway) -> None:
    """Three attempts visit three clusters in the plan's order."""
    gateway.admit("gpu-a-1", "remote-own-key", "remote-tls", rid="rid-order")
    for name in ("b", "own"):
        gateway.upstreams[name].answer = lambda _: Answer(status=429)
    assert json.loads(gateway.ask().body) == {"served_by": "tls"}
    ended = gateway.ends("rid-order", log=names.LOG_ATTEMPT, log_type=UPSTREAM_END, count=3)
    assert [e.common_properties.upstream_cluster for e in ended] == ["gpu-a-1", "remote-own-key", "remote-tls"]


def test_a_request_without_a_body_is_decided_by_its_headers(gateway: Gateway) -> None:
    """GET goes through kvgate too, in one message."""
    gateway.admit("gpu-a-0")
    reply = gateway.ask("/metrics", None, method="GET")
    assert (reply.status, gateway.decider.asked[0].body, gateway.seen("a")[0].path) == (200, None, "/metrics")


@pytest.mark.parametrize(
    "path", ["/v1/%63hat/completions", "/v1/chat%2Fcompletions", "//v1//chat/completions", "/x/../v1/chat/completions"]
)
def test_a_path_has_one_spelling(gateway: Gateway, path: str) -> None:
    """An engine that decodes a path differently cannot be reached past kvgate's counting."""
    gateway.admit("gpu-a-0")
    gateway.ask(path)
    shown = gateway.decider.asked[0].headers[":path"]
    assert (shown, gateway.seen("a")[0].path) == ("/v1/chat/completions", "/v1/chat/completions")


@pytest.mark.parametrize(
    "more",
    [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"],
    ids=["head", "request"],
)
def test_a_tunnel_is_refused_by_its_head(gateway: Gateway, more: bytes) -> None:
    """CONNECT is answered at once, for its body has no end, and what is sent through it reaches nobody."""
    gateway.admit("gpu-a-0")
    with socket.create_connection(("127.0.0.1", gateway.envoy.port), timeout=ANSWERED_WITHIN_S) as client:
        client.sendall(b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n" + more)
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"x-kvgate-decision: reject\r\n" in answer
    assert (gateway.decider.asked, gateway.served_by()) == ([], [])


def test_http2_clients_are_served_alike(gateway: Gateway) -> None:
    """Over HTTP/2 the plan, the retry onto TLS and the headers are the same."""
    gateway.admit("gpu-a-0", "remote-tls", x_kvgate_model_at=MODEL_AT)
    gateway.upstreams["a"].answer = lambda _: Answer(status=503)
    status, headers, body = ask_http2(gateway.envoy.port, BODY)
    assert (status, json.loads(body), headers["x-kvgate-decision"]) == (200, {"served_by": "tls"}, "admit")
    assert json.loads(gateway.seen("tls")[0].body)["model"] == "gpt-remote"


def test_accept_encoding_is_removed(gateway: Gateway) -> None:
    """Engines answer uncompressed, else usage could not be read."""
    gateway.admit("gpu-a-0")
    gateway.ask(headers={"accept-encoding": "gzip, br"})
    assert "accept-encoding" not in gateway.seen("a")[0].headers


def test_a_body_survives_larger_than_envoys_default_buffer(gateway: Gateway) -> None:
    """A body just under the configured limit is decided, rewritten and retried whole."""
    body = b'{"model":"coder","prompt":"' + b"x" * 250_000 + b'"}'
    gateway.admit("gpu-a-0", "remote-tls", x_kvgate_model_at=names.model_at(9, 16))
    gateway.upstreams["a"].answer = lambda _: Answer(status=503)
    assert gateway.ask(body=body).status == 200
    assert gateway.seen("tls")[0].body == body.replace(b'"coder"', b'"gpt-remote"', 1)


def test_a_chunked_upload_is_rewritten(gateway: Gateway) -> None:
    """A client that sends no content-length is served the same, twice."""
    gateway.admit("gpu-a-0", "remote-tls", x_kvgate_model_at=names.model_at(9, 16))
    gateway.upstreams["a"].answer = lambda _: Answer(status=503)
    reply = gateway.ask(body=iter([b'{"model":', b'"coder"}']))
    assert (reply.status, gateway.seen("tls")[0].body) == (200, b'{"model":"gpt-remote"}')
