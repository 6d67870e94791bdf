"""Strict, frozen models of kvgate.yaml: an unknown key, a wrong type or a value out of range is an error.

Owns the shape and the bounds of single values. References between sections and sums of deadlines are
``checks``; files and YAML are ``load``. Keys are camelCase in the file and snake_case here.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.alias_generators import to_camel

from extproc.config.forms import (
    Address,
    FilePath,
    Header,
    HttpUrl,
    LedgerUrl,
    Name,
    Network,
    Prefix,
    Printable,
    ServerName,
    TcpAddress,
    Variable,
)

#: Bounds that no real figure meets and every consumer can hold: Lua's doubles, protobuf's 32 bits, a duration's days.
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Milliseconds = Annotated[int, Field(gt=0, le=86_400_000)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]
Mebibytes = Annotated[int, Field(ge=0, le=2**30)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]

#: Engines kvgate has rules for; ``openai`` is any remote API that speaks the OpenAI protocol.
EngineName = Literal["vllm", "sglang", "llamacpp", "ollama", "tgi", "trtllm", "openai"]
#: Engines whose KV pool is allocated once at start, so that NVML's free memory says nothing about a request.
PREALLOCATING: frozenset[str] = frozenset({"vllm", "sglang", "llamacpp", "tgi", "trtllm"})
#: Engines on which an overflow of the pool kills running requests instead of preempting one.
FATAL_OVERFLOW: frozenset[str] = frozenset({"llamacpp", "ollama"})


#: Families of chat templates whose overhead is known (``tokens.overheads``), for models without a template at hand.
TemplateFamily = Literal["chatml", "llama-3", "mistral", "gemma", "phi", "deepseek", "glm", "command", "harmony"]


class Section(BaseModel):
    """Common rules of every section: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=True,
        allow_inf_nan=False,
    )


class LedgerConfig(Section):
    """Where reservations live; ``deadline_ms`` bounds one call, ``when_down`` is the posture without Redis."""

    url: LedgerUrl = "redis://127.0.0.1:6379/0"
    pool: Name = "default"
    deadline_ms: Milliseconds = 50
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 10
    when_down: Literal["reject", "remote", "share"] = "reject"


class Serve(Section):
    """The ext_proc service; ``listen`` is ``unix:PATH`` or host:port."""

    listen: Address = "unix:/run/kvgate/extproc.sock"
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    admin: TcpAddress = "127.0.0.1:9902"
    count_deadline_ms: Milliseconds = 300
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 33_554_432
    max_body_values: Annotated[int, Field(ge=1000, le=2**30)] = 1_500_000


class OpenPosture(Section):
    """Where undecided requests go when the operator chose fail-open, and how many at once."""

    target: Name
    max_requests: Annotated[int, Field(gt=0, le=1_000_000)] = 8


class DownstreamTls(Section):
    """Certificate and key of Envoy's own listener."""

    cert_file: FilePath
    key_file: FilePath


class EnvoyConfig(Section):
    """What ``kvgate envoy`` needs to know beyond targets and lanes."""

    listen: Address = "127.0.0.1:10000"
    admin: Address = "127.0.0.1:9901"
    message_timeout_ms: Milliseconds = 1000
    max_message_timeout_ms: Milliseconds = 10_000
    stream_idle_timeout_s: Annotated[int, Field(gt=0, le=604_800)] = 3600
    periodic_s: Annotated[float, Field(ge=0.1, le=60)] = 1
    undecided: Literal["closed"] | dict[Literal["open"], OpenPosture] = "closed"
    use_remote_address: bool = True
    tls: DownstreamTls | None = None

    @property
    def open_posture(self) -> OpenPosture | None:
        """The fail-open posture, or None where undecided requests are refused."""
        return None if isinstance(self.undecided, str) else self.undecided.get("open")


class Weights(Section):
    """What the model's weights are stored as."""

    quantization: Printable | None = None
    size_bytes: Bytes | None = None


class Model(Section):
    """Facts about one model: its geometry, its tokenizer, its limits."""

    geometry: FilePath | None = None
    weights: Weights = Weights()
    tokenizer: FilePath | None = None
    chat_template: FilePath | None = None
    template_family: TemplateFamily | None = None
    template_overhead_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    kv_dtype: Printable = "auto"
    kv_bytes_per_token: Count | None = None
    context_tokens: Count | None = None
    capability: Ratio = 0.5
    image_tokens: Count | None = None


class Replica(Section):
    """One running engine instance of a target; ``kv_tokens`` is its pool where no agent can read it.

    ``metrics_url`` is where its metrics are served if that is not under ``url`` (Triton's metrics port). With
    ``discover`` it stands for many: one replica ``NAME@ADDRESS`` behind every address of the URL's host.
    """

    name: Name
    url: HttpUrl
    discover: Literal["dns"] | None = None
    metrics_url: HttpUrl | None = None
    devices: tuple[Printable, ...] = Field(default=(), strict=False)
    kv_tokens: Count | None = None
    max_sequences: Count | None = None


class PrefillRate(Section):
    """Bounds of the measured prefill rate of one replica, in tokens per second."""

    floor: Count = 2000
    cold_start: Count = 6000


class Inject(Section):
    """A credential that Envoy puts into the request; its value never passes through kvgate."""

    secret_env: Variable
    header: Header = "authorization"
    prefix: Prefix = "Bearer "


class Auth(Section):
    """What happens to the client's credential and which one the engine gets."""

    client: Literal["strip", "forward"] = "strip"
    inject: Inject | None = None


