"""The emulated engine's request and answer bodies: OpenAI chat and completions in, tokens and JSON out.

Owns the reading of a body, the token rule and the shape of answers; knows no sockets and no scheduling.

Tokens are counted, in this order: the header ``x-emulator-input-tokens`` (per prompt); a ``tokenizer.json`` where one
was given, chat messages laid out as ChatML; else the byte rule: one token per started 4 bytes of UTF-8 text, plus 4
per chat message. Every output token is 4 bytes of text, so both rules agree on answers.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from extproc.local.paged import EngineShape, Generation

BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: vLLM's and OpenAI's default of the completions endpoint.
DEFAULT_COMPLETION_TOKENS = 16
_FILLER = (
    "def step(pool, queue):\n    for item in queue:\n        if pool.free >= item.blocks:\n            yield item\n\n"
)
_FILLER += " " * (-len(_FILLER) % BYTES_PER_TOKEN)
_FILLER_TOKENS = len(_FILLER) // BYTES_PER_TOKEN

Encode = Callable[[str], Sequence[int]]


class ApiFault(Exception):
    """A request that the engine answers with an error; ``kind`` is its ``type`` field."""

    def __init__(self, status: int, kind: str, message: str, **fields: object) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": status, **fields}}


@dataclass(frozen=True, slots=True)
class Call:
    """One request as the engine will run it.

    ``prompts`` holds the tokens of each prompt; ``keys`` the names of its full blocks; ``outputs`` how many tokens
    each sequence will produce, prompt by prompt, sample by sample; ``cap`` the limit after clamping to the context.
    """

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    samples: int
    prompts: tuple[int, ...]
    keys: tuple[tuple[Hashable, ...], ...]
    outputs: tuple[int, ...]
    cap: int
    max_tokens: int | None

    def reason(self, index: int) -> str:
        """Why sequence ``index`` ends, if nobody disturbs it."""
        return "length" if self.outputs[index] >= self.cap else "stop"


@dataclass(frozen=True, slots=True)
class Rules:
    """What reading a body needs to know: limits, names, tokens, and how long answers are."""

    shape: EngineShape
    served: frozenset[str]
    encode: Encode | None
    seed: int
    mean_output_tokens: float
    llamacpp: bool


def encoder(path: str | None) -> Encode | None:
    """The exact counter of a ``tokenizer.json``, or None where none was given."""
    if path is None:
        return None
    from tokenizers import Tokenizer  # only where a tokenizer is asked for: 0.3 s and 100 MB

    tokenizer = Tokenizer.from_file(path)
    return lambda text: list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def output_text(start: int, end: int) -> str:
    """The text of output tokens ``start`` .. ``end``; the same for every request."""
    return "".join(
        _FILLER[(at % _FILLER_TOKENS) * BYTES_PER_TOKEN : (at % _FILLER_TOKENS + 1) * BYTES_PER_TOKEN]
        for at in range(start, end)
    )


def read_call(path: str, headers: Mapping[str, str], body: bytes, rules: Rules) -> Call:
    """The call in ``body``; ``ApiFault`` with the engine's own status and wording."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiFault(400, "BadRequestError", "the body is not JSON") from None
    if not isinstance(data, dict):
        raise ApiFault(400, "BadRequestError", "the body must be a JSON object")
    model = data.get("model", next(iter(sorted(rules.served))))
    if not rules.llamacpp and model not in rules.served:
        raise ApiFault(404, "NotFoundError", f"The model `{model}` does not exist.")
    chat = path == CHAT
    texts = [_chat_text(data, rules)] if chat else _prompts(data)
    prompts = tuple(_tokens(text, headers, chat, data, rules) for text in texts)
    keys = tuple(_keys(text, tokens, rules.shape) for text, tokens in zip(texts, prompts, strict=True))
    samples = max(_whole(data, "n", 1) or 1, 0 if chat else _whole(data, "best_of", 1) or 1)
    max_tokens = _max_tokens(data, chat)
    room = _room(max(prompts), max_tokens, rules)
    cap = room if max_tokens is None or max_tokens < 0 else min(room, max_tokens)
    options = data.get("stream_options") or {}
    return Call(
        chat=chat,
        model=str(model),
        stream=bool(data.get("stream", False)),
        include_usage=bool(isinstance(options, dict) and options.get("include_usage")),
        samples=samples,
        prompts=prompts,
        keys=keys,
        outputs=_outputs(data, headers, body, cap, len(prompts) * samples, rules),
        cap=cap,
        max_tokens=max_tokens,
    )


def generations(call: Call, rid: str, *, prefix_cache: bool) -> list[Generation]:
    """The sequences of a call, ``tag`` left to the caller.

    Samples of one prompt share its full blocks with or without a prefix cache, as forked sequences do; without one
    the blocks' names are this call's own, so that nobody else finds them.
    """
    out: list[Generation] = []
    for at, (tokens, keys) in enumerate(zip(call.prompts, call.keys, strict=True)):
        mine = object()
        names: tuple[Hashable, ...] = keys
        if not prefix_cache:
            names = tuple((mine, block) for block in range(len(keys))) if call.samples > 1 else ()
        outputs = call.outputs[at * call.samples : (at + 1) * call.samples]
        out.extend(
            Generation(rid, tokens, output, prompt_keys=names, shared_blocks=len(names) if sample else 0)
            for sample, output in enumerate(outputs)
        )
    return out


