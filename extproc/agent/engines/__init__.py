"""The engine table: one row per engine kind, looked up by the configuration's ``engine`` key."""

from __future__ import annotations

from extproc.agent.engines.base import Engine
from extproc.agent.engines.llamacpp import LlamaCpp
from extproc.agent.engines.ollama import Ollama
from extproc.agent.engines.openai import OpenAi
from extproc.agent.engines.rows import SGLANG, TGI, TRTLLM
from extproc.agent.engines.table import TableEngine
from extproc.agent.engines.vllm import Vllm

ROWS: tuple[Engine, ...] = (
    Vllm(),
    TableEngine(SGLANG),
    LlamaCpp(),
    Ollama(),
    TableEngine(TRTLLM),
    TableEngine(TGI),
    OpenAi(),
)
ENGINES: dict[str, Engine] = {row.name: row for row in ROWS}
