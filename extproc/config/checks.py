"""What single values cannot show: references between sections, sums of deadlines, postures that defeat themselves.

A configuration in, lines out; pure but for the certificate files that a ``rediss://`` address names. ``check`` lists
errors, ``warnings`` what works but surprises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from urllib.parse import urlsplit

from extproc.config import forms
from extproc.config.models import FATAL_OVERFLOW, PREALLOCATING, Config, Lane, Replica
from extproc.ledger.address import parse

#: Part of Envoy's message timeout left for parsing, encoding and the socket after counting and the ledger call.
MARGIN_MS = 100
#: A held request must be answered this long before Envoy gives up on it.
QUEUE_MARGIN_MS = 1000
#: Scheme of a ledger URL -> how to write one.
LEDGER_EXAMPLES = {
    "unix": "unix:///run/valkey.sock",
    "redis+sentinel": "redis+sentinel://10.0.0.5:26379/SERVICE",
    "rediss+sentinel": "rediss+sentinel://10.0.0.5:26379/SERVICE",
    "redis+cluster": "redis+cluster://10.0.0.5:6379,10.0.0.6:6379",
    "rediss+cluster": "rediss+cluster://10.0.0.5:6379,10.0.0.6:6379",
}
#: Names of clusters that the generated Envoy configuration keeps for itself start with this.
INTERNAL_PREFIX = "kvgate-"
#: Engines that serve several models at one URL, each with a pool of its own.
MANY_MODELS = frozenset({"ollama", "trtllm", "llamacpp"})
#: ``localhost`` is one of these, whichever the resolver says first.
_LOOPBACK = frozenset({"localhost", "[::1]", "127.0.0.1"})
_EVERY_ADDRESS = frozenset({"0.0.0.0", "[::]"})  # noqa: S104  compared, never bound


def check(config: Config) -> list[str]:
    """Every error, as ``path: what is wrong; mend``."""
    return [
        *_sections(config),
        *(f"ledger.url: {line}" for line in _ledger(config.ledger.url)),
        *worker_problems(config, config.serve.listen, config.serve.admin, config.serve.workers),
        *_targets(config),
        *(
            f"targets.{name}.replicas.{replica.name}.{line}"
            for name, _, replica in config.local_replicas()
            for line in _discovered(config, replica)
        ),
        *_lanes(config),
        *_aliases(config),
        *_deadlines(config),
        *_templates(config),
    ]


def _templates(config: Config) -> Iterator[str]:
    """A template is rendered or its overhead charged, not both."""
    for name, model in config.models.items():
        if model.chat_template is not None and model.template_family is not None:
            yield (
                f"models.{name}.templateFamily: it stands in for a template, but chatTemplate names one; "
                "remove one of them"
            )


def warnings(config: Config) -> list[str]:
    """What loads but may surprise, in the same form."""
    lines = []
    for name, lane in config.lanes.items():
        if lane.fallback and not config.targets:
            lines.append(f"lanes.{name}.fallback: target {lane.fallback!r} is not defined in this file; add `targets`")
        engines = {config.targets[t].engine for t in lane_targets(config, name) if t in config.targets}
        if lane.min_free_vram_mb and engines and engines <= PREALLOCATING | {"openai"}:
            lines.append(
                f"lanes.{name}.minFreeVramMb: ignored, its engines preallocate their KV pool; "
                "kvReserveMb and devices.guardMb apply"
            )
    lines += [
        f"models.{name}.tokenizer: absent, so inputs are counted by an upper bound; name a tokenizer.json"
        for name, model in config.models.items()
        if model.tokenizer is None
    ]
    lines += _promised_twice(config)
    if config.no_agent == "ledgerOnly" and (found := config.discovered()):
        lines.append(
            f"noAgent: `ledgerOnly` has no meaning for {', '.join(found)}: without an agent nothing is discovered"
        )
    if config.ledger.url == "embedded":
        lines.append("ledger.url: `embedded` works with `kvgate up` only; `kvgate serve` needs a redis:// address")
    if config.serve.listen.endswith(":0"):
        lines.append("serve.listen: with port 0 Envoy cannot know where the service listens; name a port")
    if config.unknown_paths == "pass" and config.local_replicas():
        lines.append(
            "unknownPaths: `pass` lets clients reach the engines' other paths (administration, cache resets, loading of models) "
            "and use memory there that nobody reserved; choose `reject`, or close those paths before Envoy"
        )
    return lines


def _promised_twice(config: Config) -> Iterator[str]:
    """Replicas that are one engine: each would be given its whole pool."""
    first: dict[tuple[str, str], str] = {}
    for name, target, replica in config.local_replicas():
        served = (target.served_model or "") if target.engine in MANY_MODELS else ""
        known = first.setdefault((replica.url.rstrip("/"), served), replica.name)
        if known != replica.name:
            yield (
                f"targets.{name}.replicas.{replica.name}.url: is that of replica {known!r} too, so one pool is promised "
                "twice; name each engine once (an alias may list several targets, a target `adapters`)"
            )


def worker_problems(config: Config, listen: str, admin: str, workers: int) -> list[str]:
    """Why ``workers`` processes cannot serve on these addresses with this ledger: every line is ``path: what; mend``."""
    lines = []
    if workers > 1 and config.ledger.url == "memory":
        lines.append("ledger.url: `memory` is one process's own, so each of several workers would admit as if it were alone; name a redis:// address or use one worker")  # fmt: skip
    for path, text in (("serve.listen", listen), ("serve.admin", admin)):
        *_, last = worker_addresses(text, workers)
        if workers > 1 and forms.problem(forms.Address, last) is not None:
            lines.append(f"{path}: the last of {workers} workers would get {last}, which is no address; choose a lower port or a shorter path")  # fmt: skip
    bound = [
        ("serve.admin", admin, workers), ("serve.listen", listen, workers), ("agent.admin", config.agent.admin, 1),
        ("envoy.admin", config.envoy.admin, 1), ("envoy.listen", config.envoy.listen, 1),
    ]  # fmt: skip
    for (path, one, many), (other, two, others) in combinations(bound, 2):
        ours, theirs = _ports(one, many), _ports(two, others)
        if ours and theirs and _meet(ours, theirs):
            lines.append(f"{path}: its ports {_span(ours[1])} meet those of {other}, {_span(theirs[1])}; move one of them")  # fmt: skip
        elif same := set(_sockets(one, many)) & set(_sockets(two, others)):
            lines.append(f"{path}: its socket {min(same)} is that of {other} as well; move one of them")
    return lines


def worker_addresses(address: str, workers: int) -> tuple[str, ...]:
    """One address per worker: PATH.0, PATH.1 ... or successive ports; port 0 stays 0, and a single worker's is as given."""
    if workers == 1:
        return (address,)
    if address.startswith("unix:"):
        return tuple(f"{address}.{worker}" for worker in range(workers))
    host, _, port = address.rpartition(":")
    return tuple(f"{host}:{int(port) + worker if int(port) else 0}" for worker in range(workers))


