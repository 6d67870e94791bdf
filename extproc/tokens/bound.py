"""Upper bounds on token counts that hold without a tokenizer.

A byte-level tokenizer emits at most one token per UTF-8 byte of its normalised text, a character-level one (with
byte fallback) at most one per character or byte, plus a prefix per text. Normalisation can lengthen text (NFC of
U+1D160 is three times as long, NFKC of U+FDFA ten times), so the longest of the forms in use counts. What a chat
template adds is bounded by constants that hold for every template in the tests, with a factor to spare.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from json.encoder import encode_basestring

from extproc.dialects.content import TOOL_REFERENCE
from extproc.dialects.model import ChatPrompt, Json, Prompt, TextPrompt, TokenPrompt
from extproc.tokens.overheads import ANY, TemplateOverhead

#: BOS, EOS, CLS, SEP and the like around one prompt, and the blank that SentencePiece puts before a text.
PROMPT_OVERHEAD = 4

#: Markup of one argument or schema key where a template spells it in tags.
PER_KEY = 24

#: A picture's placeholder between its start and end marks, or a line of its own.
PER_PART = 8

#: A string -> most of its tokens.
Measure = Callable[[str], int]

#: Characters looked at in one step (about a millisecond), so that other threads get a turn.
_STEP = 128 * 1024

#: Slack per cut: what composing may do otherwise there. A mark may come to another letter, or one composed character may
#: come apart, which adds at most 6 bytes (a Hangul syllable).
_EDGE = 8

#: Combining marks in a row that are composed; sorting them takes quadratic time. Real text has fewer (Stream-Safe Text
#: Format, Unicode Standard Annex 15, section 13).
MARKS = 30

#: Strings from this length are measured once a count, however many prompts they stand in.
_REMEMBERED_CHARS = 256

#: Strings of one value whose measure is kept while it is walked: all that a set of tools repeats, and little memory.
_KNOWN_STRINGS = 1024

#: Printed JSON up to this is counted as one text where a tokenizer is at hand; more of it costs more than it is worth.
PRINTED_CHARS = 512 * 1024

#: Characters of a number as JSON; whole numbers outside the other may have more.
_NUMBER, _WIDE = 24, 10**23

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")

#: More than ``MARKS`` characters in a row that may be marks. No mark is a word character but two that Unicode counts as
#: letters; symbols in such a row lose nothing, as none of them composes.
_MANY_MARKS = re.compile(rf"[\W\uff9e\uff9f]{{{MARKS + 1},}}")


class TextBounds:
    """``text_bound`` that remembers long strings while one request is counted: a query stands in each of its pairs."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Most tokens of ``text``."""
        if len(text) < _REMEMBERED_CHARS:
            return text_bound(text)
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = text_bound(text)
        return known


def text_bound(text: str, tick: Callable[[], None] = lambda: None) -> int:
    """Most tokens that any tokenizer in use makes of ``text``, special tokens around it not included.

    Linear in the text, whatever it is. ``tick`` is called between steps of a long text, so that a thread can give way;
    it must not raise.
    """
    if text.isascii():
        return len(text)
    if len(text) <= _STEP:
        return _step_bound(text)
    total = 0
    for start in range(0, len(text), _STEP):
        total += _step_bound(text[start : start + _STEP]) + _EDGE
        tick()
    return total


def _step_bound(text: str) -> int:
    # ASCII is the same in every form, and composing an ASCII letter with a mark never makes it longer, so only
    # the runs in between are normalised.
    runs = _NOT_ASCII.findall(text)
    total = len(text) - sum(map(len, runs))
    if max(map(len, runs), default=0) > MARKS:
        many = [found for run in runs for found in _MANY_MARKS.findall(run)]
        if many:
            total += sum(map(_marks_bound, many))
            runs = [piece for run in runs for piece in _MANY_MARKS.split(run)]
    return total + _forms_bound("\0".join(runs)) - max(0, len(runs) - 1)


def _forms_bound(text: str) -> int:
    longest = _utf8(text)
    if not unicodedata.is_normalized("NFC", text):
        longest = max(longest, _utf8(unicodedata.normalize("NFC", text)))
    if not unicodedata.is_normalized("NFKC", text):
        longest = max(longest, _utf8(unicodedata.normalize("NFKC", text)))
    if not unicodedata.is_normalized("NFKD", text):
        # Accent-stripping tokenizers (BERT) see decomposed characters, one token each at most.
        longest = max(longest, len(unicodedata.normalize("NFKD", text)))
    return longest


def _marks_bound(run: str) -> int:
    """A long run of marks without composing it.

    No composed form is longer in UTF-8 than what it decomposes to, and decomposing is character by character, so short
    pieces decompose to as much as the whole.
    """
    pieces = [run[start : start + MARKS] for start in range(0, len(run), MARKS)]
    apart = "\0".join(pieces)
    longest = max(_utf8(unicodedata.normalize(form, apart)) for form in ("NFD", "NFKD")) - (len(pieces) - 1)
    return max(_utf8(run), longest) + _EDGE


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def prompt_bound(prompt: Prompt, overhead: TemplateOverhead = ANY, measure: Measure = text_bound) -> int:
    """Most tokens of one prompt, pictures and unknown parts not included."""
    if isinstance(prompt, TokenPrompt):
        return prompt.length + sum(map(measure, prompt.texts)) + PROMPT_OVERHEAD * bool(prompt.texts)
    if isinstance(prompt, TextPrompt):
        return sum(measure(text) + PROMPT_OVERHEAD for text in prompt.texts)
    return chat_bound(prompt, overhead, measure)


