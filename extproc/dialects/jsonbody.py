"""JSON bodies: one parse that keeps the place of every top-level value.

The top level is split first (each value stays undecoded and keeps its offsets), then only the values that
matter are decoded. Strict where an engine might read the body otherwise than we do (duplicate keys that
matter, NaN, depth); silent about everything else. Lone surrogates, which JavaScript clients make by cutting
strings, are accepted as the engines' own parsers accept them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NoReturn

import msgspec

from extproc.dialects.model import BodyLimits, Json, Span
from extproc.errors import BadRequest

_BOM = b"\xef\xbb\xbf"

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder()

_OPEN = re.compile(rb"[ \t\n\r]*\{")
_KEY = re.compile(rb'[ \t\n\r]*"((?:[^"\\]++|\\.)*+)"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\n\r]*([,}])")
#: An escaped UTF-16 surrogate; msgspec refuses a lone one, json does not.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_BLANK = re.compile(r"[ \t\n\r]*")

#: Bytes looked at in one step where strings are told from what is between them: bounds the memory of the step.
_STEP = 256 * 1024
#: The same where brackets are looked for until there are enough.
_BRACKETS_STEP = 4 * 1024


class Members:
    """The members of one JSON object, undecoded, each with the place of its value in the body.

    Construction costs one pass over the bytes, and decodes what has brackets enough to be too deep; ``get`` decodes
    the others on demand.

    Raises:
        BadRequest: 400 ``invalid_json``, ``invalid_type``, ``too_many_members`` or ``nesting_too_deep``, wherever in the
            body that is; 413 ``too_complex``.
    """

    __slots__ = ("_decoded", "_limits", "_names", "_path", "_raw", "data", "spans", "start")

    def __init__(self, data: bytes, limits: BodyLimits, *, at: Span | None = None, path: str = "") -> None:
        self.data = data
        self._limits = limits
        self._path = path
        self.spans: dict[str, Span] = {}
        self._raw: Mapping[str, bytes | msgspec.Raw] = {}
        self._names: list[str] = []
        self._decoded: dict[Span, Json] = {}
        if at is None:
            _refuse_crowds(data, limits)
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
            raise self._too_many()
        if self._take(raw):
            self._names = list(raw)
            self._refuse_deep()
        else:
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
        for key in self._names:
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

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that the object has; most requests have few of the many that may stand in one."""
        raw = self._raw
        return [name for name in names if name in raw]

    def is_null(self, name: str) -> bool:
        """Whether the member is absent or null."""
        span = self.spans.get(name)
        return span is None or self.data[span[0] : span[0] + 1] == b"n"

    def get(self, name: str) -> Json:
        """The decoded value of a member, None where absent. Raises BadRequest (depth, invalid text)."""
        raw = self._raw.get(name)
        if raw is None:
            return None
        span = self.spans[name]
        return self._decoded[span] if span in self._decoded else decode_value(raw, self._limits, self.param(name))

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

    def _refuse_deep(self) -> None:
        """Decode, and so look into, the values with enough brackets to be too deep, whether anybody reads them or not."""
        for name, span in self.spans.items():
            if self.data[span[0]] in b"[{" and _has_brackets(self.data, *span, self._limits.max_depth + 1):
                self._decoded[span] = decode_value(self._raw[name], self._limits, self.param(name))

    def _take_slowly(self, begin: int, end: int) -> None:
        """The same with json's scanner: for bodies with duplicate keys, escaped keys or lone surrogates."""
        try:
            pairs = list(self._scanned(self.data[begin:end].decode("utf-8"), begin))
        except RecursionError:
            raise _too_deep(self._limits, self._path or None) from None
        except (ValueError, UnicodeDecodeError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "invalid text"
            raise BadRequest(400, "invalid_json", f"The body is not valid JSON: {reason}.") from None
        self._names = [name for name, _ in pairs]
        self.spans = dict(pairs)
        self._raw = {key: self.data[begin:end] for key, (begin, end) in self.spans.items()}

    def _scanned(self, text: str, offset: int) -> Iterator[tuple[str, Span]]:
        """Every member in the order of the text, duplicates included; the text begins ``offset`` bytes into the body."""
        at = _blank(text, 0)
        if text[at : at + 1] != "{":
            json.JSONDecoder(parse_constant=_no_constant, parse_int=str).decode(text)
            raise BadRequest(400, "invalid_type", f"{self.where} must be a JSON object.", self._path or None)
        narrow = text.isascii()
        seen, place, found = 0, offset, 0

        def byte(index: int) -> int:
            # Asked in the order of the text, so that each character is measured once.
            nonlocal seen, place
            place += index - seen if narrow else len(text[seen:index].encode("utf-8"))
            seen = index
            return place

        at = _blank(text, at + 1)
        more = text[at : at + 1] != "}"
        while more:
            name, at = _key(text, at)
            value, after = _scanner.raw_decode(text, at)
            found += 1
            if found > self._limits.max_members:
                raise self._too_many()
            if type(value) is dict or type(value) is list:
                check_depth(value, self._limits, self.param(name))
            yield name, (byte(at), byte(after))
            at = _blank(text, after)
            more = text[at : at + 1] == ","
            at = _blank(text, at + 1) if more else at
        if text[at : at + 1] != "}" or _blank(text, at + 1) != len(text):
            raise json.JSONDecodeError("Expecting ',' or the end", text, at)

    def _too_many(self) -> BadRequest:
        limit = self._limits.max_members
        return BadRequest(400, "too_many_members", f"{self.where} has over {limit} keys.", self._path or None)


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


def values_of(data: bytes, enough: int) -> int:
    """Most JSON values in a text: commas and opening brackets outside its strings.

    Counting ends above ``enough``. Where commas and brackets within strings count too and still make no more than that,
    their sum is the answer.
    """
    rough = _values(data)
    if rough <= enough:
        return rough
    # Without escaped quotes every quote begins or ends a string.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    found = inside = 0
    for start in range(0, len(plain), _STEP):
        pieces = plain[start : start + _STEP].split(b'"')
        found += _values(b"".join(pieces[inside::2]))
        inside ^= len(pieces) - 1 & 1
        if found > enough:
            break
    return found


def _values(data: bytes) -> int:
    return data.count(b",") + _brackets(data, 0, len(data))


def _brackets(data: bytes, begin: int, end: int) -> int:
    return data.count(b"[", begin, end) + data.count(b"{", begin, end)


def _has_brackets(data: bytes, begin: int, end: int, least: int) -> bool:
    """Whether so many opening brackets stand there; a conversation that has them has them early."""
    found = 0
    for start in range(begin, end, _BRACKETS_STEP):
        found += _brackets(data, start, min(end, start + _BRACKETS_STEP))
        if found >= least:
            return True
    return False


def _refuse_crowds(data: bytes, limits: BodyLimits) -> None:
    """413 ``too_complex`` before anything is decoded: a value costs a hundred bytes of memory and a microsecond."""
    if len(data) > limits.max_values < values_of(data, limits.max_values):
        raise too_complex(f"The body holds over {limits.max_values} JSON values.")


def too_complex(message: str) -> BadRequest:
    """The refusal of a body that costs too much to read."""
    return BadRequest(413, "too_complex", message)


def _too_deep(limits: BodyLimits, param: str | None) -> BadRequest:
    return BadRequest(400, "nesting_too_deep", f"The JSON nests deeper than {limits.max_depth} levels.", param)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _opaque_int(digits: str) -> int | float:
    """Integers of any length: beyond what a counter can use they only have to survive."""
    return int(digits) if len(digits) < 400 else float("inf")


_scanner = json.JSONDecoder(parse_constant=_no_constant, parse_int=str, parse_float=str)


def _blank(text: str, at: int) -> int:
    """Behind the blanks at ``at``."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _key(text: str, at: int) -> tuple[str, int]:
    """A key and where its value begins. Raises JSONDecodeError."""
    if text[at : at + 1] != '"':
        raise json.JSONDecodeError("Expecting a key in double quotes", text, at)
    name, at = _scanner.raw_decode(text, at)
    at = _blank(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting ':'", text, at)
    return name, _blank(text, at + 1)


def _key_text(raw: bytes) -> str:
    if b"\\" in raw:
        return str(json.loads(b'"' + raw + b'"'))
    return raw.decode("utf-8", "replace")