def _ports(address: str, workers: int) -> tuple[str, range] | None:
    """Host and ports of the workers; None for unix sockets and free ports."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or int(port) == 0:
        return None
    return host, range(int(port), int(port) + workers)


def _sockets(address: str, workers: int) -> tuple[str, ...]:
    """Paths of the workers' sockets; none for ports."""
    return worker_addresses(address, workers) if address.startswith("unix:") else ()


def _meet(ours: tuple[str, range], theirs: tuple[str, range]) -> bool:
    """Whether both would bind one port of one machine; a host of zeros is every address of it."""
    hosts = {ours[0], theirs[0]}
    one_host = len(hosts) == 1 or bool(_EVERY_ADDRESS & hosts) or ("localhost" in hosts and hosts <= _LOOPBACK)
    return one_host and bool(set(ours[1]) & set(theirs[1]))


def _span(ports: Sequence[int]) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"


def lane_targets(config: Config, lane: str) -> tuple[str, ...]:
    """Names of every target that requests of ``lane`` can reach, in no particular order of preference."""
    names = [t for alias in config.aliases.values() if alias.lane == lane for t in alias.targets]
    names += config.lanes[lane].targets
    if config.lanes[lane].fallback:
        names.append(str(config.lanes[lane].fallback))
    return tuple(dict.fromkeys(names))


