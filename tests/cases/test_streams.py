"""Public bug reports of kind d: what Envoy and clients do to an ext_proc stream, and what becomes of the reservation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from extproc import wire
from extproc.ledger.base import ReplicaState, ReserveRequest, ReserveResult
from extproc.ledger.inmemory import InMemoryLedger
from extproc.server import start
from extproc.wire import pb
from tests.cases.sidecar import (
    BUFFERED,
    Answer,
    Sidecar,
    Stream,
    body,
    chat,
    device,
    fleet,
    head,
    report,
    tokens,
    trailers,
)

MODES = pb.ProtocolConfiguration
Make = Callable[..., Sidecar]
BODY = chat(max_tokens=5)[1]


@pytest.fixture
def make() -> Iterator[Make]:
    """Sidecars that are closed in the end."""
    made: list[Sidecar] = []

    def one(text: str = fleet(), **more: Any) -> Sidecar:
        made.append(Sidecar(text, **more))
        return made[-1]

    yield one
    for sidecar in made:
        sidecar.close()


class Faulty(InMemoryLedger):
    """A ledger that takes the room and then breaks, as a bug of ours might."""

    async def reserve(self, request: ReserveRequest) -> ReserveResult:
        """Reserve, and answer with an exception."""
        await super().reserve(request)
        raise ValueError("broken")


class Reset(Stream):
    """A stream that Envoy resets: what can be read ends, and the call's task is cancelled next."""

    async def read(self) -> Any:
        """The next message, or the end that a reset looks like."""
        message = await super().read()
        task = asyncio.current_task()
        if message is grpc.aio.EOF and task is not None:
            asyncio.get_running_loop().call_soon(task.cancel)
        return message


@pytest.mark.parametrize("size", [67_000, 120_000, 1_048_576, 2_000_000])
async def test_d02_bodies_of_coding_agents_pass_by_default(make: Make, size: int) -> None:
    """Nothing of ours refuses 67 KB to 2 MB; the default limit is above 4 MiB."""
    sidecar = make()
    await sidecar.see(report(tokens=4_000_000))
    *_, answer = await sidecar.answer(head(), body(chat("x" * size)[1]))
    assert answer.plan == ("gpu-0",)
    assert sidecar.config.serve.max_body_bytes >= 4 * 1024 * 1024


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.STREAMED, MODES.BUFFERED_PARTIAL, MODES.FULL_DUPLEX_STREAMED])
async def test_d03_d09_a_mode_in_which_no_decision_can_route_is_refused_at_once(make: Make, mode: int) -> None:
    """A cut body is never parsed as the whole, and no answer of the wrong form is sent: one clear 503."""
    sidecar = make()
    await sidecar.see(report())
    (answer,) = await sidecar.answer(head(mode=mode))
    assert (answer.status, answer.reason, answer.body["error"]["code"]) == (503, "internal", "internal_error")
    assert await sidecar.reserved() == []


@pytest.mark.parametrize("mode", [BUFFERED, MODES.STREAMED])
async def test_a_refusal_is_the_last_word(make: Make, mode: int) -> None:
    """Envoy resets a stream that refuses, so nothing more is read or written on it: each such loss costs memory for ever."""
    sidecar = make()
    await sidecar.see(report())
    stream = Stream(iter([head(mode=mode, content_length="99999999"), body(BODY)]))
    last = await sidecar.runtime.service.process(stream, stream)
    assert last.immediate_response.status.code == (413 if mode == BUFFERED else 503)
    assert stream.written == []
    assert [message.WhichOneof("request") for message in stream.sent] == ["request_body"]


async def test_nothing_is_sent_after_a_reset(make: Make) -> None:
    """A client that leaves during its upload costs no memory: the end of what can be read is not answered at once."""
    stream = Reset(iter([head()]))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(make().runtime.service.process(stream, stream))
    assert len(stream.written) == 1


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.STREAMED, MODES.BUFFERED_PARTIAL, MODES.FULL_DUPLEX_STREAMED])
async def test_d22_requests_without_a_body_need_no_body_mode(make: Make, mode: int) -> None:
    """GETs and upgrades are decided by their head alone."""
    sidecar = make()
    (answer,) = await sidecar.answer(head("/v1/realtime", method="GET", last=True, mode=mode, upgrade="websocket"))
    assert (answer.status, answer.metadata["decision"]) == (0, "pass")


