"""Envoy's own answers (too large, no upstream, timeout, not decided) as JSON that OpenAI's and Anthropic's clients read.

kvgate's refusals pass untouched: they carry ``decision: reject`` in the metadata, and the first rule lets those through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from extproc.gateway import names
from extproc.gateway.pieces import header, metadata_matcher
from extproc.gateway.protos import accesslog, core, hcm, matcher, route

JSON = "application/json"
MODELS_PREFIX = "/v1/models/"
#: Seconds after which a client may try again when kvgate did not answer.
RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of Envoy: what the client reads, and whether a retry makes sense.

    ``decision`` is ``unavailable`` where something is broken or late, ``reject`` where the request is at fault.
    """

    status: int
    decision: str
    reason: str
    kind: str
    message: str

    @property
    def retry(self) -> bool:
        """A broken or late dependency may be back; a faulty request stays faulty."""
        return self.decision == "unavailable"


NO_SUCH_MODEL = Reply(404, "reject", "unknown_model", "not_found_error", "No such model; GET /v1/models lists them.")
UNDECIDED = Reply(
    503, "unavailable", "not_ready", "overloaded_error", "Admission is not available; no engine got the request."
)
#: By status, for everything else that Envoy answers by itself.
REPLIES: tuple[Reply, ...] = (
    Reply(408, "reject", "request_timeout", "timeout_error", "The request was not received in time."),
    Reply(413, "reject", "body_too_large", "request_too_large", "The request body is larger than the gateway accepts."),
    Reply(
        431,
        "reject",
        "bad_request",
        "invalid_request_error",
        "The request headers are larger than the gateway accepts.",
    ),
    Reply(500, "unavailable", "internal", "api_error", "The gateway could not process the exchange."),
    Reply(502, "unavailable", "upstream_unavailable", "api_error", "The engine's answer could not be read."),
    Reply(503, "unavailable", "upstream_unavailable", "overloaded_error", "The engine cannot be reached."),
    Reply(504, "unavailable", "upstream_timeout", "timeout_error", "The engine did not answer in time."),
)
OTHER = Reply(400, "reject", "bad_request", "invalid_request_error", "The gateway refused the request.")


def body(kind: str, message: str, code: str) -> str:
    """An error body with the fields of both families: ``error.type/message`` (both), ``error.code/param``, ``type``."""
    return json.dumps({"type": "error", "error": {"type": kind, "message": message, "param": None, "code": code}})


def local_reply_config() -> hcm.LocalReplyConfig:
    """The rules, first match wins."""
    return hcm.LocalReplyConfig(mappers=list(_mappers()))


def _mappers() -> Iterator[hcm.ResponseMapper]:
    # A route without a cluster adds no headers to an immediate response (observed), so this rule does.
    yield hcm.ResponseMapper(
        filter=_decision(names.DECISION_REJECT, where_absent=False), headers_to_add=decision_headers()
    )
    models = accesslog.AccessLogFilter(header_filter=accesslog.HeaderFilter(header=path_under(MODELS_PREFIX)))
    yield _mapper(NO_SUCH_MODEL, _all(_status(NO_SUCH_MODEL.status), models))
    # No decision has this name, so the rule applies where there is none at all.
    yield _mapper(UNDECIDED, _all(_status(UNDECIDED.status), _decision("-", where_absent=True)))
    for reply in REPLIES:
        yield _mapper(reply, _status(reply.status))
    yield _mapper(OTHER, _status(OTHER.status, accesslog.ComparisonFilterOp.GE))


def decision_headers() -> list[core.HeaderValueOption]:
    """The response headers that come from the metadata; a key that is absent makes no header."""
    return [
        header(name, f"%DYNAMIC_METADATA({names.DECISION_NAMESPACE}:{key})%")
        for name, key in names.RESPONSE_HEADERS.items()
    ]


def path_under(prefix: str) -> route.HeaderMatcher:
    """Matches requests whose path starts with ``prefix``."""
    return route.HeaderMatcher(name=":path", string_match=matcher.StringMatcher(prefix=prefix))


def _mapper(reply: Reply, applies: accesslog.AccessLogFilter) -> hcm.ResponseMapper:
    headers = [
        header("x-kvgate-decision", reply.decision),
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


def _decision(value: str, *, where_absent: bool) -> accesslog.AccessLogFilter:
    exact = matcher.ValueMatcher(string_match=matcher.StringMatcher(exact=value))
    return accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(
            matcher=metadata_matcher(names.DECISION_NAMESPACE, names.KEY_DECISION, exact),
            match_if_key_not_found=where_absent,
        )
    )


def _all(*filters: accesslog.AccessLogFilter) -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(and_filter=accesslog.AndFilter(filters=list(filters)))
