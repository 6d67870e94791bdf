"""A signal ends a local run wherever it arrives."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from extproc.local.lifetime import Stopped, stopping_on_signals


class _SignalWhenCollected:
    """Its finaliser, from which no exception comes out, is where the signal arrives."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # bytecode for the interpreter to run the handler in
            pass


def _signal_in_a_finaliser() -> None:
    _SignalWhenCollected()


def test_a_signal_in_a_finaliser_is_found_by_the_next_check() -> None:
    """An exception raised there would be lost, with a traceback."""
    with stopping_on_signals() as stopping:
        stopping.check()
        _signal_in_a_finaliser()

        with pytest.raises(Stopped, match="SIGTERM"):
            stopping.check()


def test_work_in_an_event_loop_ends_soon_and_is_cancelled() -> None:
    """The load of a demo does not go on to its end."""
    fates: list[str] = []

    async def work() -> None:
        try:
            _signal_in_a_finaliser()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            fates.append("cancelled")
            raise

    with stopping_on_signals() as stopping, pytest.raises(Stopped):
        asyncio.run(stopping.unless(work()))
    assert fates == ["cancelled"]


def test_the_first_signal_is_the_one_that_is_told() -> None:
    """A second one neither interrupts nor renames what goes on."""
    with stopping_on_signals() as stopping:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Stopped, match="SIGINT"):
            stopping.check()


def test_work_that_ends_first_gives_its_result() -> None:
    """Nothing is changed where no signal comes; afterwards the handlers are those of before."""
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> int:
        return 7

    with stopping_on_signals() as stopping:
        assert asyncio.run(stopping.unless(work())) == 7
    assert signal.getsignal(signal.SIGTERM) is before
