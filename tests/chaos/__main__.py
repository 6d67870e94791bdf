"""``make chaos``: three minutes of faults under load, at most ten; prints its figures, exit status 1 if anything broke."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.chaos.run import play

LONGEST_S = 600.0


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=180.0, help=f"length of the load (default 180, at most {LONGEST_S:g})"
    )
    parser.add_argument("--seed", type=int, default=None, help="order and length of the faults (default: random)")
    args = parser.parse_args()
    if not 0 < args.seconds <= LONGEST_S:
        parser.error(f"--seconds {args.seconds:g}: give more than 0 and at most {LONGEST_S:g}")
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"chaos: {args.seconds:g} s, seed {seed}", flush=True)
    began = time.monotonic()
    account = play(args.seconds, seed, say=lambda line: print(line, flush=True))
    print(f"\nfaults: {dict(sorted(account.faults.items()))}")
    for name, value in account.figures.items():
        if name != "logs":
            print(f"{name}: {value}")
    print(f"took {time.monotonic() - began:.0f} s")
    for problem in account.problems[:20]:
        print(f"PROBLEM {problem[:600]}")
    if account.problems:
        print(account.figures.get("logs", ""))
        print(f"{len(account.problems)} problems; again with --seed {seed}")
        return 1
    print("nothing over capacity, nothing left reserved, no stream harmed, every refusal well formed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