class UpstreamTls(Section):
    """Trust for an https target: the CA bundle and the name its certificate must carry (default: the URL's host)."""

    ca_file: FilePath = "/etc/ssl/certs/ca-certificates.crt"
    server_name: ServerName | None = None


class Target(Section):
    """An addressable choice: model, quantisation and where it runs; ``engine: openai`` is remote."""

    engine: EngineName
    model: Name | None = None
    served_model: Printable | None = None
    url: HttpUrl | None = None
    replicas: tuple[Replica, ...] = Field(default=(), strict=False)
    adapters: tuple[Printable, ...] = Field(default=(), strict=False)
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    ttft_budget_ms: Milliseconds = 2000
    prefill_tokens_per_s: PrefillRate | None = None
    watermark: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.02
    max_waiting: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    abort_lag_ms: Annotated[int, Field(ge=0, le=86_400_000)] = 1500
    auth: Auth = Auth()
    tls: UpstreamTls = UpstreamTls()

    @property
    def remote(self) -> bool:
        """Whether the target is somebody else's API, whose memory is not ours to schedule."""
        return self.engine == "openai"

    @property
    def fatal_overflow(self) -> bool:
        """Whether outgrowing the pool kills running requests, so that the full cap must be reserved."""
        return self.engine in FATAL_OVERFLOW

    def watermark_blocks(self, capacity_blocks: int | None) -> int:
        """KV blocks of a pool that no admission takes; 0 where the pool is not known."""
        return math.ceil((capacity_blocks or 0) * self.watermark)


class LaneQueue(Section):
    """A bounded wait at the gate for one lane."""

    max_depth: Count = 64
    max_wait_ms: Milliseconds = 5000
    max_bytes: Bytes = 67_108_864


class Lane(Section):
    """A class of service with budgets; the first six keys are the lanes file that must load unchanged."""

    max_input_tokens: Count | None = None
    max_output_tokens: Count | None = None
    concurrency: Count | None = None
    min_free_vram_mb: Mebibytes = 0
    kv_reserve_mb: Mebibytes = 0
    fallback: Name | None = None
    targets: tuple[Name, ...] = Field(default=(), strict=False)
    share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    yields_at: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    queue: LaneQueue | None = None
    clamp_output: bool = False
    include_usage: bool = False
    prompt_logprobs: Literal["deny", "allow"] = "deny"
    remote: Literal["allow", "never"] = "allow"
    when_down: Literal["reject", "remote", "share"] | None = None


class Alias(Section):
    """A model name clients use: its lane and its ordered targets."""

    lane: Name
    targets: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)]


class LaneHeader(Section):
    """A header that names the lane, believed only from these networks."""

    name: Header
    trusted_cidrs: tuple[Network, ...] = Field(strict=False, min_length=1)


class Devices(Section):
    """What stays free on every device."""

    guard_mb: Mebibytes = 256


class Freshness(Section):
    """Ages of an agent's report: fresh up to the first, unknown after the second."""

    fresh_s: Annotated[float, Field(gt=0, le=3600)] = 5
    unknown_s: Annotated[float, Field(gt=0, le=3600)] = 15


class Agent(Section):
    """The node agent: how often it looks, how long it waits, and which node it speaks for."""

    node: Name | None = None
    interval_s: Annotated[float, Field(ge=0.1, le=60)] = 1
    timeout_ms: Milliseconds = 800
    admin: TcpAddress = "127.0.0.1:9913"


class TelemetryConfig(Section):
    """Where spans go (OTLP/gRPC host:port; None: nowhere) and how much is kept."""

    otlp_endpoint: Address | None = None
    decision_log: Annotated[int, Field(gt=0, le=10_000_000)] = 2000
    max_label_values: Annotated[int, Field(gt=0, le=100_000)] = 100


class Config(Section):
    """The whole of kvgate.yaml; only ``lanes`` or ``targets`` is required."""

    mode: Literal["enforce", "shadow"] = "enforce"
    ledger: LedgerConfig = LedgerConfig()
    serve: Serve = Serve()
    envoy: EnvoyConfig = EnvoyConfig()
    models: dict[Name, Model] = {}
    targets: dict[Name, Target] = {}
    lanes: dict[Name, Lane] = {}
    aliases: dict[Printable, Alias] = {}
    lane_header: LaneHeader | None = None
    default_lane: Name | None = None
    unknown_paths: Literal["pass", "reject"] = "pass"
    devices: Devices = Devices()
    freshness: Freshness = Freshness()
    no_agent: Literal["reject", "ledgerOnly"] = "reject"
    agent: Agent = Agent()
    telemetry: TelemetryConfig = TelemetryConfig()
    _where: str = PrivateAttr("defaults")

    @property
    def where(self) -> str:
        """The file that it was loaded from, as messages name it."""
        return self._where

    def named(self, where: str) -> Config:
        """The same configuration, loaded from ``where``."""
        copy = self.model_copy()
        copy._where = where
        return copy

    def discovered(self) -> dict[str, Replica]:
        """The replicas that stand for as many as are found, by name."""
        return {replica.name: replica for _, _, replica in self.local_replicas() if replica.discover is not None}

    def local_replicas(self) -> tuple[tuple[str, Target, Replica], ...]:
        """Every local replica with its target's name, in the file's order."""
        return tuple(
            (name, target, replica)
            for name, target in self.targets.items()
            if not target.remote
            for replica in target.replicas
        )
