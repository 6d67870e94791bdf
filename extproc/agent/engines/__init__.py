"""The engine table: one row per engine kind, looked up by the configuration's ``engine`` key."""

from __future__ import annotations

from extproc.agent.engines.base import Engine
from extproc.agent.engines.llamacpp import LlamaCpp
from extproc.agent.engines.vllm import Vllm

ENGINES: dict[str, Engine] = {row.name: row for row in (Vllm(), LlamaCpp())}
