"""The engines' own routes: vLLM's rerank and score, llama.cpp's completion and infill, SGLang's and TGI's generate."""

from __future__ import annotations

from dataclasses import replace

from extproc.dialects import fields
from extproc.dialects.content import Gathered, strings_of
from extproc.dialects.jsonbody import Members
from extproc.dialects.model import BodyLimits, CapField, InferenceRequest, Json, Prompt, Route, TextPrompt, TokenPrompt
from extproc.dialects.openai import bounded, generation, pooled, prompts_of
from extproc.errors import BadRequest

#: Fields that hold the two sides of a pair, by route.
_PAIRS = {
    "vllm.rerank": (("query",), ("documents", "texts")),
    "vllm.score": (("text_1", "queries"), ("text_2", "documents", "items")),
}


def pairs(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """Rerank and score: one sequence per pair, the single side repeated."""
    gathered = Gathered()
    left, right = (_texts(members, names, gathered) for names in _PAIRS[route.dialect or ""])
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise BadRequest(400, "invalid_value", "Both sides must have one entry or equally many.", None)
    return pooled(members, route, gathered, tuple(TextPrompt(pair) for pair in zip(left, right, strict=True)))


def _texts(members: Members, names: tuple[str, ...], gathered: Gathered) -> list[str]:
    name = next((n for n in names if n in members), names[0])
    value = members.get(name)
    if type(value) is dict and type(value.get("content")) is list:
        value = value["content"]
    if type(value) is not list:
        value = [value]
    bounded(value, name)
    if any(item is None or type(item) not in (str, dict, list) for item in value) or not value:
        raise BadRequest(400, "invalid_type", f"{name} must be text or a list of texts.", name)
    return [item if type(item) is str else strings_of(item, gathered) for item in value]


def completion(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """llama.cpp /completion: text, tokens, both mixed (one prompt), or several of these."""
    value = members.get("prompt")
    return generation(members, route, limits, Gathered(), _llamacpp_prompts(value), cap_path=("n_predict",))


def _llamacpp_prompts(value: Json) -> tuple[Prompt, ...]:
    if type(value) is dict:
        value = value.get("prompt_string")
    if type(value) is list and value and any(type(item) is int for item in value):
        return (_mixed(value),)
    if type(value) is list and any(type(item) in (list, dict) for item in value):
        return tuple(prompt for item in bounded(value, "prompt") for prompt in _llamacpp_prompts(item))
    return prompts_of(value, "prompt")


def _mixed(items: list[Json]) -> Prompt:
    texts = tuple(item for item in items if type(item) is str)
    if any(type(item) not in (int, str) for item in items):
        raise BadRequest(400, "invalid_type", "prompt must hold text and token ids only.", "prompt")
    return TokenPrompt(len(items) - len(texts), texts)


def infill(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """llama.cpp /infill: prefix, suffix, prompt, and extra files before them."""
    gathered = Gathered()
    names = ("input_prefix", "input_suffix", "prompt")
    texts = [text for name in names if (text := fields.text(members, name)) is not None]
    texts += [strings_of(extra, gathered) for extra in fields.listing(members.get("input_extra"), "input_extra")]
    return generation(members, route, limits, gathered, (TextPrompt(tuple(texts)),), cap_path=("n_predict",))


def generate(members: Members, route: Route, limits: BodyLimits) -> InferenceRequest:
    """/generate by shape: TGI (inputs, parameters), SGLang (text or input_ids, sampling_params), vLLM's demo (prompt)."""
    name = next((n for n in ("inputs", "text", "input_ids", "prompt") if n in members), "prompt")
    outer = "parameters" if name == "inputs" else "sampling_params"
    request = generation(
        members, route, limits, Gathered(), prompts_of(members.get(name), name), cap_path=(outer, "max_new_tokens")
    )
    nested = members.members(outer)
    if nested is None:
        return _without_place(members, request, outer)
    caps = request.edit.caps + fields.caps(nested)
    width = max(fields.count(nested, n, limits) for n in ("n", "best_of"))
    ignore_eos = request.ignore_eos or fields.flag(nested, "ignore_eos")
    minimum = fields.integer(nested.get("min_new_tokens"), f"{outer}.min_new_tokens") or 0
    cap = fields.largest(caps)
    points = replace(fields.edit_points(members, caps, (outer, "max_new_tokens")), options=members.spans.get(outer))
    return replace(
        request,
        sequences=request.sequences * width,
        max_output_tokens=cap,
        min_output_tokens=max(0, (cap or minimum) if ignore_eos else minimum),
        ignore_eos=ignore_eos,
        edit=points,
    )


def _without_place(members: Members, request: InferenceRequest, outer: str) -> InferenceRequest:
    """SGLang also takes a list of sampling parameters, one per prompt: the largest cap counts, none can be written."""
    value = members.get(outer)
    if value is None:
        return request
    caps: list[CapField] = []
    for index, item in enumerate(fields.listing(value, outer)):
        limit = fields.integer(fields.mapping(item, outer).get("max_new_tokens"), f"{outer}[{index}].max_new_tokens")
        caps.append(CapField(f"{outer}[{index}]", (0, 0), limit if limit is None or limit >= 0 else None))
    unlimited = any(cap.value is None for cap in caps)
    points = replace(request.edit, cap_path=())
    return replace(request, max_output_tokens=None if unlimited else fields.largest(caps), edit=points)