@pytest.mark.parametrize(("mode", "more"), [(BUFFERED, []), (None, [(), ()])])
async def test_d07_a_second_end_of_stream_reserves_nothing(make: Make, mode: int | None, more: list[Any]) -> None:
    """One parse, one reservation: a body announced as one message ends the stream, else more is answered neutrally."""
    sidecar = make()
    await sidecar.see(report(tokens=2_000_000))
    whole = chat("x" * 600_000)[1]
    answers = await sidecar.answer(head(mode=mode), body(whole), body(b"y" * 500_000), body(b"", last=True))
    assert [answer.plan for answer in answers] == [(), ("gpu-0",), *more]
    assert len(await sidecar.reserved()) == 1


async def test_d10_a_body_with_trailers_behind_it_is_decided_once(make: Make) -> None:
    """The body message has no end of stream then, and the trailers are answered."""
    sidecar = make()
    await sidecar.see(report())
    answers = await sidecar.answer(head(), body(BODY, last=False), trailers())
    assert [answer.plan for answer in answers] == [(), ("gpu-0",), ()]
    assert len(await sidecar.reserved()) == 1


async def test_d15_a_fault_of_ours_is_an_answer_and_leaves_nothing_reserved(make: Make) -> None:
    """An exception after the room was taken: 503 in JSON at once, the room given back, the fault counted."""
    sidecar = make(ledger=Faulty(time.time, periodic_s=1.0))
    await sidecar.see(report())
    *_, answer = await sidecar.answer(head(), body(BODY))
    assert (answer.status, answer.reason, answer.headers["content-type"]) == (503, "internal", "application/json")
    assert await sidecar.reserved() == []
    found = sidecar.samples()
    assert found['kvgate_internal_errors_total{where="decision"}'] == 1
    assert found["kvgate_exchanges_undecided"] == found["kvgate_extproc_streams"] == 0


async def test_d13_d21_a_client_that_leaves_while_we_decide_leaves_nothing(make: Make) -> None:
    """A stream cancelled in the middle of the ledger call gives back what that call took."""
    entered = asyncio.Event()

    class Slow(InMemoryLedger):
        async def reserve(self, request: ReserveRequest) -> ReserveResult:
            result = await super().reserve(request)
            entered.set()
            await asyncio.sleep(60)
            return result

    sidecar = make(ledger=Slow(time.time, periodic_s=1.0))
    await sidecar.see(report())
    stream = asyncio.create_task(sidecar.answer(head(), body(BODY)))
    await entered.wait()
    assert len(await sidecar.reserved()) == 1
    assert sidecar.samples()["kvgate_exchanges_undecided"] == 1
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    await sidecar.runtime.service.settle()
    assert await sidecar.reserved() == []
    assert sidecar.samples()["kvgate_exchanges_undecided"] == 0


async def test_d16_d17_a_body_over_grpcs_default_limit_comes_in_and_does_not_go_back(make: Make) -> None:
    """8 MB over a real gRPC socket; the answer says what to do and holds no byte of the body."""
    sidecar = make()
    await sidecar.see(report(tokens=20_000_000))
    bound: list[str] = []
    server = await start(sidecar.runtime.service, "127.0.0.1:0", sidecar.config.serve.max_body_bytes, bound.append)
    try:
        async with grpc.aio.insecure_channel(bound[0], options=[("grpc.max_send_message_length", -1)]) as channel:
            call = channel.stream_stream(
                f"/{wire.EXT_PROC_SERVICE}/{wire.EXT_PROC_PROCESS}",
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )()
            await call.write(head())
            await call.read()
            await call.write(body(chat("x" * 8_000_000)[1]))
            answer = await call.read()
            assert await call.read() is grpc.aio.EOF  # nothing more can come, so the stream is over
    finally:
        await server.stop(None)
    assert answer.request_body.response.clear_route_cache
    assert not answer.request_body.response.HasField("body_mutation")
    assert answer.ByteSize() < 4096


async def test_d19_internal_headers_of_a_client_steer_nothing(make: Make) -> None:
    """Lane, endpoint and reservation of our own choice, also where Envoy's removal was forgotten."""
    sidecar = make(fleet(more="laneHeader: {name: x-team-lane, trustedCidrs: [10.0.0.0/8]}\n"))
    await sidecar.see(report())
    spoofed = {"x_gateway_destination_endpoint": "10.0.0.9:8000", "x_team_lane": "vip", "x_kvgate_rid": "r-1"}
    *_, answer = await sidecar.answer(head(**spoofed), body(BODY))
    assert (answer.plan, answer.metadata["lane"]) == (("gpu-0",), "edit")
    (rid,) = await sidecar.reserved()
    assert rid == answer.metadata["rid"] != "r-1"


