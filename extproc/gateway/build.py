"""A configuration to an Envoy bootstrap, and the bootstrap to YAML or JSON."""

from __future__ import annotations

import json
from typing import cast

import yaml

from extproc.config import Config
from extproc.errors import ConfigError
from extproc.gateway.clusters import clusters
from extproc.gateway.listener import make_listener
from extproc.gateway.pieces import address, typed
from extproc.gateway.protos import betterproto2, bootstrap, core, downstream_connections, overload, tls
from extproc.gateway.upstream import secret_name

#: Connections beyond this are refused, so that Envoy does not run out of files first.
MAX_DOWNSTREAM_CONNECTIONS = 20_000
HEAD = "# Envoy 1.40 bootstrap, made by `kvgate envoy` from a kvgate.yaml: change that file, not this one.\n"


def build(config: Config, *, node_id: str = "kvgate-envoy") -> bootstrap.Bootstrap:
    """The typed bootstrap for ``config``; ``ConfigError`` where there is nothing to route to.

    ``node_id`` names this Envoy towards kvgate (the owner of a reservation); give each Envoy its own.
    """
    if not config.targets:
        raise ConfigError(["targets: missing; Envoy needs at least one target to route to"])
    monitor = overload.ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections",
        typed_config=typed(
            downstream_connections.DownstreamConnectionsConfig(
                max_active_downstream_connections=MAX_DOWNSTREAM_CONNECTIONS
            )
        ),
    )
    return bootstrap.Bootstrap(
        node=core.Node(id=node_id, cluster=config.ledger.pool),
        admin=bootstrap.Admin(address=address(config.envoy.admin)),
        overload_manager=overload.OverloadManager(resource_monitors=[monitor]),
        static_resources=bootstrap.BootstrapStaticResources(
            listeners=[make_listener(config)], clusters=list(clusters(config)), secrets=_secrets(config)
        ),
    )


def _secrets(config: Config) -> list[tls.Secret]:
    """One secret per environment variable; Envoy reads it, kvgate never does."""
    variables = sorted({t.auth.inject.secret_env for t in config.targets.values() if t.auth.inject})
    return [
        tls.Secret(
            name=secret_name(variable),
            generic_secret=tls.GenericSecret(secret=core.DataSource(environment_variable=variable)),
        )
        for variable in variables
    ]


def as_dict(made: bootstrap.Bootstrap) -> dict[str, object]:
    """The bootstrap as plain data with Envoy's own field names."""
    return cast(dict[str, object], made.to_dict(casing=betterproto2.Casing.SNAKE))


def as_json(made: bootstrap.Bootstrap) -> str:
    """The bootstrap as JSON text."""
    return json.dumps(as_dict(made), indent=2, ensure_ascii=False) + "\n"


def as_yaml(made: bootstrap.Bootstrap) -> str:
    """The bootstrap as YAML text; text with line breaks (the Lua filters) as blocks."""
    return HEAD + yaml.dump(as_dict(made), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Block style for text with line breaks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
