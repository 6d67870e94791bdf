"""The emulated engine over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from extproc.local.emulator_server import EmulatedEngine
from extproc.local.emulator_settings import Settings
from extproc.local.paged import EngineShape

#: What takes longer never comes.
WITHIN_S = 60.0
FAST = EngineShape(
    blocks=201,
    block_tokens=16,
    max_model_tokens=3200,
    step_base_s=0.002,
    prefill_tokens_per_s=1e6,
    decode_tokens_per_s=1e6,
)
SETTINGS = Settings(shape=FAST, served=("m",), chunk_interval_s=0.0)
CELLS = EngineShape(
    blocks=400,
    block_tokens=1,
    max_sequences=4,
    max_model_tokens=400,
    step_base_s=0.002,
    overflow="fatal",
    null_block=False,
)


@asynccontextmanager
async def emulated(settings: Settings = SETTINGS) -> AsyncIterator[EmulatedEngine]:
    """One engine on an ephemeral port."""
    engine = EmulatedEngine(settings)
    await engine.listen()
    try:
        yield engine
    finally:
        await engine.close()


def wire(path: str, body: dict[str, object] | None = None, **headers: str) -> bytes:
    """The bytes of one request; a body makes it a POST."""
    payload = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: x", f"content-length: {len(payload)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + payload


async def call(
    engine: EmulatedEngine, path: str, body: dict[str, object] | None = None, **headers: str
) -> tuple[int, str]:
    """Status and everything behind the head of one answer, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    try:
        writer.write(wire(path, body, connection="close", **headers))
        raw = await asyncio.wait_for(reader.read(), WITHIN_S)
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, rest = raw.decode().partition("\r\n\r\n")
    assert "server: kvgate-emulated-engine" in head
    return int(head.split(" ")[1]), rest


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; the test's timeout is the bound."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - the engine under test has no event to wait for
            await asyncio.sleep(0.002)


async def shut(writer: asyncio.StreamWriter) -> None:
    """Wait until a closed connection is gone, reset or not."""
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def drain(reader: asyncio.StreamReader) -> None:
    """Read to the end of a connection."""
    while await reader.read(65536):
        pass


def prompt(tokens: int, **more: object) -> dict[str, object]:
    """A completions body of so many tokens that runs to its cap."""
    return {"model": "m", "prompt": [1] * tokens, "ignore_eos": True, **more}


async def test_a_chat_answer_carries_its_usage() -> None:
    """Text of 4 bytes a token, usage, finish reason and the request's id."""
    async with emulated() as engine:
        body = {"model": "m", "messages": [{"role": "user", "content": "abcd"}], "max_tokens": 7, "ignore_eos": True}
        status, text = await call(engine, "/v1/chat/completions", body, x_request_id="r-1")

    answer = json.loads(text)
    assert (status, answer["id"], answer["object"]) == (200, "chatcmpl-r-1", "chat.completion")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["message"]["content"]) == 28


