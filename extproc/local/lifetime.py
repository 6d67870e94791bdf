"""The life of a local run: its directory, and the first SIGTERM or SIGINT as an exception that unwinds everything."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from extproc.local.supervisor import ChildFailed

#: A file of this name in a run's directory keeps it.
KEEP = "keep"


class Stopped(BaseException):
    """SIGTERM or SIGINT asked us to end; no ``except Exception`` on the way may swallow it."""


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Inside, the first signal raises ``Stopped``; later ones are ignored, so that nothing interrupts the clean-up."""

    def handler(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
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
