"""The engines' own routes: vLLM's rerank and score, llama.cpp's completion and infill, SGLang's and TGI's generate."""

from __future__ import annotations

from msgspec.structs import replace

from extproc.dialects import fields, schemas
from extproc.dialects.content import Gathered, clean, strings_of
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, InferenceRequest, Json, Prompt, Route, Span, TextPrompt, TokenPrompt
from extproc.dialects.openai import bounded, first_given, generation, pooled, prompts_of, take_pictures
from extproc.errors import BadRequest

#: Fields that hold the two sides of a pair, by route. SGLang's score and vLLM's generative scoring take token ids too.
_PAIRS = {
    "vllm.rerank": (("query",), ("documents", "texts")),
    "vllm.score": (("text_1", "queries", "data_1", "query"), ("text_2", "documents", "data_2", "items")),
    "vllm.generative_scoring": (("query",), ("items",)),
}

#: What the engine puts into every pair beside its two sides: SGLang, vLLM.
_INSTRUCTIONS = ("instruct", "instruction")

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
    """Rerank and score: one sequence per pair, the single side and the instruction repeated."""
    gathered = Gathered()
    left, right = (_sides(members, names, gathered) for names in _PAIRS[route.dialect or ""])
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise BadRequest(400, "invalid_value", "Both sides must have one entry or equally many.", None)
    told = tuple(text for name in _INSTRUCTIONS if (text := fields.text(members, name)) is not None)
    kwargs = members.get("chat_template_kwargs")
    if kwargs is not None:
        told = (*told, strings_of(fields.mapping(kwargs, "chat_template_kwargs"), gathered))
    return pooled(members, route, gathered, tuple(_pair(*pair, told) for pair in zip(left, right, strict=True)))


def _pair(left: str | list[int], right: str | list[int], told: tuple[str, ...]) -> Prompt:
    texts = tuple(side for side in (left, right) if type(side) is str)
    ids = sum(len(side) for side in (left, right) if type(side) is list)
    return TokenPrompt(ids, (*told, *texts)) if len(texts) < 2 else TextPrompt((*told, *texts))


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
    """The request with its object of options; SGLang also takes a list of these, one per prompt: the largest figures count."""
    value = members.get(path[0]) if len(path) > 1 else None
    if type(value) is not list:
        return generation(members, route, limits, gathered, prompts, cap_path=path)
    request = generation(members, route, limits, gathered, prompts, cap_path=())
    each = fields.listed(members, path[0], limits)
    caps = [fields.caps(options) for options in each]
    largest = [fields.largest(found) for found in caps]
    cap = None if None in largest else max(cap for cap in largest if cap is not None)
    ignores = request.ignore_eos or any(fields.flag(options, "ignore_eos") for options in each)
    names = ("min_tokens", "min_new_tokens")
    least = max(fields.integer(o.get(name), o.param(name)) or 0 for o in each for name in names)
    bare = tuple(place for place, found in zip(_places(each), caps, strict=True) if not found)
    points = replace(
        request.edit,
        caps=(*request.edit.caps, *(cap for found in caps for cap in found)),
        cap_path=path if bare else (),
        outers=bare,
        outer_depth=1,
    )
    return replace(
        request,
        sequences=request.sequences * max(fields.width(options, limits) for options in each),
        max_output_tokens=cap,
        min_output_tokens=max(0, (cap or least) if ignores else least),
        ignore_eos=ignores,
        schema_bytes=max(request.schema_bytes, *(schemas.guard(options, limits) for options in each)),
        edit=points,
    )


def _places(each: list[Members]) -> list[Span]:
    """Spans of the objects, their ends as far as an insertion behind the opening brace needs them."""
    return [(o.start - 1, max((end for _, end in o.spans.values()), default=o.start) + 1) for o in each]


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
