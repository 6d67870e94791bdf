"""OpenAI's dialects as vLLM, SGLang and llama.cpp serve them: chat, completions, embeddings."""

from __future__ import annotations

from extproc.dialects import fields
from extproc.dialects.content import Gathered, clean
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import (
    BodyLimits,
    ChatPrompt,
    InferenceRequest,
    Json,
    Prompt,
    Route,
    TextPrompt,
    TokenPrompt,
)
from extproc.errors import BadRequest

#: Prompts of one request; as many as vLLM takes sequences.
MAX_PROMPTS = 16_384

#: Numbers in a picture processor's settings up to this may be sides; areas beyond the other are as good as unlimited.
_LARGEST_SIDE, _LARGEST_AREA = 16_384, 2**40

#: Names that decide what a request takes; twice the same is a contradiction.
MATTERS = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "input",
        "inputs",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "min_tokens",
        "tools",
    }
    | {
        "ignore_eos",
        "options",
        "system",
        "suffix",
        "context",
        "images",
        "raw",
        "format",
        "think",
        "instructions",
        "use_beam_search",
        "prompt_logprobs",
        "echo",
    }
    | set(fields.CAP_NAMES)
)


def chat(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/chat/completions."""
    gathered = Gathered()
    messages = [_message(m, i, gathered) for i, m in enumerate(_required_list(members, "messages"))]
    tools = fields.listing(members.get("tools"), "tools")
    if not tools and "functions" in members:
        tools = [{"type": "function", "function": f} for f in fields.listing(members.get("functions"), "functions")]
    schema_bytes = guard_schema(members, "response_format", limits)
    continues = fields.flag(members, "continue_final_message")
    prefill = continues or (bool(messages) and messages[-1].get("role") == "assistant")
    prompt = ChatPrompt(
        messages=messages,
        tools=tools or None,
        add_generation_prompt=fields.flag(members, "add_generation_prompt", default=True),
        continue_final_message=continues,
        add_special_tokens=fields.flag(members, "add_special_tokens"),
        template=fields.text(members, "chat_template"),
        kwargs=_template_kwargs(members),
    )
    return generation(
        members, route, limits, gathered, (prompt,), has_tools=bool(tools), prefill=prefill, schema_bytes=schema_bytes
    )


def chat_batch(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """vLLM's /v1/chat/completions/batch: one prompt per conversation."""
    gathered = Gathered()
    prompts = tuple(
        ChatPrompt([_message(m, i, gathered) for i, m in enumerate(fields.listing(conversation, "messages"))])
        for conversation in bounded(_required_list(members, "messages"), "messages")
    )
    return generation(members, route, limits, gathered, prompts)


def completions(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/completions: text, a list of texts, token ids, or lists of token ids."""
    specials = fields.flag(members, "add_special_tokens", default=True)
    suffix = fields.text(members, "suffix")
    prompts = prompts_of(members.get("prompt"), "prompt", specials=specials, suffix=suffix)
    return generation(members, route, limits, Gathered(), prompts)


def embeddings(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/embeddings (and /pooling, /classify): inputs counted, nothing generated; vLLM also takes messages."""
    gathered = Gathered()
    if "messages" in members:
        prompts: tuple[Prompt, ...] = (
            ChatPrompt(
                [_message(m, i, gathered) for i, m in enumerate(_required_list(members, "messages"))],
                add_generation_prompt=fields.flag(members, "add_generation_prompt"),
            ),
        )
    else:
        name = next((n for n in ("input", "prompt", "content", "inputs") if n in members), "input")
        prompts = prompts_of(members.get(name), name, gathered=gathered)
    return pooled(members, route, gathered, prompts)


def pooled(members: Members, route: Route, gathered: Gathered, prompts: tuple[Prompt, ...]) -> InferenceRequest:
    """A request that generates nothing: one sequence per prompt."""
    return InferenceRequest(
        dialect=route.dialect or "",
        operation=route.operation or "",
        model=fields.text(members, "model"),
        stream=False,
        prompts=prompts,
        sequences=len(prompts),
        max_output_tokens=0,
        images=tuple(gathered.images),
        picture_tokens_asked=_picture_tokens_asked(members, gathered),
        unknown_parts=gathered.unknown_parts,
        warnings=tuple(gathered.warnings),
        body_bytes=len(members.data),
        edit=fields.edit_points(members, (), ()),
    )


def generation(
    members: Members,
    route: Route,
    limits: BodyLimits,
    gathered: Gathered,
    prompts: tuple[Prompt, ...],
    *,
    has_tools: bool = False,
    prefill: bool = False,
    schema_bytes: int = 0,
    cap_path: tuple[str, ...] = ("max_tokens",),
) -> InferenceRequest:
    """The fields that all generating OpenAI routes share."""
    caps = fields.caps(members)
    cap = fields.largest(caps)
    width = max(fields.count(members, name, limits) for name in ("n", "best_of"))
    ignore_eos = fields.flag(members, "ignore_eos")
    minimum = fields.integer(members.get("min_tokens"), "min_tokens") or 0
    stream_options = fields.mapping(members.get("stream_options"), "stream_options")
    return InferenceRequest(
        dialect=route.dialect or "",
        operation=route.operation or "",
        model=fields.text(members, "model"),
        stream=fields.flag(members, "stream"),
        prompts=prompts,
        sequences=len(prompts) * width,
        max_output_tokens=cap,
        min_output_tokens=max(0, (cap or minimum) if ignore_eos else minimum),
        images=tuple(gathered.images),
        picture_tokens_asked=_picture_tokens_asked(members, gathered),
        unknown_parts=gathered.unknown_parts,
        has_tools=has_tools,
        include_usage_asked=stream_options.get("include_usage") is True,
        ignore_eos=ignore_eos,
        prompt_logprobs=_prompt_logprobs(members),
        prefill=prefill,
        schema_bytes=schema_bytes,
        warnings=tuple(gathered.warnings),
        body_bytes=len(members.data),
        edit=fields.edit_points(members, caps, cap_path),
    )


def prompts_of(
    value: Json,
    param: str,
    *,
    specials: bool = True,
    suffix: str | None = None,
    gathered: Gathered | None = None,
) -> tuple[Prompt, ...]:
    """The four prompt shapes: text, token ids (ONE prompt), and lists of either."""
    tail = (suffix,) if suffix else ()
    if type(value) is str:
        return (TextPrompt((value, *tail), specials),)
    if type(value) is not list or not value:
        raise BadRequest(400, "invalid_type", f"{param} must be text, token ids, or a list of these.", param)
    if type(value[0]) is int:
        return (_token_prompt(value, param, tail),)
    bounded(value, param)
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        if type(item) is str:
            prompts.append(TextPrompt((item, *tail), specials))
        elif type(item) is list:
            prompts.append(_token_prompt(item, f"{param}[{index}]", tail))
        elif type(item) is dict and gathered is not None:
            prompts.append(ChatPrompt([{"role": "user", "content": clean(item.get("content", [item]), gathered)}]))
        else:
            raise BadRequest(400, "invalid_type", f"{param}[{index}] must be text or token ids.", f"{param}[{index}]")
    return tuple(prompts)


def bounded(prompts: list[Json], param: str) -> list[Json]:
    """The list, refused if it has more prompts than any engine takes."""
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(400, "invalid_value", f"{param} has over {MAX_PROMPTS} entries.", param)
    return prompts


def _token_prompt(ids: list[Json], param: str, tail: tuple[str, ...]) -> TokenPrompt:
    if set(map(type, ids)) - {int}:
        raise BadRequest(400, "invalid_type", f"{param} must hold token ids only.", param)
    return TokenPrompt(len(ids), tail)


def guard_schema(members: Members, name: str, limits: BodyLimits) -> int:
    """Size of the output grammar in bytes; 400 ``schema_too_complex`` where engines might compile it for hours."""
    span = members.spans.get(name)
    if span is None:
        return 0
    size = span[1] - span[0]
    if size > limits.max_schema_bytes:
        raise BadRequest(
            400, "schema_too_complex", f"The output schema is over the limit of {limits.max_schema_bytes} bytes.", name
        )
    if _union_depth(members.get(name)) > limits.max_schema_unions:
        raise BadRequest(
            400, "schema_too_complex", f"The output schema nests more than {limits.max_schema_unions} unions.", name
        )
    return size


def _union_depth(root: Json) -> int:
    """How deep oneOf, anyOf and allOf nest in each other."""
    deepest = 0
    stack = [(root, 0)]
    while stack:
        value, unions = stack.pop()
        deepest = max(deepest, unions)
        if type(value) is dict:
            stack.extend((v, unions + (k in ("oneOf", "anyOf", "allOf"))) for k, v in value.items())
        elif type(value) is list:
            stack.extend((v, unions) for v in value)
    return deepest


def _required_list(members: Members, name: str) -> list[Json]:
    if members.is_null(name):
        raise BadRequest(400, "missing_field", f"{members.param(name)} is required.", members.param(name))
    return fields.listing(members.get(name), members.param(name))


def _message(message: Json, index: int, gathered: Gathered) -> dict[str, Json]:
    """One message with its media replaced; unchanged where it has none."""
    if type(message) is not dict:
        raise BadRequest(400, "invalid_type", f"messages[{index}] must be an object.", f"messages[{index}]")
    content = message.get("content")
    if content is None:
        return message
    cleaned = clean(content, gathered)
    return message if cleaned is content else {**message, "content": cleaned}


def _template_kwargs(members: Members) -> dict[str, Json]:
    kwargs: dict[str, Json] = {}
    effort = members.get("reasoning_effort")
    given = fields.mapping(members.get("chat_template_kwargs"), "chat_template_kwargs")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = effort != "none"
    if not members.is_null("documents"):
        kwargs["documents"] = members.get("documents")
    kwargs.update(given)
    return kwargs


def _picture_tokens_asked(members: Members, gathered: Gathered) -> int:
    """Most tokens of one picture under ``mm_processor_kwargs`` (vLLM), 0 without them.

    Any number in there may be a limit on the area in pixels, or, where it is small, on a side. No picture processor
    makes more than one token of 14 x 14 pixels.
    """
    if not gathered.images or members.is_null("mm_processor_kwargs"):
        return 0
    gathered.warn("mm_processor_kwargs")
    largest = 1
    stack = [members.get("mm_processor_kwargs")]
    while stack:
        value = stack.pop()
        if type(value) is int or (type(value) is float and value < _LARGEST_AREA):
            largest = max(largest, min(int(value), _LARGEST_AREA))
        elif type(value) is list:
            stack.extend(value)
        elif type(value) is dict:
            stack.extend(value.values())
    return max(1, (largest if largest > _LARGEST_SIDE else largest * largest) // (14 * 14))


def _prompt_logprobs(members: Members) -> int:
    """Log-probabilities kept for each input token; completions ask for them with ``echo`` and ``logprobs``."""
    value = fields.integer(members.get("prompt_logprobs"), "prompt_logprobs")
    if value:
        return value
    logprobs = members.get("logprobs")
    if not fields.flag(members, "echo") or logprobs is None or logprobs is False:
        return 0
    return 1 if logprobs is True else fields.integer(logprobs, "logprobs") or 0
