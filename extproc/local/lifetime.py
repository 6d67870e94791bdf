"""The life of a local run: its directory, and its orderly end at the first SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from extproc.local.supervisor import ChildFailed

#: A file of this name in a run's directory keeps it.
KEEP = "keep"
#: How soon work in an event loop ends after a signal.
CHECK_S = 0.2
T = TypeVar("T")


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGINT asked us to end; no ``except Exception`` and no event loop on the way keeps it."""


class Stopping:
    """Whether a signal asked us to end.

    The handler only remembers: an exception raised in it is lost, with a traceback on the screen, where Python happens to
    run a hook around a fork or a finaliser. Whoever waits does so in turns and calls ``check`` in each.
    """

    def __init__(self) -> None:
        self._signal = ""

    def ask(self, number: int) -> None:
        """Remember the first signal."""
        self._signal = self._signal or signal.Signals(number).name

    def check(self) -> None:
        """Raise ``Stopped`` if a signal came."""
        if self._signal:
            raise Stopped(self._signal)

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; ``Stopped``, and ``work`` cancelled, soon after a signal."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=CHECK_S))[0]:
            self.check()
        return task.result()


@contextmanager
def stopping_on_signals() -> Iterator[Stopping]:
    """Inside, the first SIGTERM or SIGINT is remembered; nothing interrupts the clean-up."""
    stopping = Stopping()

    def handler(number: int, frame: FrameType | None) -> None:
        stopping.ask(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory for configuration, logs and sockets; kept where a child failed or ``keep`` was called."""
    directory = Path(tempfile.mkdtemp(prefix="kvgate-"))
    try:
        yield directory
    except ChildFailed:
        keep(directory)
        raise
    finally:
        if not (directory / KEEP).exists():
            shutil.rmtree(directory, ignore_errors=True)


def keep(directory: Path) -> None:
    """Let the run's directory stay, so that its logs can be read."""
    (directory / KEEP).touch()