def chat_bound(
    prompt: ChatPrompt, overhead: TemplateOverhead = ANY, measure: Measure = text_bound, *, counted: bool = False
) -> int:
    """Most tokens of a conversation: all its strings, tools indented, and what a template of this family adds.

    ``measure`` gives the most tokens of one string; ``counted`` says that a tokenizer does, so that printed values are
    better counted whole. Linear in the conversation.
    """
    total = overhead.fixed + (0 if any(map(_speaks, prompt.messages)) else overhead.system) + PROMPT_OVERHEAD
    for message in prompt.messages:
        total += overhead.per_message
        for name, value in message.items():
            if name == "tool_calls":
                calls = value if isinstance(value, list) else [value]
                total += sum(_call_bound(call, overhead, measure, counted) for call in calls)
            elif type(value) is str:
                total += measure(value)
            else:
                total += _walked(value, measure)[0]
    if prompt.tools:
        # Printed as JSON or spelled in tags, never both.
        total += overhead.tools + max(_spelled_and_printed(prompt.tools, measure, counted))
        for tool, times in _referred(prompt):
            total += times * (overhead.per_call + max(_spelled_and_printed(tool, measure, counted)))
    if prompt.kwargs:
        total += _spelled_and_printed(prompt.kwargs, measure, counted)[1]
    return total


def _referred(prompt: ChatPrompt) -> list[tuple[Json, int]]:
    """Tools that parts refer to by name, and how often: a template may write each again in their place."""
    names = Counter(
        name
        for message in prompt.messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and part.get("type") == TOOL_REFERENCE and isinstance(name := part.get("name"), str)
    )
    if not names:
        return []
    functions = [(tool, tool.get("function")) for tool in prompt.tools or () if isinstance(tool, dict)]
    named = [(tool, function.get("name")) for tool, function in functions if isinstance(function, dict)]
    return [(tool, names[name]) for tool, name in named if isinstance(name, str) and names[name]]


def _speaks(message: dict[str, Json]) -> bool:
    """Whether this is a system message with words, in whose place no template puts its own.

    Only the ``system`` role: templates differ in what they make of ``developer``. A first part alone may be one that
    vLLM drops (Claude Code's billing line).
    """
    content = message.get("content")
    if isinstance(content, list):
        content = next((part.get("text") for part in content[1:] if isinstance(part, dict)), None)
    return message.get("role") == "system" and isinstance(content, str) and bool(content.strip())


def _call_bound(call: Json, overhead: TemplateOverhead, measure: Measure, counted: bool) -> int:
    """A tool call: its arguments may be printed as the client wrote them, parsed and printed anew, or in tags."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    spelled, printed = _spelled_and_printed(call, measure, counted)
    if isinstance(arguments, str) and arguments:
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = {}
        spelled_anew, printed_anew = _spelled_and_printed(parsed, measure, counted)
        spelled += spelled_anew
        printed += max(0, printed_anew - measure(arguments))
    return overhead.per_call + max(spelled, printed)


def _spelled_and_printed(value: Json, measure: Measure, counted: bool) -> tuple[int, int]:
    """Most tokens of a nested value in tags, and as JSON with four blanks a level."""
    spelled, printed = _walked(value, measure)
    if not counted:
        return spelled, printed
    text = _printed(value) if printed <= PRINTED_CHARS else None
    return spelled, _walked(value, text_bound)[1] if text is None else measure(text)


def _walked(root: Json, measure: Measure) -> tuple[int, int]:
    """(in tags, as JSON) of a nested value, without printing it: one visit per value, one level after another.

    In tags: text of all strings, and markup for every key and part. As JSON: the widest that a template prints, each
    value and closing bracket on a line of its own, indented by four blanks for each level.
    """
    # The walk begins with a list around the value, which adds one part to the first sum and nothing to the second.
    spelled, printed, indent = -PER_PART, 0, 0
    known: dict[str, tuple[int, int]] = {}
    level: list[Json] = [[root]]
    while level:
        below: list[Json] = []
        for container in level:
            size = len(container)
            printed += size * (indent + 2) + indent - 2 if size else 2
            if type(container) is list:
                spelled += PER_PART * size
                values = container
            else:
                spelled += PER_KEY * size
                printed += 2 * size
                for key in container:
                    printed += _said(key, measure, known)[1]
                values = container.values()
            for value in values:
                kind = type(value)
                if kind is str:
                    tokens, with_marks = _said(value, measure, known)
                    spelled += tokens
                    printed += with_marks
                elif kind is list or kind is dict:
                    below.append(value)
                elif value is None:
                    printed += 4
                elif kind is bool:
                    spelled += _NUMBER
                    printed += 5
                else:
                    width = _NUMBER if kind is not int or -_WIDE < value < _WIDE else value.bit_length() // 3 + 2
                    spelled += width
                    printed += width
        level = below
        indent += 4
    return spelled, printed


def _said(text: str, measure: Measure, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Most tokens of one string, and of it as JSON; ``known`` keeps the first, for tools say the same names again and again."""
    found = known.get(text)
    if found is None:
        tokens = measure(text)
        found = (tokens, tokens + _marks_of(text))
        if len(known) < _KNOWN_STRINGS:
            known[text] = found
    return found


def _marks_of(text: str) -> int:
    """Characters that JSON adds to a string: its quotes and the escapes in it."""
    return len(encode_basestring(text)) - len(text)


def _printed(value: Json) -> str | None:
    """JSON as the widest template prints it, None where Python cannot."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=4, default=str)
    except (ValueError, RecursionError):
        return None