@pytest.mark.parametrize("asked", [True, False])
async def test_a_stream_ends_with_done_and_with_usage_only_if_asked(asked: bool) -> None:
    """SSE chunks, the usage chunk with empty choices where asked for, then [DONE]."""
    async with emulated() as engine:
        body = prompt(3, max_tokens=5, stream=True, stream_options={"include_usage": asked})
        _, text = await call(engine, "/v1/completions", body)

    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert sum(len(choice["text"]) for chunk in chunks for choice in chunk["choices"]) == 20
    usages = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    assert usages == ([{"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}] if asked else [])


async def test_a_gone_client_frees_its_blocks_within_a_step() -> None:
    """Running drops to none and the pool is empty soon after a client leaves in mid-stream."""
    slow = replace(SETTINGS, shape=replace(FAST, step_base_s=0.02))
    async with emulated(slow) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(wire("/v1/completions", prompt(100, max_tokens=3000, stream=True)))
        await reader.readuntil(b"data: ")
        held = engine.engine.pool.used
        writer.close()
        await shut(writer)
        await until(lambda: not engine.engine.busy)
        stats = engine.stats()

    assert held >= 7  # 100 tokens of prompt; what was written until we looked comes on top
    assert (stats["used_blocks"], stats["aborted"], stats["open_requests"]) == (0, 1, 0)
    requests = stats["requests"]
    assert isinstance(requests, list)
    assert requests[0]["outcome"] == "aborted"


async def test_metrics_have_the_names_and_labels_of_vllm() -> None:
    """The series an agent reads are there, with the pool's size and the counts so far."""
    async with emulated() as engine:
        await call(engine, "/v1/completions", prompt(10, max_tokens=4))
        _, text = await call(engine, "/metrics")

    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="m"}'
    assert series[f"vllm:kv_cache_usage_perc{labels}"] == "0.0"
    assert series[f"vllm:prompt_tokens_total{labels}"] == "10.0"
    assert series[f"vllm:generation_tokens_total{labels}"] == "4.0"
    assert series[f"vllm:time_to_first_token_seconds_count{labels}"] == "1.0"
    assert any('block_size="16"' in name and 'num_gpu_blocks="201"' in name for name in series)


async def test_a_full_unified_cache_fails_every_running_request() -> None:
    """The llama.cpp personality answers all running requests 500 with llama.cpp's message and counts one event."""
    async with emulated(replace(SETTINGS, shape=CELLS, personality="llamacpp")) as engine:
        answers = await asyncio.gather(*[call(engine, "/v1/completions", prompt(60, max_tokens=80)) for _ in range(4)])
        _, props = await call(engine, "/props")
        stats = engine.stats()

    assert [status for status, _ in answers] == [500] * 4
    assert all("Context size has been exceeded." in text for _, text in answers)
    assert (stats["over_capacity_events"], stats["failed"], stats["peak_used_blocks"]) == (1, 4, 400)
    assert json.loads(props)["default_generation_settings"]["n_ctx"] == 400


async def test_faults_strike_as_often_as_told() -> None:
    """Two requests are answered 503, the third is served; an unknown fault is refused and named."""
    async with emulated() as engine:
        await call(engine, "/emulator/faults", {"status": 503, "count": 2})
        statuses = [(await call(engine, "/v1/completions", prompt(1, max_tokens=1)))[0] for _ in range(3)]
        bad = await call(engine, "/emulator/faults", {"explode": 1})

    assert statuses == [503, 503, 200]
    assert bad[0] == 400
    assert "explode" in bad[1]


async def test_a_reset_breaks_the_connection_after_its_chunks() -> None:
    """The client sees a connection reset after two chunks and the engine frees the request."""
    async with emulated() as engine:
        await call(engine, "/emulator/faults", {"reset": 1, "reset_after_chunks": 2})
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(wire("/v1/completions", prompt(5, max_tokens=100, stream=True)))
        with pytest.raises(ConnectionResetError):
            await drain(reader)
        writer.close()
        await shut(writer)
        await until(lambda: not engine.engine.busy)

    assert engine.stats()["aborted"] == 1


async def test_a_hanging_engine_stays_healthy_and_goes_on_when_mended() -> None:
    """While it hangs no token comes and /health is 200; afterwards the same request ends."""
    async with emulated() as engine:
        await call(engine, "/emulator/faults", {"hang": True})
        waiting = asyncio.create_task(call(engine, "/v1/completions", prompt(5, max_tokens=2)))
        await until(lambda: engine.engine.busy)
        steps = engine.engine.tally.steps
        health = await call(engine, "/health")
        await call(engine, "/emulator/faults", {"clear": True})
        status, _ = await waiting

    assert (steps, health[0], status) == (0, 200, 200)


async def test_connections_are_kept_and_pipelined_requests_wait() -> None:
    """Two requests sent at once on one connection are answered in order."""
    async with emulated() as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(wire("/v1/completions", prompt(4, max_tokens=1)) + wire("/version", connection="close"))
        raw = (await asyncio.wait_for(reader.read(), WITHIN_S)).decode()
        writer.close()
        await shut(writer)

    assert raw.index("text_completion") < raw.index('"version"')


async def test_idle_connections_close() -> None:
    """An idle connection is closed after the keep-alive time, as vLLM's is."""
    async with emulated(replace(SETTINGS, keep_alive_s=0.05)) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        writer.close()
        await shut(writer)


async def test_three_hundred_streams_at_once() -> None:
    """300 concurrent streams all get their tokens, and the log knows each by its id."""
    shape = replace(FAST, blocks=5001, max_sequences=512, step_base_s=0.01)
    async with emulated(replace(SETTINGS, shape=shape, chunk_interval_s=0.1)) as engine:
        jobs: list[Awaitable[tuple[int, str]]] = [
            call(engine, "/v1/completions", prompt(40, max_tokens=20, stream=True), x_request_id=f"s{at}")
            for at in range(300)
        ]
        answers = await asyncio.gather(*jobs)
        stats = engine.stats()

    assert all(text.rstrip().endswith("0") and "[DONE]" in text for _, text in answers)
    requests = stats["requests"]
    assert isinstance(requests, list)
    assert {entry["id"] for entry in requests} == {f"s{at}" for at in range(300)}
    assert (stats["output_tokens"], stats["used_blocks"]) == (6000, 0)
