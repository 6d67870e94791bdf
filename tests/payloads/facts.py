"""What a payload's row expects, fact by fact, and what we find.

A fact is a name and a value. Most names are measures: one figure of the sighting, compared as the name says (its ending
may ask for a bound or a sum). A few are judged by a rule of their own. What nobody can check here is reported as
unchecked with the reason, never passed over; a row of which nothing was checked is not ok.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.dialects import ChatPrompt
from extproc.errors import BadRequest
from tests.payloads.sighting import Sighting


class Unseen(Exception):
    """Why a fact cannot be judged."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One comparison; ``ok`` is None where it could not be made, and ``got`` says why."""

    name: str
    expected: object
    got: object
    ok: bool | None


Measure = Callable[[Sighting], Any]
Rule = Callable[[Any, Sighting], tuple[object, bool]]

#: What is found where a fact needs a request and there is none: no figure equals it.
REFUSED = "refused"


def _of_request(name: str) -> Measure:
    return lambda seen: getattr(seen.request, name) if seen.request is not None else REFUSED


def _of_error(name: str) -> Measure:
    return lambda seen: getattr(seen.error, name) if seen.error is not None else "accepted"


def _roles(*names: str, but: Sequence[str] = ()) -> Measure:
    def measure(seen: Sighting) -> object:
        return seen.tokens(*(text for role, text in seen.texts if (role in names or not names) and role not in but))

    return measure


def _exact(seen: Sighting) -> object:
    """The engine's own figure; a bound is none."""
    if seen.exact is None:
        return REFUSED
    return (
        seen.exact.input_tokens if seen.exact.source == "exact" else f"{seen.exact.input_tokens} ({seen.exact.source})"
    )


def _each(seen: Sighting) -> object:
    return list(seen.exact.per_prompt) if seen.exact is not None else REFUSED


def _width(seen: Sighting) -> int:
    """What the client gets back for each prompt."""
    n = seen.document.get("n") if isinstance(seen.document, dict) else None
    return int(n) if isinstance(n, int | float) else 1


def _returned(seen: Sighting) -> object:
    return len(seen.request.prompts) * _width(seen) if seen.request is not None else REFUSED


def _tools(seen: Sighting) -> int:
    prompts = seen.request.prompts if seen.request is not None else ()
    return sum(len(prompt.tools or []) for prompt in prompts if isinstance(prompt, ChatPrompt))


def _kv_max(seen: Sighting) -> object:
    output = seen.request.kv_tokens_output_max if seen.request else None
    return None if output is None or seen.exact is None else seen.exact.input_tokens + output


def _text(seen: Sighting) -> str:
    return "".join(text for _, text in seen.texts)


def _reserve(seen: Sighting) -> int:
    return int(seen.request is not None and seen.request.reserve)


def _base(expected: Any, seen: Sighting) -> tuple[object, bool]:
    """The model under an adapter's name, as names of adapters are made: BASE:ADAPTER, BASE@ADAPTER, BASE/ADAPTER, BASE&ADAPTER."""
    model = seen.parsed.model if seen.parsed is not None else None
    rest = model.removeprefix(str(expected)) if model else REFUSED
    return model or REFUSED, bool(model) and rest != model and rest[:1] in ("", ":", "@", "/", "&")


def _strings(root: Any) -> Iterator[str]:
    if isinstance(root, str):
        yield root
    for inner in root.values() if isinstance(root, dict) else root if isinstance(root, list) else ():
        yield from _strings(inner)


def _base64_chars(seen: Sighting) -> int:
    found = [text.rpartition(";base64,")[2] for text in _strings(seen.document)]
    return sum(len(text) for text in found if len(text) >= 256 and re.fullmatch(r"[A-Za-z0-9+/_-]+={0,2}", text))


def _density(seen: Sighting) -> float:
    return (
        len(_text(seen).encode("utf-8", "surrogatepass")) / seen.exact.input_tokens if seen.exact is not None else 0.0
    )


def _under(divisor: int) -> Measure:
    return lambda seen: _density(seen) / divisor < 1.0


