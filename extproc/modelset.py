"""What a configuration's models cost: geometries loaded once at start, every mistake in one list.

Owns the loading of geometries and the choice of rules per target; ``counting`` loads the tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.config.models import Config, Model
from extproc.errors import ConfigError, GeometryError
from extproc.memory import Geometry, KvModel, build_kv_model, engine_rules, load_geometry


@dataclass(frozen=True, slots=True)
class ModelSet:
    """Geometry per model; None where none is named, so that only tokens are counted."""

    config: Config
    geometries: Mapping[str, Geometry | None]

    @classmethod
    def load(cls, config: Config, *, where: str) -> ModelSet:
        """Load everything the configuration names; ``ConfigError`` with a line per file that cannot be used."""
        problems: list[str] = []
        geometries: dict[str, Geometry | None] = {}
        for name, model in config.models.items():
            try:
                geometries[name] = load_geometry(model.geometry) if model.geometry is not None else None
            except GeometryError as error:
                problems.append(f"{where}: models.{name}.geometry: {error}")
        loaded = cls(config, geometries)
        if not problems:
            problems += loaded._kv_problems(where)
        if problems:
            raise ConfigError(problems)
        return loaded

    def geometry(self, target: str) -> Geometry | None:
        """The geometry of a target's model, or None where none was named."""
        model = self.config.targets[target].model
        return self.geometries.get(model) if model is not None else None

    def kv(self, target: str, block_tokens: int | None) -> KvModel:
        """The cost model of a target whose engine reports blocks of this size (None: the engine's default)."""
        settings = self.config.targets[target]
        rules = engine_rules(settings.engine, None)
        geometry = self.geometry(target)
        model = self.config.models[settings.model] if settings.model is not None else Model()
        if geometry is None:
            shards = settings.tensor_parallel * settings.pipeline_parallel
            kv = KvModel.tokens_only(block_tokens or rules.block_tokens, target, settings.engine, shards)
        else:
            kv = build_kv_model(
                geometry,
                rules,
                kv_dtype=None if model.kv_dtype == "auto" else model.kv_dtype,
                tp=settings.tensor_parallel,
                pp=settings.pipeline_parallel,
                block_tokens=block_tokens,
            )
        return kv if model.kv_bytes_per_token is None else kv.measured(model.kv_bytes_per_token)

    def _kv_problems(self, where: str) -> list[str]:
        problems = []
        for name, target in self.config.targets.items():
            if target.remote:
                continue
            try:
                self.kv(name, None)
            except GeometryError as error:
                problems.append(f"{where}: targets.{name}: {error}")
        return problems
