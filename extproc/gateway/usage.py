"""Token usage read by Envoy from the answers, so that no response byte passes through Python.

One table of JSON paths serves whole JSON answers (json_to_metadata) and server-sent events (sse_to_metadata).
Rules run in the table's order and a later one that finds its value wins. Streams in NDJSON (Ollama's native
API) are not parsed by either filter; their token counts are learned from response bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.gateway import names
from extproc.gateway.pieces import extension, http_filter
from extproc.gateway.protos import hcm, json_parser, json_to_metadata, matcher, sse_to_metadata

#: Where usage stands: a path of keys in the JSON value, and the metadata key it becomes.
PATHS: tuple[tuple[tuple[str, ...], str], ...] = (
    # llama.cpp: native /completion, and `timings` beside every kind of answer
    (("tokens_evaluated",), names.USAGE_INPUT),
    (("tokens_predicted",), names.USAGE_OUTPUT),
    (("timings", "cache_n"), names.USAGE_CACHED),
    # Ollama, native and not streamed
    (("prompt_eval_count",), names.USAGE_INPUT),
    (("eval_count",), names.USAGE_OUTPUT),
    # OpenAI chat and completions (vLLM, SGLang, llama.cpp, TGI, TensorRT-LLM alike)
    (("usage", "prompt_tokens"), names.USAGE_INPUT),
    (("usage", "completion_tokens"), names.USAGE_OUTPUT),
    (("usage", "prompt_tokens_details", "cached_tokens"), names.USAGE_CACHED),
    # OpenAI responses, Anthropic messages; in a stream also Anthropic's message_delta
    (("usage", "input_tokens"), names.USAGE_INPUT),
    (("usage", "output_tokens"), names.USAGE_OUTPUT),
    (("usage", "input_tokens_details", "cached_tokens"), names.USAGE_CACHED),
    (("usage", "cache_read_input_tokens"), names.USAGE_CACHE_READ),
    (("usage", "cache_creation_input_tokens"), names.USAGE_CACHE_WRITE),
)
#: Where usage stands in events only: Anthropic's message_start, OpenAI's response.completed.
EVENT_PATHS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("message", "usage", "input_tokens"), names.USAGE_INPUT),
    (("message", "usage", "output_tokens"), names.USAGE_OUTPUT),
    (("message", "usage", "cache_read_input_tokens"), names.USAGE_CACHE_READ),
    (("message", "usage", "cache_creation_input_tokens"), names.USAGE_CACHE_WRITE),
    (("response", "usage", "input_tokens"), names.USAGE_INPUT),
    (("response", "usage", "output_tokens"), names.USAGE_OUTPUT),
    (("response", "usage", "input_tokens_details", "cached_tokens"), names.USAGE_CACHED),
)
#: Envoy's default is exactly "application/json", which skips "; charset=utf-8".
JSON_CONTENT_TYPES = r"^application/(.*\+)?json(;.*)?$"
#: Bounds what one unterminated event may hold in memory.
MAX_EVENT_BYTES = 1_048_576
JSON_FILTER = "json_to_metadata"


def filters() -> Iterator[hcm.HttpFilter]:
    """The two filters, in the order of the chain."""
    yield http_filter(
        JSON_FILTER,
        json_to_metadata.JsonToMetadata(
            response_rules=json_to_metadata.JsonToMetadataMatchRules(
                allow_content_types_regex=matcher.RegexMatcher(regex=JSON_CONTENT_TYPES),
                rules=[_rule(path, key) for path, key in PATHS],
            )
        ),
    )
    parser = json_parser.JsonContentParser(
        rules=[json_parser.JsonContentParserRuleConfig(rule=_rule(path, key)) for path, key in (*PATHS, *EVENT_PATHS)]
    )
    yield http_filter(
        "sse_to_metadata",
        sse_to_metadata.SseToMetadata(
            response_rules=sse_to_metadata.SseToMetadataProcessingRules(
                max_event_size=MAX_EVENT_BYTES, content_parser=extension("envoy.content_parsers.json", parser)
            )
        ),
    )


def _rule(path: tuple[str, ...], key: str) -> json_to_metadata.JsonToMetadataRule:
    return json_to_metadata.JsonToMetadataRule(
        selectors=[json_to_metadata.JsonToMetadataSelector(key=step) for step in path],
        on_present=json_to_metadata.JsonToMetadataKeyValuePair(
            metadata_namespace=names.USAGE_NAMESPACE, key=key, type=json_to_metadata.JsonToMetadataValueType.NUMBER
        ),
    )
