"""What a request is once it is understood: the values that the dialects hand to counting and admission.

Owns the shapes of a parsed request. Knows no engine, no tokenizer, no HTTP server. Byte offsets are always
into the decoded body (content-encoding removed), ends are exclusive. The values are structs: frozen and slotted as the
dataclasses elsewhere, and built in a fifth of the time, which counts where some are built for every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from extproc.types import ImageInput

Span = tuple[int, int]

#: One JSON value as decoded: dict, list, str, int, float, bool or None.
Json = Any

Kind = Literal["inference", "control", "unknown"]


class BodyLimits(Struct, frozen=True):
    """Bounds on what one request may make us do.

    ``max_bytes`` holds for the body as sent and as decompressed; ``max_ratio`` (decompressed over
    compressed) counts once the output passes ``ratio_floor_bytes``; ``max_window_bytes`` is the zstd window
    (memory) that a frame may ask for; ``max_depth`` the nesting of JSON values; ``max_values`` the values of the whole body; ``max_members`` the keys of an object whose places are kept; ``max_schema_bytes`` and
    ``max_schema_unions`` guard the output grammar (engines compile it without a time limit);
    ``max_sequences`` is vLLM's own limit on n.
    """

    max_bytes: int = 32 * 1024 * 1024
    max_ratio: int = 200
    ratio_floor_bytes: int = 1024 * 1024
    max_window_bytes: int = 32 * 1024 * 1024
    max_depth: int = 96
    max_values: int = 1_500_000
    max_members: int = 1_000
    max_schema_bytes: int = 256 * 1024
    max_schema_unions: int = 6
    max_sequences: int = 16_384


class Route(Struct, frozen=True):
    """What a path stands for: ``dialect`` (None where unknown), ``operation`` (gen_ai.operation.name), ``kind``."""

    dialect: str | None
    operation: str | None
    kind: Kind


class DecodedBody(Struct, frozen=True):
    """A body without content-encoding; ``changed`` says that ``data`` differs from what the client sent."""

    data: bytes
    changed: bool


class ChatPrompt(Struct, frozen=True):
    """A conversation in the shape that engines feed to a chat template.

    ``messages`` follow the OpenAI form (role, content as string or list of parts, tool_calls …) whatever
    the client's dialect was; ``tools`` likewise. ``kwargs`` are the template's extra variables.
    ``merge_system`` says that system messages may stand anywhere (Anthropic) and are joined into the first
    where a template insists on that. ``template`` is one that the client sends, which is never rendered, "" where the
    engine makes messages of the body by code that nobody follows here: no count of these is exact. Images are part of ``messages`` only as ``{"type": "image"}`` parts without data.
    """

    messages: list[dict[str, Json]]
    tools: list[Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    merge_system: bool = False
    template: str | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict)


class TextPrompt(Struct, frozen=True):
    """Plain text pieces that become one sequence of tokens, special tokens added by the tokenizer."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True):
    """A prompt given as token ids (exact length), with text beside it where a dialect mixes both."""

    length: int
    texts: tuple[str, ...] = ()


#: Operations whose answers are generated token by token.
GENERATING = frozenset({"chat", "text_completion"})

Prompt = ChatPrompt | TextPrompt | TokenPrompt


class CapField(Struct, frozen=True):
    """One output cap found in the body: its JSON path, the place of its value and what it says (None: no cap).

    ``unlimited`` tells a number that lifts every limit (-1) from null, which says nothing.
    """

    name: str
    span: Span
    value: int | None
    unlimited: bool = False


class EditPoints(Struct, frozen=True):
    """Where a mutation may touch the body.

    ``start`` is the offset behind the opening brace; ``empty`` says that the object has no members.
    ``model`` spans the top-level value including its quotes. ``caps`` are all caps present; ``cap_path`` is
    where the dialect's own cap is inserted if ``native_cap`` is False: ("max_tokens",) or
    ("options", "num_predict"). ``outers`` spans the innermost value along that path which the body has (of
    a list of options each that has no cap), and ``outer_depth`` is how many names lead to it. ``stream_options`` spans that object's value.
    """

    start: int
    empty: bool
    model: Span | None = None
    caps: tuple[CapField, ...] = ()
    cap_path: tuple[str, ...] = ()
    native_cap: bool = False
    outers: tuple[Span, ...] = ()
    outer_depth: int = 0
    stream_options: Span | None = None
    include_usage: Span | None = None


