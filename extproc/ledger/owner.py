"""Which node of a cluster serves the ledger's slot: its nodes are asked, and what they name is counted.

A node's table may be behind by several moves, and so may be what a node thinks of itself: it was stopped, or cut off,
while another took its slots. So a node is believed only where it says itself that it serves the slot, and

* the newest word led to it: whoever served the slot until now named it (MOVED), or named who named it; or
* more than half of all that were asked name it, itself included; or
* there is nobody else: of those that answered it is named most often.

``Poll`` is pure; ``find`` asks, each node once, so that nodes which name each other make no circle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import hiredis

from extproc.errors import LedgerDown
from extproc.ledger.stream import NotRun, Stream

Host = tuple[str, int]
#: Opens a connection to a node and returns whom that one names; OSError, TimeoutError or ``LedgerDown`` where nobody.
Ask = Callable[[Host], Coroutine[Any, Any, tuple[Host, Stream]]]

#: The newest word alone is asked for this long, then the others too.
ALONE_S = 0.2
#: Whoever has not answered by then is left out.
FIND_S = 2.0
#: So many nodes are asked at most, and whoever they name.
MAX_ASKED = 16


def moved_to(message: str, asked: str) -> Host:
    """Where ``MOVED slot host:port`` points; ``asked`` is the host that said it.

    IPv6 addresses stand there without brackets; no host, or ``?``, means that of the node that says it.
    """
    host, _, port = message.split(" ")[2].rpartition(":")
    return (asked if host in ("", "?") else host, int(port))


def named_by(reply: Any, asked: Host) -> Host:
    """Whom a node names, by its reply to a command on one of the slot's keys; ``NotRun`` where it names nobody.

    ``ASK`` and ``TRYAGAIN`` come from a node that is losing the slot, which is its own until it has lost it.
    """
    if not isinstance(reply, hiredis.ReplyError):
        return asked
    message = str(reply)
    code = message.split(" ", 1)[0]
    if code == "MOVED":
        return moved_to(message, asked[0])
    if code in ("ASK", "TRYAGAIN"):
        return asked
    raise NotRun(f"ledger answered {message}")


def hosts_in(slots: Any, asked: str) -> tuple[Host, ...]:
    """Every node in a reply to CLUSTER SLOTS, masters first; none in an error (``NOPERM``)."""
    if not isinstance(slots, list):
        return ()
    ranks: dict[Host, int] = {}
    for _first, _last, *nodes in slots:
        for rank, (name, port, *_) in enumerate(nodes):
            text = name.decode() if isinstance(name, bytes) else ""
            host = (asked if text in ("", "?") else text, int(port))
            ranks[host] = min(rank, ranks.get(host, rank))
    return tuple(sorted(ranks, key=lambda host: ranks[host]))


class Poll:
    """What the nodes said so far; ``newest`` is where the last word pointed, None where there is none."""

    def __init__(self, newest: Host | None = None) -> None:
        self.asked: list[Host] = []
        self.failed: dict[Host, str] = {}
        self._named: dict[Host, Host] = {}
        self._led_to = set() if newest is None else {newest}

    def heard(self, host: Host, named: Host) -> None:
        """``host`` names ``named``, which may be itself."""
        self._named[host] = named
        if host in self._led_to:
            self._led_to.add(named)

    def winner(self, *, last: bool) -> Host | None:
        """Who is believed; ``last``: no more answers will come."""
        votes = Counter(self._named.values())
        serving = [host for host, named in self._named.items() if named == host]
        for host in serving:
            if host in self._led_to:
                return host
        best = max(serving, key=lambda host: votes[host], default=None)
        if best is None or last or 2 * votes[best] > len(self.asked):
            return best
        return None

    def why_none(self) -> str:
        """What each node said, in the order in which they were asked."""
        said = {host: f"names {named[0]}:{named[1]}" for host, named in self._named.items()} | self.failed
        return "; ".join(f"{host}:{port} {said.get((host, port), 'silent')}" for host, port in self.asked)


class _Asking:
    """The nodes that are being asked, and the connections to those that answered."""

    def __init__(self, newest: Host | None, ask: Ask) -> None:
        self.poll = Poll(newest)
        self._ask = ask
        self._tasks: dict[asyncio.Task[tuple[Host, Stream]], Host] = {}
        self._streams: dict[Host, Stream] = {}

    @property
    def some(self) -> bool:
        """Whether answers may come yet."""
        return bool(self._tasks)

    def also(self, hosts: Iterable[Host]) -> None:
        """Ask these too, where they have not been."""
        for host in hosts:
            if host not in self.poll.asked:
                self.poll.asked.append(host)
                self._tasks[asyncio.create_task(self._ask(host))] = host

    async def hear(self, within_s: float) -> None:
        """Take the next answers, and ask whom they name."""
        done, _ = await asyncio.wait(self._tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            host = self._tasks.pop(each)
            try:
                named, self._streams[host] = each.result()
            except (OSError, TimeoutError, LedgerDown) as e:
                self.poll.failed[host] = str(e) or "timed out"
            else:
                self.poll.heard(host, named)
                self.also([named])

    def take(self, host: Host) -> Stream:
        """The connection to a node that answered; ``close`` will not close it."""
        return self._streams.pop(host)

    async def close(self) -> None:
        """Ask no more, and close every connection that was not taken."""
        for each in self._tasks:
            each.cancel()
        for left in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(left, BaseException):  # it answered in the turn in which the matter was settled
                left[1].close()
        for stream in self._streams.values():
            stream.close()


async def find(known: Sequence[Host], newest: Host | None, ask: Ask) -> Stream:
    """A connection to the node that serves the slot; ``NotRun`` where no node is believed.

    ``newest`` is asked alone at first, then ``known`` too. The connections that are not returned are closed.
    """
    loop = asyncio.get_running_loop()
    until_s, alone_until_s = loop.time() + FIND_S, loop.time() + ALONE_S
    asking = _Asking(newest, ask)
    alone = newest is not None
    if newest is not None:
        asking.also([newest])
    try:
        while True:
            alone = alone and asking.some and not asking.poll.failed and loop.time() < alone_until_s
            if not alone:
                asking.also(known[:MAX_ASKED])
            if asking.some:
                await asking.hear((alone_until_s if alone else until_s) - loop.time())
            over = loop.time() >= until_s or not (alone or asking.some)
            winner = asking.poll.winner(last=over)
            if winner is not None:
                return asking.take(winner)
            if over:
                raise NotRun(asking.poll.why_none())
    finally:
        await asking.close()
