"""The one parse: places of values, duplicates, depth, surrogates, and nothing else refused."""

from __future__ import annotations

import json

import pytest

from extproc.dialects import BodyLimits, jsonbody
from extproc.dialects.jsonbody import Members, values_of
from extproc.errors import BadRequest

LIMITS = BodyLimits()


def members(text: str | bytes) -> Members:
    return Members(text if isinstance(text, bytes) else text.encode(), LIMITS)


def refusal(text: str | bytes, *, read: str = "a") -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        members(text).get(read)
    return caught.value.status, caught.value.code


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"model":"m"}',
        ' { "model" : "m" , "a" : [1, {"model": "x"}] } ',
        '\ufeff{"model":"m"}',
        '{"messages":[{"content":"\\"model\\":\\"no\\""}],"model":"m"}',
        '{"x":"\\ud83d","model":"m"}',
        '{"\\u006dodel":"m"}',
        '{"a":{"b":[]},"c":{},"d":"","e":"}{][,:","model":"m"}',
        '{"k\\"ey":1,"model":"m"}',
        '{"a":1,"a":2,"model":"m"}',
        '{"n":1e5 ,"t":true , "model":"m" ,"z":-0.5}',
    ],
)
def test_the_place_of_a_value_is_exact(text: str) -> None:
    """The span of model holds its value with quotes and nothing more, whatever stands around it."""
    data = text.encode()
    found = Members(data, LIMITS)
    begin, end = found.spans["model"]
    assert data[begin:end] == b'"m"'
    assert found.get("model") == "m"


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_a_duplicate_that_matters_is_400(name: str) -> None:
    """Two values of one deciding key: the engine may take the other one."""
    for first, second in (("1", "1"), ("1", "12"), ('"x"', '"xy"')):
        with pytest.raises(BadRequest) as caught:
            members(f'{{"{name}":{first},"q":0,"{name}":{second}}}').refuse_duplicates({name})
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "duplicate_key", name)


def test_a_duplicate_in_escapes_is_found() -> None:
    """A key spelt with an escape is the same key."""
    with pytest.raises(BadRequest):
        members('{"model":"a","mo\\u0064el":"b"}').refuse_duplicates({"model"})


def test_a_duplicate_in_another_case_matters_to_go() -> None:
    """Ollama's decoder compares keys without case."""
    found = members('{"model":"a","Model":"b"}')
    found.refuse_duplicates({"model"})
    with pytest.raises(BadRequest):
        found.refuse_duplicates({"model"}, fold=True)


def test_other_duplicates_pass() -> None:
    """Keys that decide nothing may occur twice; the last one counts, as engines read it."""
    found = members('{"x":1,"x":2}')
    found.refuse_duplicates({"model"})
    assert found.get("x") == 2


@pytest.mark.parametrize(
    "text",
    ['{"a":NaN}', '{"a":Infinity}', '{"a":-Infinity}', '{"a":1', '{"a":01}', "{'a':1}", '{"a":1}}', "", "nul", '{"a":1,}',
     '{"a":"\\ud83d","b":NaN}', '{"a":"\\ud83d"', b'{"a":"\xff"}', b'{"\xff":1}', '{"a":"\n"}', "\ufeff\ufeff{}"],
)  # fmt: skip
def test_what_is_not_json_is_400(text: str | bytes) -> None:
    """Constants, cut texts, bad UTF-8 and trailing characters are invalid JSON."""
    assert refusal(text) == (400, "invalid_json")


def test_utf16_is_400() -> None:
    """JSON on the wire is UTF-8; a parser that guesses would accept what the engine refuses."""
    assert refusal('{"a":1}'.encode("utf-16")) == (400, "invalid_json")


@pytest.mark.parametrize("text", ["[]", "[1]", "1", '"x"', "null", "true"])
def test_a_body_that_is_no_object_is_400(text: str) -> None:
    """Valid JSON of another kind is the wrong type."""
    assert refusal(text) == (400, "invalid_type")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [LIMITS.max_depth + 1, 900, 100_000])
def test_deep_nesting_is_400(opening: str, depth: int) -> None:
    """Any depth beyond the limit is refused, never a RecursionError."""
    closing = "]" if opening == "[" else "}"
    text = '{"a":' + opening * depth + "0" + closing * depth + "}"
    assert refusal(text) == (400, "nesting_too_deep")


def test_depth_up_to_the_limit_is_read() -> None:
    """The limit itself is allowed."""
    text = '{"a":' + "[" * LIMITS.max_depth + "]" * LIMITS.max_depth + "}"
    assert members(text).get("a") == json.loads("[" * LIMITS.max_depth + "]" * LIMITS.max_depth)


def test_a_lone_surrogate_is_read() -> None:
    """JavaScript clients cut emoji in half; the engines' parsers accept that."""
    assert members('{"a":"x\\ud83d"}').get("a") == "x\ud83d"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000, "123456789012345678901234567890", "1E+2", "-0"])
def test_numbers_of_any_size_do_not_break_the_parse(number: str) -> None:
    """Numbers in schemas are opaque."""
    assert len(members(f'{{"a":[{number}],"b":1}}').get("a")) == 1


