"""``python -m tests.load NAME [--small] [--publish]``: one scenario, its figures printed, exit 1 where an aim is missed."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

NAMES = ("race", "llamacpp", "bypass", "retry", "aborts", "soak", "streams", "policies")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--small", action="store_true", help="the form that runs in `make test`")
    parser.add_argument("--publish", action="store_true", help="write the figures into docs/evidence.md")
    args = parser.parse_args()
    scenario = importlib.import_module(f"tests.load.{args.name}")
    began = time.monotonic()
    report = scenario.run(scenario.SMALL if args.small else scenario.FULL, f"python -m tests.load {args.name}")
    print(report.text())
    print(f"  took {time.monotonic() - began:.0f} s")
    if args.publish:
        report.publish()
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
