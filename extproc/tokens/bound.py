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
from collections.abc import Callable

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

#: Slack per step: a combining mark at its edge may be reordered differently than in the whole text.
_EDGE = 8

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def text_bound(text: str, tick: Callable[[], None] = lambda: None) -> int:
    """Most tokens that any tokenizer in use makes of ``text``, special tokens around it not included.

    ``tick`` is called between steps of a long text, so that a thread can give way; it must not raise.
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
    ascii_chars = len(text) - sum(map(len, runs))
    return ascii_chars + _forms_bound("\0".join(runs)) - max(0, len(runs) - 1)


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


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def prompt_bound(prompt: Prompt, overhead: TemplateOverhead = ANY) -> int:
    """Most tokens of one prompt, pictures and unknown parts not included."""
    if isinstance(prompt, TokenPrompt):
        return prompt.length + sum(map(text_bound, prompt.texts)) + PROMPT_OVERHEAD * bool(prompt.texts)
    if isinstance(prompt, TextPrompt):
        return sum(text_bound(text) + PROMPT_OVERHEAD for text in prompt.texts)
    return chat_bound(prompt, overhead)


def chat_bound(prompt: ChatPrompt, overhead: TemplateOverhead = ANY, measure: Measure = text_bound) -> int:
    """Most tokens of a conversation: all its strings, tools indented, and what a template of this family adds.

    ``measure`` gives the most tokens of one string. Without a tokenizer that is ``text_bound``.
    """
    total = overhead.fixed + (0 if any(map(_speaks, prompt.messages)) else overhead.system) + PROMPT_OVERHEAD
    for message in prompt.messages:
        total += overhead.per_message
        for name, value in message.items():
            if name == "tool_calls":
                calls = value if isinstance(value, list) else [value]
                total += sum(_call_bound(call, overhead, measure) for call in calls)
            elif type(value) is str:
                total += measure(value)
            else:
                total += _value_bound(value, measure)
    if prompt.tools:
        # Printed as JSON or spelled in tags, never both.
        total += overhead.tools + max(_value_bound(prompt.tools, measure), measure(_printed(prompt.tools)))
    if prompt.kwargs:
        total += measure(_printed(prompt.kwargs))
    return total


def _speaks(message: dict[str, Json]) -> bool:
    """Whether this is a system message with words, in whose place no template puts its own.

    Only the ``system`` role: templates differ in what they make of ``developer``. A first part alone may be one that
    vLLM drops (Claude Code's billing line).
    """
    content = message.get("content")
    if isinstance(content, list):
        content = next((part.get("text") for part in content[1:] if isinstance(part, dict)), None)
    return message.get("role") == "system" and isinstance(content, str) and bool(content.strip())


def _call_bound(call: Json, overhead: TemplateOverhead, measure: Measure) -> int:
    """A tool call: its arguments may be printed as the client wrote them, parsed and printed anew, or in tags."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    spelled, printed = _value_bound(call, measure), measure(_printed(call))
    if isinstance(arguments, str) and arguments:
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = {}
        spelled += _value_bound(parsed, measure)
        printed += max(0, measure(_printed(parsed)) - measure(arguments))
    return overhead.per_call + max(spelled, printed)


def _value_bound(root: Json, measure: Measure) -> int:
    """Text of all strings of a nested value, and markup for every key and part; numbers as they print."""
    total = 0
    stack = [root]
    while stack:
        value = stack.pop()
        if type(value) is str:
            total += measure(value)
        elif type(value) is list:
            total += PER_PART * len(value)
            stack.extend(value)
        elif type(value) is dict:
            total += PER_KEY * len(value)
            stack.extend(value.values())
        elif value is not None:
            total += 24
    return total


def _printed(value: Json) -> str:
    """JSON as the widest template prints it."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=4, default=str)
    except (ValueError, RecursionError):
        return ""
