"""JSON bodies: one parse that keeps the place of every top-level value.

The top level is split first (each value stays undecoded and keeps its offsets), then only the values that
matter are decoded. Strict where an engine might read the body otherwise than we do (duplicate keys that
matter, NaN, depth); silent about everything else. Lone surrogates, which JavaScript clients make by cutting
strings, are accepted as the engines' own parsers accept them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NoReturn

import msgspec

from extproc.dialects.model import BodyLimits, Json, Span
from extproc.errors import BadRequest

_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\n\r"

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder()

_OPEN = re.compile(rb"[ \t\n\r]*\{")
_KEY = re.compile(rb'[ \t\n\r]*"((?:[^"\\]++|\\.)*+)"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\n\r]*([,}])")
#: One lexical piece of a value: a string, a bracket, or a run of anything else up to the next of those.
_PIECE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]|[^"\[\]{},]++|,', re.DOTALL)
#: An escaped UTF-16 surrogate; msgspec refuses a lone one, json.loads does not.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Members:
    """The members of one JSON object, undecoded, each with the place of its value in the body.

    Construction costs one pass over the bytes; ``get`` decodes one value on demand.
    """

    __slots__ = ("_limits", "_path", "_raw", "_unique", "data", "spans", "start")

    def __init__(self, data: bytes, limits: BodyLimits, *, at: Span | None = None, path: str = "") -> None:
        self.data = data
        self._limits = limits
        self._path = path
        self.spans: dict[str, Span] = {}
        self._raw: Mapping[str, bytes | msgspec.Raw] = {}
        self._unique = False
        begin, end = at if at is not None else (len(_BOM) if data.startswith(_BOM) else 0, len(data))
        source = data if begin == 0 and end == len(data) else memoryview(data)[begin:end]
        opened = _OPEN.match(data, begin)
        self.start = opened.end() if opened else begin
        try:
            raw = _members.decode(source)
        except msgspec.ValidationError:
            raise BadRequest(400, "invalid_type", f"{self.where} must be a JSON object.", path or None) from None
        except RecursionError:
            raise _too_deep(limits, path or None) from None
        except msgspec.DecodeError as error:
            if not _SURROGATE.search(data, begin, end):
                raise BadRequest(400, "invalid_json", f"The body is not valid JSON: {error}.") from None
            self._take_slowly(begin, end)
            return
        if len(raw) > limits.max_members:
            raise BadRequest(400, "too_many_members", f"{self.where} has over {limits.max_members} keys.", path or None)
        self._unique = self._take(raw)
        if not self._unique:
            self._take_slowly(begin, end)

    @property
    def where(self) -> str:
        """The object's name for messages."""
        return self._path or "The request body"

    def refuse_duplicates(self, names: Collection[str], *, fold: bool = False) -> None:
        """Raise 400 ``duplicate_key`` if one of ``names`` occurs twice: the engine may take the other one.

        ``fold`` compares without case, as Go's decoder (Ollama) does.
        """
        seen: set[str] = set()
        for key in self.spans if self._unique else [key for key, _ in self._pairs()]:
            name = key.casefold() if fold else key
            if name in names:
                if name in seen:
                    raise BadRequest(400, "duplicate_key", f"The key {name!r} occurs more than once.", name)
                seen.add(name)

    def fold(self, names: Collection[str]) -> None:
        """Let keys that spell one of ``names`` in another case stand for it, as Go's decoder does."""
        renamed = {key: folded for key in self.spans if (folded := key.casefold()) != key and folded in names}
        if renamed:
            self.spans = {renamed.get(key, key): span for key, span in self.spans.items()}
            self._raw = {renamed.get(key, key): raw for key, raw in self._raw.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def is_null(self, name: str) -> bool:
        """Whether the member is absent or null."""
        span = self.spans.get(name)
        return span is None or self.data[span[0] : span[0] + 1] == b"n"

    def get(self, name: str) -> Json:
        """The decoded value of a member, None where absent. Raises BadRequest (depth, invalid text)."""
        raw = self._raw.get(name)
        if raw is None:
            return None
        return decode_value(raw, self._limits, self.param(name))

    def param(self, name: str) -> str:
        """The JSON path of a member."""
        return f"{self._path}.{name}" if self._path else name

    def members(self, name: str) -> Members | None:
        """A nested object with places, None where absent, null or not an object."""
        span = self.spans.get(name)
        if span is None or self.data[span[0] : span[0] + 1] != b"{":
            return None
        return Members(self.data, self._limits, at=span, path=self.param(name))

    def _take(self, raw: dict[str, msgspec.Raw]) -> bool:
        """Walk the object once along msgspec's values; False if the text has other members than they say."""
        position, data = self.start, self.data
        for name, value in raw.items():
            key = _KEY.match(data, position)
            if key is None or _key_text(key.group(1)) != name:
                return False
            view = memoryview(value)
            begin, end = key.end(), key.end() + len(view)
            follow = _NEXT.match(data, end)
            if follow is None or not data.startswith(view, begin):
                return False
            self.spans[name] = (begin, end)
            position = follow.end()
        self._raw = raw
        return data[position - 1 : position] == b"}" or not raw

    def _take_slowly(self, begin: int, end: int) -> None:
        """The same without msgspec: for bodies with duplicate keys, escaped keys or lone surrogates."""
        text = self.data[begin:end]
        try:
            value = json.loads(text.decode("utf-8"), parse_constant=_no_constant, parse_int=str, parse_float=str)
        except RecursionError:
            raise _too_deep(self._limits, self._path or None) from None
        except (ValueError, UnicodeDecodeError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "invalid text"
            raise BadRequest(400, "invalid_json", f"The body is not valid JSON: {reason}.") from None
        if not isinstance(value, dict):
            raise BadRequest(400, "invalid_type", f"{self.where} must be a JSON object.", self._path or None)
        self.spans = dict(self._pairs())
        self._raw = {key: self.data[begin:end] for key, (begin, end) in self.spans.items()}

    def _pairs(self) -> Iterator[tuple[str, Span]]:
        """Every member in the order of the text, duplicates included; the text is known to be valid."""
        position = self.start
        while (key := _KEY.match(self.data, position)) is not None:
            end = self._value_end(key.end())
            yield _key_text(key.group(1)), (key.end(), end)
            follow = _NEXT.match(self.data, end)
            if follow is None or follow.group(1) == b"}":
                return
            position = follow.end()

    def _value_end(self, position: int) -> int:
        depth = 0
        while True:
            piece = _PIECE.match(self.data, position)
            if piece is None:
                return position
            first = self.data[position]
            if first in b"[{":
                depth += 1
            elif first in b"]}":
                depth -= 1
                if depth < 0:
                    return position
            elif first == 0x2C and depth == 0:
                return position
            position = piece.end()
            if depth == 0:
                if first in b'"]}':
                    return position
                return position - (len(piece.group()) - len(piece.group().rstrip(_SPACE)))


def decode_value(raw: bytes | msgspec.Raw, limits: BodyLimits, param: str | None) -> Json:
    """One JSON value; numbers out of range stay as they can, lone surrogates stay in the strings.

    Raises:
        BadRequest: 400 ``invalid_json`` or ``nesting_too_deep``.
    """
    try:
        value = _anything.decode(raw)
    except RecursionError:
        raise _too_deep(limits, param) from None
    except msgspec.DecodeError:
        value = _decode_leniently(bytes(raw), limits, param)
    if type(value) is dict or type(value) is list:
        check_depth(value, limits, param)
    return value


def _decode_leniently(raw: bytes, limits: BodyLimits, param: str | None) -> Json:
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_no_constant, parse_int=_opaque_int)
    except RecursionError:
        raise _too_deep(limits, param) from None
    except (ValueError, UnicodeDecodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "invalid text"
        raise BadRequest(400, "invalid_json", f"The body is not valid JSON: {reason}.", param) from None


def check_depth(root: Json, limits: BodyLimits, param: str | None) -> None:
    """Raise 400 if containers nest deeper than the limit; iterative, one visit per container and value."""
    containers = (dict, list)
    level = [root]
    depth = 0
    while level:
        depth += 1
        if depth > limits.max_depth:
            raise _too_deep(limits, param)
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) in containers
        ]


def _too_deep(limits: BodyLimits, param: str | None) -> BadRequest:
    return BadRequest(400, "nesting_too_deep", f"The JSON nests deeper than {limits.max_depth} levels.", param)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _opaque_int(digits: str) -> int | float:
    """Integers of any length: beyond what a counter can use they only have to survive."""
    return int(digits) if len(digits) < 400 else float("inf")


def _key_text(raw: bytes) -> str:
    if b"\\" in raw:
        return str(json.loads(b'"' + raw + b'"'))
    return raw.decode("utf-8", "replace")
