"""Counting beside the loop: what runs where, deadlines, memory, one count per model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from extproc.counting import GIANT_BYTES, INLINE_BYTES, MAX_PENDING_BYTES, CounterSpec, Counting
from extproc.dialects import BodyLimits, InferenceRequest
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.tokens.encoders import Vocabulary
from extproc.types import RequestHead
from tests.payloads.tokenizers import tokenizer_dir
from tests.unit.dialects.asking import request

HEAD = RequestHead("POST", "/v1/completions", {})


class Words:
    """An encoder that counts words, remembers its threads, and waits when told to."""

    name = "words"

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(10)
        return len(text.split())

    def remembered_bytes(self) -> int:
        return 7


def ask(size: int) -> InferenceRequest:
    return request("/v1/completions", {"model": "m", "prompt": "w " * (size // 2)})


@pytest.fixture
async def words() -> AsyncIterator[tuple[Words, Counting]]:
    encoder = Words()
    counter = PromptCounter(vocabulary=Vocabulary(encoder, 10, True, False, frozenset(), 0))
    counting = Counting({"a": counter, "b": counter}, deadline_ms=300)
    yield encoder, counting
    encoder.gate.set()
    counting.close()


@pytest.mark.parametrize(("size", "where"), [(100, "MainThread"), (INLINE_BYTES * 2, "kvgate-count_0"), (GIANT_BYTES * 2, "kvgate-count-giant_0")])  # fmt: skip
async def test_the_size_decides_where_a_count_runs(words: tuple[Words, Counting], size: int, where: str) -> None:
    """Small ones on the loop, longer ones in threads, giants in a thread of their own."""
    encoder, counting = words
    found = await counting.per_target(["a"], ask(size))
    assert (found["a"].input_tokens, found["a"].source) == (size // 2, "exact")
    assert encoder.threads == [where]
    assert counting.stats.pending_bytes == 0


async def test_targets_of_one_model_are_counted_once(words: tuple[Words, Counting]) -> None:
    """And an unknown target gets the bound."""
    encoder, counting = words
    found = await counting.per_target(["a", "b", "remote"], ask(100))
    assert (found["a"], found["remote"].source) == (found["b"], "bound")
    assert len(encoder.threads) == 1
    assert counting.remembered_bytes() == 7


async def until(condition: Callable[[], bool], *, patience: int = 1000) -> None:
    for _ in range(patience):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not happen")


async def test_a_deadline_answers_with_the_bound(words: tuple[Words, Counting]) -> None:
    """The request goes on with a figure that is not below; the bytes stay pending until the thread is done."""
    encoder, counting = words
    encoder.gate.clear()
    big = ask(INLINE_BYTES * 2)
    found = await counting.count(PromptCounter(vocabulary=counting._counters["a"].vocabulary), big, deadline_ms=30)
    assert found.source == "bound"
    assert found.input_tokens >= INLINE_BYTES
    assert (counting.stats.deadlines, counting.stats.pending_bytes) == (1, big.body_bytes)
    encoder.gate.set()
    await until(lambda: counting.stats.pending_bytes == 0)


async def test_stuck_giants_do_not_hold_up_others(words: tuple[Words, Counting]) -> None:
    """With the giants' thread blocked, an agent's turn is counted at once."""
    encoder, counting = words
    encoder.gate.clear()
    giants = [asyncio.create_task(counting.per_target(["a"], ask(GIANT_BYTES * 2))) for _ in range(3)]
    await until(lambda: "kvgate-count-giant_0" in encoder.threads)
    encoder.gate.set()
    found = await counting.per_target(["a"], ask(INLINE_BYTES * 2))
    assert found["a"].source == "exact"
    assert [(await giant)["a"].source for giant in giants] == ["exact"] * 3


async def test_pending_bytes_are_bounded(words: tuple[Words, Counting]) -> None:
    """Beyond the limit nothing is queued; the bound answers."""
    encoder, counting = words
    counting.stats.pending_bytes = MAX_PENDING_BYTES
    found = await counting.per_target(["a"], ask(INLINE_BYTES * 2))
    assert (found["a"].source, counting.stats.refused_for_memory) == ("bound", 1)
    assert encoder.threads == []


async def test_giants_are_parsed_beside_the_loop(words: tuple[Words, Counting]) -> None:
    """The same result, the same refusals."""
    _, counting = words
    body = b'{"model":"m","prompt":"' + b"x" * (GIANT_BYTES * 2) + b'"}'
    parsed = await counting.parse(HEAD, body, BodyLimits())
    assert (parsed.model, parsed.body is body) == ("m", True)
    with pytest.raises(BadRequest):
        await counting.parse(HEAD, body[:-1], BodyLimits())
    with pytest.raises(BadRequest):
        await counting.parse(HEAD, b"{", BodyLimits())


@pytest.fixture(scope="module")
def one_helper() -> Iterator[Counting]:
    """One helper process for all tests of this module; it takes a while to start."""
    spec = CounterSpec(str(tokenizer_dir("deepseek-coder-33b-base") / "tokenizer.json"))
    counting = Counting({"t": spec.load()}, specs={"t": spec}, deadline_ms=5000)
    counting.start_giant_helper()
    yield counting
    counting.close()


@pytest.fixture
async def helped(one_helper: Counting) -> Counting:
    await until(one_helper.helper_ready, patience=12_000)
    return one_helper


GIANT = b'{"model":"m","prompt":"' + b"word " * (GIANT_BYTES // 4) + b'","max_tokens":9}'


async def test_the_helper_parses_and_counts_giants(helped: Counting) -> None:
    """The same figures as here, the body is the client's own, the prompts stay away."""
    parsed = await helped.parse(HEAD, GIANT, BodyLimits())
    here = request("/v1/completions", GIANT)
    assert parsed.request is not None
    assert (parsed.body is GIANT, parsed.model_span, parsed.request.prompts) == (True, here.model_span, ())
    assert (parsed.request.max_output_tokens, parsed.request.sequences) == (9, 1)
    found = await helped.per_target(["t", "remote"], parsed.request)
    expected = helped._counters["t"].count(here)
    assert (found["t"].per_prompt, found["t"].source) == (expected.per_prompt, "exact")
    assert found["remote"].per_prompt == helped._counters["t"].bound(here).per_prompt


