"""Several processes of one service: started together, those that die started again, all of them ended with us.

Owns processes and their readiness; knows nothing of what they serve. A worker tells that it is ready by a byte on the
descriptor that its command line names; the kernel ends workers whose supervisor was killed (Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.local.supervisor import die_with_parent, how_it_ended

POLL_S = 0.05
#: A worker that served and died is started again after the first pause; each failure to come back doubles it.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

#: The command of a worker that is to write to this descriptor when it is ready.
Command = Callable[[int], Sequence[str]]


@dataclass(slots=True)
class _Worker:
    """One place among the workers, whoever fills it: ``served`` tells that one of them was ready before."""

    command: Command
    process: subprocess.Popen[bytes]
    descriptor: int
    started_s: float
    ready: bool = False
    served: bool = False
    pause_s: float = FIRST_PAUSE_S

    def look(self) -> None:
        """Read whether it became ready."""
        if not self.ready and _readable(self.descriptor):
            self.ready = self.served = True
            self.pause_s = FIRST_PAUSE_S


def supervise(commands: Sequence[Command]) -> int:
    """Run one process per command until SIGTERM or SIGINT (0); 1 where one ends before it was ever ready.

    The first starts alone, so that a mistake that all of them share is said once.
    """
    stopping = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    for caught in (signal.SIGTERM, signal.SIGINT):
        signal.signal(caught, stop)
    workers: list[_Worker] = []
    waiting = list(commands)
    try:
        while not stopping:
            if waiting and all(worker.served for worker in workers[:1]):
                count = 1 if not workers else len(waiting)
                workers += [_start(command) for command in waiting[:count]]
                del waiting[:count]
            for number, worker in enumerate(workers):
                worker.look()
                if worker.process.poll() is not None and not _replaced(number, workers):
                    return 1
            time.sleep(POLL_S)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.wait()
            os.close(worker.descriptor)
    return 0


def _replaced(number: int, workers: list[_Worker]) -> bool:
    """Start a worker that ended again when its pause is over; False where its place was never filled."""
    worker = workers[number]
    code = worker.process.returncode
    if not worker.served:
        if code != 1:  # with 1 it has said why
            print(f"worker {number} ended before it was ready ({how_it_ended(code)})", file=sys.stderr, flush=True)
        return False
    if time.monotonic() - worker.started_s > worker.pause_s:
        os.close(worker.descriptor)
        again = _start(worker.command)
        again.served = True
        again.pause_s = worker.pause_s if worker.ready else min(LONGEST_PAUSE_S, worker.pause_s * 2)
        workers[number] = again
    return True


def _start(command: Command) -> _Worker:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    try:
        process = subprocess.Popen(command(theirs), pass_fds=(theirs,), preexec_fn=die_with_parent(signal.SIGKILL))
    finally:
        os.close(theirs)
    return _Worker(command, process, ours, time.monotonic())


def _readable(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) != b""
    except BlockingIOError:
        return False