def test_a_long_string_with_escapes_takes_the_slow_way_in_linear_memory() -> None:
    """A megabyte of escapes beside a lone surrogate is walked without trouble."""
    text = '{"model":"m","a":"\\ud83d' + '\\"' * 500_000 + '"}'
    found = members(text)
    assert len(found.get("a")) == 500_001


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("before", ["", '"x":1,"x":2,', '"x":"\\ud83d",', '"x":' + nested(900) + ',"x":1,'])
@pytest.mark.parametrize("value", [nested(900), '{"a":' + nested(96) + "}", "[1," * 97 + "1" + "]" * 97])
def test_depth_is_refused_where_nobody_looks(before: str, value: str) -> None:
    """A key that is never read goes to the engine too; the first of two values does."""
    with pytest.raises(BadRequest) as caught:
        members(f'{{"model":"m",{before}"metadata":{value}}}')
    assert (caught.value.status, caught.value.code) == (400, "nesting_too_deep")


@pytest.mark.parametrize("before", ["", '"x":1,"x":2,', '"x":"\\ud83d",'])
def test_many_brackets_are_not_depth(before: str) -> None:
    """Brackets in strings and side by side pass."""
    found = members(f'{{{before}"a":["{"[" * 900}",{"[]," * 900}{nested(90)}]}}')
    assert len(found.get("a")) == 902


def test_what_was_looked_into_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the depth of a long conversation is the decoding that its reader needs."""
    calls: list[str | None] = []
    really = jsonbody.decode_value

    def watched(raw: bytes, limits: BodyLimits, param: str | None) -> object:
        calls.append(param)
        return really(raw, limits, param)

    monkeypatch.setattr(jsonbody, "decode_value", watched)
    found = members('{"messages":[' + "{}," * 200 + '{}],"stop":["a"]}')
    assert (len(found.get("messages")), found.get("stop"), calls) == (201, ["a"], ["messages", "stop"])


@pytest.mark.parametrize("text", ['{"x":"\\ud83d"', '{"x":1,"x":2'])
def test_the_slow_way_stops_at_the_limit_of_keys(text: str) -> None:
    """The limit on keys holds for odd bodies as well, duplicates included."""
    with pytest.raises(BadRequest) as caught:
        members(text + "".join(f',"{number}":1' for number in range(1000)) + "}")
    assert (caught.value.status, caught.value.code) == (400, "too_many_members")


def test_the_slow_way_reads_each_byte_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is skipped by one call of the scanner, whatever is in it."""
    calls = 0

    class Watched:
        def raw_decode(self, text: str, at: int) -> tuple[object, int]:
            nonlocal calls
            calls += 1
            return scanner.raw_decode(text, at)

    scanner = jsonbody._scanner
    monkeypatch.setattr(jsonbody, "_scanner", Watched())
    found = members('{"model":"\\ud83d é","x":[' + "[]," * 10_000 + '1],"é":"é","n":2}')
    assert (calls, found.get("é"), found.get("n")) == (8, "é", 2)


@pytest.mark.parametrize(
    "text",
    ['{"x":"\\ud83d",}', '{"x":"\\ud83d" "y":1}', '{"x" "\\ud83d"}', '{"x":"\\ud83d"} 1', '{"x":"\\ud83d","y"}', '{"x":"\\ud83d",y:1}',
     '{"x":"\\ud83d","y":[1,}', '{"x":"\\ud83d","y":}'],
)  # fmt: skip
def test_the_slow_way_is_no_laxer(text: str) -> None:
    """What is not JSON beside a lone surrogate is refused as elsewhere."""
    assert refusal(text) == (400, "invalid_json")


def test_a_list_with_a_surrogate_is_no_object() -> None:
    """Valid, but not a request."""
    assert refusal('["\\ud83d"]') == (400, "invalid_type")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[1,2,3]", 3), ('{"a":[],"b":{}}', 4), ('["a,b","[{"]', 2), (r'["a\",[","b\\",1]', 3), (r'["\\\",[[",1]', 2),
        ('["' + "x" * 300_000 + ',[",' + "1," * 9 + "1]", 11), ('["' + ",[" * 200_000 + '",1]', 2),
    ],
)  # fmt: skip
def test_values_are_told_from_text(text: str, values: int) -> None:
    """Commas and brackets within strings are no values, escapes and long strings included."""
    assert values_of(text.encode(), 1) == values


def test_values_that_may_be_few_are_not_told_from_text() -> None:
    """The rough count is an upper bound; it is the answer where it is small enough."""
    assert values_of(b'["a,b",1]', 5) == 3
    assert values_of(b"[" + b"[]," * 500_000 + b"1]", 10) < 400_000  # stopped early


@pytest.mark.parametrize("value", ["[" + "{}," * 60 + "1]", "[" + "1," * 120 + "1]", "[" + '"",' * 120 + "1]"])
def test_a_body_of_too_many_values_is_413_before_it_is_decoded(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is of the bytes; nothing is decoded."""
    limits = BodyLimits(max_values=100)
    text = f'{{"model":"m","messages":{value}}}'.encode()
    monkeypatch.setattr(jsonbody, "_members", None)
    with pytest.raises(BadRequest) as caught:
        Members(text, limits)
    assert (caught.value.status, caught.value.code) == (413, "too_complex")


def test_text_is_not_too_complex() -> None:
    """A table with more commas than the limit has values, in one string."""
    assert Members(b'{"a":"' + b"1,2,[3]," * 100 + b'"}', BodyLimits(max_values=100)).get("a")[:4] == "1,2,"
