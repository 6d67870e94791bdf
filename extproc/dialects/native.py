"""The engines' own routes: vLLM's rerank and score, llama.cpp's completion and infill, SGLang's and TGI's generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from extproc.dialects import fields
from extproc.dialects.content import Gathered, clean, strings_of
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, CapField, InferenceRequest, Json, Prompt, Route, TextPrompt, TokenPrompt
from extproc.dialects.openai import bounded, first_given, generation, pooled, prompts_of, take_pictures
from extproc.errors import BadRequest

#: Fields that hold the two sides of a pair, by route. SGLang's score and vLLM's generative scoring take token ids too.
_PAIRS = {
    "vllm.rerank": (("query",), ("documents", "texts")),
    "vllm.score": (("text_1", "queries", "data_1", "query"), ("text_2", "documents", "data_2", "items")),
    "vllm.generative_scoring": (("query",), ("items",)),
}

#: What /generate takes for a prompt -> (the object of options, the cap in it): TGI, SGLang, vLLM, Triton, vLLM's demo.
_GENERATE = {
    "inputs": ("parameters", "max_new_tokens"),
    "text": ("sampling_params", "max_new_tokens"),
    "input_ids": ("sampling_params", "max_new_tokens"),
    "input_embeds": ("sampling_params", "max_new_tokens"),
    "token_ids": ("sampling_params", "max_tokens"),
    "text_input": ("max_tokens",),
    "prompt": ("max_tokens",),
}

#: SGLang's fields of media beside the prompt.
_MEDIA = ("video_data", "audio_data")


def pairs(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """Rerank and score: one sequence per pair, the single side repeated."""
    gathered = Gathered()
    left, right = (_sides(members, names, gathered) for names in _PAIRS[route.dialect or ""])
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise BadRequest(400, "invalid_value", "Both sides must have one entry or equally many.", None)
    return pooled(members, route, gathered, tuple(_pair(*pair) for pair in zip(left, right, strict=True)))


def _pair(left: str | list[int], right: str | list[int]) -> Prompt:
    texts = tuple(side for side in (left, right) if type(side) is str)
    ids = sum(len(side) for side in (left, right) if type(side) is list)
    return TokenPrompt(ids, texts) if len(texts) < 2 else TextPrompt(texts)


def _sides(members: Members, names: tuple[str, ...], gathered: Gathered) -> list[str | list[int]]:
    name = first_given(members, names)
    value = members.get(name)
    if type(value) is dict and type(value.get("content")) is list:
        value = value["content"]
    if type(value) is not list or (value and set(map(type, value)) == {int}):
        value = [value]
    if not value:
        raise BadRequest(400, "invalid_type", f"{name} must be text or a list of texts.", name)
    return [_side(item, name, gathered) for item in bounded(value, name)]


def _side(item: Json, name: str, gathered: Gathered) -> str | list[int]:
    if type(item) is str:
        return item
    if type(item) is list and item and set(map(type, item)) == {int}:
        return item
    if type(item) not in (dict, list):
        raise BadRequest(400, "invalid_type", f"{name} must be text or a list of texts.", name)
    return strings_of(item, gathered)


def completion(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """llama.cpp /completion: text, tokens, both mixed (one prompt), or several of these."""
    gathered = Gathered()
    prompts = prompts_of(members.get("prompt"), "prompt", gathered)
    return generation(members, route, limits, gathered, prompts, cap_path=("n_predict",))


def infill(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """llama.cpp /infill: prefix, suffix, prompt, and extra files before them: text as a whole, whatever it looks like."""
    gathered = Gathered()
    texts = [text for name in ("input_prefix", "input_suffix") if (text := fields.text(members, name)) is not None]
    for index, extra in enumerate(fields.listing(members.get("input_extra"), "input_extra")):
        if type(extra) is not dict:
            raise BadRequest(400, "invalid_type", f"input_extra[{index}] must be an object.", f"input_extra[{index}]")
        texts += [value for value in extra.values() if type(value) is str]
    prompt = None if members.is_null("prompt") else prompts_of(members.get("prompt"), "prompt", gathered)
    inner = [p for p in prompt or () if isinstance(p, TextPrompt | TokenPrompt)]
    texts += [text for p in inner for text in p.texts]
    ids = sum(p.length for p in inner if isinstance(p, TokenPrompt))
    whole: Prompt = TokenPrompt(ids, tuple(texts)) if ids else TextPrompt(tuple(texts))
    return generation(members, route, limits, gathered, (whole,), cap_path=("n_predict",))


def generate(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/generate by shape: TGI (inputs), SGLang (text, input_ids, input_embeds), vLLM (token_ids, prompt), Triton."""
    gathered = Gathered()
    name = first_given(members, ("prompt", *_GENERATE))
    prompts = _generate_prompts(members.get(name), name, gathered)
    take_pictures(members.get("image_data"), gathered)
    content = members.get("content_parts")
    if content is not None:
        clean(fields.listing(content, "content_parts"), gathered)
    for media in _MEDIA:
        if not members.is_null(media):
            given = members.get(media)
            gathered.unknown_parts += len(given) if type(given) is list else 1
            gathered.warn("unknown_content_part")
    return _with_options(members, route, limits, gathered, prompts, _GENERATE[name])


