"""The emulated engine behind HTTP: routes, real time, streams and injected faults.

A stand-in for load and fault work, never a real engine; every answer says so (``server: kvgate-emulated-engine``).
The memory is ``paged``, the bodies are ``emulator_api``, the scrape is ``emulator_metrics``. Given the same seed,
bodies and arrival order, token counts and scheduling are the same; only wall-clock times differ.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from extproc.local import emulator_api as api
from extproc.local.emulator_metrics import Meter
from extproc.local.emulator_settings import Faults, Settings
from extproc.local.http1 import Exchange, HttpConnection
from extproc.local.paged import Engine, Generation, Phase, Step, Tally

SERVER_NAME = "kvgate-emulated-engine"
#: Requests that /emulator/stats remembers.
LOG_ENTRIES = 50_000


@dataclass(slots=True, eq=False)
class Answer:
    """One request on its way: its sequences, what has been sent, what the log will say."""

    exchange: Exchange
    call: api.Call
    rid: str
    created: int
    arrived_s: float
    group: list[Generation] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    open: int = 0
    started: bool = False
    chunks: int = 0
    flushed_s: float = 0.0
    reset_after: int | None = None


class EmulatedEngine:
    """The server: ``listen`` once, ``close`` at the end; one asyncio task runs the engine's steps."""

    def __init__(self, settings: Settings) -> None:
        shape = settings.shape
        self.settings = settings
        self.engine = Engine(shape)
        self.meter = Meter(self.engine, settings.served[0])
        self.faults = Faults()
        self.log: deque[dict[str, object]] = deque(maxlen=LOG_ENTRIES)
        self.port = 0
        self._rules = api.Rules(
            shape=shape,
            served=frozenset(settings.served),
            encode=api.encoder(settings.tokenizer),
            seed=settings.seed,
            mean_output_tokens=settings.mean_output_tokens,
            llamacpp=settings.personality == "llamacpp",
        )
        self._wall_s = time.time() - time.monotonic()
        self._numbers = 0
        self._live = 0
        self._wake = asyncio.Event()
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._steps: asyncio.Task[None] | None = None
        self._gets: dict[str, Callable[[Exchange], None]] = {
            "/health": self._health,
            "/ping": self._health,
            "/version": lambda exchange: exchange.send(200, _json({"version": SERVER_NAME})),
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/emulator/stats": lambda exchange: exchange.send(200, _json(self.stats())),
            "/emulator/faults": lambda exchange: exchange.send(200, _json(asdict(self.faults))),
        }
        self._posts: dict[str, Callable[[Exchange], None]] = {
            api.CHAT: self._accept,
            api.COMPLETIONS: self._accept,
            "/tokenize": self._tokenize,
            "/emulator/faults": self._set_faults,
            "/emulator/reset": self._reset_counts,
        }
        if self._rules.llamacpp:
            self._gets |= {"/props": self._props, "/slots": self._slots}

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Open the port (0: an ephemeral one), start the engine and return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpConnection(self._route, SERVER_NAME, self.settings.keep_alive_s, self._connections),
            host,
            port,
            backlog=1024,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._steps = loop.create_task(self._run())
        return self.port

    async def close(self) -> None:
        """Stop the engine, the port and every connection."""
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.gather(self._steps, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # the loop tells them now

    def stats(self) -> dict[str, object]:
        """What the engine counted itself (blocks are KV blocks), and one entry per ended request, oldest first."""
        engine, shape = self.engine, self.engine.shape
        return {
            "emulator": SERVER_NAME,
            "overflow": shape.overflow,
            "block_tokens": shape.block_tokens,
            "capacity_blocks": shape.usable_blocks,
            "used_blocks": engine.pool.used,
            "peak_used_blocks": engine.pool.peak_used,
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "open_requests": self._live,
            **asdict(engine.tally),
            "requests": list(self.log),
        }

    # --- routes -------------------------------------------------------------------------------------------------

    def _route(self, exchange: Exchange) -> None:
        request = exchange.request
        table = self._posts if request.method == "POST" else self._gets
        handler = table.get(request.path)
        if handler is not None:
            handler(exchange)
            return
        known = request.path in self._posts or request.path in self._gets
        exchange.send(405 if known else 404, _json({"detail": "Method Not Allowed" if known else "Not Found"}))

    def _health(self, exchange: Exchange) -> None:
        exchange.send(503 if self.faults.dead_health else 200, b"", "text/plain")

    def _models(self, exchange: Exchange) -> None:
        rows = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": SERVER_NAME,
                "root": name,
                "parent": None,
                "max_model_len": self.settings.shape.max_model_tokens,
            }
            for name in self.settings.served
        ]
        exchange.send(200, _json({"object": "list", "data": rows}))

    def _metrics(self, exchange: Exchange) -> None:
        if not self.faults.silent_metrics:
            text = self.meter.llamacpp_text() if self._rules.llamacpp else self.meter.vllm_text()
            exchange.send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _props(self, exchange: Exchange) -> None:
        shape = self.settings.shape
        body = {
            "default_generation_settings": {"n_ctx": shape.max_model_tokens},
            "total_slots": shape.max_sequences,
            "model_path": SERVER_NAME,
            "endpoint_slots": True,
            "endpoint_metrics": True,
            "build_info": SERVER_NAME,
        }
        exchange.send(200, _json(body))

    def _slots(self, exchange: Exchange) -> None:
        shape, running = self.settings.shape, self.engine.running
        rows: list[dict[str, object]] = []
        for at in range(shape.max_sequences):
            row: dict[str, object] = {"id": at, "n_ctx": shape.max_model_tokens, "is_processing": at < len(running)}
            if at < len(running):
                row |= {"n_prompt_tokens": running[at].input_tokens, "n_prompt_tokens_processed": running[at].computed}
            rows.append(row)
        exchange.send(200, _json(rows))

    def _tokenize(self, exchange: Exchange) -> None:
        data = _object(exchange)
        if data is None:
            return
        chat = "messages" in data
        if "content" in data:
            data["prompt"] = data.pop("content")
        path = api.CHAT if chat else api.COMPLETIONS
        call = self._read(exchange, path, _json({**data, "max_tokens": 1, "model": self.settings.served[0]}))
        if call is not None:
            body = {"count": sum(call.prompts), "max_model_len": self.settings.shape.max_model_tokens, "tokens": []}
            exchange.send(200, _json(body))

    def _set_faults(self, exchange: Exchange) -> None:
        data = _object(exchange)
        if data is None:
            return
        if data.pop("clear", False):
            self.faults = Faults()
        try:
            self.faults.update(data)
        except ValueError as error:
            exchange.send(400, _json({"error": str(error)}))
            return
        self._wake.set()
        exchange.send(200, _json(asdict(self.faults)))

    def _reset_counts(self, exchange: Exchange) -> None:
        """Start the counts again; requests inside stay."""
        self.engine.tally = Tally()
        self.engine.pool.peak_used = self.engine.pool.used
        self.meter.reset()
        self.log.clear()
        exchange.send(200, b"{}")

    # --- a request's life ---------------------------------------------------------------------------------------

    def _accept(self, exchange: Exchange) -> None:
        faults = self.faults
        arrived_s = time.monotonic()
        if faults.count:
            faults.count -= 1
            exchange.send(
                faults.status,
                _json({"error": {"message": "injected fault", "type": "injected", "code": faults.status}}),
                **({"retry_after": str(faults.retry_after_s)} if faults.retry_after_s else {}),
            )
            return
        if faults.reset and not faults.reset_after_chunks:
            faults.reset -= 1
            exchange.reset()
            return
        if faults.first_byte_delay_s:
            timer = asyncio.get_running_loop().call_later(faults.first_byte_delay_s, self._begin, exchange, arrived_s)
            exchange.on_gone = timer.cancel
            return
        self._begin(exchange, arrived_s)

    def _begin(self, exchange: Exchange, arrived_s: float) -> None:
        call = self._read(exchange, exchange.request.path, exchange.request.body)
        if call is None:
            return
        self._numbers += 1
        rid = exchange.request.headers.get("x-request-id") or f"emulated-{self._numbers}"
        answer = Answer(exchange, call, rid, int(time.time()), arrived_s)
        if self.faults.reset:
            self.faults.reset -= 1
            answer.reset_after = self.faults.reset_after_chunks
        answer.group = api.generations(call, rid, prefix_cache=self.settings.shape.prefix_cache)
        answer.sent = [0] * len(answer.group)
        answer.open = len(answer.group)
        exchange.on_gone = lambda: self._client_gone(answer)
        self._live += 1
        if call.stream and not self._rules.llamacpp:
            self._open_stream(answer)  # vLLM answers 200 at once, llama.cpp with the first token
        now_s = time.monotonic()
        for index, generation in enumerate(answer.group):
            generation.tag = (answer, index)
            self.engine.submit(generation, now_s)
        self._wake.set()

    def _read(self, exchange: Exchange, path: str, body: bytes) -> api.Call | None:
        try:
            return api.read_call(path, exchange.request.headers, body, self._rules)
        except api.ApiFault as fault:
            exchange.send(fault.status, _json(fault.body))
            return None

    def _client_gone(self, answer: Answer) -> None:
        lag_s = self.faults.abort_lag_s
        if lag_s:
            asyncio.get_running_loop().call_later(lag_s, self._abort, answer)
        else:
            self._abort(answer)

    def _abort(self, answer: Answer) -> None:
        if answer.open:
            now_s = time.monotonic()
            for generation in answer.group:
                if self.engine.abort(generation, now_s):
                    self._observe(answer, generation)
            self._ended(answer, "aborted")
            self._wake.set()

    def _ended(self, answer: Answer, outcome: str) -> None:
        answer.open = 0
        self._live -= 1
        firsts = [generation.first_token_s for generation in answer.group if generation.first_token_s is not None]
        self.log.append(
            {
                "id": answer.rid,
                "outcome": outcome,
                "input_tokens": sum(answer.call.prompts),
                "output_tokens": sum(generation.generated for generation in answer.group),
                "preemptions": sum(generation.preemptions for generation in answer.group),
                "start_s": answer.arrived_s + self._wall_s,
                "first_token_s": min(firsts) + self._wall_s if firsts else None,
                "end_s": time.monotonic() + self._wall_s,
            }
        )

    def _observe(self, answer: Answer, generation: Generation) -> None:
        call = answer.call
        reason = "error" if generation.phase is Phase.FAILED else call.reason(answer.group.index(generation))
        self.meter.request(generation, reason, call.max_tokens, call.samples)

    # --- the engine's steps -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """One step after the other while there is work; a step's results appear when its time has passed."""
        due_s = time.monotonic()
        while True:
            while self.faults.hang or not self.engine.busy:
                self._wake.clear()
                await self._wake.wait()
            # A step that came late does not shorten the next ones by more than one step.
            due_s = max(due_s, time.monotonic() - self.settings.shape.step_base_s)
            step = self.engine.plan(time.monotonic())
            self._deliver_failures(step)
            due_s += max(step.duration_s, 0.001) / self.faults.rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            emitted = self.engine.complete(step, now_s)
            self.meter.step(step.tokens)
            for generation in emitted:
                self._deliver(generation, now_s)

    def _deliver_failures(self, step: Step) -> None:
        body = _json({"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}})
        for answer in dict.fromkeys(_answer_of(generation) for generation in step.failed):
            for generation in answer.group:
                self.engine.abort(generation, time.monotonic())  # samples of it that still waited
                if generation.phase is Phase.FAILED:
                    self._observe(answer, generation)
            if answer.started:
                answer.exchange.write(b"data: " + body + b"\n\n")
                answer.exchange.end()
            else:
                answer.exchange.send(500, body)
            if answer.open:
                self._ended(answer, "failed")

    def _deliver(self, generation: Generation, now_s: float) -> None:
        answer = _answer_of(generation)
        last = generation.phase is Phase.FINISHED
        if last:
            answer.open -= 1
            self._observe(answer, generation)
        if answer.call.stream:
            due = last or not answer.chunks or now_s - answer.flushed_s >= self.settings.chunk_interval_s
            if due and not self._send_chunk(answer, generation, now_s):
                return
        if last and not answer.open:
            self._finish(answer)

    def _open_stream(self, answer: Answer) -> None:
        answer.started = True
        answer.exchange.start(200, "text/event-stream; charset=utf-8")

    def _send_chunk(self, answer: Answer, generation: Generation, now_s: float) -> bool:
        """Send what is new of every sequence that has news; False where an injected reset struck."""
        if not answer.started:
            self._open_stream(answer)
        events: list[bytes] = []
        for index, member in enumerate(answer.group):
            ended = member is generation and member.phase is Phase.FINISHED
            if member.generated > answer.sent[index] or ended:
                text = api.output_text(answer.sent[index], member.generated)
                reason = answer.call.reason(index) if ended else None
                one = api.choice(answer.call, index, text, reason, delta=True, first=not answer.sent[index])
                events.append(
                    b"data: "
                    + _json(api.envelope(answer.call, self._id(answer), answer.created, [one], delta=True))
                    + b"\n\n"
                )
                answer.sent[index] = member.generated
        answer.exchange.write(b"".join(events))
        answer.flushed_s = now_s
        answer.chunks += 1
        if answer.reset_after is not None and answer.chunks >= answer.reset_after:
            answer.exchange.reset()
            answer.open = max(answer.open, 1)
            self._abort(answer)
            return False
        return True

    def _finish(self, answer: Answer) -> None:
        call, exchange = answer.call, answer.exchange
        used = api.usage(call, answer.group, cached=self.settings.shape.prefix_cache)
        if call.stream:
            tail = b""
            if call.include_usage:
                tail = (
                    b"data: "
                    + _json({**api.envelope(call, self._id(answer), answer.created, [], delta=True), "usage": used})
                    + b"\n\n"
                )
            exchange.write(tail + b"data: [DONE]\n\n")
            exchange.end()
        else:
            choices = [
                api.choice(call, index, api.output_text(0, generation.generated), call.reason(index), delta=False)
                for index, generation in enumerate(answer.group)
            ]
            exchange.send(
                200,
                _json({**api.envelope(call, self._id(answer), answer.created, choices, delta=False), "usage": used}),
            )
        self._ended(answer, "complete")

    @staticmethod
    def _id(answer: Answer) -> str:
        return f"{'chatcmpl' if answer.call.chat else 'cmpl'}-{answer.rid}"


def _answer_of(generation: Generation) -> Answer:
    tag = generation.tag
    assert isinstance(tag, tuple)
    answer = tag[0]
    assert isinstance(answer, Answer)
    return answer


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _object(exchange: Exchange) -> dict[str, object] | None:
    """The JSON object in the body, or None after a 400."""
    try:
        data = json.loads(exchange.request.body or b"{}")
    except ValueError:
        data = None
    if not isinstance(data, dict):
        exchange.send(400, _json({"error": "the body must be a JSON object"}))
        return None
    return data
