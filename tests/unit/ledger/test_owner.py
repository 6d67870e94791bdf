"""Which node of a cluster is believed: nodes that know less than others, name each other, or do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import hiredis
import pytest

from extproc.ledger import owner
from extproc.ledger.owner import Host, Poll, find, hosts_in, moved_to, named_by
from extproc.ledger.stream import NotRun, Stream

A, B, C, D = ("a", 1), ("b", 2), ("c", 3), ("d", 4)
SILENT = "silent"


class Nodes:
    """A cluster by what each node says: whom it names, why it names nobody, or nothing at all."""

    def __init__(self, said: Mapping[Host, Host | str]) -> None:
        self.said = said
        self.asked: list[Host] = []
        self.open: set[Host] = set()
        self.silence = asyncio.Event()

    async def ask(self, host: Host) -> tuple[Host, Stream]:
        """See ``owner.Ask``."""
        self.asked.append(host)
        said = self.said.get(host, "Connection refused")
        if said == SILENT:
            self.silence.set()
            await asyncio.Event().wait()
        if isinstance(said, str):
            raise OSError(said)
        self.open.add(host)
        return said, Connection(self, host)


class Connection(Stream):
    """Tells its cluster that it was closed."""

    def __init__(self, nodes: Nodes, host: Host) -> None:
        super().__init__(host[0])
        self.node = host
        self._nodes = nodes

    def close(self) -> None:
        """See ``Stream.close``."""
        self._nodes.open.discard(self.node)


async def found(said: Mapping[Host, Host | str], known: tuple[Host, ...], newest: Host | None = None) -> Host:
    """Who is believed; the connection to it, and no other, is open then."""
    nodes = Nodes(said)
    stream = await find(known, newest, nodes.ask)
    assert isinstance(stream, Connection)
    assert nodes.open == {stream.node}
    assert len(nodes.asked) == len(set(nodes.asked))
    return stream.node


async def test_the_newest_word_is_believed_at_once_and_nobody_else_is_asked() -> None:
    """However many others still name the owner before."""
    nodes = Nodes({A: A, B: B, C: A, D: A})
    await find((A, C, D), B, nodes.ask)
    assert nodes.asked == [B]


async def test_a_chain_of_moves_is_followed_from_node_to_node() -> None:
    """The slot went on while the word was on its way."""
    assert await found({A: B, B: C, C: D, D: D}, (A,), A) == D


async def test_nodes_that_name_each_other_make_no_circle() -> None:
    """Neither has heard of the last move; a third serves the slot, and nobody names it."""
    assert await found({A: B, B: A, C: C}, (A, B, C), A) == C


async def test_where_no_node_serves_the_slot_each_is_asked_once_and_said_to_say_what() -> None:
    """It is on its way between two nodes of which neither holds itself for its owner."""
    nodes = Nodes({A: B, B: A, C: "CLUSTERDOWN"})
    with pytest.raises(NotRun, match="a:1 names b:2; b:2 names a:1; c:3 CLUSTERDOWN"):
        await find((A, B, C), A, nodes.ask)
    assert sorted(nodes.asked) == [A, B, C]
    assert nodes.open == set()


@pytest.mark.parametrize("said", ["Connection refused", SILENT])
async def test_a_new_owner_that_cannot_be_reached_is_not_waited_for(said: str) -> None:
    """It died after it had got the slot: its replica has it by now."""
    assert await found({A: said, B: D, C: D, D: D}, (A, B, C), A) == D


async def test_a_node_that_was_cut_off_and_goes_on_is_outvoted() -> None:
    """It holds itself for the owner; the others know of the failover."""
    assert await found({A: A, B: D, C: D, D: D}, (A, B, C)) == D


async def test_the_majority_does_not_wait_for_the_silent() -> None:
    """One of four is stopped."""
    assert await found({A: A, B: A, C: A, D: SILENT}, (A, B, C, D)) == A


async def test_who_serves_is_believed_where_the_others_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``FIND_S``; a name that cannot be reached from here does not count against it."""
    monkeypatch.setattr(owner, "FIND_S", 0.2)
    assert await found({A: A, B: D, C: SILENT, D: SILENT}, (A, B, C)) == A