#: What is the matter -> configuration, the engine's report (None: nobody reported), the request, status and reason.
REFUSALS: dict[str, tuple[str, dict[str, Any] | None, tuple[str, bytes], int, str]] = {
    "nobody reported": (fleet(), None, tokens(100), 503, "unknown_state"),
    "engine gone": (fleet(), {"state": ReplicaState.LOST}, tokens(100), 503, "unknown_state"),
    "telemetry old": (fleet(), {"age_s": 60.0}, tokens(100), 503, "unknown_state"),
    "draining": (fleet(), {"state": ReplicaState.DRAINING}, tokens(100), 503, "not_ready"),
    "engine full": (fleet(), {"used_blocks": 6200, "running": 9}, tokens(1000), 429, "insufficient_headroom"),
    "card full": (fleet(), {"free_mb": 10}, tokens(100), 429, "insufficient_headroom"),
    "engine queues": (fleet(), {"waiting": 40, "running": 9}, tokens(100), 429, "engine_queue"),
    "sequences": (fleet(), {"max_sequences": 4}, tokens(100, n=8), 429, "sequences_full"),
    "lane over budget": (fleet(lane="{maxInputTokens: 50}"), {}, tokens(100), 400, "prompt_budget_exceeded"),
    "over the context": (fleet(), {"max_model_tokens": 150}, tokens(100), 400, "exceeds_context"),
    "over the pool": (fleet(), {"tokens": 160}, tokens(1000), 400, "exceeds_pool"),
    "no such model": (fleet(), {}, chat(model="other"), 404, "unknown_model"),
}


@pytest.mark.parametrize("matter", REFUSALS)
async def test_d23_d24_every_refusal_says_what_is_the_matter(make: Make, matter: str) -> None:
    """Status, reason, retry headers and error body of each, and nothing goes anywhere instead."""
    text, seen, (path, data), status, reason = REFUSALS[matter]
    sidecar = make(text)
    if seen is not None:
        free_mb = seen.get("free_mb", 20_000)
        shown = {key: value for key, value in seen.items() if key != "free_mb"}
        await sidecar.see(report(**shown), devices=[device(free_mb)])
    if matter == "sequences":
        await sidecar.decide(tokens(100))
    *_, answer = await sidecar.answer(head(path), body(data))
    assert (answer.status, answer.reason, answer.plan) == (status, reason, ())
    assert answer.body["error"]["reason"] == reason
    assert answer.headers["x-should-retry"] == ("true" if status in (429, 503) else "false")
    assert ("retry-after" in answer.headers) is (status in (429, 503))
    (row, *_) = await sidecar.log.recent(1)
    assert row["outcome"] == f"reject:{reason}"


async def test_d24_a_full_lane_is_told_apart_from_a_full_engine(make: Make) -> None:
    """lane_full is 429 like a full pool, and has its own name."""
    sidecar = make(fleet(lane="{concurrency: 1}"))
    await sidecar.see(report())
    answers: list[Answer] = []
    for _ in range(2):
        answers += await sidecar.answer(head(), body(BODY))
    assert (answers[1].plan, answers[3].status, answers[3].reason) == (("gpu-0",), 429, "lane_full")


async def test_d26_a_declared_length_over_the_limit_is_answered_before_the_body(make: Make) -> None:
    """413 with a complete body in the client's dialect, and no retry."""
    sidecar = make(fleet(more="serve: {maxBodyBytes: 10485760}\n"))
    (answer,) = await sidecar.answer(head(content_length="20000000"))
    assert (answer.status, answer.reason) == (413, "body_too_large")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.body["error"]["code"] == "request_too_large"
    (anthropic,) = await sidecar.answer(head("/v1/messages", content_length="20000000"))
    assert (anthropic.status, anthropic.body["type"]) == (413, "error")


async def test_i10_demand_without_any_engine_is_counted(make: Make) -> None:
    """Five requests for a model without a live replica count by lane and reason; an unknown model stands elsewhere."""
    sidecar = make()
    await sidecar.see()
    for model in ["coder"] * 5 + ["no-such-model"]:
        await sidecar.answer(head(), body(json.dumps({"model": model, "messages": []}).encode()))
    found = sidecar.samples()
    series = 'kvgate_decisions_total{{decision="reject",lane="{}",mode="enforce",reason="{}",target="none"}}'
    assert found[series.format("edit", "unknown_state")] == 5
    assert found[series.format("none", "unknown_model")] == 1
    assert found['kvgate_requested_models_total{decision="reject",model="coder"}'] == 5
