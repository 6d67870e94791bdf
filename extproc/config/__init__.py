"""The configuration file: strict models, one loader for every command, cross-checks with a mend each.

``load`` is what ``serve``, ``check`` and every other command call, so that none accepts what another refuses.
"""

from extproc.config.load import load, load_text
from extproc.config.models import (
    Agent,
    Alias,
    Auth,
    Config,
    Devices,
    EnvoyConfig,
    Freshness,
    Inject,
    Lane,
    LaneHeader,
    LaneQueue,
    LedgerConfig,
    Model,
    OpenPosture,
    PrefillRate,
    Replica,
    Serve,
    Target,
    TelemetryConfig,
    Weights,
)

__all__ = [
    "Agent",
    "Alias",
    "Auth",
    "Config",
    "Devices",
    "EnvoyConfig",
    "Freshness",
    "Inject",
    "Lane",
    "LaneHeader",
    "LaneQueue",
    "LedgerConfig",
    "Model",
    "OpenPosture",
    "PrefillRate",
    "Replica",
    "Serve",
    "Target",
    "TelemetryConfig",
    "Weights",
    "load",
    "load_text",
]
