"""Memory of LLM serving: from a model's configuration to blocks and bytes per shard.

Owns geometry, engine rules, projections, weights and overheads; does no I/O except in ``loader``. Formulas and their
sources: docs/memory.md.
"""

from __future__ import annotations

from extproc.memory.capacity import Capacity, Drift, capacity_drift, capacity_from_report, drift
from extproc.memory.catalogue import catalogue_names, catalogue_row
from extproc.memory.dtypes import KvTypes, kv_types
from extproc.memory.engines import ENGINES, EngineRules, Overflow, canonical_engine, engine_rules
from extproc.memory.flags import DEFAULT_FLAGS, Flags, default_batched_tokens
from extproc.memory.geometry import Geometry, LayerGroup, LayerKind, ParamCounts, StateShape
from extproc.memory.gguf_geometry import geometry_from_gguf
from extproc.memory.hf import geometry_from_config
from extproc.memory.kv import KvModel, Projection, build_kv_model, project, shared_prefix_tokens
from extproc.memory.loader import load_geometry
from extproc.memory.vision import image_size, image_tokens

__all__ = [
    "DEFAULT_FLAGS",
    "ENGINES",
    "Capacity",
    "Drift",
    "EngineRules",
    "Flags",
    "Geometry",
    "KvModel",
    "KvTypes",
    "LayerGroup",
    "LayerKind",
    "Overflow",
    "ParamCounts",
    "Projection",
    "StateShape",
    "build_kv_model",
    "canonical_engine",
    "capacity_drift",
    "capacity_from_report",
    "catalogue_names",
    "catalogue_row",
    "default_batched_tokens",
    "drift",
    "engine_rules",
    "geometry_from_config",
    "geometry_from_gguf",
    "image_size",
    "image_tokens",
    "kv_types",
    "load_geometry",
    "project",
    "shared_prefix_tokens",
]
