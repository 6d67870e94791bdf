"""Counting beside the loop: what runs where, deadlines, memory, one count per model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from extproc.counting import GIANT_BYTES, INLINE_BYTES, MAX_PENDING_BYTES, CounterSpec, Counting, giants
from extproc.counting.pool import INLINE_BOUND_BYTES, INLINE_VALUES
from extproc.dialects import BodyLimits, InferenceRequest
from extproc.errors import BadRequest
from extproc.tokens import PromptCounter
from extproc.tokens.encoders import Vocabulary
from extproc.types import RequestHead
from tests.payloads.tokenizers import tokenizer_dir
from tests.unit.dialects.asking import request

HEAD = RequestHead("POST", "/v1/completions", {})
#: A deadline that no busy machine meets.
PATIENT_MS = 60_000


class Words:
    """An encoder that counts words, remembers its threads, and waits when told to."""

    name = "words"

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(PATIENT_MS / 1000)
        return len(text.split())

    def remembered_bytes(self) -> int:
        return 7


def ask(size: int) -> InferenceRequest:
    return request("/v1/completions", {"model": "m", "prompt": "w " * (size // 2)})


@pytest.fixture
async def words() -> AsyncIterator[tuple[Words, Counting]]:
    encoder = Words()
    counter = PromptCounter(vocabulary=Vocabulary(encoder, 10, True, False, frozenset(), 0))
    counting = Counting({"a": counter, "b": counter}, deadline_ms=PATIENT_MS)
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


async def until(condition: Callable[[], bool], *, patience: int = 12_000) -> None:
    for _ in range(patience):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not happen")


async def test_a_deadline_answers_with_the_bound(words: tuple[Words, Counting]) -> None:
    """The request goes on with a figure that is not below; the bytes stay pending until the thread is done."""
    encoder, patient = words
    encoder.gate.clear()
    big = ask(INLINE_BYTES * 2)
    # With a clock that stands still the thread does not see for itself, before it begins, that it is too late.
    counting = Counting(patient._counters, clock_s=lambda: 0.0)
    found = await counting.count(counting._counters["a"], big, deadline_ms=30)
    assert found.source == "bound"
    assert found.input_tokens >= INLINE_BYTES
    assert (counting.stats.deadlines, counting.stats.pending_bytes) == (1, big.body_bytes)
    encoder.gate.set()
    await until(lambda: counting.stats.pending_bytes == 0)
    counting.close()


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


@pytest.mark.parametrize(("size", "inline"), [(INLINE_BOUND_BYTES // 2, 1), (INLINE_BOUND_BYTES * 2, 0)])
async def test_a_long_bound_is_no_work_for_the_loop(words: tuple[Words, Counting], size: int, inline: int) -> None:
    """Without a tokenizer the bound is all there is; a long text's is computed in a thread."""
    _, counting = words
    found = await counting.per_target(["remote"], ask(size))
    assert (found["remote"].source, counting.stats.inline, counting.stats.threaded) == ("bound", inline, 1 - inline)


async def test_what_may_unpack_to_a_giant_is_parsed_beside_the_loop(words: tuple[Words, Counting]) -> None:
    """A few kilobytes of gzip can be a megabyte of JSON; those that cannot are parsed at once."""
    _, counting = words
    head = RequestHead("POST", "/v1/completions", {"content-encoding": "deflate"})
    plain = b'{"model":"m","prompt":"' + b"word " * 60_000 + b'"}'
    small, large = zlib.compress(plain, 9), zlib.compress(plain, 0)
    assert len(small) * BodyLimits().max_ratio < GIANT_BYTES < len(large) * BodyLimits().max_ratio
    assert (await counting.parse(head, small, BodyLimits())).body == plain
    assert not counting._medium._threads
    assert (await counting.parse(head, large, BodyLimits())).body == plain
    assert len(counting._medium._threads) == 1


@pytest.fixture(scope="module")
def one_helper() -> Iterator[Counting]:
    """One helper process for all tests of this module; it takes a while to start."""
    spec = CounterSpec(str(tokenizer_dir("deepseek-coder-33b-base") / "tokenizer.json"))
    counting = Counting({"t": spec.load()}, specs={"t": spec}, deadline_ms=PATIENT_MS)
    counting.start_giant_helper()
    yield counting
    counting.close()