def _sections(config: Config) -> Iterator[str]:
    if not config.lanes and not config.targets:
        yield "(top): neither `lanes` nor `targets` is given; add one of them"
    if config.targets and not config.lanes:
        yield "lanes: targets are given but no lane; add a lane that bounds their requests"
    if config.default_lane is not None and config.default_lane not in config.lanes:
        yield f"defaultLane: lane {config.default_lane!r} is not defined; define it under `lanes`"
    if config.freshness.fresh_s > config.freshness.unknown_s:
        yield "freshness.freshS: is above unknownS; lower it"


def _ledger(url: str) -> Iterator[str]:
    if url in ("memory", "embedded"):
        return
    example = LEDGER_EXAMPLES.get(url.partition("://")[0], "redis://127.0.0.1:6379/0")
    try:
        address = parse(url)
    except OSError as error:
        yield f"a certificate file cannot be used ({error.strerror or error}); name readable PEM files"
        return
    except ValueError as error:
        yield f"{error}; write it like {example}"
        return
    wrong = [
        f"{host}:{port}" for host, port in address.hosts if not forms.bare_host(host) or not 0 < port <= forms.MAX_PORT
    ]
    if wrong:
        yield f"{wrong[0]!r} is not a host and a port; write it like {example}"
    if address.db < 0 or (address.db and address.kind == "cluster"):
        yield f"database {address.db} does not exist there; leave it out"
    if url.startswith("unix:") and not (address.path or "").strip("/"):
        yield f"names no socket; write it like {example}"


def _targets(config: Config) -> Iterator[str]:
    for name, target in config.targets.items():
        path = f"targets.{name}"
        if name.startswith(INTERNAL_PREFIX):
            yield f"{path}: names that start with {INTERNAL_PREFIX!r} are reserved; rename it"
        if target.remote and target.url is None:
            yield f"{path}.url: missing; an `openai` target needs the URL of its API"
        if target.remote and target.replicas:
            yield f"{path}.replicas: a remote target has a `url`, not replicas; remove them"
        if not target.remote and target.url is not None:
            yield f"{path}.url: a local target names its engines under `replicas`; move it there"
        if not target.remote and not target.replicas:
            yield f"{path}.replicas: missing; a local target needs at least one replica"
        if target.model is not None and target.model not in config.models:
            yield f"{path}.model: model {target.model!r} is not defined; define it under `models`"
        if (
            target.auth.client == "forward"
            and target.auth.inject
            and target.auth.inject.header.lower() == "authorization"
        ):
            yield f"{path}.auth: the client's authorization is both forwarded and replaced; keep one of them"
    clusters = Counter(
        [r.name for _, _, r in config.local_replicas()] + [n for n, t in config.targets.items() if t.remote]
    )
    for cluster, times in clusters.items():
        if times > 1:
            yield f"targets: the name {cluster!r} is used by {times} replicas or remote targets; make each unique"
        if cluster.startswith(INTERNAL_PREFIX):
            yield f"targets: the replica name {cluster!r} is reserved; rename it"


def _discovered(config: Config, replica: Replica) -> Iterator[str]:
    """What contradicts `discover`: its replicas are found by the agent, and told apart by ``NAME@ADDRESS``."""
    if replica.discover is None:
        base, at, _ = replica.name.rpartition("@")
        if at and base in config.discovered():
            yield f"name: {replica.name!r} is the form of what is found under {base!r}; rename it"
        return
    if forms.literal(urlsplit(replica.url).hostname or ""):
        yield "discover: the URL has an address, which names one engine; write a name or remove `discover`"
    if replica.devices:
        yield "devices: belong to one engine, and `discover` finds many; remove one of the two"


