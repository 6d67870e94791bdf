"""``kvgate check``: loads a configuration as ``serve`` would and says everything that is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys

from extproc.config import Config, load
from extproc.config.checks import warnings
from extproc.counting import Counting
from extproc.errors import ConfigError
from extproc.modelset import ModelSet

HELP = "load a configuration as serve would and print every mistake"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="the configuration, kvgate.yaml")
    parser.add_argument("--json", action="store_true", help="print problems and warnings as JSON")


def run(args: argparse.Namespace) -> int:
    """0 usable (warnings may be printed), 1 not usable."""
    problems: list[str] = []
    notes: list[str] = []
    try:
        config = load(args.file)
        notes = [f"{args.file}: {line}" for line in warnings(config)]
        for load_files in (_geometries, _tokenizers):
            try:
                notes += [f"{args.file}: {line}" for line in load_files(config)]
            except ConfigError as error:
                problems += error.problems
    except ConfigError as error:
        problems = error.problems
    if args.json:
        print(json.dumps({"file": args.file, "ok": not problems, "problems": problems, "warnings": notes}))
        return 1 if problems else 0
    for line in notes:
        print(f"warning: {line}", file=sys.stderr)
    for line in problems:
        print(line, file=sys.stderr)
    if not problems:
        print(f"{args.file}: ok")
    return 1 if problems else 0


def _geometries(config: Config) -> list[str]:
    ModelSet.load(config, where=config.where)
    return []


def _tokenizers(config: Config) -> list[str]:
    counting = Counting.from_config(config)
    try:
        return counting.notes()
    finally:
        counting.close()