@pytest.fixture
async def helped(one_helper: Counting, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """The helper, ready, and with more time for an answer than a busy machine needs."""
    monkeypatch.setattr(giants, "ANSWER_S", PATIENT_MS / 1000)
    await until(one_helper.helper_ready)
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


def crowd(values: int) -> bytes:
    """A chat of many content parts of no type."""
    return b'{"model":"m","messages":[{"role":"user","content":[' + b"{}," * (values // 2) + b"1]}]}"


CHAT = RequestHead("POST", "/v1/chat/completions", {})


async def test_a_body_of_many_values_goes_to_the_helper(helped: Counting) -> None:
    """It costs a giant's time however few its bytes; text with as many commas does not."""
    body = crowd(2 * INLINE_VALUES)
    assert INLINE_BYTES < len(body) < GIANT_BYTES
    parsed = await helped.parse(CHAT, body, BodyLimits())
    assert parsed.request is not None
    assert (parsed.request.handle > 0, parsed.request.unknown_parts) == (True, INLINE_VALUES + 1)
    found = await helped.per_target(["t"], parsed.request)
    assert found["t"].input_tokens > parsed.request.unknown_parts * 1000
    text = b'{"model":"m","prompt":"' + b"{}," * INLINE_VALUES + b'"}'
    plain = await helped.parse(HEAD, text, BodyLimits())
    assert plain.request is not None
    assert plain.request.handle == 0


async def test_a_body_of_too_many_values_is_refused_by_the_helper(helped: Counting) -> None:
    """Before it is decoded, so that the helper is there for the next one."""
    before = helped.stats.helpers_lost
    with pytest.raises(BadRequest) as caught:
        await helped.parse(CHAT, crowd(40_000), BodyLimits(max_values=30_000))
    assert (caught.value.status, caught.value.code, helped.stats.helpers_lost) == (413, "too_complex", before)


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
async def test_what_the_helper_gave_up_on_is_not_parsed_again(
    helped: Counting, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that took the helper too long, or its life, is refused, though this process could have parsed it."""
    answer_s = 0.5 if blow == signal.SIGSTOP else PATIENT_MS / 1000 - 1
    monkeypatch.setattr(giants, "ANSWER_S", answer_s)
    helper = helped._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGSTOP)
    asked = asyncio.create_task(helped.parse(HEAD, GIANT, BodyLimits()))
    if blow == signal.SIGKILL:
        await until(lambda: helper._link.gettimeout() == answer_s)  # the body is on its way
        os.kill(helper.pid, blow)
    with pytest.raises(BadRequest) as caught:
        await asked
    assert (caught.value.status, caught.value.code) == (413, "too_complex")
    assert helped._helper is not helper


async def test_a_control_call_that_the_helper_gave_up_on_passes(
    helped: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread: control calls are never refused for their body."""
    monkeypatch.setattr(giants, "ANSWER_S", 0.2)
    assert helped._helper is not None
    os.kill(helped._helper.pid, signal.SIGSTOP)
    parsed = await helped.parse(RequestHead("POST", "/tokenize", {}), GIANT, BodyLimits())
    assert (parsed.route.kind, parsed.body is GIANT, parsed.request) == ("control", True, None)


async def test_a_helper_that_ended_by_itself_costs_nobody_a_request(helped: Counting) -> None:
    """A giant that comes afterwards is parsed here, and another helper started."""
    helper = helped._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGKILL)
    await until(helper.ended)
    parsed = await helped.parse(HEAD, GIANT, BodyLimits())
    assert parsed.request is not None
    assert (parsed.request.handle, helped._helper is helper) == (0, False)


async def test_a_lost_giant_is_bounded_by_what_it_may_print_as(helped: Counting) -> None:
    """Tools nested deep print as a hundred times their bytes; the figure without the prompts is not below that."""
    deep = b"[" * 90 + b"1," * GIANT_BYTES + b"1" + b"]" * 90
    body = b'{"model":"m","messages":[{"role":"user","content":[1]}],"tools":[' + deep + b"]}"
    parsed = await helped.parse(CHAT, body, BodyLimits())
    assert parsed.request is not None
    assert helped._helper is not None
    os.kill(helped._helper.pid, signal.SIGKILL)
    await until(helped._helper.ended)
    lost = (await helped.per_target(["t"], parsed.request))["t"]
    a_line = len("\n" + "    " * 91 + "1,")
    assert lost.input_tokens >= GIANT_BYTES * a_line