class InferenceRequest(Struct, frozen=True):
    """One request, understood.

    ``sequences`` = prompts x max(n, best_of, beam width); for embeddings and scoring the number of inputs.
    ``max_output_tokens`` is the largest cap named, None without one, 0 where nothing is generated.
    ``min_output_tokens`` is what the engine is forced to produce (min_tokens; the cap with ignore_eos).
    ``unknown_parts`` counts content parts of types we do not know; each is charged a configured amount.
    ``hidden`` counts texts of the prompt that the body does not show: earlier turns that the engine keeps, stored
    prompts, what a client's own template may add.
    ``prompt_logprobs`` is how many log-probabilities the engine keeps for each input token; negative: of the whole
    vocabulary. ``prefill`` says that the last message is an assistant's to be continued. ``context_tokens`` is a context
    length that the request itself asks the engine for (Ollama's num_ctx), None otherwise; ``context_ids`` the
    length of an earlier context sent along as token ids. ``picture_tokens_asked`` is not 0 where the client sets the
    picture processor itself: no picture takes more tokens than that and its own area say. ``truncate_to`` is the most
    tokens of a prompt that vLLM keeps at the client's wish, None where it keeps all.
    ``reserve`` is False for control calls and load/unload requests. ``body_bytes`` is the decoded body's size.
    ``handle`` is not 0 where the prompts lie in the process that parsed them.
    """

    dialect: str
    operation: str
    model: str | None
    stream: bool
    prompts: tuple[Prompt, ...]
    sequences: int
    max_output_tokens: int | None
    min_output_tokens: int = 0
    images: tuple[ImageInput, ...] = ()
    picture_tokens_asked: int = 0
    truncate_to: int | None = None
    unknown_parts: int = 0
    hidden: int = 0
    reserve: bool = True
    has_tools: bool = False
    include_usage_asked: bool = False
    ignore_eos: bool = False
    prompt_logprobs: int = 0
    prefill: bool = False
    context_tokens: int | None = None
    context_ids: int = 0
    schema_bytes: int = 0
    warnings: tuple[str, ...] = ()
    body_bytes: int = 0
    handle: int = 0
    edit: EditPoints = EditPoints(start=0, empty=True)

    @property
    def model_span(self) -> Span | None:
        """Place of the top-level model value in the body, quotes included."""
        return self.edit.model

    @property
    def generates(self) -> bool:
        """Whether the engine decodes tokens for this request at all."""
        return self.operation in GENERATING and self.max_output_tokens != 0

    @property
    def runs_to_cap(self) -> bool:
        """Whether every sequence is certain to use its whole cap, so that no statistics apply."""
        cap = self.max_output_tokens
        return cap is not None and (self.ignore_eos or self.min_output_tokens >= cap > 0)

    @property
    def kv_tokens_output_max(self) -> int | None:
        """Output tokens of all sequences at the cap, None without a cap."""
        return None if self.max_output_tokens is None else self.sequences * self.max_output_tokens


class Parsed(Struct, frozen=True):
    """The result of parsing one HTTP request.

    ``body`` is what goes on to the engine; ``decoded`` says that a content-encoding was removed from it.
    ``request`` is None on routes that are not understood. ``model`` and ``model_span`` (top-level model value,
    quotes included) are known wherever the body is a JSON object that names one.
    """

    route: Route
    body: bytes
    decoded: bool
    request: InferenceRequest | None
    model: str | None = None
    model_span: Span | None = None

    @property
    def unknown(self) -> bool:
        """Whether the path or the content type is none that we know."""
        return self.route.kind == "unknown"

    @property
    def dialect(self) -> str | None:
        """The dialect of the path, for errors in the client's own form."""
        return self.route.dialect


class EditedBody(Struct, frozen=True):
    """A body after an edit and where its top-level model value now lies (None: the body names no model)."""

    body: bytes
    model_span: Span | None