def _depth(root: Any) -> int:
    inner = root.values() if isinstance(root, dict) else root if isinstance(root, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _content_length(seen: Sighting) -> int | None:
    length = seen.head.headers.get("content-length", "")
    return int(length) if length.isdigit() else None


#: fact -> what is found. Names of one thing in several rows' words stand side by side.
MEASURES: dict[str, Measure] = {
    "status": _of_error("status"),
    "code": _of_error("code"),
    "param": _of_error("param"),
    "error_type": Sighting.refusal_type,
    "dialect": lambda s: s.parsed.dialect if s.parsed else REFUSED,
    "operation": _of_request("operation"),
    "model": lambda s: s.parsed.model if s.parsed else REFUSED,
    "stream": _of_request("stream"),
    "sequences": _of_request("sequences"),
    "inputs": _of_request("sequences"),
    "n": lambda s: _width(s) if s.request else REFUSED,
    "returned": _returned,
    "prompts": lambda s: len(s.request.prompts) if s.request else REFUSED,
    "max_output": _of_request("max_output_tokens"),
    "max_output_tokens": _of_request("max_output_tokens"),
    "min_tokens": _of_request("min_output_tokens"),
    "ignore_eos": _of_request("ignore_eos"),
    "num_ctx": _of_request("context_tokens"),
    "prefill": _of_request("prefill"),
    "has_tools": _of_request("has_tools"),
    "include_usage": _of_request("include_usage_asked"),
    "prompt_logprobs": _of_request("prompt_logprobs"),
    "unknown_parts": _of_request("unknown_parts"),
    "hidden": _of_request("hidden"),
    "warnings": lambda s: list(s.request.warnings) if s.request else REFUSED,
    "reserve": _reserve,
    "count_source": lambda s: s.exact.source if s.exact else REFUSED,
    "chatml_tokens": _exact,
    "prompt_tokens": _exact,
    "input_tokens": _exact,
    # Plain ChatML ignores tools, so the exact count is the one without them.
    "chatml_tokens_without_tools": _exact,
    "prompt_tokens_each": _each,
    "input_tokens_each": _each,
    "longest": lambda s: max(s.exact.per_prompt, default=0) if s.exact else REFUSED,
    "bound": lambda s: s.bound.input_tokens if s.bound else REFUSED,
    "kv_tokens_max": _kv_max,
    "system_tokens": _roles("system"),
    "message_tokens": _roles(but=("system",)),
    "tool_result_tokens": _roles("tool"),
    "reasoning_tokens": _roles("reasoning"),
    "suffix_tokens": lambda s: s.tokens(*(t for t in [(s.document or {}).get("suffix")] if isinstance(t, str))),
    "tool_call_args_tokens": lambda s: s.tokens(*s.calls),
    "tools_tokens": lambda s: s.tokens(s.tools) if s.tools else 0,
    "tools": _tools,
    "images_total": lambda s: len(s.request.images) if s.request else REFUSED,
    "b64_chars": _base64_chars,
    "bytes_div4_is_under": _under(4),
    "bytes_div2_is_under": _under(2),
    "inflated_bytes": lambda s: len(s.parsed.body) if s.parsed else REFUSED,
    "content_length": _content_length,
    "encoding": lambda s: s.head.headers.get("content-encoding") or None,
    "depth": lambda s: _depth(s.document),
    "deadline_ms": lambda s: s.elapsed_ms,
    "schema_bytes": _of_request("schema_bytes"),
}

#: Ending of a fact's name -> how its measure is compared.
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "_lower_bound": lambda expected, got: got >= expected,
    "_at_least": lambda expected, got: got >= expected,
    "_min": lambda expected, got: got >= expected,
    "_upper_bound": lambda expected, got: got <= expected,
    "_at_most": lambda expected, got: got <= expected,
    "_max": lambda expected, got: got <= expected,
    "_about": lambda expected, got: abs(got - expected) <= expected * 0.25,
    "_sum": lambda expected, got: got == expected,
    "_total": lambda expected, got: got == expected,
}


def _valid(expected: Any, seen: Sighting, row: Mapping[str, Any]) -> Fact:
    outcome = f"refused: {seen.error.status} {seen.error.code}" if seen.error else "accepted"
    if expected == "pass-through":
        kind = seen.parsed.route.kind if seen.parsed else outcome
        return Fact("valid", expected, kind, seen.parsed is not None and not _reserve(seen) and kind != "inference")
    if expected == "policy":
        return _policy(seen, row, outcome)
    if expected in (True, False, "accepted", "refused"):
        return Fact("valid", expected, outcome, (seen.error is None) == (expected in (True, "accepted")))
    return Fact("valid", expected, f"unchecked: {expected!r} says nothing that can be found", None)


