"""One model's counter: a request in, a token count out, exact where it can be, else a true upper bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from extproc.dialects.model import ChatPrompt, InferenceRequest, Prompt, TextPrompt, TokenPrompt
from extproc.errors import ConfigError, GeometryError
from extproc.memory.gguf_header import read_header
from extproc.memory.hf import VISION_FAMILIES
from extproc.tokens import bound as bounds
from extproc.tokens.conversation import prepared
from extproc.tokens.encoders import EncoderFailure, Vocabulary, load_vocabulary
from extproc.tokens.overheads import ANY, TemplateOverhead
from extproc.tokens.pictures import UNKNOWN_PICTURES, PictureRule, picture_rule
from extproc.tokens.templates import ChatTemplate, TemplateFailure
from extproc.types import TokenCount

#: Charge for a content part that we do not know (audio, video, documents): a page or two of text.
UNKNOWN_PART_TOKENS = 2048

#: Charge for text of the prompt that the body does not show (earlier turns by their id): a long conversation.
HIDDEN_TOKENS = 32_768

#: A string counted alone may merge otherwise where a template puts its marks beside it: tokens allowed for its two ends.
JUNCTION_TOKENS = 4

#: Messages beyond this are not rendered: the bound answers in a fraction of the time.
MAX_MESSAGES = 20_000

#: Special tokens that a template may name.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


#: What engines other than vLLM may add: a BOS that neither template nor tokenizer.json has, a line break for an empty
#: part (llama.cpp), ``"strict": false`` in a tool or blanks in a call (SGLang).
OTHERWISE_BOS = 1
OTHERWISE_PART = 2
OTHERWISE_TOOL = 12

#: Model types whose conversations vLLM 0.32 encodes by code of its own, not by the chat template (config/model.py,
#: renderers/): so does it for a directory with a tekken.json.
OWN_PROMPTS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "kimi_audio", "inkling"})
OWN_PROMPTS_NOTE = "vLLM writes this model's prompts by code of its own; conversations are counted by a bound"

#: Dialects whose two texts a cross-encoder joins and other models take each alone.
_PAIRS = frozenset({"vllm.rerank", "vllm.score"})

#: Keys of a GGUF header -> the template's name.
_GGUF_TEMPLATES = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}


class CountingStopped(Exception):
    """Raised by a tick (deadline, budget) to stop an exact count; the bound answers."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """Tokens of one prompt, how many pictures stand in it as one token each, and whether the figure is the engine's."""

    tokens: int
    pads: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class PromptCounter:
    """Counts the prompts of requests for one model.

    Without a ``vocabulary`` every count is the bound. Without a ``template`` a conversation is counted string by string
    and its template charged by ``overhead``: an upper bound too. ``tool_template`` is the template some models use
    where a request has tools. Where the engine's own handling of messages is not ``followed``, a rendered conversation
    is an upper bound, with an allowance for what engines do otherwise. ``note`` says what was found at load.
    """

    vocabulary: Vocabulary | None = None
    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None
    pictures: PictureRule = UNKNOWN_PICTURES
    unknown_part_tokens: int = UNKNOWN_PART_TOKENS
    overhead: TemplateOverhead = ANY
    adds_specials: int | None = None
    followed: bool = True
    note: str | None = None

    def count(
        self,
        request: InferenceRequest,
        *,
        budget_tokens: int | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> TokenCount:
        """The exact count, or the bound where there is no exact one, ``budget_tokens`` is passed, or ``tick`` stops it.

        ``tick`` is called every millisecond or so of work and may raise CountingStopped.
        """
        if self.vocabulary is None:
            return self.bound(request)
        others = self._others(request)
        pictures = self.pictures.exact(request)
        most = self.pictures.most(request)
        beside = most if pictures is None else max(0, pictures - len(request.images))
        left = None if budget_tokens is None else budget_tokens - others - beside
        counted: list[_Counted] = []
        known: dict[str, int] | None = {} if len(request.prompts) > 1 else None
        paired = request.dialect in _PAIRS
        try:
            for prompt in request.prompts:
                counted.append(self._counted(prompt, self.vocabulary, left, tick, known, paired))
                if left is not None:
                    left -= counted[-1].tokens
        except (CountingStopped, EncoderFailure, TemplateFailure):
            return self.bound(request)
        counts = self._kept(request, [part.tokens for part in counted]) or [0]
        pads = sum(part.pads for part in counted)
        if request.images and (pictures is None or pads != len(request.images)):
            pictures = None
        elif pictures:
            pictures -= pads
        counts[0] += others + (most if pictures is None else pictures)
        unseen = request.unknown_parts or request.hidden
        exact = pictures is not None and not unseen and all(part.exact for part in counted)
        return TokenCount(tuple(counts), "exact" if exact else "bound", hidden_tokens=HIDDEN_TOKENS * request.hidden)

    def bound(self, request: InferenceRequest) -> TokenCount:
        """A count that no tokenizer exceeds, in time proportional to the text and without native code."""
        measure = bounds.TextBounds()
        counts = [bounds.prompt_bound(prompt, self.overhead, measure) for prompt in request.prompts]
        counts = self._kept(request, counts) or [0]
        counts[0] += self._others(request) + self.pictures.most(request)
        return TokenCount(tuple(counts), "bound", hidden_tokens=HIDDEN_TOKENS * request.hidden)

    def _counted(
        self,
        prompt: Prompt,
        vocabulary: Vocabulary,
        left: int | None,
        tick: Callable[[], None],
        known: dict[str, int] | None,
        paired: bool,
    ) -> _Counted:
        """One prompt; ``known`` remembers the strings of a request with several, as a query stands in each pair."""

        def stop(so_far: int) -> None:
            tick()
            if left is not None and so_far > left:
                raise CountingStopped

        def tokens(text: str, specials: bool = False) -> int:
            if left is not None and len(text) > left * vocabulary.max_token_bytes:
                raise CountingStopped
            if known is None or specials:
                return vocabulary.count(text, add_special_tokens=specials, tick=stop)
            if text not in known:
                known[text] = vocabulary.count(text, add_special_tokens=False, tick=stop)
            return known[text]

        tick()
        if isinstance(prompt, TokenPrompt):
            # What engines put between ids and texts, or around files to be filled in, is theirs.
            allowed = 0 if self.followed else bounds.PROMPT_OVERHEAD * len(prompt.texts)
            return _Counted(prompt.length + sum(map(tokens, prompt.texts)) + allowed, exact=not allowed)
        if isinstance(prompt, TextPrompt):
            specials = self._added_specials(vocabulary) if prompt.add_special_tokens else 0
            pieces = bounds.PROMPT_OVERHEAD * len(prompt.texts) if len(prompt.texts) > 1 else OTHERWISE_BOS
            allowed, exact = (0, True) if self.followed else (pieces, False)
            if paired:
                alone, joined = 2 * specials, vocabulary.pair_specials if self.adds_specials is None else 2 * specials
                specials, exact = max(alone, joined), exact and alone == joined
            return _Counted(sum(map(tokens, prompt.texts)) + specials + allowed, exact=exact)
        template = self._template_for(prompt)
        if template is None:
            return _Counted(
                bounds.chat_bound(prompt, self.overhead, lambda text: tokens(text) + JUNCTION_TOKENS, counted=True),
                exact=False,
            )
        text = self._rendered(prompt, template, tick)
        pad = self.pictures.pad
        pads = text.count(pad) if pad is not None and pad in vocabulary.specials else 0
        count = tokens(text, prompt.add_special_tokens)
        return _Counted(count, pads) if self.followed else _Counted(count + _otherwise(prompt), exact=False)

    def _kept(self, request: InferenceRequest, counts: list[int]) -> list[int]:
        """Counts after vLLM has cut the prompts; other engines do not, and a counter without a tokenizer may stand for any."""
        most = request.truncate_to
        if most is None or request.images or not self.followed or self.vocabulary is None:
            return counts
        return [min(count, most) for count in counts]

    def _added_specials(self, vocabulary: Vocabulary) -> int:
        return vocabulary.prompt_specials if self.adds_specials is None else self.adds_specials

    def _template_for(self, prompt: ChatPrompt) -> ChatTemplate | None:
        return self.tool_template if prompt.tools and self.tool_template is not None else self.template

    def _rendered(self, prompt: ChatPrompt, template: ChatTemplate, tick: Callable[[], None]) -> str:
        if prompt.template is not None or len(prompt.messages) > MAX_MESSAGES:
            raise TemplateFailure("no template to render this conversation with")
        messages, tools = prepared(prompt, template, keep_billing=not self.followed)
        return template.render(
            messages,
            tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            kwargs=prompt.kwargs,
            tick=tick,
        )

    def _others(self, request: InferenceRequest) -> int:
        """Tokens of unknown parts, of an earlier context, and of what the body does not show."""
        return self.unknown_part_tokens * request.unknown_parts + request.context_ids + HIDDEN_TOKENS * request.hidden


def _otherwise(prompt: ChatPrompt) -> int:
    """Tokens that another engine may make more of a conversation than vLLM: empty parts kept, blanks and fields of tools."""
    parts = sum(len(content) for m in prompt.messages if isinstance(content := m.get("content"), list))
    calls = sum(len(calls) for m in prompt.messages if isinstance(calls := m.get("tool_calls"), list))
    return OTHERWISE_BOS + OTHERWISE_PART * parts + OTHERWISE_TOOL * (calls + len(prompt.tools or []))


def load_tokenizer(
    path: Path | None,
    chat_template: Path | None = None,
    *,
    now: Callable[[], datetime],
    image_family: str | None = None,
    image_tokens_each: int | None = None,
    overhead: TemplateOverhead = ANY,
    followed: bool = True,
    model_type: str | None = None,
) -> PromptCounter:
    """The counter of one model from its files; without ``path`` a counter of bounds.

    The template is ``chat_template`` (a Jinja file, or a GGUF file that carries one), else ``chat_template.jinja`` beside
    the tokenizer, else the one in ``tokenizer_config.json`` there; none for models whose prompts the engine writes itself.
    ``model_type`` and ``image_family`` default to what ``config.json`` beside the tokenizer says. ``now`` is the clock that
    templates may print.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    if path is None:
        pictures = picture_rule(image_family, {}, image_tokens_each)
        return PromptCounter(pictures=pictures, overhead=overhead, followed=followed)
    config = _json(path.parent / "tokenizer_config.json")
    model_type = model_type or str(_json(path.parent / "config.json").get("model_type"))
    family = image_family or VISION_FAMILIES.get(model_type)
    processor = _json(path.parent / "preprocessor_config.json")
    specials = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    own = model_type in OWN_PROMPTS or (path.parent / "tekken.json").exists()
    sources = {} if own else _templates(path, chat_template, config)
    compiled = {name: _compiled(source, specials, now, path) for name, source in sources.items()}
    vocabulary = load_vocabulary(path)
    return PromptCounter(
        vocabulary=vocabulary,
        template=compiled.get("default"),
        tool_template=compiled.get("tool_use"),
        pictures=picture_rule(family, processor, image_tokens_each),
        overhead=overhead,
        followed=followed,
        note=vocabulary.note or (OWN_PROMPTS_NOTE if own else None),
    )


def _templates(path: Path, chat_template: Path | None, config: Mapping[str, Any]) -> dict[str, str]:
    file = chat_template or path.parent / "chat_template.jinja"
    if file.suffix.lower() == ".gguf":
        return _gguf_templates(file)
    if chat_template is not None or file.exists():
        try:
            return {"default": file.read_text("utf-8")}
        except (OSError, ValueError) as error:
            raise ConfigError([f"{file}: cannot be read as a chat template ({error})"]) from error
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given if isinstance(entry, dict)}
    return {}


def _gguf_templates(file: Path) -> dict[str, str]:
    """The templates in a GGUF file's header, which llama.cpp renders; its tokenizer is not read."""
    try:
        with file.open("rb") as data:
            fields = read_header(data, str(file)).fields
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read as a chat template ({error})"]) from error
    except GeometryError as error:
        raise ConfigError([str(error)]) from error
    found = {name: fields.get(key) for name, key in _GGUF_TEMPLATES.items()}
    sources = {name: source for name, source in found.items() if isinstance(source, str)}
    if "default" not in sources:
        raise ConfigError([f"{file}: holds no chat template; name a Jinja file, or templateFamily"])
    return sources


def _compiled(source: str, specials: Mapping[str, str], now: Callable[[], datetime], path: Path) -> ChatTemplate:
    try:
        return ChatTemplate(source, specials, now=now)
    except jinja2.TemplateError as error:
        raise ConfigError([f"{path}: its chat template is not valid Jinja ({error})"]) from error


def _json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: not readable JSON ({error})"]) from error
    return data if isinstance(data, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    content = value.get("content") if isinstance(value, dict) else None
    return content if isinstance(content, str) else None
