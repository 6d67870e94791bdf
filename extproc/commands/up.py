"""``kvgate up``: the whole local stack in one process tree, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc.config import Config
from extproc.config.forms import HttpUrl, problem
from extproc.errors import ConfigError, DependencyDown, UsageError
from extproc.local import ask, effective, stack
from extproc.local.demo_stack import PORTS, DemoEngines, make_engines
from extproc.local.effective import Data
from extproc.local.lifetime import Stopped, Stopping, run_directory, stopping_on_signals
from extproc.local.preflight import make_sure
from extproc.local.supervisor import ChildFailed, Supervisor

HELP = "run ledger, agent, ext_proc, Envoy and, where none are given, engines on this machine"
#: The agent reports twice a second or so; an engine that is down must not keep the stack from starting.
FLEET_READY_S = 10.0
#: Ports of a run without a configuration file of its own, each used if it is free: section, key, port.
PORTS_WANTED = (
    ("envoy", "listen", 10000),
    ("envoy", "admin", 9901),
    ("serve", "admin", 9902),
    ("agent", "admin", 9913),
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What will run: the configuration's data, engines of our own if any, and what to call them."""

    data: Data
    engines: DemoEngines | None
    description: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="configuration (default: the demo's)")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="a running engine; may be repeated. With -c they become the replicas of its first local target",
    )
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="start a child again up to N times (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Run until a signal; 0 after a clean stop, 1 a child failed or the configuration cannot be used, 2 wrong usage."""
    _check(args.engine)
    try:
        with stopping_on_signals() as stopping, run_directory() as directory:
            return _up(args, directory, stopping)
    except Stopped:
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except (ChildFailed, DependencyDown) as error:
        print(f"kvgate up: {error}", file=sys.stderr)
        return 1


def _check(engines: Sequence[str]) -> None:
    """URLs of engines have the configuration's form, and each engine is named once: one pool is not promised twice."""
    for url in engines:
        if (why := problem(HttpUrl, url)) is not None:
            # What was given is not repeated: a URL that has a user may have a password.
            raise UsageError(f"kvgate up: --engine {why}")
    twice = [url for url, times in Counter(url.rstrip("/") for url in engines).items() if times > 1]
    if twice:
        raise UsageError(f"kvgate up: --engine {twice[0]} is given twice; name each engine once")


def _up(args: argparse.Namespace, directory: Path, stopping: Stopping) -> int:
    plan = _plan(args.config, args.engine, directory)
    embedded = plan.data.get("ledger", {}).get("url") == "embedded"
    data = effective.with_value(plan.data, f"unix:{directory}/extproc.sock", "serve", "listen")
    if args.config is not None:
        make_sure(effective.write(directory / "kvgate.yaml", data).named(str(args.config)))
    port = stack.free_ports(1)[0] if embedded else None
    if port is not None:
        data = effective.with_value(data, f"redis://127.0.0.1:{port}/0", "ledger", "url")
    config_file = directory / "kvgate.yaml"
    config = effective.write(config_file, data)
    children = [
        *(plan.engines.children() if plan.engines else ()),
        *stack.KvgateStack(config, config_file, directory, port).children(),
    ]
    logs = directory / "logs"
    with Supervisor(logs, restarts=args.restarts, say=_say, check_stopped=stopping.check) as supervisor:
        for child in children:
            supervisor.start(child)
            _say(f"started {child.name}")
        if config.local_replicas():
            late = ask.await_fleet(config_file, FLEET_READY_S, supervisor.check)
            for replica, state in late.items():
                _say(f"not ready yet: {replica} ({state}); requests for it go to its fallback or are refused")
        _announce(plan, config, config_file, supervisor.log_directory)
        try:
            supervisor.watch(lambda: False)
        except Stopped:
            for name in supervisor.stop():
                _say(f"{name} did not end in time and was killed")
            raise
    return 0


def _plan(config_file: Path | None, engines: Sequence[str], directory: Path) -> _Plan:
    if config_file is not None:
        data = effective.read(config_file)
        if not engines:
            return _Plan(data, None, "engines as configured")
        return _Plan(_replace_replicas(data, engines), None, f"engines given: {', '.join(engines)}")
    addresses = {(section, key): f"127.0.0.1:{stack.preferred(port)}" for section, key, port in PORTS_WANTED}
    if engines:
        found: dict[str, tuple[str, str]] = {}
        for url in engines:
            probe = stack.probe(url)
            if probe is None:
                raise DependencyDown(
                    f"--engine {url}: no vLLM, SGLang, llama.cpp or Ollama answers there; start it first"
                )
            found[url] = (probe.engine, probe.served_model)
        names = ", ".join(f"{engine} at {url}" for url, (engine, _) in found.items())
        return _Plan(_at(addresses, effective.for_engines(found)), None, f"engines given: {names}")
    demo = make_engines(directory, stack.free_ports(PORTS))
    return _Plan(_at(addresses, demo.fill(effective.read(effective.DEMO_CONFIG))), demo, demo.description)


def _at(addresses: Mapping[tuple[str, str], str], data: Data) -> Data:
    for path, address in addresses.items():
        data = effective.with_value(data, address, *path)
    return data


def _replace_replicas(data: Data, urls: Sequence[str]) -> Data:
    for name, target in data.get("targets", {}).items():
        if target["engine"] != "openai":
            rows = [{"name": f"{name}-{number}", "url": url} for number, url in enumerate(urls)]
            return effective.with_value(data, rows, "targets", name, "replicas")
    raise ConfigError(["targets: --engine needs a local target whose replicas it gives; add one"])


def _announce(plan: _Plan, config: Config, config_file: Path, logs: Path) -> None:
    names = ", ".join(config.aliases) or "none: add aliases"
    _say(f"engines   {plan.description}")
    _say(f"send to   http://{config.envoy.listen}/v1/chat/completions   models: {names}")
    _say(f"look at   kvgate status -c {config_file}")
    _say(f"admin     envoy http://{config.envoy.admin}   kvgate http://{config.serve.admin}")
    _say(f"logs      {logs}")
    _say("Ctrl-C stops everything.")


def _say(line: str) -> None:
    print(line, flush=True)
