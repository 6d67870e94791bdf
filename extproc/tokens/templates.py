"""Chat templates, rendered as the engines render them.

The environment is the one that transformers documents for chat templates (immutable sandbox, trimmed blocks,
``tojson`` without HTML escapes, loop controls, ``generation`` blocks), so that the rendered text is the
engine's to the byte. Only templates of the operator are rendered, never one that a request carries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.dialects.model import Json

#: Mark that stands at the end of a message to be continued, so that its place is found in the rendered text.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

#: Rendered text beyond this is not worth finishing: no engine's context holds it, and the bound answers.
MAX_RENDERED_CHARS = 64 * 1024 * 1024

#: The same for the conversation of four words that a template is tried with at load.
_PROBE_CHARS = 1024 * 1024

#: Pieces between two looks at the deadline.
_PIECES_PER_TICK = 256


class TemplateFailure(Exception):
    """The template does not take this conversation; the engine will decide about it, we take the bound."""


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks what the assistant wrote; for counting its body is plain output."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the block, unwrapped into a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    # A megabyte of deep nesting prints as hundreds.
    pieces: list[str] = []
    size = 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise jinja2.TemplateError("the printed value is too long")
    return "".join(pieces)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


class ChatTemplate:
    """One compiled template and what its text says about how messages must be prepared for it.

    ``system_first`` says that it refuses a system message in the middle. ``wants_parts`` is True where the template iterates over message content, so that engines hand it lists of
    parts; otherwise text parts are joined with newlines. ``variables`` are the names it reads.
    """

    def __init__(self, source: str, specials: Mapping[str, str], *, now: Callable[[], datetime]) -> None:
        environment = _environment(now)
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._specials = dict(specials)
        self.source = source
        self.wants_parts = any(True for _ in _content_loops(tree))
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        self.system_first = self._refuses_inline_system()

    def _refuses_inline_system(self) -> bool:
        probe = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            self.render(probe, None, add_generation_prompt=False, max_chars=_PROBE_CHARS)
        except TemplateFailure as failure:
            return isinstance(failure.__cause__, jinja2.TemplateError)
        return False

    def render(
        self,
        messages: list[dict[str, Json]],
        tools: list[Json] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Json] | None = None,
        tick: Callable[[], None] = lambda: None,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> str:
        """The prompt text. ``tick`` is called now and then and may raise to stop.

        Raises:
            TemplateFailure: the template refuses, fails or produces too much text.
        """
        if continue_final_message:
            messages = _marked(messages)
        context: dict[str, Any] = dict(self._specials)
        context.update({name: value for name, value in (kwargs or {}).items() if name in self.variables})
        context.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        context.setdefault("documents", None)
        pieces: list[str] = []
        size = 0
        try:
            for number, piece in enumerate(self._template.generate(context)):
                pieces.append(piece)
                size += len(piece)
                if size > max_chars:
                    raise TemplateFailure("the rendered conversation is too long")
                if number % _PIECES_PER_TICK == 0:
                    tick()
        except jinja2.TemplateError as error:
            raise TemplateFailure(f"the chat template refuses: {type(error).__name__}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError, ArithmeticError) as error:
            raise TemplateFailure(f"the chat template fails: {type(error).__name__}") from error
        text = "".join(pieces)
        return _cut_at_mark(text) if continue_final_message else text


def _marked(messages: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """A copy whose last message ends with the mark."""
    if not messages:
        raise TemplateFailure("there is no message to continue")
    last = deepcopy(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
    else:
        parts = content if isinstance(content, list) else []
        part = next((p for p in reversed(parts) if isinstance(p, dict) and isinstance(p.get("text"), str)), None)
        if part is None:
            raise TemplateFailure("the last message has no text to continue")
        part["text"] += _CONTINUE_MARK
    return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE_MARK.strip())
    if place < 0:
        raise TemplateFailure("the template drops the message to continue")
    kept = text[:place]
    return kept if text.startswith(_CONTINUE_MARK, place) else kept.rstrip()


# --- does the template iterate over content? (the rule by which vLLM chooses the content format) ---------------


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, directly, through a macro's parameter, or over a variable named content."""
    message_names = set(_message_names(tree))
    in_macros: set[int] = set()
    parameters: dict[int, set[str]] = {}
    calls = list(tree.find_all(nodes.Call))
    for macro in tree.find_all(nodes.Macro):
        names = _content_parameters(macro, calls, message_names)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            parameters.setdefault(id(loop), set()).update(names)
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if any(_reaches(over, name, "content") for name in message_names) or (
            isinstance(over, nodes.Name)
            and (over.name in parameters.get(id(loop), ()) or (over.name == "content" and id(loop) not in in_macros))
        ):
            yield loop


def _content_parameters(macro: nodes.Macro, calls: list[nodes.Call], message_names: set[str]) -> set[str]:
    """The macro's parameters that receive a message's content somewhere."""
    names: set[str] = set()
    for call in calls:
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = list(zip((argument.name for argument in macro.args), call.args, strict=False))
        given += [(keyword.key, keyword.value) for keyword in call.kwargs]
        names |= {
            name for name, value in given if any(_reaches(value, message, "content") for message in message_names)
        }
    return names & {argument.name for argument in macro.args}


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Loop variables that stand for one message."""
    lists = ["messages"]
    assigns = list(tree.find_all(nodes.Assign))
    for name in lists:
        for assign in assigns:
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in lists and _reaches(assign.node, name):
                lists.append(target.name)
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reaches(loop.iter, name) for name in lists):
            yield loop.target.name


def _reaches(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable (or its ``key``), possibly filtered, tested or sliced."""
    while True:
        inner: nodes.Node | None = None
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            inner = node.node
        if inner is None:
            break
        node = inner
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _reaches(node.node, name)
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == key
        and isinstance(node.node, nodes.Name)
        and node.node.name == name
    )