def _lanes(config: Config) -> Iterator[str]:
    for name, lane in config.lanes.items():
        path = f"lanes.{name}"
        if config.targets:
            for key, target in [("fallback", lane.fallback), *(("targets", t) for t in lane.targets)]:
                if target is not None and target not in config.targets:
                    yield f"{path}.{key}: target {target!r} is not defined; define it under `targets`"
                elif target is not None and lane.remote == "never" and config.targets[target].remote:
                    yield f"{path}.{key}: {target!r} is remote but the lane says `remote: never`; drop one of them"
        if lane.yields_at is not None and lane.share is None:
            yield f"{path}.yieldsAt: has no meaning without `share`; add a share or remove it"
        yield from _lane_postures(config, name, lane)


def _lane_postures(config: Config, name: str, lane: Lane) -> Iterator[str]:
    posture = lane.when_down or config.ledger.when_down
    remotes = [t for t in lane_targets(config, name) if t in config.targets and config.targets[t].remote]
    if config.targets and posture == "remote" and (lane.remote == "never" or not remotes):
        yield f"lanes.{name}.whenDown: `remote` but the lane can reach no remote target; add one or choose `reject`"
    if lane.queue is None:
        return
    if config.envoy.open_posture is not None:
        yield f"lanes.{name}.queue: needs `envoy.undecided: closed`, else held requests run undecided when kvgate stops"
    limit = config.envoy.max_message_timeout_ms - QUEUE_MARGIN_MS
    if lane.queue.max_wait_ms > limit:
        yield f"lanes.{name}.queue.maxWaitMs: must be at most {limit} (envoy.maxMessageTimeoutMs - {QUEUE_MARGIN_MS}); lower it"


def _aliases(config: Config) -> Iterator[str]:
    for name, alias in config.aliases.items():
        path = f"aliases.{name}"
        if alias.lane not in config.lanes:
            yield f"{path}.lane: lane {alias.lane!r} is not defined; define it under `lanes`"
        for target in alias.targets:
            if target not in config.targets:
                yield f"{path}.targets: target {target!r} is not defined; define it under `targets`"
            elif (
                alias.lane in config.lanes
                and config.lanes[alias.lane].remote == "never"
                and config.targets[target].remote
            ):
                yield f"{path}.targets: {target!r} is remote but its lane says `remote: never`; drop one of them"


def _deadlines(config: Config) -> Iterator[str]:
    total = config.serve.count_deadline_ms + config.ledger.deadline_ms + MARGIN_MS
    if total > config.envoy.message_timeout_ms:
        yield (
            f"envoy.messageTimeoutMs: {config.envoy.message_timeout_ms} is below serve.countDeadlineMs + ledger.deadlineMs "
            f"+ {MARGIN_MS} = {total}; raise it or lower those"
        )
    if config.envoy.max_message_timeout_ms < config.envoy.message_timeout_ms:
        yield "envoy.maxMessageTimeoutMs: is below messageTimeoutMs; raise it"
    if config.ledger.lease_s < 3 * config.envoy.periodic_s:
        yield f"ledger.leaseS: must be at least 3 x envoy.periodicS = {3 * config.envoy.periodic_s:g}, else live requests expire; raise it"
    posture = config.envoy.open_posture
    if posture is None:
        return
    if posture.target not in config.targets:
        yield f"envoy.undecided.open.target: target {posture.target!r} is not defined; define it under `targets`"
    elif config.targets[posture.target].engine in FATAL_OVERFLOW:
        yield f"envoy.undecided.open.target: an overflow of {posture.target!r} kills running requests; use `closed` or another target"