def _chat_text(data: Mapping[str, object], rules: Rules) -> str:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiFault(400, "BadRequestError", "messages must be a list with at least one entry")
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            raise ApiFault(400, "BadRequestError", "a message must be an object")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        text = f"{content or ''}{json.dumps(message['tool_calls']) if message.get('tool_calls') else ''}"
        parts.append(f"<|im_start|>{message.get('role', 'user')}\n{text}<|im_end|>\n" if rules.encode else text)
    if data.get("tools"):
        parts.append(json.dumps(data["tools"]))
    return "".join(parts) + ("<|im_start|>assistant\n" if rules.encode else "")


def _prompts(data: Mapping[str, object]) -> list[str | list[int]]:
    prompt = data.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, int) for part in prompt):
            return [prompt]
        if all(isinstance(part, str) or (isinstance(part, list) and part) for part in prompt):
            return list(prompt)
    raise ApiFault(400, "BadRequestError", "prompt must be text, token ids, or a list of either")


def _tokens(
    text: str | list[int], headers: Mapping[str, str], chat: bool, data: Mapping[str, object], rules: Rules
) -> int:
    told = headers.get("x-emulator-input-tokens", "")
    if told.isdigit():
        return max(1, int(told))
    if isinstance(text, list):
        return len(text)
    if rules.encode is not None:
        return max(1, len(rules.encode(text)))
    messages = data.get("messages")
    extra = TOKENS_PER_MESSAGE * len(messages) if chat and isinstance(messages, list) else 0
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN) + extra)


def _keys(text: str | list[int], tokens: int, shape: EngineShape) -> tuple[Hashable, ...]:
    """Names of the prompt's full blocks: a running checksum over the prompt cut into that many equal parts.

    Where a tokenizer or a header set the count, the cut is in proportion, which keeps equal prompts equal and gives
    a common prefix common names only where both prompts have the same tokens per byte (always so by the byte rule).
    """
    full = tokens // shape.block_tokens
    raw = (
        text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b"".join(b"%08d" % token for token in text)
    )
    stride = max(1, len(raw) * shape.block_tokens // tokens)
    names: list[Hashable] = []
    running = 0
    for at in range(full):
        running = zlib.crc32(raw[at * stride : (at + 1) * stride], running)
        names.append((at, running))
    return tuple(names)


def _whole(data: Mapping[str, object], name: str, least: int) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ApiFault(400, "BadRequestError", f"{name} must be a whole number of at least {least}")
    return value


def _max_tokens(data: Mapping[str, object], chat: bool) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = _whole(data, name, -1)
        if value is not None:
            return value
    return None if chat else DEFAULT_COMPLETION_TOKENS


def _room(longest: int, max_tokens: int | None, rules: Rules) -> int:
    """Output tokens that the context leaves; the engines' own errors where a prompt does not fit."""
    limit = rules.shape.max_model_tokens
    if rules.llamacpp:
        if longest >= limit:
            raise ApiFault(
                400,
                "exceed_context_size_error",
                f"request ({longest} tokens) exceeds the available context size ({limit} tokens), try increasing it",
                n_prompt_tokens=longest,
                n_ctx=limit,
            )
        return limit - longest
    if max_tokens is not None and max_tokens > limit:
        raise ApiFault(400, "BadRequestError", f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}")
    if longest >= limit:
        raise ApiFault(
            400,
            "BadRequestError",
            f"This model's maximum context length is {limit} tokens. However, your request has {longest} input tokens.",
        )
    return limit - longest


def _outputs(
    data: Mapping[str, object], headers: Mapping[str, str], body: bytes, cap: int, sequences: int, rules: Rules
) -> tuple[int, ...]:
    """How long each answer gets: told by a header, the cap, or drawn from the seed and the body."""
    told = headers.get("x-emulator-output-tokens", "")
    if told.isdigit():
        return (min(cap, int(told)),) * sequences
    if data.get("ignore_eos"):
        return (cap,) * sequences
    draw = random.Random(f"{rules.seed}:{zlib.crc32(body)}")
    return tuple(min(cap, 1 + int(draw.expovariate(1 / rules.mean_output_tokens))) for _ in range(sequences))


def usage(call: Call, group: Sequence[Generation], *, cached: bool) -> dict[str, object]:
    """The usage object of an answer."""
    given = sum(call.prompts)
    made = sum(generation.generated for generation in group)
    out: dict[str, object] = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
    if cached:
        out["prompt_tokens_details"] = {"cached_tokens": sum(generation.cached for generation in group)}
    return out


def choice(
    call: Call, index: int, text: str, reason: str | None, *, delta: bool, first: bool = False
) -> dict[str, object]:
    """One entry of ``choices``, whole or as a stream's delta."""
    if not call.chat:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    message: dict[str, object] = {"role": "assistant"} if first or not delta else {}
    message["content"] = text
    return {"index": index, "delta" if delta else "message": message, "logprobs": None, "finish_reason": reason}


def envelope(
    call: Call, answer_id: str, created: int, choices: list[dict[str, object]], *, delta: bool
) -> dict[str, object]:
    """An answer or a stream's chunk around its choices."""
    kind = ("chat.completion.chunk" if delta else "chat.completion") if call.chat else "text_completion"
    return {"id": answer_id, "object": kind, "created": created, "model": call.model, "choices": choices}
