"""The checked-in wire messages: current with their .proto, and byte-compatible with Envoy's own API."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.data.accesslog import v3 as data_accesslog
from envoy_data_plane.envoy.service.accesslog import v3 as accesslog
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.type import v3 as envoy_type
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from extproc.wire import generate, pb

if TYPE_CHECKING:
    from pathlib import Path

#: Our message -> the class of envoy-data-plane that is its oracle.
ORACLES: Mapping[str, Any] = {
    "HeaderValue": core.HeaderValue,
    "HeaderMap": core.HeaderMap,
    "HeaderValueOption": core.HeaderValueOption,
    "Metadata": core.Metadata,
    "Node": core.Node,
    "SocketAddress": core.SocketAddress,
    "Pipe": core.Pipe,
    "Address": core.Address,
    "HttpHeaders": ext_proc.HttpHeaders,
    "HttpBody": ext_proc.HttpBody,
    "HttpTrailers": ext_proc.HttpTrailers,
    "ProtocolConfiguration": ext_proc.ProtocolConfiguration,
    "ProcessingRequest": ext_proc.ProcessingRequest,
    "HeaderMutation": ext_proc.HeaderMutation,
    "BodyMutation": ext_proc.BodyMutation,
    "CommonResponse": ext_proc.CommonResponse,
    "HeadersResponse": ext_proc.HeadersResponse,
    "BodyResponse": ext_proc.BodyResponse,
    "TrailersResponse": ext_proc.TrailersResponse,
    "HttpStatus": envoy_type.HttpStatus,
    "ImmediateResponse": ext_proc.ImmediateResponse,
    "ProcessingResponse": ext_proc.ProcessingResponse,
    "ResponseFlags": data_accesslog.ResponseFlags,
    "AccessLogCommon": data_accesslog.AccessLogCommon,
    "HTTPRequestProperties": data_accesslog.HttpRequestProperties,
    "HTTPResponseProperties": data_accesslog.HttpResponseProperties,
    "HTTPAccessLogEntry": data_accesslog.HttpAccessLogEntry,
    "StreamAccessLogsMessage": accesslog.StreamAccessLogsMessage,
    "Identifier": accesslog.StreamAccessLogsMessageIdentifier,
    "HTTPAccessLogEntries": accesslog.StreamAccessLogsMessageHttpAccessLogEntries,
    "StreamAccessLogsResponse": accesslog.StreamAccessLogsResponse,
}
#: grpc.health.v1 has no class there; its bytes are asserted literally.
WITHOUT_ORACLE = {"HealthCheckRequest", "HealthCheckResponse"}

SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT32: "enum",  # HttpStatus.code
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
}
HTTP_CODES = [code.value for code in envoy_type.StatusCode if code.value]


def messages() -> dict[str, Descriptor]:
    """Every message of the .proto, nested ones too, map entries left out."""
    found: dict[str, Descriptor] = {}

    def collect(descriptor: Descriptor) -> None:
        if not descriptor.GetOptions().map_entry:
            found[descriptor.name] = descriptor
        for nested in descriptor.nested_types:
            collect(nested)

    for descriptor in pb.DESCRIPTOR.message_types_by_name.values():
        collect(descriptor)
    return found


def oracle_fields(name: str) -> dict[int, tuple[str, Any]]:
    """Number -> (name, betterproto2 metadata) of one oracle class."""
    found = {}
    for item in dataclasses.fields(ORACLES[name]):
        meta = item.metadata["betterproto"]
        found[meta.number] = (item.name, meta)
    return found


def random_struct(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random JSON object as metadata carries it."""
    leaves: list[Any] = [rng.random() * 1e6, float(rng.randint(-9, 2**40)), "ü" * rng.randint(0, 5), True, False, None]
    if depth:
        leaves += [random_struct(rng, depth - 1), [random_struct(rng, depth - 1), 1.5, "a"]]
    return {f"k{i}": rng.choice(leaves) for i in range(rng.randint(0, 4))}


def scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    """A random value of a scalar field that is not its default."""
    if field.full_name == "kvgate.wire.HttpStatus.code":
        return rng.choice(HTTP_CODES)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values if v.number])
    return {
        FieldDescriptor.TYPE_STRING: lambda: "é" + "x" * rng.randint(0, 200),
        FieldDescriptor.TYPE_BYTES: lambda: b"\xff" + rng.randbytes(rng.randint(0, 300)),
        FieldDescriptor.TYPE_BOOL: lambda: True,
        FieldDescriptor.TYPE_UINT32: lambda: rng.randint(1, 2**32 - 1),
        FieldDescriptor.TYPE_UINT64: lambda: rng.randint(1, 2**64 - 1),
    }[field.type]()


def set_message(rng: random.Random, message: Any) -> None:
    """Fill a sub-message: random for well-known types, recursive for our own."""
    kind = message.DESCRIPTOR.full_name
    message.SetInParent()
    if kind == "google.protobuf.Struct":
        message.update(random_struct(rng))
    elif kind == "google.protobuf.Duration":
        message.FromMicroseconds(rng.randint(0, 10**12))
    elif kind == "google.protobuf.Timestamp":
        message.FromMicroseconds(rng.randint(0, 2 * 10**15))
    elif kind == "google.protobuf.UInt32Value":
        message.value = rng.randint(0, 599)
    elif kind == "google.protobuf.Any":
        message.type_url, message.value = "type.googleapis.com/google.protobuf.Empty", rng.randbytes(5)
    else:
        fill(rng, message)