async def test_one_known_node_leads_to_the_owner() -> None:
    """A URL need not name every node."""
    assert await found({A: B, B: B}, (A,)) == B


async def test_so_many_nodes_are_asked_and_no_more() -> None:
    """A cluster of hundreds is not asked as a whole."""
    many = tuple((f"n{number}", 1) for number in range(100))
    nodes = Nodes(dict.fromkeys(many, many[-1]))
    await find(many, None, nodes.ask)
    assert len(nodes.asked) <= owner.MAX_ASKED + 1


async def test_a_search_that_is_given_up_closes_what_it_opened() -> None:
    """The ledger is closed while it looks for its server."""
    nodes = Nodes({A: B, B: SILENT, C: C})
    search = asyncio.create_task(find((A, B, C), None, nodes.ask))
    await nodes.silence.wait()
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    assert nodes.open == set()


def test_a_poll_believes_nobody_that_does_not_say_it_serves() -> None:
    """Two name one that has not answered; a third, that is not the majority's, serves."""
    poll = Poll()
    poll.asked = [A, B, C, D]
    poll.heard(A, C)
    poll.heard(B, C)
    assert poll.winner(last=True) is None
    poll.heard(D, D)
    assert (poll.winner(last=False), poll.winner(last=True)) == (None, D)
    poll.heard(C, C)
    assert poll.winner(last=False) == C


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("MOVED 866 10.0.0.7:6379", ("10.0.0.7", 6379)),
        ("MOVED 866 redis-2.redis.svc:6380", ("redis-2.redis.svc", 6380)),
        ("MOVED 866 ::1:7000", ("::1", 7000)),
        ("MOVED 866 fd00::7:2:7000", ("fd00::7:2", 7000)),
        ("MOVED 866 :7001", ("asked", 7001)),
        ("MOVED 866 ?:7001", ("asked", 7001)),
    ],
)
def test_where_a_slot_moved(message: str, where: Host) -> None:
    """Addresses, names, IPv6, and a node that does not say a host."""
    assert moved_to(message, "asked") == where


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (None, A),
        (hiredis.ReplyError("ASK 866 b:2"), A),
        (hiredis.ReplyError("TRYAGAIN Multiple keys request during rehashing of slot"), A),
        (hiredis.ReplyError("MOVED 866 b:2"), B),
        (hiredis.ReplyError("MOVED 866 :5"), ("a", 5)),
    ],
)
def test_whom_a_reply_names(reply: object, named: Host) -> None:
    """A node that is losing the slot has it until it has lost it."""
    assert named_by(reply, A) == named


@pytest.mark.parametrize("error", ["CLUSTERDOWN The cluster is down", "LOADING", "NOPERM this user has no permissions"])
def test_a_node_that_cannot_say_names_nobody(error: str) -> None:
    """And its reason is kept."""
    with pytest.raises(NotRun, match=error):
        named_by(hiredis.ReplyError(error), A)


def test_nodes_of_a_cluster_are_learned_masters_first() -> None:
    """From CLUSTER SLOTS; who may not ask learns nothing."""
    slots = [
        [0, 5000, [b"a", 1, b"id"], [b"d", 4, b"id", [b"hostname", b"x"]]],
        [5001, 9000, [b"", 2, b"id"], [b"a", 1, b"id"]],
        [9001, 16383, [None, 3, b"id"], [b"?", 5, b"id"]],
    ]
    assert hosts_in(slots, "asked") == (A, ("asked", 2), ("asked", 3), D, ("asked", 5))
    assert hosts_in(hiredis.ReplyError("NOPERM"), "asked") == ()
