"""A process of its own for giant bodies: parsing 27 MB holds the GIL for tens of milliseconds, here nobody's.

One helper per ``Counting``, spoken to over a socket pair from one thread: frames of a pickled message and raw
bytes, one answer per call. Only our own process writes to the socket, so pickle is no way in. The helper keeps
the prompts of the giants it parsed until they are counted; it ends when the socket closes.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from extproc.counting.specs import CounterSpec, load_specs
from extproc.dialects import BodyLimits, InferenceRequest, Parsed, parse
from extproc.errors import BadRequest
from extproc.tokens import CountingStopped, PromptCounter
from extproc.types import RequestHead, TokenCount

#: Lengths of the message and of the bytes behind it.
_FRAME = struct.Struct("!QQ")

#: The helper must answer within this, or it is given up and replaced.
ANSWER_S = 5.0

#: Bytes of bodies whose prompts the helper keeps between parsing and counting.
KEPT_BYTES = 256 * 1024 * 1024


#: Giants give way to everything else on the machine.
_NICE = 5

#: What the helper runs; not ``-m``, which would make this module's classes twice.
_MAIN = "import sys; from extproc.counting.giants import main; main(int(sys.argv[1]))"


class HelperGone(Exception):
    """The helper ended or did not answer in time."""


@dataclass(frozen=True, slots=True)
class ParseCall:
    """Parse the bytes of this frame."""

    head: RequestHead
    limits: BodyLimits


@dataclass(frozen=True, slots=True)
class CountCall:
    """Count the giant ``handle`` with each of the counters named, and forget it."""

    handle: int
    counters: tuple[CounterSpec, ...]
    budget_tokens: int | None
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A BadRequest on its way back."""

    status: int
    code: str
    message: str
    param: str | None


def _send(link: socket.socket, message: object, data: bytes = b"") -> None:
    head = pickle.dumps(message)
    link.sendall(_FRAME.pack(len(head), len(data)) + head)
    if data:
        link.sendall(data)


def _receive(link: socket.socket) -> tuple[Any, bytes]:
    head, data = _FRAME.unpack(_exactly(link, _FRAME.size))
    return pickle.loads(_exactly(link, head)), _exactly(link, data)  # noqa: S301  (our own process wrote it)


def _exactly(link: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    got = 0
    while got < size:
        count = link.recv_into(view[got:])
        if not count:
            raise EOFError
        got += count
    return bytes(buffer)


class GiantHelper:
    """The parent's side. Every call blocks its thread, without the GIL, until the helper answers."""

    def __init__(self, specs: Mapping[str, CounterSpec]) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._link = ours
        self._ready = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        _send(ours, tuple(dict.fromkeys(specs.values())))

    @property
    def pid(self) -> int:
        """The helper's process id."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    def ready(self) -> bool:
        """Whether its tokenizers are loaded; never waits. Raises HelperGone."""
        if not self._ready and select.select([self._link], [], [], 0)[0]:
            self._call(None)
            self._ready = True
        return self._ready

    def parse(self, head: RequestHead, body: bytes, limits: BodyLimits) -> Parsed:
        """``dialects.parse``; the request's prompts stay with the helper under its ``handle``.

        Raises:
            BadRequest: as ``dialects.parse``.
            HelperGone: no answer.
        """
        answer, decoded = self._call(ParseCall(head, limits), body)
        if isinstance(answer, Refused):
            raise BadRequest(answer.status, answer.code, answer.message, answer.param)
        parsed: Parsed = answer
        return replace(parsed, body=decoded if parsed.decoded else body)

    def count(self, call: CountCall) -> tuple[TokenCount, ...] | None:
        """One count per counter, None if the helper no longer knows the giant. Raises HelperGone."""
        answer, _ = self._call(call)
        counts: tuple[TokenCount, ...] | None = answer
        return counts

    def _call(self, message: object | None, data: bytes = b"") -> tuple[Any, bytes]:
        try:
            self._link.settimeout(ANSWER_S)
            if message is not None:
                _send(self._link, message, data)
            return _receive(self._link)
        except (OSError, EOFError) as error:
            self.close()
            raise HelperGone(str(error)) from error

    def close(self) -> None:
        """End the helper."""
        self._link.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Helper:
    """The helper's side: counters, and the giants between parsing and counting."""

    def __init__(self, specs: tuple[CounterSpec, ...]) -> None:
        self._counters: dict[CounterSpec, PromptCounter] = load_specs(specs)
        self._kept: OrderedDict[int, InferenceRequest] = OrderedDict()
        self._kept_bytes = 0
        self._last = 0

    def answer(self, message: object, data: bytes) -> tuple[object, bytes]:
        if isinstance(message, ParseCall):
            return self._parse(message, data)
        if isinstance(message, CountCall):
            return self._count(message), b""
        raise TypeError(f"{type(message).__name__} is no call")

    def _parse(self, call: ParseCall, body: bytes) -> tuple[object, bytes]:
        try:
            parsed = parse(call.head, body, call.limits)
        except BadRequest as error:
            return Refused(error.status, error.code, error.message, error.param), b""
        if parsed.request is not None:
            self._last += 1
            self._keep(self._last, parsed.request)
            parsed = replace(parsed, request=replace(parsed.request, prompts=(), handle=self._last))
        return replace(parsed, body=b""), parsed.body if parsed.decoded else b""

    def _keep(self, handle: int, request: InferenceRequest) -> None:
        self._kept[handle] = request
        self._kept_bytes += request.body_bytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].body_bytes

    def _count(self, call: CountCall) -> tuple[TokenCount, ...] | None:
        request = self._kept.pop(call.handle, None)
        if request is None:
            return None
        self._kept_bytes -= request.body_bytes
        stop_at_s = time.perf_counter() + call.deadline_s

        def tick() -> None:
            if time.perf_counter() > stop_at_s:
                raise CountingStopped

        return tuple(
            self._counters.get(spec, PromptCounter()).count(request, budget_tokens=call.budget_tokens, tick=tick)
            for spec in call.counters
        )


def main(descriptor: int) -> None:
    """Answer calls until the socket closes."""
    os.nice(_NICE)
    with socket.socket(fileno=descriptor) as link:
        try:
            helper = _Helper(_receive(link)[0])
            _send(link, "ready")
            while True:
                _send(link, *helper.answer(*_receive(link)))
        except (EOFError, ConnectionError):
            return
