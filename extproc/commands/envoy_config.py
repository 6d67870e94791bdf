"""``kvgate envoy FILE``: the Envoy bootstrap for a configuration, on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from extproc.config import load
from extproc.errors import ConfigError

if TYPE_CHECKING:
    import argparse

HELP = "print the Envoy bootstrap for a configuration"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="kvgate.yaml")
    parser.add_argument("--json", action="store_true", help="JSON instead of YAML")
    parser.add_argument(
        "--node-id",
        default="kvgate-envoy",
        metavar="ID",
        help="this Envoy's name towards kvgate; each Envoy needs its own (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the bootstrap; 1 with one line per mistake where the configuration cannot be used."""
    from extproc.gateway import build  # the typed Envoy configuration takes half a second to import

    try:
        made = build.build(load(args.file), node_id=args.node_id)
    except ConfigError as error:
        named = [line if line.startswith(f"{args.file}: ") else f"{args.file}: {line}" for line in error.problems]
        print(*named, sep="\n", file=sys.stderr)
        return 1
    sys.stdout.write(build.as_json(made) if args.json else build.as_yaml(made))
    return 0
