"""Values of a wrong type anywhere: the engine's parser would refuse or ignore them, ours must not fall over them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.dialects import BodyLimits, parse
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.types import RequestHead
from tests.engines.conversations import Dice, anthropic, chat, responses
from tests.fuzz.corpus import SHAPES
from tests.payloads.tokenizers import counter

ODD: tuple[Any, ...] = (None, True, -1, 1e300, "x", [], [[]], [{"type": "f"}], {}, {"a": {"b": []}})

MADE = [("/chat/completions", chat), ("/messages", anthropic), ("/responses", responses)]
BODIES = [*SHAPES, *((path, make(Dice(seed))) for path, make in MADE for seed in (3, 4))]


def replaced(value: Any) -> Iterator[Any]:
    """The value with each of its parts, in turn, made odd."""
    yield from ODD
    if isinstance(value, dict):
        for name, inner in value.items():
            for new in replaced(inner):
                yield {**value, name: new}
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            for new in replaced(inner):
                yield [*value[:index], new, *value[index + 1 :]]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path[1:]}-{n}" for n, (path, _) in enumerate(BODIES)])
def test_any_odd_value_is_understood_or_refused(path: str, body: dict[str, Any]) -> None:
    """A request with a count and a bound, or a 4xx; found by fuzzing: an item whose ``type`` is a list."""
    known = counter("deepseek-v2")
    for number, odd in enumerate(replaced(body)):
        try:
            found = parse(RequestHead("POST", path, {}), json.dumps(odd).encode(), BodyLimits()).request
        except BadRequest:
            continue
        assert found is not None
        assert PromptCounter().count(found).input_tokens >= 0
        if number % 9 == 0:
            assert known.count(found).input_tokens >= 0
