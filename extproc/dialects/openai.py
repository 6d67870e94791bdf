"""OpenAI's dialects as vLLM, SGLang and llama.cpp serve them: chat, completions, embeddings."""

from __future__ import annotations

import math

from msgspec.structs import replace

from extproc.dialects import fields, schemas
from extproc.dialects.content import IMAGE_TYPES, Gathered, clean, image_of, kind_of, strings_of, take_image
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

#: Least bytes of one row of a prompt given as embeddings: no model served has fewer than 64 numbers of two bytes.
_EMBEDDING_BYTES = 128

#: Names that decide what a request takes, in any dialect; twice the same is a contradiction.
MATTERS = frozenset(
    {
        *("model", "stream", "stream_options", "options", "sampling_params", "parameters", "use_beam_search"),
        *(
            "messages",
            "prompt",
            "input",
            "inputs",
            "text",
            "texts",
            "text_input",
            "input_ids",
            "token_ids",
            "instances",
        ),
        *("system", "instructions", "suffix", "context", "images", "raw", "think", "content", "content_parts", "data"),
        *("prompt_embeds", "input_embeds", "image_data", "video_data", "audio_data"),
        *(
            "input_prefix",
            "input_suffix",
            "input_extra",
            "previous_input_messages",
            "previous_response_id",
            "conversation",
        ),
        *("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2", "instruct", "instruction"),
        *("tools", "tool_choice", "functions", "template", "chat_template", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "mm_processor_kwargs"),
        *("truncate_prompt_tokens", "padding"),
        *("reasoning", "reasoning_effort", "thinking", "output_config", "echo", "logprobs", "prompt_logprobs"),
        *("response_format", "format", "structured_outputs", "guided_json", "json_schema", "output_format"),
        *fields.OPTION_NAMES,
        *fields.CAP_NAMES,
    }
)


