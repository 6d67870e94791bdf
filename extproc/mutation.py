"""Turns a finished decision into the message that Envoy acts on; protobuf appears here and in ``server`` only.

A route is chosen anew only if ``clear_route_cache`` comes together with a header mutation, so every admitted
request carries one. A changed body needs its exact content-length in the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.struct_pb2 import Struct

from extproc.gateway.names import DECISION_NAMESPACE, PLAN_NAMESPACE
from extproc.types import Decision
from extproc.wire import pb

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
#: Answers to messages that need none, by the request's field name.
CONTINUES: Mapping[str, pb.ProcessingResponse] = {
    "request_headers": pb.ProcessingResponse(request_headers=pb.HeadersResponse()),
    "request_body": pb.ProcessingResponse(request_body=pb.BodyResponse()),
    "request_trailers": pb.ProcessingResponse(request_trailers=pb.TrailersResponse()),
    "response_headers": pb.ProcessingResponse(response_headers=pb.HeadersResponse()),
    "response_body": pb.ProcessingResponse(response_body=pb.BodyResponse()),
    "response_trailers": pb.ProcessingResponse(response_trailers=pb.TrailersResponse()),
}


def go_on(decision: Decision, *, stage: str) -> pb.ProcessingResponse:
    """The answer that lets a request go on to its plan; ``stage`` is the field of the message answered."""
    response = pb.ProcessingResponse()
    common = (response.request_headers if stage == "request_headers" else response.request_body).response
    _set_headers(common.header_mutation, decision.headers)
    if decision.body is not None:
        common.body_mutation.body = decision.body
        _set_headers(common.header_mutation, (("content-length", str(len(decision.body))),))
        common.header_mutation.remove_headers.append("content-encoding")
    common.clear_route_cache = True
    _set_metadata(response, decision)
    return response


def refuse(
    decision: Decision, *, status: int, headers: Sequence[tuple[str, str]], body: bytes
) -> pb.ProcessingResponse:
    """The answer that refuses: status, headers and body for the client; metadata for headers and the access log."""
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = f"kvgate_{decision.reason}"
    _set_headers(immediate.headers, headers)
    _set_metadata(response, decision)
    return response


def hold(timeout_ms: int) -> pb.ProcessingResponse:
    """Asks Envoy to wait longer for the next answer of this stage."""
    response = pb.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(timeout_ms)
    return response


def _set_headers(mutation: pb.HeaderMutation, headers: Sequence[tuple[str, str]]) -> None:
    options = mutation.set_headers
    for name, value in headers:
        option = options.add()
        option.append_action = _OVERWRITE
        header = option.header
        header.key, header.raw_value = name, value.encode("utf-8", "replace")


def _set_metadata(response: pb.ProcessingResponse, decision: Decision) -> None:
    fields = response.dynamic_metadata.fields
    _fill(fields[DECISION_NAMESPACE].struct_value, decision.metadata)
    if decision.plan:
        groups = fields[PLAN_NAMESPACE].struct_value.fields["priority_groups"].list_value.values
        for cluster in decision.plan:
            group = groups.add().struct_value.fields
            group["name"].string_value = cluster


def _fill(struct: Struct, values: Mapping[str, object]) -> None:
    fields = struct.fields
    for name, value in values.items():
        if isinstance(value, str):
            fields[name].string_value = value
        elif isinstance(value, float):
            fields[name].number_value = value
        elif isinstance(value, bool):
            fields[name].bool_value = value
        elif isinstance(value, int):
            fields[name].number_value = value
