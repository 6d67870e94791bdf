"""What a counter is made from: values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from extproc.config.models import Config, Model
from extproc.errors import ConfigError, GeometryError
from extproc.memory import load_geometry
from extproc.tokens import PromptCounter, load_tokenizer, overhead_of


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """The files and figures of one model's counter; ``model_type`` and ``vision_family`` are its geometry's."""

    tokenizer: str | None = None
    chat_template: str | None = None
    image_tokens: int | None = None
    template_family: str | None = None
    template_overhead_tokens: int | None = None
    model_type: str | None = None
    vision_family: str | None = None

    def load(self) -> PromptCounter:
        """Read the files. Raises ConfigError."""
        return load_tokenizer(
            Path(self.tokenizer) if self.tokenizer else None,
            Path(self.chat_template) if self.chat_template else None,
            now=datetime.now,
            image_family=self.vision_family,
            image_tokens_each=self.image_tokens,
            overhead=overhead_of(self.template_family, self.template_overhead_tokens, self.model_type),
        )

    def key_of(self, line: str) -> str:
        """The model's key whose file a mistake's line is about."""
        return "chatTemplate" if self.chat_template and line.startswith(f"{self.chat_template}:") else "tokenizer"


def specs_of(config: Config) -> dict[str, CounterSpec]:
    """target -> spec of its model; targets without a model are counted by the bound."""
    models = {name: _spec(model) for name, model in config.models.items()}
    return {name: models.get(target.model or "", CounterSpec()) for name, target in config.targets.items()}


def load_all(config: Config, specs: Iterable[CounterSpec]) -> dict[CounterSpec, PromptCounter]:
    """Each spec's counter, its files read once; ``ConfigError`` with one line per model whose files cannot be used."""
    loaded: dict[CounterSpec, PromptCounter] = {}
    problems: list[str] = []
    for spec in dict.fromkeys(specs):
        try:
            loaded[spec] = spec.load()
        except ConfigError as error:
            path = f"{config.where}: models.{_owner(config, spec)}"
            problems += [f"{path}.{spec.key_of(line)}: {line}" for line in error.problems]
        except OSError as error:
            path = f"{config.where}: models.{_owner(config, spec)}.tokenizer"
            problems.append(f"{path}: {error.filename}: cannot be looked at ({error.strerror}); make it readable")
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