def _policy(seen: Sighting, row: Mapping[str, Any], outcome: str) -> Fact:
    """A choice of ours, in the words of ``choose`` or ``decision``; without words anything but a fault of ours."""
    words = str(row["expect"].get("choose") or row["expect"].get("decision") or "")
    status = re.match(r"(?:refuse\w*|reject\w*|answer)?\W*(?:with )?([45]\d\d)\b", words)
    refusal = seen.error or seen.lane_refusal()
    got = f"refused: {refusal.status} {refusal.code}" if refusal else outcome
    if status:
        ok: bool | None = refusal is not None and refusal.status == int(status.group(1))
    elif re.match(r"(count|accept|pass|strip|treat|forward|ignore|charge)", words):
        ok = refusal is None
    else:
        # Other words are prose: whatever they choose, a fault of ours is none of it.
        ok = refusal is None or 400 <= refusal.status < 500
    return Fact("valid", f"policy: {words[:60] or 'accepted or 4xx'}", got, ok)


def _decision(expected: Any, seen: Sighting) -> tuple[object, bool]:
    """A refusal by the lane's defaults: status and code."""
    words = re.match(r"([45]\d\d) (\w+)", str(expected))
    if words is None:
        raise Unseen("prose")
    refusal: BadRequest | None = seen.error or seen.lane_refusal()
    got = f"{refusal.status} {refusal.code}" if refusal else "accepted"
    return got, got == words.group()


def _text_tokens(expected: Any, seen: Sighting) -> tuple[object, bool]:
    """Texts alone, with the arguments of calls, and either without reasoning; within 2 %."""
    texts, calls, thoughts = _roles()(seen), seen.tokens(*seen.calls), _roles("reasoning")(seen)
    sums = {texts, texts + calls, texts - thoughts, texts + calls - thoughts}
    nearest = min(sums, key=lambda each: abs(each - expected))
    return nearest, seen.request is not None and abs(nearest - expected) <= expected * 0.02


def _length(size: Callable[[str], int]) -> Rule:
    """The size of all texts, of those that are not the system's, or of one of them: rows say it of either."""

    def rule(expected: Any, seen: Sighting) -> tuple[object, bool]:
        sizes = [(role, size(text)) for role, text in seen.texts]
        sums = {sum(n for _, n in sizes), sum(n for role, n in sizes if role != "system"), *(n for _, n in sizes)}
        nearest = min(sums, key=lambda each: abs(each - expected))
        return nearest, nearest == expected and seen.request is not None

    return rule


def _text_about(expected: Any, seen: Sighting) -> tuple[object, bool]:
    got = _roles()(seen)
    return got, RELATIONS["_about"](expected, got)


def _images(expected: Any, seen: Sighting) -> tuple[object, bool]:
    images = seen.request.images if seen.request else ()
    got = [
        {"width": i.width, "height": i.height, "bytes": i.encoded_bytes, "source": i.source, "url": i.source == "url"}
        for i in images
    ]
    if isinstance(expected, int):
        return len(got), seen.request is not None and len(got) == expected
    ok = len(got) == len(expected) and all(_image(e, g) for e, g in zip(expected, got, strict=True))
    return [{k: g[k] for k in e if k in g} for e, g in zip(expected, got, strict=False)], ok


