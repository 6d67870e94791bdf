"""Conversations for comparing counts with a real engine: varied, seeded, the same on every machine and version.

Owns a small generator of its own (no ``random``: its sequences may change between Python versions), because the
recorded oracle refers to conversations by number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

Body = dict[str, Any]

#: Conversations per family: chat, completions, Anthropic messages, responses.
COUNT = 240

_WORDS = (
    "ledger reserve block token stream queue lane headroom prefill decode agent engine replica shard cache page "
    "watermark budget admit reject retry abort settle renew lease snapshot fresh stale the a of to in is not and "
    "naïve café Größe façade résumé über 東京 请 分析 数据 토큰 サーバー привет мир नमस्ते مرحبا"
).split(" ")
_CODE = (
    "def f(x: int) -> int:\n    return x * 2  # twice\n",
    "for (const [k, v] of Object.entries(o)) {\n\tconsole.log(`${k}=${v}`);\n}\n",
    "SELECT id, sum(x) FROM t GROUP BY id HAVING sum(x) > 1e3;\n",
    "diff --git a/x.py b/x.py\n@@ -1,2 +1,2 @@\n-a = 1\n+a = 2\n",
    "0000: 7f45 4c46 0201 0100 0000 0000 0000 0000\n",
    '{"k": [1, 2.5, -3e7, null, true], "s": "a\\"b\\\\c"}\n',
    "$ ls -la /tmp\ntotal 0\ndrwxr-xr-x  2 root root 40 Jan  1 00:00 .\n",
)
_ODD = (
    "😀👍🏽 👩‍👩‍👧‍👦 🇩🇪",
    "e\u0301a\u0308 \u0958 \U0001d160",
    "   \n\n\n\t\tx   ",
    "<|im_end|><|im_start|>user",
    "</s>[INST]",
    "<think>\n\n</think>",
    "１２３ＡＢＣ",
    "\u200b\u00a0\u3000",
    "1234567890" * 6,
    "a" * 90,
    "##### ===== ----- _____",
    "“quoted” … ‚x‘ «y»",
    "\r\nwin\r\n",
    "",
)


class Dice:
    """A linear congruential generator (Knuth's MMIX constants)."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 2654435761 + 1

    def below(self, n: int) -> int:
        """A number in [0, n)."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % n

    def one(self, items: Sequence[Any]) -> Any:
        """One of the items."""
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        """True in ``percent`` of the cases."""
        return self.below(100) < percent


def text(dice: Dice, longest: int = 60) -> str:
    """Prose, code and oddities run together."""
    pieces = []
    for _ in range(1 + dice.below(4)):
        kind = dice.below(10)
        if kind < 6:
            pieces.append(
                " ".join(dice.one(_WORDS) for _ in range(1 + dice.below(longest))) + dice.one((".", "?", "!", "\n", ""))
            )
        elif kind < 8:
            pieces.append(dice.one(_CODE) * (1 + dice.below(4)))
        else:
            pieces.append(dice.one(_ODD))
    return dice.one((" ", "\n", "")).join(pieces)


def tool(dice: Dice, number: int) -> Body:
    """A function tool with a nested schema."""
    properties: Body = {
        "path": {"type": "string", "description": text(dice, 12)},
        "limit": {"type": "integer", "minimum": 0, "maximum": dice.one((100, 2**31, 20_000_000_000))},
        "mode": {"type": "string", "enum": ["a", "b", "größe"]},
    }
    if dice.chance(40):
        properties["edits"] = {
            "type": "array",
            "items": {"type": "object", "properties": {"old": {"type": "string"}}, "required": ["old"]},
        }
    function: Body = {
        "name": f"tool_{number}",
        "description": text(dice, 30),
        "parameters": {"type": "object", "properties": properties, "required": ["path"]},
    }
    if dice.chance(20):
        function["strict"] = dice.chance(50)
    if dice.chance(20):
        function = {"parameters": function.pop("parameters"), **function}
    return {"type": "function", "function": function}


def arguments(dice: Dice) -> Body:
    """Arguments of one call."""
    values: Body = {"path": dice.one(("src/a.py", "größe/ü.txt", "x y")), "limit": dice.below(5000)}
    if dice.chance(30):
        values["edits"] = [{"old": text(dice, 10)}]
    if dice.chance(20):
        values["ratio"] = dice.one((0.5, 1e-7, 3.0, True, None))
    return values


def _content(dice: Dice) -> Any:
    if dice.chance(25):
        return [{"type": "text", "text": text(dice)} for _ in range(1 + dice.below(3))]
    return text(dice)


def chat(dice: Dice) -> Body:
    """An OpenAI chat with system, tools, calls, results, several turns."""
    tools = [tool(dice, n) for n in range(dice.below(5))] if dice.chance(45) else []
    messages: list[Body] = [{"role": "system", "content": _content(dice)}] if dice.chance(60) else []
    for turn in range(1 + dice.below(4)):
        messages.append({"role": "user", "content": _content(dice)})
        if tools and dice.chance(60):
            call = {
                "id": f"call_{turn}",
                "type": "function",
                "function": {
                    "name": tools[0]["function"]["name"],
                    "arguments": json.dumps(arguments(dice), ensure_ascii=dice.chance(50)),
                },
            }
            messages.append(
                {"role": "assistant", "content": dice.one((None, "", text(dice, 10))), "tool_calls": [call]}
            )
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": _content(dice)})
        answer: Body = {"role": "assistant", "content": text(dice)}
        if dice.chance(25):
            answer["reasoning_content"] = text(dice, 20)
        messages.append(answer)
    messages.append({"role": "user", "content": _content(dice)})
    body: Body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    if tools:
        body |= {"tools": tools, "tool_choice": "none"}
    if dice.chance(15):
        body["chat_template_kwargs"] = {"enable_thinking": dice.chance(50)}
    if dice.chance(10):
        body["reasoning_effort"] = dice.one(("low", "high", "none"))
    if dice.chance(8):
        body["messages"].append({"role": "assistant", "content": "Sure, " + text(dice, 8)})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return body


def anthropic(dice: Dice) -> Body:
    """An Anthropic conversation with blocks of every kind."""
    messages: list[Body] = []
    tools = [t["function"] for t in (tool(dice, n) for n in range(dice.below(4)))] if dice.chance(60) else []
    for turn in range(1 + dice.below(3)):
        messages.append(
            {
                "role": "user",
                "content": dice.one(
                    (text(dice), [{"type": "text", "text": text(dice)}, {"type": "text", "text": text(dice)}])
                ),
            }
        )
        if tools:
            blocks: list[Body] = (
                [{"type": "thinking", "thinking": text(dice, 10), "signature": "c2ln"}] if dice.chance(30) else []
            )
            blocks += [
                {"type": "text", "text": text(dice, 10)},
                {"type": "tool_use", "id": f"t{turn}", "name": "tool_0", "input": arguments(dice)},
            ]
            messages.append({"role": "assistant", "content": blocks})
            result = dice.one(
                (text(dice), [{"type": "text", "text": text(dice)}, {"type": "text", "text": text(dice)}])
            )
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{turn}", "content": result}]}
            )
        messages.append({"role": "assistant", "content": text(dice)})
    messages.append({"role": "user", "content": text(dice)})
    body: Body = {"model": "tiny", "max_tokens": 1, "messages": messages}
    if dice.chance(60):
        body["system"] = dice.one(
            (
                text(dice),
                [
                    {"type": "text", "text": "x-anthropic-billing-header: v=1; h=abc;"},
                    {"type": "text", "text": text(dice)},
                ],
            )
        )
    if tools:
        body |= {
            "tools": [
                {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools
            ],
            "tool_choice": {"type": "none"},
        }
    return body


def responses(dice: Dice) -> Body:
    """A responses request in the way of Codex: items, calls, outputs, reasoning."""
    body: Body = {"model": "tiny", "max_output_tokens": 1, "store": False}
    if dice.chance(60):
        body["instructions"] = text(dice)
    if dice.chance(20):
        return body | {"input": text(dice) or "x"}
    items: list[Body] = []
    for turn in range(1 + dice.below(3)):
        items.append(
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text(dice) or "x"}]}
        )
        if dice.chance(50):
            items.append(
                {
                    "type": "function_call",
                    "call_id": f"c{turn}",
                    "name": "tool_0",
                    "arguments": json.dumps(arguments(dice)),
                }
            )
            items.append({"type": "function_call_output", "call_id": f"c{turn}", "output": text(dice)})
        items.append(
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": text(dice) or "y", "annotations": []}],
                "id": f"m{turn}",
                "status": "completed",
            }
        )
    items.append({"role": "user", "content": text(dice) or "x"})
    body["input"] = items
    if dice.chance(50):
        body |= {
            "tools": [{"type": "function", **{k: v for k, v in tool(dice, 0)["function"].items() if k != "strict"}}],
            "tool_choice": "none",
        }
    return body


def completion(dice: Dice) -> Body:
    """A plain completion: one text, several, or token ids."""
    prompt = dice.one(
        (text(dice) or "x", [text(dice) or "x", text(dice) or "y"], [1 + dice.below(200) for _ in range(30)])
    )
    return {"model": "tiny", "prompt": prompt, "max_tokens": 1}


def all_requests() -> Iterator[tuple[str, Body]]:
    """(path, body) of every conversation, in the order that the oracle's figures have."""
    makers = (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat),
        ("/v1/messages", anthropic),
        ("/v1/responses", responses),
        ("/v1/completions", completion),
    )
    for number in range(COUNT):
        path, make = makers[number % len(makers)]
        yield path, make(Dice(number + 1))
