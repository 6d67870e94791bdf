"""The generated bootstrap in a real Envoy, between real upstreams and a decider whose answers the test chooses."""

from __future__ import annotations

import http.client
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.config import load_text
from extproc.gateway import names
from extproc.gateway.build import build
from tests.support import certificate, envoy_process, upstream
from tests.support.extproc import Asked, Decider, Verdict, deciding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: A request that nobody answers fails its test.
ANSWERED_WITHIN_S = 60.0
SERVER_NAME = "api.example.test"
LOCAL_KEY, REMOTE_KEY = "local-secret", "remote-secret"
BODY = b'{"messages":[{"model":"coder"}],"model":"coder","stream":false}'
#: Where the top-level model stands in BODY.
MODEL_AT = names.model_at(BODY.rindex(b'"coder"'), BODY.rindex(b'"coder"') + len(b'"coder"'))

CONFIG = """
serve: {{listen: "unix:{folder}/s.sock", maxBodyBytes: 262144}}
envoy:
  {{listen: "127.0.0.1:0", admin: "127.0.0.1:0", periodicS: 0.1, messageTimeoutMs: 30000, maxMessageTimeoutMs: 30000,
    undecided: {undecided}{more}}}
targets:
  primary:
    engine: vllm
    servedModel: 'served "ä"'
    adapters: [my-lora]
    auth: {{inject: {{secretEnv: LOCAL_KEY}}}}
    replicas: [{{name: gpu-a-0, url: "{a}"}}, {{name: gpu-a-1, url: "{b}"}}, {{name: gone, url: "http://127.0.0.1:9"}}]
  small: {{engine: llamacpp, replicas: [{{name: gpu-b-0, url: "{small}"}}]}}
  remote-tls:
    engine: openai
    url: "{tls}/openai/v1"
    servedModel: gpt-remote
    tls: {{caFile: "{ca}", serverName: {server}}}
    auth: {{inject: {{secretEnv: REMOTE_KEY, header: x-api-key, prefix: ""}}}}
  remote-wrong-name: {{engine: openai, url: "{tls}", tls: {{caFile: "{ca}", serverName: other.test}}}}
  remote-own-key: {{engine: openai, url: "{own}", auth: {{client: forward}}}}
lanes:
  fast: {{targets: [primary, small, remote-tls, remote-own-key]}}
aliases:
  coder: {{lane: fast, targets: [primary]}}
  org/big: {{lane: fast, targets: [small]}}
"""


@dataclass(frozen=True)
class Reply:
    """What the client got."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Gateway:
    """The running parts. ``verdict`` is what the decider answers next."""

    envoy: envoy_process.Envoy
    decider: Decider
    upstreams: dict[str, upstream.Upstream]
    verdict: Verdict = field(default_factory=Verdict)

    def admit(self, *clusters: str, retries: int | None = None, rid: str = "rid-1", **headers: str) -> None:
        """Decide for this plan; extra headers with underscores for dashes."""
        self.verdict = Verdict(
            plan=clusters,
            metadata={"rid": rid, "decision": "admit", "target": "primary", "lane": "fast"},
            headers={
                names.HEADER_RID: rid,
                names.HEADER_MAX_RETRIES: str(len(clusters) - 1 if retries is None else retries),
                **{key.replace("_", "-"): value for key, value in headers.items()},
            },
        )

    def ask(
        self,
        path: str = "/v1/chat/completions",
        body: bytes | Iterable[bytes] | None = BODY,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request over HTTP/1.1."""
        connection = http.client.HTTPConnection("127.0.0.1", self.envoy.port, timeout=ANSWERED_WITHIN_S)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def seen(self, name: str) -> list[upstream.Seen]:
        """What one upstream has received."""
        return self.upstreams[name].seen

    def served_by(self) -> list[str]:
        """The upstreams that received anything."""
        return [name for name, each in self.upstreams.items() if each.seen]

    def ends(self, rid: str, *, log: str = names.LOG_REQUEST, log_type: int = 6, count: int = 1) -> list[Any]:
        """The access-log entries of one rid (6: DownstreamEnd, 9: UpstreamEnd)."""

        def mine(entry: Any) -> bool:
            metadata = entry.common_properties.metadata.filter_metadata
            header = entry.request.request_headers.get(names.HEADER_RID)
            return rid == header or rid == dict(metadata[names.DECISION_NAMESPACE]).get("rid")

        return self.decider.entries_where(
            lambda name, entry: name == log and entry.common_properties.access_log_type == log_type and mine(entry),
            count=count,
        )

    def reset(self) -> None:
        """Forget what was seen and how upstreams were told to answer."""
        for name, each in self.upstreams.items():
            each.seen.clear()
            each.answer = upstream.naming(name)
        self.decider.asked.clear()
        self.verdict = Verdict()


@contextmanager
def running(*, undecided: str = "closed", tls: bool = False, sections: str = "") -> Iterator[Gateway]:
    """All parts, in a folder of their own with a path short enough for a unix socket.

    ``tls``: Envoy's listener too; ``sections``: more of kvgate.yaml.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvgw-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        pair = certificate.make(folder, SERVER_NAME)
        upstreams = {name: stack.enter_context(upstream.serving(name)) for name in ("a", "b", "small", "own")}
        upstreams["tls"] = stack.enter_context(upstream.serving("tls", certificate=pair))
        urls = {name: each.url for name, each in upstreams.items()}
        more = f', tls: {{certFile: "{pair[0]}", keyFile: "{pair[1]}"}}' if tls else ""
        text = CONFIG.format(folder=folder, ca=pair[0], server=SERVER_NAME, undecided=undecided, more=more, **urls)
        gateway: list[Gateway] = []

        def decide(asked: Asked) -> Verdict:
            return gateway[0].verdict

        decider = stack.enter_context(deciding(decide, f"unix:{folder}/s.sock"))
        environment = {"LOCAL_KEY": LOCAL_KEY, "REMOTE_KEY": REMOTE_KEY}
        config = load_text(text + sections, where="test")
        made = envoy_process.unhurried(build(config, node_id="envoy-under-test"), ANSWERED_WITHIN_S)
        process = stack.enter_context(envoy_process.running(made, folder, environment=environment))
        gateway.append(Gateway(process, decider, upstreams))
        yield gateway[0]
