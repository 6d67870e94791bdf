"""What a counter is made from: values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from extproc.config.models import Config, Model
from extproc.errors import ConfigError, GeometryError
from extproc.memory import load_geometry
from extproc.tokens import PromptCounter, load_tokenizer, overhead_of

#: Engines whose handling of messages is followed to the byte and held against a real one (tests/engines).
FOLLOWED = frozenset({"vllm"})


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """The files and figures of one model's counter on one engine.

    ``model_type`` and ``vision_family`` are its geometry's; ``followed`` says that the engine prepares messages as
    ``tokens.conversation`` does, so that the rendered count is the engine's own.
    """

    tokenizer: str | None = None
    chat_template: str | None = None
    image_tokens: int | None = None
    template_family: str | None = None
    template_overhead_tokens: int | None = None
    model_type: str | None = None
    vision_family: str | None = None
    followed: bool = True

    def load(self) -> PromptCounter:
        """Read the files. Raises ConfigError."""
        return load_tokenizer(
            Path(self.tokenizer) if self.tokenizer else None,
            Path(self.chat_template) if self.chat_template else None,
            now=datetime.now,
            image_family=self.vision_family,
            image_tokens_each=self.image_tokens,
            overhead=overhead_of(self.template_family, self.template_overhead_tokens, self.model_type),
            followed=self.followed,
            model_type=self.model_type,
        )

    def key_of(self, line: str) -> str:
        """The model's key whose file a mistake's line is about."""
        return "chatTemplate" if self.chat_template and line.startswith(f"{self.chat_template}:") else "tokenizer"


def specs_of(config: Config) -> dict[str, CounterSpec]:
    """target -> spec of its model on its engine; targets without a model are counted by the bound."""
    models = {name: _spec(model) for name, model in config.models.items()}
    return {
        name: replace(models.get(target.model or "", CounterSpec()), followed=target.engine in FOLLOWED)
        for name, target in config.targets.items()
    }


def load_specs(
    specs: Iterable[CounterSpec], load: Callable[[CounterSpec], PromptCounter] = CounterSpec.load
) -> dict[CounterSpec, PromptCounter]:
    """Each spec's counter; what differs in the engine alone shares files and memory. Raises what ``load`` does."""
    files: dict[CounterSpec, PromptCounter] = {}
    loaded: dict[CounterSpec, PromptCounter] = {}
    for spec in dict.fromkeys(specs):
        key = replace(spec, followed=True)
        if key not in files:
            files[key] = load(key)
        loaded[spec] = replace(files[key], followed=spec.followed)
    return loaded


def load_all(config: Config, specs: Iterable[CounterSpec]) -> dict[CounterSpec, PromptCounter]:
    """``load_specs``; ``ConfigError`` with one line per model whose files cannot be used."""
    problems: list[str] = []

    def load(spec: CounterSpec) -> PromptCounter:
        try:
            return spec.load()
        except ConfigError as error:
            path = f"{config.where}: models.{_owner(config, spec)}"
            problems.extend(f"{path}.{spec.key_of(line)}: {line}" for line in error.problems)
        except OSError as error:
            path = f"{config.where}: models.{_owner(config, spec)}.tokenizer"
            problems.append(f"{path}: {error.filename}: cannot be looked at ({error.strerror}); make it readable")
        return PromptCounter()

    loaded = load_specs(specs, load)
    if problems:
        raise ConfigError(problems)
    return loaded


def _owner(config: Config, spec: CounterSpec) -> str:
    """The first model that a spec is of."""
    return next(name for name, model in config.models.items() if _spec(model) == spec)


def _spec(model: Model) -> CounterSpec:
    model_type, vision_family = _known_of(model.geometry)
    return CounterSpec(
        model.tokenizer,
        model.chat_template,
        model.image_tokens,
        model.template_family,
        model.template_overhead_tokens,
        model_type,
        vision_family,
    )


def _known_of(geometry: str | None) -> tuple[str | None, str | None]:
    """(model type, vision family) of a geometry; nothing of one that cannot be loaded, which ``modelset`` reports."""
    if geometry is None:
        return None, None
    try:
        loaded = load_geometry(geometry)
    except GeometryError:
        return None, None
    return loaded.model_type, loaded.vision_family
