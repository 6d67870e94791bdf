"""Calls of one kind that leave in the same turn of the event loop travel in one command, and each gets its own answer.

A script's call costs the server several times what one more request inside it does. Pure: knows neither sockets nor
what is carried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis


@dataclass(frozen=True, slots=True)
class Shared:
    """A kind of command that carries at most ``most`` calls' payloads: how it is made, and its reply's answers read."""

    command: Callable[[Sequence[bytes]], bytes]
    answers: Callable[[bytes], Sequence[Any]]
    most: int


@dataclass(frozen=True, slots=True)
class Part:
    """One call's payload, to travel in a command of its kind."""

    kind: Shared
    payload: bytes


class Together:
    """Many commands' replies for one who waits for them all; stands once for each among the waiting calls."""

    __slots__ = ("_count", "_future", "_replies")

    def __init__(self, future: asyncio.Future[list[Any]], count: int) -> None:
        self._future = future
        self._count = count
        self._replies: list[Any] = []

    def done(self) -> bool:
        """Whether nobody waits for them any more."""
        return self._future.done()

    def set_result(self, reply: Any) -> None:
        """The next command's reply."""
        self._replies.append(reply)
        if len(self._replies) == self._count:
            self._future.set_result(self._replies)

    def set_exception(self, error: BaseException) -> None:
        """The next command got none: the error stands in its place."""
        self.set_result(error)


class Carrier:
    """One command on its way with its parts; stands among the waiting calls where a future would."""

    __slots__ = ("_futures", "_payloads", "kind")

    def __init__(self, kind: Shared) -> None:
        self.kind = kind
        self._payloads: list[bytes] = []
        self._futures: list[asyncio.Future[Any]] = []

    def __len__(self) -> int:
        return len(self._futures)

    def takes(self, part: Part) -> bool:
        """Whether ``part`` may travel along."""
        return part.kind is self.kind and len(self._payloads) < self.kind.most

    def add(self, part: Part, future: asyncio.Future[Any]) -> None:
        """Take ``part`` along; ``future`` gets its answer."""
        self._payloads.append(part.payload)
        self._futures.append(future)

    def packed(self) -> bytes:
        """The command as the server reads it."""
        return self.kind.command(self._payloads)

    def done(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(future.done() for future in self._futures)

    def set_result(self, reply: Any) -> None:
        """The command's reply: an answer for each part, or one error for all of them."""
        failed = isinstance(reply, hiredis.ReplyError)
        answers = [reply] * len(self._futures) if failed else self.kind.answers(reply)
        for future, answer in zip(self._futures, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def set_exception(self, error: BaseException) -> None:
        """No reply came."""
        for future in self._futures:
            if not future.done():
                future.set_exception(error)
