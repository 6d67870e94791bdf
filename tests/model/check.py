"""Runs scenarios and makes failing ones small: ``python -m tests.model.check --runs 10000 [--seed N] [--both]``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from tests.model.adapters import Both, Reference, ScriptLedger
from tests.model.world import Scenario, Violation, World
from tests.support.valkey import ValkeyServer


@dataclass
class Totals:
    """What a series of runs did.

    ``needless``: refusals of requests that an offline packer would have placed at that moment, knowing the true state
    and the reserved sizes; ``block_seconds`` the load served; ``peak_share`` the fullest any engine ever was, as a
    share of its pool.
    """

    runs: int = 0
    admitted: int = 0
    refused: int = 0
    needless: int = 0
    block_seconds: float = 0.0
    peak_share: float = 0.0


#: Settings of a world without faults in which half of all streams are aborted.
CALM: dict[str, Any] = {
    "aborts": 0.5, "left_while_deciding": 0.0, "record_loss": 0.0, "crash_every_s": 0.0, "pause_every_s": 0.0,
    "outage_every_s": 0.0, "loss_every_s": 0.0, "restart_every_s": 0.0, "agent_away_every_s": 0.0, "slots": None,
    "record_lag_s": 0.02, "tight": True, "span_s": 20.0, "requests": 40,
}  # fmt: skip


def run_one(scenario: Scenario, ledger: Any, totals: Totals | None = None) -> str | None:
    """The violation of one run, or None."""
    ledger.reset(f"model-{scenario.seed}", fresh=True)
    world = World(scenario, ledger)
    try:
        world.run()
    except Violation as violation:
        return str(violation)
    if totals is not None:
        totals.runs += 1
        totals.admitted += world.admitted
        totals.refused += world.refused
        totals.needless += world.needless
        totals.block_seconds += world.block_seconds
        totals.peak_share = max(totals.peak_share, *(e.peak / e.capacity for e in world.engines))
    return None


def shrink(scenario: Scenario, ledger: Any) -> Scenario:
    """A smaller scenario that still fails: without faults it does not need, and with fewer requests."""
    calm = Scenario(seed=0)
    changed = True
    while changed:
        changed = False
        for field in dataclasses.fields(scenario):
            value, default = getattr(scenario, field.name), getattr(calm, field.name)
            options: list[Any] = [] if field.name in ("seed", "capacity") or value == default else [default]
            if field.name == "requests":
                options = [value // 2, value - 1] if value > 1 else []
            elif field.name == "aborts":
                options = [0.0] if value else []
            for option in options:
                smaller = dataclasses.replace(scenario, **{field.name: option})
                if run_one(smaller, ledger) is not None:
                    scenario, changed = smaller, True
                    break
    return scenario


def check(first_seed: int, runs: int, ledger: Any, **fixed: Any) -> Totals:
    """Run them all, some settings fixed; AssertionError names the smallest failing scenario."""
    totals = Totals()
    for seed in range(first_seed, first_seed + runs):
        scenario = dataclasses.replace(Scenario.draw(seed), **fixed)
        found = run_one(scenario, ledger, totals)
        if found is not None:
            small = shrink(scenario, ledger)
            raise AssertionError(f"{found}\n  replay: {scenario}\n  smaller: {small}: {run_one(small, ledger)}")
    return totals


def main() -> None:
    """The long form from a shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="no faults: what the ledger refuses needlessly")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="fix a setting of every scenario"
    )
    parser.add_argument("--strangers", type=int, default=0, help="requests per run that bypass kvgate")
    parser.add_argument("--on", choices=("scripts", "reference", "both"), default="scripts")
    args = parser.parse_args()
    began = time.monotonic()
    with ValkeyServer() as server:
        real = ScriptLedger(server.port, "model")
        ledger = {"scripts": real, "both": Both(real)}.get(args.on) or Reference()
        fixed: dict[str, Any] = dict(CALM) if args.calm else {}
        fixed |= {name: ast.literal_eval(value) for name, _, value in (item.partition("=") for item in args.set)}
        if args.strangers:
            fixed["strangers"] = args.strangers
        totals = check(args.seed, args.runs, ledger, **fixed)
        real.close()
    print(f"{totals} in {time.monotonic() - began:.0f} s on {args.on}: 0 violations")


if __name__ == "__main__":
    main()