async def test_the_helper_decodes_and_refuses(helped: Counting) -> None:
    """A compressed giant comes back as plain bytes; a refusal is the same refusal."""
    noise = "".join(chr(33 + i * 7919 % 90) for i in range(GIANT_BYTES * 2)).replace('"', "").replace("\\", "")
    plain = b'{"model":"m","prompt":"' + noise.encode() + b'"}'
    packed = zlib.compress(plain, 0)
    parsed = await helped.parse(
        RequestHead("POST", "/v1/completions", {"content-encoding": "deflate"}), packed, BodyLimits()
    )
    assert (parsed.decoded, parsed.body) == (True, plain)
    with pytest.raises(BadRequest) as caught:
        await helped.parse(HEAD, GIANT[:-1], BodyLimits())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


async def test_a_lost_helper_is_replaced(helped: Counting) -> None:
    """A giant whose prompts died with it gets a figure that is not below; the next ones are served."""
    parsed = await helped.parse(HEAD, GIANT, BodyLimits())
    assert parsed.request is not None
    assert helped._helper is not None
    os.kill(helped._helper.pid, signal.SIGKILL)
    lost = await helped.per_target(["t"], parsed.request)
    assert lost["t"].source == "bound"
    assert lost["t"].input_tokens >= len(GIANT)
    assert helped.stats.helpers_lost >= 1
    again = await helped.parse(HEAD, GIANT, BodyLimits())
    assert again.request is not None
    assert (await helped.per_target(["t"], again.request))["t"].input_tokens > 1000
