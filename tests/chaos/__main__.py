"""``make chaos``: minutes of faults under load, at most ten; prints its figures, exit status 1 if anything broke."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.chaos.run import PHASES, Account, Phase, play

#: Of load; starting the parts and waiting for the last clients comes on top.
LONGEST_S = 500.0


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=400.0, help=f"of load in all phases (default 400, at most {LONGEST_S:g})"
    )
    parser.add_argument("--seed", type=int, default=None, help="order and length of the faults (default: random)")
    parser.add_argument("--phase", choices=[phase.name for phase in PHASES], help="only this one, for all the seconds")
    args = parser.parse_args()
    if not 0 < args.seconds <= LONGEST_S:
        parser.error(f"--seconds {args.seconds:g}: give more than 0 and at most {LONGEST_S:g}")
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"chaos: {args.seconds:g} s, seed {seed}", flush=True)
    began = time.monotonic()
    problems = 0
    for phase in PHASES:
        if args.phase in (None, phase.name):
            seconds = args.seconds * (phase.share if args.phase is None else 1.0)
            print(f"\n== {phase.name}: {seconds:g} s", flush=True)
            problems += _tell(phase, play(phase, seconds, seed, say=lambda line: print(line, flush=True)))
    print(f"\ntook {time.monotonic() - began:.0f} s")
    if problems:
        print(f"{problems} problems; again with --seed {seed}")
        return 1
    print("nothing over capacity, nothing left reserved, no stream harmed, every refusal well formed")
    return 0


def _tell(phase: Phase, account: Account) -> int:
    """Print one phase's account; returns how many problems it had."""
    print(f"{phase.name}: faults {dict(sorted(account.faults.items()))}")
    for name, value in account.figures.items():
        if name != "logs":
            print(f"{phase.name}: {name}: {value}")
    for problem in account.problems[:20]:
        print(f"PROBLEM {problem[:600]}")
    if account.problems:
        print(account.figures.get("logs", ""))
    sys.stdout.flush()
    return len(account.problems)


if __name__ == "__main__":
    sys.exit(main())