def chat(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/chat/completions."""
    gathered = Gathered()
    messages = [_message(m, i, gathered) for i, m in enumerate(_required_list(members, "messages"))]
    tools = fields.listing(members.get("tools"), "tools")
    if not tools and "functions" in members:
        tools = [{"type": "function", "function": f} for f in fields.listing(members.get("functions"), "functions")]
    continues = fields.flag(members, "continue_final_message")
    prefill = continues or (bool(messages) and messages[-1].get("role") == "assistant")
    prompt = ChatPrompt(
        messages=messages,
        tools=tools or None,
        add_generation_prompt=fields.flag(members, "add_generation_prompt", default=True),
        continue_final_message=continues,
        add_special_tokens=fields.flag(members, "add_special_tokens"),
        kwargs=_template_kwargs(members),
    )
    prompt = with_template(prompt, fields.text(members, "chat_template"), gathered)
    return generation(members, route, limits, gathered, (prompt,), tools=tools, prefill=prefill)


def cohere_chat(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """vLLM's /cohere/v2/chat: the same fields, turned into messages by code that nobody follows here: a bound."""
    request = chat(members, route, limits)
    return replace(request, prompts=_unrendered(request.prompts))


def _unrendered(prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    return tuple(replace(p, template=p.template or "") if isinstance(p, ChatPrompt) else p for p in prompts)


def with_template(prompt: ChatPrompt, template: str | None, gathered: Gathered) -> ChatPrompt:
    """The conversation under a template that the client sends: never rendered here, its own words counted.

    What lies in braces may repeat itself, so that the length is known only where there are none. vLLM takes a template
    in a request, at either place, only under ``--trust-request-chat-template``; other engines ignore it.
    """
    given = prompt.kwargs.get("chat_template")
    if template is None and given is None:
        return prompt
    if any("{" in text for text in (template, given) if type(text) is str):
        gathered.hide("chat_template_in_request")
    kwargs = {**prompt.kwargs, "chat_template": [template or "", given]}
    return replace(prompt, template=template or "", kwargs=kwargs)


def chat_batch(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """vLLM's /v1/chat/completions/batch: one prompt per conversation."""
    gathered = Gathered()
    prompts = tuple(
        ChatPrompt([_message(m, i, gathered) for i, m in enumerate(fields.listing(conversation, "messages"))])
        for conversation in bounded(_required_list(members, "messages"), "messages")
    )
    return generation(members, route, limits, gathered, prompts)


def completions(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/completions: text, token ids, both mixed, lists of these, embeddings in their place or beside them."""
    gathered = Gathered()
    specials = fields.flag(members, "add_special_tokens", default=True)
    suffix = fields.text(members, "suffix")
    embedded = embedded_prompts(members.get("prompt_embeds"), gathered)
    if embedded and members.is_null("prompt"):
        return generation(members, route, limits, gathered, embedded)
    prompts = prompts_of(members.get("prompt"), "prompt", gathered, specials=specials, suffix=suffix)
    return generation(members, route, limits, gathered, (*embedded, *prompts))


def embedded_prompts(value: Json, gathered: Gathered) -> tuple[Prompt, ...]:
    """vLLM's ``prompt_embeds``: one prompt per encoded tensor, whose rows nobody here unpacks."""
    tensors = [] if value is None else value if type(value) is list else [value]
    prompts: list[Prompt] = []
    for tensor in bounded(tensors, "prompt_embeds"):
        if type(tensor) is not str:
            raise BadRequest(400, "invalid_type", "prompt_embeds must be base64 or a list of it.", "prompt_embeds")
        gathered.unknown_parts += 1
        gathered.warn("embeddings_not_counted")
        prompts.append(TokenPrompt(len(tensor) * 3 // 4 // _EMBEDDING_BYTES))
    return tuple(prompts)


def embeddings(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/v1/embeddings (and /pooling, /classify): inputs counted, nothing generated; vLLM also takes messages."""
    gathered = Gathered()
    if "messages" in members:
        given = _required_list(members, "messages")
        adds = fields.flag(members, "add_generation_prompt")
        prompts: tuple[Prompt, ...] = tuple(
            ChatPrompt([_message(m, i, gathered) for i, m in enumerate(one)], add_generation_prompt=adds)
            for one in (bounded(given, "messages") if given and type(given[0]) is list else [given])
            if type(one) is list
        )
    elif "data" in members and members.is_null("input"):
        # The body of a plugin of the engine's (vLLM's IO processors): what it makes of it nobody knows.
        gathered.unknown_parts += 1
        gathered.warn("plugin_data")
        prompts = (TextPrompt((strings_of(members.get("data"), gathered),)),)
    else:
        name = first_given(members, ("input", "prompt", "content", "inputs"))
        prompts = prompts_of(members.get(name), name, gathered)
    return pooled(members, route, gathered, prompts)


def cohere_embed(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """vLLM's /v2/embed: texts, pictures, or inputs of both, each a prompt."""
    gathered = Gathered()
    prompts: list[Prompt] = []
    for name in ("texts", "images", "inputs"):
        for index, item in enumerate(bounded(fields.listing(members.get(name), name), name)):
            kind = type(item)
            if kind is str and name == "texts":
                prompts.append(TextPrompt((item,)))
            elif (kind is str and name == "images") or (type(item) is dict and name == "inputs"):
                content = item.get("content") if type(item) is dict else [{"type": "image", "image": item}]
                prompts.append(ChatPrompt([{"role": "user", "content": clean(content, gathered)}], template=""))
            else:
                raise BadRequest(400, "invalid_type", f"{name}[{index}] has the wrong type.", f"{name}[{index}]")
    if not prompts:
        raise BadRequest(400, "missing_field", "One of texts, images and inputs is required.", "texts")
    return pooled(members, route, gathered, tuple(prompts))


def first_given(members: Members, names: tuple[str, ...]) -> str:
    """The first of the names whose value is not null, the first of all where there is none."""
    return next((name for name in names if not members.is_null(name)), names[0])


def pooled(members: Members, route: Route, gathered: Gathered, prompts: tuple[Prompt, ...]) -> InferenceRequest:
    """A request that generates nothing: one sequence per prompt."""
    if members.get("padding") == "max_length":
        # vLLM fills each prompt up to its longest.
        gathered.hide("padding_not_counted")
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
        truncate_to=_truncate_to(members),
        unknown_parts=gathered.unknown_parts,
        hidden=gathered.hidden,
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
    tools: list[Json] | None = None,
    prefill: bool = False,
    cap_path: tuple[str, ...] = ("max_tokens",),
) -> InferenceRequest:
    """The fields that all generating routes share, on the top level and in the object that holds the cap.

    ``cap_path`` leads to the dialect's own cap; where it has more than one name, those before the last name objects of
    options (SGLang's ``sampling_params``, TGI's ``parameters``).
    """
    nested = _inner(members, cap_path)
    holders = [members] if nested is None else [members, nested]
    caps = tuple(cap for holder in holders for cap in fields.caps(holder))
    cap = fields.largest(caps)
    width = math.prod(fields.width(holder, limits) for holder in holders)
    ignore_eos = any(fields.flag(holder, "ignore_eos") for holder in holders)
    minimum = max(map(fields.minimum, holders))
    stream_options = fields.mapping(members.get("stream_options"), "stream_options")
    return InferenceRequest(
        dialect=route.dialect or "",
        operation=route.operation or "",
        model=fields.text(members, "model"),
        stream=fields.flag(members, "stream"),
        prompts=_unrendered(prompts) if gathered.loose else prompts,
        sequences=len(prompts) * width,
        max_output_tokens=cap,
        min_output_tokens=max(0, (cap or minimum) if ignore_eos else minimum),
        images=tuple(gathered.images),
        picture_tokens_asked=_picture_tokens_asked(members, gathered),
        truncate_to=_truncate_to(members),
        unknown_parts=gathered.unknown_parts,
        hidden=gathered.hidden,
        has_tools=bool(tools),
        include_usage_asked=stream_options.get("include_usage") is True,
        ignore_eos=ignore_eos,
        prompt_logprobs=max(_prompt_logprobs(holder) for holder in holders),
        prefill=prefill,
        schema_bytes=max(schemas.guard(holder, limits, tools) for holder in holders),
        warnings=tuple(gathered.warnings),
        body_bytes=len(members.data),
        edit=fields.edit_points(members, caps, cap_path),
    )


def _inner(members: Members, path: tuple[str, ...]) -> Members | None:
    """The object of options that holds the cap, None where the body has none or the cap is on the top level."""
    inner: Members | None = None
    for name in path[:-1]:
        inner = fields.options(members if inner is None else inner, name)
        if inner is None:
            return None
    return inner


def prompts_of(
    value: Json, param: str, gathered: Gathered, *, specials: bool = True, suffix: str | None = None
) -> tuple[Prompt, ...]:
    """Text, token ids (ONE prompt), both mixed (one too), an object that holds its text, and lists of any of these.

    The object is llama.cpp's ``{"prompt_string", "multimodal_data"}`` or an embedding's content in parts.
    """
    tail = (suffix,) if suffix else ()
    if type(value) is not list or int in set(map(type, value)):
        return (_prompt(value, param, gathered, tail, specials),)
    if not value:
        raise BadRequest(400, "invalid_type", f"{param} must be text, token ids, or a list of these.", param)
    return tuple(
        _prompt(item, f"{param}[{index}]", gathered, tail, specials) for index, item in enumerate(bounded(value, param))
    )


def _prompt(value: Json, param: str, gathered: Gathered, tail: tuple[str, ...], specials: bool) -> Prompt:
    kind = type(value)
    if kind is str:
        return TextPrompt((value, *tail), specials)
    if kind is dict and "prompt_string" in value:
        text = value["prompt_string"]
        take_pictures(value.get("multimodal_data"), gathered)
        if type(text) is str:
            return TextPrompt((text, *tail), specials)
    elif kind is dict:
        return ChatPrompt([{"role": "user", "content": clean(value.get("content", [value]), gathered)}])
    elif kind is list:
        texts = tuple(item for item in value if type(item) is str)
        if not set(map(type, value)) - {int, str}:
            return TokenPrompt(len(value) - len(texts), (*texts, *tail))
    raise BadRequest(400, "invalid_type", f"{param} must be text or token ids.", param)


def take_pictures(value: Json, gathered: Gathered) -> None:
    """Pictures beside a prompt, by URL, data URI, bare base64 or file; what is no string is an unknown part."""
    for item in [] if value is None else value if type(value) is list else [value]:
        if type(item) is list:
            take_pictures(item, gathered)
        elif type(item) is str:
            gathered.images.append(image_of(item))
        elif type(item) is dict and kind_of(item) in IMAGE_TYPES:
            take_image(item, gathered)
        elif item is not None:
            gathered.unknown_parts += 1
            gathered.warn("unknown_content_part")


def bounded(prompts: list[Json], param: str) -> list[Json]:
    """The list, refused if it has more prompts than any engine takes."""
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(400, "invalid_value", f"{param} has over {MAX_PROMPTS} entries.", param)
    return prompts


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


def _truncate_to(members: Members) -> int | None:
    """vLLM's ``truncate_prompt_tokens``; -1 means the model's own length, which cuts nothing that fits."""
    value = fields.integer(members.get("truncate_prompt_tokens"), "truncate_prompt_tokens")
    return value if value is not None and value > 0 else None


def _prompt_logprobs(members: Members) -> int:
    """Log-probabilities kept for each input token; completions ask for them with ``echo`` and ``logprobs``."""
    value = fields.integer(members.get("prompt_logprobs"), members.param("prompt_logprobs"))
    if value:
        return value
    logprobs = members.get("logprobs")
    if not fields.flag(members, "echo") or logprobs is None or logprobs is False:
        return 0
    return 1 if logprobs is True else fields.integer(logprobs, "logprobs") or 0