def _generate_prompts(value: Json, name: str, gathered: Gathered) -> tuple[Prompt, ...]:
    return _rows(value, name) if name == "input_embeds" else prompts_of(value, name, gathered)


def _rows(value: Json, name: str) -> tuple[Prompt, ...]:
    """SGLang's embeddings as numbers: one row per token, one prompt or a list of these."""
    given = fields.listing(value, name)
    first = given[0] if given else None
    if type(first) is not list or not first:
        raise BadRequest(400, "invalid_type", f"{name} must be rows of numbers.", name)
    batch = bounded(given, name) if type(first[0]) is list else [given]
    return tuple(TokenPrompt(len(fields.listing(rows, name))) for rows in batch)


def _with_options(
    members: Members,
    route: Route,
    limits: BodyLimits,
    gathered: Gathered,
    prompts: tuple[Prompt, ...],
    path: tuple[str, ...],
) -> InferenceRequest:
    """The request with its object of options; SGLang also takes a list of these, one per prompt.

    Of a list the largest figures count, and no cap can be written where there is none.
    """
    value = members.get(path[0]) if len(path) > 1 else None
    if type(value) is not list:
        return generation(members, route, limits, gathered, prompts, cap_path=path)
    given = [fields.mapping(item, f"{path[0]}[{index}]") for index, item in enumerate(value)]
    each = [_listed(item, f"{path[0]}[{index}]", limits) for index, item in enumerate(given)]
    request = generation(members, route, limits, gathered, prompts, cap_path=())
    caps = [cap for _, cap, _ in each]
    ignores = request.ignore_eos or any(item.get("ignore_eos") is True for item in given)
    cap = fields.largest(caps) if caps and all(c.value is not None for c in caps) else None
    minimum = max((least for _, _, least in each), default=0)
    return replace(
        request,
        sequences=request.sequences * max((width for width, _, _ in each), default=1),
        max_output_tokens=cap,
        min_output_tokens=max(0, (cap or minimum) if ignores else minimum),
        ignore_eos=ignores,
    )


def _listed(options: Mapping[str, Json], param: str, limits: BodyLimits) -> tuple[int, CapField, int]:
    """(sequences per prompt, cap, least output) of one entry in a list of options."""
    widths = [fields.integer(options.get(name), f"{param}.{name}") or 1 for name in fields.WIDTH_NAMES]
    if not all(1 <= width <= limits.max_sequences for width in widths):
        raise BadRequest(400, "invalid_value", f"{param} asks for too many sequences.", param)
    cap = fields.integer(options.get("max_new_tokens"), f"{param}.max_new_tokens")
    least = fields.integer(options.get("min_new_tokens"), f"{param}.min_new_tokens") or 0
    unlimited = cap is not None and cap < 0
    return max(widths), CapField(param, (0, 0), None if unlimited else cap, unlimited), least


def vertex(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """SGLang's /vertex_generate: instances, each a body of /generate, and the parameters of all."""
    gathered = Gathered()
    prompts: list[Prompt] = []
    for index, instance in enumerate(bounded(fields.listing(members.get("instances"), "instances"), "instances")):
        param = f"instances[{index}]"
        if type(instance) is not dict:
            raise BadRequest(400, "invalid_type", f"{param} must be an object.", param)
        name = next((n for n in ("text", "input_ids", "input_embeds") if instance.get(n) is not None), "text")
        prompts += _generate_prompts(instance.get(name), name, gathered)
        take_pictures(instance.get("image_data"), gathered)
    path = ("parameters", "sampling_params", "max_new_tokens")
    return generation(members, route, limits, gathered, tuple(prompts), cap_path=path)