def fill(rng: random.Random, message: Any) -> None:
    """Set every field of ``message`` to something random; of a oneof, one member."""
    chosen = {oneof.name: rng.choice(oneof.fields) for oneof in message.DESCRIPTOR.oneofs}
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and chosen[oneof.name] is not field:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for index in range(rng.randint(1, 3)):
                entry = field.message_type.fields_by_name["value"]
                if entry.message_type is None:
                    value[f"k{index}"] = "v" * rng.randint(0, 9)
                else:
                    set_message(rng, value[f"k{index}"])
        elif field.is_repeated:
            for _ in range(rng.randint(1, 3)):
                value.append(scalar(rng, field)) if field.message_type is None else set_message(rng, value.add())
        elif field.message_type is not None:
            set_message(rng, value)
        else:
            setattr(message, field.name, scalar(rng, field))


def plain(value: Any) -> Any:
    """A field of either kind of message as plain data, so that both sides compare by value."""
    if isinstance(value, Message):
        kind = value.DESCRIPTOR.full_name
        if kind == "google.protobuf.Duration":
            return value.ToTimedelta()
        if kind == "google.protobuf.Timestamp":
            return value.ToDatetime(tzinfo=UTC)
        if kind.endswith("Value") and kind.startswith("google.protobuf.UInt"):
            return value.value
        return {field.number: plain(item) for field, item in value.ListFields()}
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in value}
    if isinstance(value, str | bytes | int | float | datetime | timedelta):
        return int(value) if isinstance(value, int) else value
    if dataclasses.is_dataclass(value):
        return oracle_plain(value)
    return [plain(item) for item in value]


def oracle_plain(message: Any) -> dict[int, Any]:
    """The set fields of a betterproto2 message, by number."""
    assert not message._unknown_fields, f"{type(message).__name__} does not know {message._unknown_fields!r}"
    found = {}
    for item in dataclasses.fields(message):
        meta, value = item.metadata["betterproto"], getattr(message, item.name)
        is_default = not meta.optional and (value in ("", b"", 0, [], {}) or value is False)
        if value is None or is_default:
            continue
        found[meta.number] = plain(value)
    return found


def test_generated_code_is_current(tmp_path: Path) -> None:
    """The checked-in files are what protoc makes of the .proto today."""
    generate.generate(tmp_path)
    for name in generate.OUTPUTS:
        assert (generate.HERE / name).read_text() == (tmp_path / name).read_text(), f"{name}: run extproc.wire.generate"


def test_every_message_has_an_oracle() -> None:
    """No message escapes the comparison with Envoy's API."""
    assert set(messages()) == set(ORACLES) | WITHOUT_ORACLE


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_fields_are_envoys(name: str) -> None:
    """Every field has Envoy's number, name, type, cardinality and oneof."""
    theirs = oracle_fields(name)
    for field in messages()[name].fields:
        their_name, meta = theirs[field.number]
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        oneof = field.containing_oneof.name if field.containing_oneof else None
        ours = (field.name, SCALARS[field.type] if not is_map else "map", field.is_repeated and not is_map, oneof)
        assert ours == (their_name, meta.proto_type, meta.repeated, meta.group)


def test_enum_values_are_envoys() -> None:
    """Enumerations carry Envoy's numbers under Envoy's names."""
    for ours, theirs in (
        (pb.AccessLogType, data_accesslog.AccessLogType),
        (pb.HeaderValueOption.HeaderAppendAction, core.HeaderValueOptionHeaderAppendAction),
        (pb.CommonResponse.ResponseStatus, ext_proc.CommonResponseResponseStatus),
    ):
        known = {member.name: member.value for member in theirs}
        assert {name: known[name] for name in ours.keys()} == dict(ours.items())  # noqa: SIM118 - not a mapping


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_round_trip_through_envoys_classes(name: str, seed: int) -> None:
    """What we write Envoy's class reads with the same values, and what it writes we read back unchanged."""
    ours = pb.DESCRIPTOR.pool.FindMessageTypeByName(messages()[name].full_name)._concrete_class()
    fill(random.Random(f"{name}{seed}"), ours)
    theirs = ORACLES[name].parse(ours.SerializeToString())
    assert oracle_plain(theirs) == plain(ours)
    again = type(ours)()
    again.ParseFromString(bytes(theirs))
    assert again == ours


def test_unknown_fields_are_tolerated() -> None:
    """A field of Envoy that we do not list is skipped; the ones beside it are read."""
    theirs = data_accesslog.AccessLogCommon(
        sample_rate=0.5,
        tls_properties=data_accesslog.TlsProperties(tls_sni_hostname="api"),
        upstream_cluster="gpu-a-0",
        downstream_transport_failure_reason="x",
        response_flags=data_accesslog.ResponseFlags(delay_injected=True, upstream_overflow=True),
    )
    ours = pb.AccessLogCommon.FromString(bytes(theirs))
    assert (ours.upstream_cluster, ours.response_flags.upstream_overflow) == ("gpu-a-0", True)
    mode = ext_proc.ProcessingRequest(
        request_body=ext_proc.HttpBody(body=b"{}", end_of_stream=True),
        observability_mode=True,
        protocol_config=ext_proc.ProtocolConfiguration(),
    )
    assert pb.ProcessingRequest.FromString(bytes(mode)).request_body.body == b"{}"


def test_health_bytes() -> None:
    """grpc.health.v1: service is field 1, status is field 1 with SERVING = 1 and NOT_SERVING = 2."""
    assert pb.HealthCheckRequest(service="a").SerializeToString() == b"\x0a\x01a"
    assert pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING).SerializeToString() == b"\x08\x01"
    assert pb.HealthCheckResponse(status=pb.HealthCheckResponse.NOT_SERVING).SerializeToString() == b"\x08\x02"