def _image(expected: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    same = all(got[key] == value for key, value in expected.items() if key in got and key != "url")
    return same and bool(expected.get("url", got["url"])) == got["url"]


def _schema_in_prompt(expected: Any, seen: Sighting) -> tuple[object, bool]:
    """Whether the words of the output schema stand among the prompt's."""
    document = seen.document if isinstance(seen.document, dict) else {}
    given = [document.get(name) for name in ("response_format", "text", "format", "structured_outputs", "guided_json")]
    words = {text for part in given if isinstance(part, dict) for text in _strings(part) if len(text) > 20}
    prompt = _text(seen)
    got = any(word in prompt for word in words)
    return got, got == bool(expected)


def _less(expected: Any, seen: Sighting) -> tuple[object, bool]:
    got = _roles()(seen)
    return got, seen.request is not None and got < expected / 10


def _json_bytes(expected: Any, seen: Sighting) -> tuple[object, bool]:
    """The tools' size in one of the ways to print JSON."""
    tools = (seen.document or {}).get("tools")
    ways = [
        len(json.dumps(tools, separators=separators, ensure_ascii=ascii_only).encode())
        for separators in ((", ", ": "), (",", ":"))
        for ascii_only in (True, False)
    ]
    return min(ways, key=lambda size: abs(size - expected)), expected in ways


#: fact -> a rule of its own.
RULES: dict[str, Rule] = {
    "decision": _decision,
    "base": _base,
    "text_tokens": _text_tokens,
    "text_tokens_about": _text_about,
    "text_tokens_lower_bound": lambda e, s: (_roles()(s), _roles()(s) >= e),
    "chars": _length(len),
    "utf8_bytes": _length(lambda text: len(text.encode("utf-8", "surrogatepass"))),
    "images": _images,
    "never": lambda e, s: (
        _of_request("max_output_tokens")(s),
        s.request is not None and s.request.max_output_tokens != e,
    ),
    "reserve": lambda e, s: (_reserve(s), bool(e) == bool(_reserve(s))),
    "warnings": lambda e, s: (MEASURES["warnings"](s), s.request is not None and set(e) == set(s.request.warnings)),
    "wrong_if_base64_counted_as_text": _less,
    "wrong_if_b64_as_text": _less,
    "bytes_per_token": lambda e, s: (round(_density(s), 2), abs(_density(s) - e) < 0.01),
    "schema_chars": lambda e, s: (MEASURES["schema_bytes"](s), s.request is not None and s.request.schema_bytes >= e),
    "schema_in_prompt": _schema_in_prompt,
    "tools_json_bytes": _json_bytes,
    "deadline_ms": lambda e, s: (round(s.elapsed_ms), s.elapsed_ms <= e),
    "kv_tokens_max": lambda e, s: (_kv_max(s), _kv_max(s) == e),
}

#: Facts that no request shows, with the reason.
UNCHECKED = {
    "rule": "prose",
    "choose": "prose; its status is judged with valid",
    "unless": "prose",
    "note": "prose",
    "image_tokens_formula": "prose; tests/unit/tokens/test_pictures.py judges the formula",
    "host_bytes": "the engine's memory; the lane's denial is judged with decision",
}

#: Facts that only a refused request can have.
_OF_REFUSALS = frozenset({"status", "code", "param", "error_type"})


def facts(row: Mapping[str, Any], seen: Sighting) -> list[Fact]:
    """Every fact of a row, that its body is as long as it says, and that the bound is one."""
    expect = row.get("expect") or {}
    found = [_judged(name, expected, seen, row) for name, expected in expect.items()]
    if "valid" not in expect and not _OF_REFUSALS & set(expect):
        outcome = _valid(True, seen, row)
        found.append(Fact("valid (not stated)", True, outcome.got, outcome.ok))
    if not any(fact.ok is not None for fact in found if fact.name != "valid (not stated)"):
        found.append(Fact("anything to check", "a fact", "none", False))
    if row.get("bytes") is not None:
        found.append(Fact("bytes", row["bytes"], seen.raw_bytes, row["bytes"] == seen.raw_bytes))
    if seen.exact is not None and seen.bound is not None and seen.request is not None and not seen.request.images:
        exact, bound = seen.exact.input_tokens, seen.bound.input_tokens
        found.append(Fact("bound holds", f">= {exact}", bound, bound >= exact))
    return found


def _judged(name: str, expected: Any, seen: Sighting, row: Mapping[str, Any]) -> Fact:
    if name == "valid":
        return _valid(expected, seen, row)
    if name in UNCHECKED:
        return Fact(name, expected, f"unchecked: {UNCHECKED[name]}", None)
    rule = RULES.get(name)
    try:
        if rule is not None:
            return Fact(name, expected, *rule(expected, seen))
        if name in MEASURES:
            got = MEASURES[name](seen)
            return Fact(name, expected, got, got == expected)
        for ending, relation in RELATIONS.items():
            measure = MEASURES.get(name.removesuffix(ending)) if name.endswith(ending) else None
            if measure is not None:
                got = measure(seen)
                return Fact(name, expected, got, isinstance(got, int | float) and relation(expected, got))
    except Unseen as reason:
        return Fact(name, expected, f"unchecked: {reason}", None)
    return Fact(name, expected, "unchecked: the runner does not know this fact", None)
