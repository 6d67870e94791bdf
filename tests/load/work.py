"""What clients will ask for: jobs with known lengths, drawn from a seed or read from a trace.

Pure. Prompts are lists of token ids, so that kvgate and the emulated engine count the same tokens without a tokenizer,
and the length of an answer is told to the emulator by a header that kvgate does not read.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from extproc.memory import KvModel, project

BLOCK_TOKENS = 16
#: Any id that is an ordinary token for every engine here.
TOKEN = 100
TRACE = Path(__file__).parents[1] / "data" / "azure_conv_18min.csv"
_KV = KvModel.tokens_only(BLOCK_TOKENS, "load", "vllm", 1)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: sent ``at_s`` after the start, or next in its client's loop.

    ``cap`` is what the client allows, ``output`` what the engine will produce. ``exact`` says to kvgate that the
    answer runs to its cap. ``abort_s``: the client leaves that long after it sent. ``direct``: past kvgate.
    """

    id: str
    at_s: float
    input: int
    output: int
    cap: int
    exact: bool = True
    stream: bool = False
    abort_s: float | None = None
    direct: bool = False

    def body(self) -> bytes:
        """An OpenAI completions request."""
        body: dict[str, Any] = {
            "model": "m", "prompt": [TOKEN] * self.input, "max_tokens": self.cap, "stream": self.stream,
            "ignore_eos": self.exact,
        }  # fmt: skip
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body, separators=(",", ":")).encode()

    @property
    def reserved_blocks(self) -> int:
        """What kvgate reserves for it when nothing has been learned of its kind."""
        return project(_KV, (self.input,), self.cap, 1).kv_blocks

    def plain(self) -> dict[str, Any]:
        """As JSON carries it."""
        return asdict(self)


def blocks(tokens: int) -> int:
    """Engine blocks that hold ``tokens``."""
    return -(-tokens // BLOCK_TOKENS)


def racing(total: int, processes: int, rounds: int, round_s: float, seed: int) -> list[list[Job]]:
    """``total`` jobs for ``processes`` clients in rounds: three fifths of a round at once, the rest over its first half.

    Nineteen of twenty ask for 60 to 400 tokens in and 15 to 45 out, one for a prompt of 1,500.
    """
    draw = random.Random(seed)
    per_round, out = total // (processes * rounds), []
    for process in range(processes):
        mine = []
        for turn in range(rounds):
            for number in range(per_round):
                late = 0.0 if number < per_round * 0.6 else draw.uniform(0, round_s / 2)
                size = 1500 if draw.random() < 0.05 else draw.randint(60, 400)
                answer = draw.randint(15, 45)
                name = f"race-{process}-{turn}-{number}"
                mine.append(Job(name, turn * round_s + late, size, answer, answer))
        out.append(sorted(mine, key=lambda job: job.at_s))
    return out


def looping(
    clients: int,
    each: int,
    seed: int,
    output: tuple[int, int],
    *,
    exact: bool = True,
    aborts: float = 0.0,
    token_s: float = 0.0,
) -> list[list[Job]]:
    """``each`` jobs for each of ``clients`` that ask again as soon as they are answered, all of them within 3 s.

    Unless ``exact``, caps are four times the answers. A share ``aborts`` of the jobs is left at a moment drawn from the whole life of its answer, ``token_s`` per token.
    """
    draw, out = random.Random(seed), []
    for client in range(clients):
        mine = []
        for number in range(each):
            length = draw.randint(*output)
            leaves, moment = draw.random() < aborts, draw.uniform(0, length * token_s)
            mine.append(Job(
                f"loop-{client}-{number}", draw.uniform(0, 3), draw.randint(60, 400), length, length if exact else 4 * length,
                exact, stream=True, abort_s=moment if leaves else None,
            ))  # fmt: skip
        out.append(mine)
    return out


def steady(arrivals: float, seconds: float, seed: int) -> list[Job]:
    """Poisson arrivals of 60 to 400 tokens in and 60 to 150 out; every second one is marked ``direct``."""
    draw, out, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + draw.expovariate(arrivals)) < seconds:
        answer = draw.randint(60, 150)
        out.append(
            Job(
                f"steady-{len(out)}", at_s, draw.randint(60, 400), answer, answer, stream=True, direct=len(out) % 2 == 1
            )
        )
    return out


def trace(seconds: float, speed: float, *, stream: bool = True, path: Path = TRACE) -> list[Job]:
    """The trace's arrivals within ``seconds`` of play, ``speed`` times as fast; caps are four times the answer."""
    return [
        Job(f"trace-{number}", at_s / speed, given, answer, min(1024, max(64, 4 * answer)), exact=False, stream=stream)
        for number, (at_s, given, answer) in enumerate(_rows(path))
        if at_s / speed < seconds
    ]


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open(encoding="utf-8") as lines:
        for row in csv.reader(line for line in lines if not line.startswith("#")):
            yield float(row[0]), int(row[1]), int(row[2])


Dealt = TypeVar("Dealt")


def dealt(things: Sequence[Dealt], processes: int) -> list[list[Dealt]]:
    """Jobs or loops dealt to ``processes`` in turn."""
    return [list(things[number::processes]) for number in range(processes)]
