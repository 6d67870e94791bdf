"""``kvgate count``: one request body to counts, as the request path would see it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from extproc.config import load
from extproc.config.models import Config, Serve
from extproc.counting import Counting
from extproc.dialects import BodyLimits, InferenceRequest, Parsed, parse
from extproc.errors import BadRequest
from extproc.local.bodies import read_body
from extproc.policy.lanes import LaneTable
from extproc.tokens import PromptCounter
from extproc.types import RequestHead, TokenCount

HELP = "count the tokens of one request body"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("body", metavar="BODY", help="a file with the request body, - for stdin")
    parser.add_argument("--path", required=True, help="the request's path, e.g. /v1/chat/completions")
    parser.add_argument("--method", default="POST", help="the request's method (default: POST)")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="a request header; may be repeated"
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="count with the models of this configuration")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0 counted, 1 not a usable request or configuration, 2 wrong usage."""
    headers: dict[str, str] = {}
    for line in args.header:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            print(f"kvgate count: --header {line!r}: write it as NAME:VALUE", file=sys.stderr)
            return 2
        headers[name.strip().lower()] = value.strip()
    config = load(args.config) if args.config else None
    serve = config.serve if config else Serve()
    limits = BodyLimits(max_bytes=serve.max_body_bytes, max_values=serve.max_body_values)
    body = read_body(args.body, limits.max_bytes)
    head = RequestHead(args.method.upper(), args.path.partition("?")[0], headers)
    try:
        parsed = parse(head, body, limits)
    except BadRequest as error:
        return _refused(args, error)
    counted = _count(parsed.request, head, config) if parsed.request else None
    if parsed.dialect is None:
        note = "is no path that kvgate counts; such requests take nothing and go by unknownPaths (docs/dialects.md)"
        print(f"kvgate count: --path {head.path}: {note}", file=sys.stderr)
    record = describe(head.path, parsed, counted)
    print(json.dumps(record) if args.json else _lines(record))
    return 0


def describe(path: str, parsed: Parsed, counted: TokenCount | None) -> dict[str, object]:
    """The JSON object of ``kvgate count``."""
    request = parsed.request
    tokens = counted.input_tokens if counted is not None else 0
    output = request.kv_tokens_output_max if request is not None else None
    return {
        "path": path,
        "dialect": parsed.dialect,
        "model": parsed.model,
        "stream": request.stream if request else False,
        "prompts": len(request.prompts) if request else 0,
        "sequences": request.sequences if request else 0,
        "input_tokens": tokens,
        "max_output_tokens": request.max_output_tokens if request else None,
        "kv_tokens_max": None if output is None else tokens + output,
        "count_source": counted.source if counted is not None else None,
        "images": [
            {"width": image.width, "height": image.height, "bytes": image.encoded_bytes}
            for image in (request.images if request else ())
        ],
        "unknown_parts": request.unknown_parts if request else 0,
        "reserve": request.reserve if request else False,
        "warnings": list(request.warnings) if request else [],
    }


def _count(request: InferenceRequest, head: RequestHead, config: Config | None) -> TokenCount:
    if config is None:
        return PromptCounter().bound(request)
    route = LaneTable(config).classify(head, request.model or "")
    target = route.chain[0] if route is not None and route.chain else ""
    counting = Counting.from_config(config)
    try:
        return asyncio.run(counting.per_target([target], request))[target]
    finally:
        counting.close()


def _refused(args: argparse.Namespace, error: BadRequest) -> int:
    if args.json:
        fields = {"status": error.status, "code": error.code, "param": error.param, "message": error.message}
        print(json.dumps({"error": fields}))
    else:
        where = f" ({error.param})" if error.param else ""
        print(f"{args.body}: {error.status} {error.code}{where}: {error.message}", file=sys.stderr)
    return 1


def _lines(record: dict[str, object]) -> str:
    return "\n".join(f"{name:<18} {_word(value)}" for name, value in record.items())


def _word(value: object) -> str:
    """A value as people read it; lists of what is not there are ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(_image(each) if isinstance(each, dict) else str(each) for each in value) or "none"
    # A client's string stays on its line: no terminal shows a lone surrogate, and some obey a control character.
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value))


def _image(image: dict[str, object]) -> str:
    return f"{image['width']}x{image['height']} ({image['bytes']} B)"
