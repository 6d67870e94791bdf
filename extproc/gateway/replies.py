"""Envoy's own answers (too large, no upstream, timeout, not decided) as JSON that OpenAI's and Anthropic's clients read.

kvgate's refusals pass untouched: they carry ``decision: reject`` in the metadata, and the first rule lets those through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from extproc.gateway import names
from extproc.gateway.pieces import header, metadata_matcher
from extproc.gateway.protos import accesslog, core, hcm, matcher

JSON = "application/json"
#: Seconds after which a client may try again when kvgate did not answer.
RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of Envoy: when it applies, what the client reads, whether a retry makes sense."""

    status: int
    reason: str
    kind: str
    message: str
    retry: bool


#: One line per status; the last line of `mappers` catches every other one.
REPLIES: tuple[Reply, ...] = (
    Reply(413, "body_too_large", "request_too_large", "The request body is larger than the gateway accepts.", False),
    Reply(404, "not_found", "not_found_error", "The gateway has no such path.", False),
    Reply(408, "request_timeout", "timeout_error", "The request was not received in time.", True),
    Reply(504, "upstream_timeout", "timeout_error", "The engine did not answer in time.", True),
    Reply(502, "upstream_unavailable", "api_error", "The engine broke off its answer.", True),
    Reply(503, "upstream_unavailable", "overloaded_error", "The engine cannot be reached.", True),
    Reply(500, "internal", "api_error", "The gateway could not process the exchange.", False),
)
UNDECIDED = Reply(
    503, "not_ready", "overloaded_error", "Admission is not available; the request was not sent to an engine.", True
)
OTHER = Reply(400, "bad_request", "invalid_request_error", "The gateway refused the request.", False)


def body(kind: str, message: str, code: str) -> str:
    """An error body with the fields of both families: ``error.type/message`` (both), ``error.code/param``, ``type``."""
    return json.dumps({"type": "error", "error": {"type": kind, "message": message, "param": None, "code": code}})


def local_reply_config() -> hcm.LocalReplyConfig:
    """The rules, first match wins."""
    return hcm.LocalReplyConfig(mappers=list(_mappers()))


def _mappers() -> Iterator[hcm.ResponseMapper]:
    yield hcm.ResponseMapper(filter=_decision_is(names.DECISION_REJECT))
    yield _mapper(UNDECIDED, _all(_status(UNDECIDED.status), _undecided()), decision="unavailable")
    for reply in REPLIES:
        yield _mapper(reply, _status(reply.status))
    yield _mapper(OTHER, _status(400, accesslog.ComparisonFilterOp.GE))


def _mapper(reply: Reply, applies: accesslog.AccessLogFilter, decision: str = "unavailable") -> hcm.ResponseMapper:
    headers = [
        header("x-kvgate-decision", decision),
        header("x-kvgate-reason", reply.reason),
        header("x-should-retry", str(reply.retry).lower()),
    ]
    if reply.retry:
        headers += [header("retry-after", str(RETRY_AFTER_S)), header("retry-after-ms", str(RETRY_AFTER_S * 1000))]
    return hcm.ResponseMapper(
        filter=applies,
        body=core.DataSource(inline_string=body(reply.kind, reply.message, reply.reason)),
        body_format_override=core.SubstitutionFormatString(
            text_format_source=core.DataSource(inline_string="%LOCAL_REPLY_BODY%"), content_type=JSON
        ),
        headers_to_add=headers,
    )


def _status(code: int, op: accesslog.ComparisonFilterOp = accesslog.ComparisonFilterOp.EQ) -> accesslog.AccessLogFilter:
    value = core.RuntimeUInt32(default_value=code, runtime_key=f"kvgate.local_reply.{code}")
    return accesslog.AccessLogFilter(
        status_code_filter=accesslog.StatusCodeFilter(comparison=accesslog.ComparisonFilter(op=op, value=value))
    )


def _decision_is(value: str) -> accesslog.AccessLogFilter:
    exact = matcher.ValueMatcher(string_match=matcher.StringMatcher(exact=value))
    return accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(
            matcher=metadata_matcher(names.DECISION_NAMESPACE, names.KEY_DECISION, exact), match_if_key_not_found=False
        )
    )


def _undecided() -> accesslog.AccessLogFilter:
    # No value of `decision` matches the impossible string; only its absence does.
    never = matcher.ValueMatcher(string_match=matcher.StringMatcher(exact="\x7f"))
    return accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(
            matcher=metadata_matcher(names.DECISION_NAMESPACE, names.KEY_DECISION, never), match_if_key_not_found=True
        )
    )


def _all(*filters: accesslog.AccessLogFilter) -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(and_filter=accesslog.AndFilter(filters=list(filters)))
