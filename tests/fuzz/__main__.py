"""Coverage-guided fuzzing (atheris): each target for its share of the time, one line of figures each.

    python -m tests.fuzz [--seconds 720] [--keep FOLDER]

Runs in the environment that ``make fuzz`` sets up. The corpus grows from run to run in FOLDER; an input that is a
finding is written beside it. Exit status 1 where there is one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import corpus

ROOT = Path(__file__).resolve().parents[2]

#: Memory of one target (libFuzzer stops it there), of which Python, the libraries and the corpus take some 300 MiB.
RSS_LIMIT_MB = 1024

#: Wall seconds of one input, on a machine that is busy with other things; the targets judge processor time.
INPUT_LIMIT_S = 20


@dataclass(frozen=True, slots=True)
class Target:
    """A module of this package, the folder of its corpus, its share of the time and its longest input."""

    module: str
    folder: str
    share: float
    longest: int
    words: bool


TARGETS = (
    Target("tests.fuzz.fuzz_dialects", "requests", 0.85, 16 * 1024, True),
    Target("tests.fuzz.fuzz_encodings", "encodings", 0.15, 4 * 1024, False),
)


def main() -> int:
    """Every target in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=720, help="of all targets together")
    parser.add_argument("--keep", type=Path, default=ROOT / ".run" / "fuzz", help="corpus, logs and findings")
    args = parser.parse_args()
    corpus.write(args.keep)
    return max([fuzz(target, round(args.seconds * target.share), args.keep) for target in TARGETS])


def fuzz(target: Target, seconds: int, keep: Path) -> int:
    """Run one target; its log's tail is shown where it found something."""
    log = keep / f"{target.folder}.log"
    command = [
        sys.executable, "-m", target.module, str(keep / target.folder), f"-artifact_prefix={keep}/{target.folder}-",
        f"-max_total_time={seconds}", f"-timeout={INPUT_LIMIT_S}", f"-rss_limit_mb={RSS_LIMIT_MB}", f"-max_len={target.longest}",
        "-print_final_stats=1", *([f"-dict={keep / 'dictionary'}"] if target.words else []),
    ]  # fmt: skip
    print(f"{target.folder}: {seconds} s, log in {log}", flush=True)
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = log.read_text("utf-8", "replace").splitlines()
    runs, peak = (_last(lines, name) for name in ("number_of_executed_units", "peak_rss_mb"))
    covered = next((found[1] for line in reversed(lines) if (found := re.search(r"cov: (\d+)", line))), "?")
    print(
        f"{target.folder}: {runs} runs, {covered} branches, peak {peak} MiB, {'no finding' if status == 0 else 'FOUND'}"
    )
    if status:
        print("\n".join(lines[-60:]))
    return 1 if status else 0


def _last(lines: list[str], name: str) -> str:
    return next((line.split()[-1] for line in reversed(lines) if name in line), "?")


if __name__ == "__main__":
    sys.exit(main())
