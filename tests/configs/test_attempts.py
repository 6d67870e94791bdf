"""Through a real Envoy: what each attempt carries into its cluster, whatever the attempt before it did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from extproc.gateway import names
from tests.support.gateway import BODY, LOCAL_KEY, MODEL_AT, REMOTE_KEY
from tests.support.upstream import Answer

if TYPE_CHECKING:
    from tests.support.gateway import Gateway

CREDENTIALS = {
    "authorization": "Bearer client",
    "x-api-key": "client-key",
    "api-key": "azure",
    "x-goog-api-key": "goog",
}


def carried(gateway: Gateway, upstream: str) -> dict[str, str]:
    """The credentials one upstream received."""
    wanted = {*CREDENTIALS, "cookie", "proxy-authorization"}
    return {k: v for k, v in gateway.seen(upstream)[0].headers.items() if k in wanted}


def refusing(gateway: Gateway, *upstreams: str) -> None:
    """These upstreams answer 503."""
    for name in upstreams:
        gateway.upstreams[name].answer = lambda _: Answer(status=503)


def test_client_credentials_are_stripped(gateway: Gateway) -> None:
    """An engine whose target says nothing about auth gets no key, no cookie."""
    gateway.admit("gpu-b-0")
    gateway.ask(headers={**CREDENTIALS, "cookie": "sso=1", "proxy-authorization": "Basic x"})
    assert carried(gateway, "small") == {}


def test_client_credentials_are_forwarded_where_configured(gateway: Gateway) -> None:
    """``auth.client: forward`` passes API keys on, but never cookies."""
    gateway.admit("remote-own-key")
    gateway.ask(headers={**CREDENTIALS, "cookie": "sso=1", "proxy-authorization": "Basic x"})
    assert carried(gateway, "own") == CREDENTIALS


def test_each_attempt_carries_its_own_credentials(gateway: Gateway) -> None:
    """The key injected for one cluster does not travel to the next; the client's key returns where it is forwarded."""
    gateway.admit("gpu-a-0", "remote-tls", "remote-own-key")
    refusing(gateway, "a", "tls")
    gateway.ask(headers={"authorization": "Bearer client"})
    assert carried(gateway, "a") == {"authorization": f"Bearer {LOCAL_KEY}"}
    assert carried(gateway, "tls") == {"x-api-key": REMOTE_KEY}
    assert carried(gateway, "own") == {"authorization": "Bearer client"}


def test_no_credential_reaches_kvgate_in_the_access_log(gateway: Gateway) -> None:
    """Neither the client's nor an injected key stands in any entry."""
    gateway.admit("gpu-a-0", "remote-own-key", rid="rid-secret")
    refusing(gateway, "a")
    gateway.ask(headers=CREDENTIALS)
    gateway.ends("rid-secret")
    gateway.ends("rid-secret", log=names.LOG_ATTEMPT, log_type=9, count=2)
    logged = "".join(str(entry) for _, entry in gateway.decider.entries)
    assert not [key for key in (*CREDENTIALS.values(), LOCAL_KEY, REMOTE_KEY) if key in logged]


def test_each_attempt_carries_its_own_model_name(gateway: Gateway) -> None:
    """The top-level model is replaced by the served name of each target, a nested one never; lengths stay exact."""
    gateway.admit("gpu-a-0", "remote-tls", "remote-own-key", x_kvgate_model_at=MODEL_AT)
    refusing(gateway, "a", "tls")
    gateway.ask()
    bodies = {name: gateway.seen(name)[0].body for name in ("a", "tls", "own")}
    assert json.loads(bodies["a"]) == {**json.loads(BODY), "model": 'served "ä"'}
    assert json.loads(bodies["tls"]) == {**json.loads(BODY), "model": "gpt-remote"}
    assert bodies["own"] == BODY
    lengths = {name: int(gateway.seen(name)[0].headers["content-length"]) for name in bodies}
    assert lengths == {name: len(body) for name, body in bodies.items()}


def test_without_a_span_the_body_goes_on_byte_for_byte(gateway: Gateway) -> None:
    """Nothing is searched for: without x-kvgate-model-at nothing is changed."""
    gateway.admit("gpu-a-0")
    gateway.ask()
    assert gateway.seen("a")[0].body == BODY


def test_a_span_that_is_no_string_changes_nothing(gateway: Gateway) -> None:
    """A span beside the value is reported in Envoy's log and the body stays whole."""
    gateway.admit("gpu-a-0", x_kvgate_model_at="0-9")
    gateway.ask()
    assert gateway.seen("a")[0].body == BODY
    gateway.admit("gpu-a-1", x_kvgate_model_at="60-900")
    gateway.ask()
    assert gateway.seen("b")[0].body == BODY


def test_an_adapter_of_the_target_keeps_its_name(gateway: Gateway) -> None:
    """A LoRA adapter that the target lists is not renamed; on a target without it the served name is used."""
    gateway.admit("gpu-a-0", "remote-tls", x_kvgate_model_at=MODEL_AT, x_kvgate_adapter="my-lora")
    refusing(gateway, "a")
    gateway.ask()
    assert gateway.seen("a")[0].body == BODY
    assert json.loads(gateway.seen("tls")[0].body)["model"] == "gpt-remote"


def test_the_base_urls_path_stands_before_the_clients(gateway: Gateway) -> None:
    """Only in the cluster that has one, also after it was set for an earlier attempt."""
    gateway.admit("remote-tls", "remote-own-key")
    refusing(gateway, "tls")
    gateway.ask("/v1/chat/completions?a=1")
    paths = [gateway.seen(name)[0].path for name in ("tls", "own")]
    assert paths == ["/openai/v1/chat/completions?a=1", "/v1/chat/completions?a=1"]


def test_the_host_is_the_clusters_own(gateway: Gateway) -> None:
    """Every attempt names the host it goes to."""
    gateway.admit("gpu-a-0", "remote-tls")
    refusing(gateway, "a")
    gateway.ask(headers={"host": "gateway.internal"})
    hosts = [gateway.seen(name)[0].headers["host"] for name in ("a", "tls")]
    assert hosts == [f"127.0.0.1:{gateway.upstreams[name].port}" for name in ("a", "tls")]


def test_a_remote_api_learns_nothing_of_the_network(gateway: Gateway) -> None:
    """No forwarded-for, no header of Envoy's or ours but the random rid; the client's request id stays."""
    gateway.admit("remote-tls", x_kvgate_adapter="my-lora", x_kvgate_model_at=MODEL_AT)
    gateway.ask(headers={"x-request-id": "mine", "x-forwarded-for": "10.1.2.3"})
    sent = sorted(name for name in gateway.seen("tls")[0].headers if name.startswith("x-"))
    assert sent == ["x-api-key", names.HEADER_RID, "x-request-id"]


def test_a_certificate_for_another_name_is_refused(gateway: Gateway) -> None:
    """TLS proves the server's name; the client gets 503 and the upstream no byte."""
    gateway.admit("remote-wrong-name")
    assert (gateway.ask().status, gateway.served_by()) == (503, [])
