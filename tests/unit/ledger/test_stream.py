"""One connection's calls and replies, with a transport that only remembers what was written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from extproc.ledger.stream import NotRun, OutcomeUnknown, Stream


class Wire(asyncio.Transport):
    """What the stream writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False


@pytest.fixture
async def stream() -> Stream:
    """A connection that is up."""
    made = Stream()
    made.connection_made(Wire())
    return made


def written(stream: Stream) -> list[bytes]:
    wire = stream._transport
    assert isinstance(wire, Wire)
    return wire.written


async def test_many_commands_leave_in_one_write_and_have_one_waiter(stream: Stream) -> None:
    """The replies come in the commands' order, an error reply among them, and only once all are there."""
    replies = stream.send_all([b"one", b"two", b"three"])
    assert stream.pending == 3
    await asyncio.sleep(0)
    assert written(stream) == [b"onetwothree"]
    stream.data_received(b":1\r\n-ERR no\r\n")
    assert not replies.done()
    stream.data_received(b":3\r\n")
    first, second, third = await replies
    assert (first, str(second), third) == (1, "ERR no", 3)
    assert stream.pending == 0


async def test_others_between_many_commands_get_their_own_replies(stream: Stream) -> None:
    """A call before, and one after, take nothing of theirs."""
    before, replies, after = stream.send(b"a"), stream.send_all([b"b", b"c"]), stream.send(b"d")
    stream.data_received(b":1\r\n:2\r\n:3\r\n:4\r\n")
    assert (await before, await replies, await after) == (1, [2, 3], 4)


async def test_replies_that_came_before_the_connection_went_are_kept(stream: Stream) -> None:
    """The commands without a reply have an error in its place: they may have run."""
    replies = stream.send_all([b"one", b"two", b"three"])
    stream.data_received(b":1\r\n")
    stream.connection_lost(None)
    first, *rest = await replies
    assert first == 1
    assert [type(reply) for reply in rest] == [OutcomeUnknown, OutcomeUnknown]
    with pytest.raises(NotRun):
        stream.send_all([b"four"])


async def test_whoever_gave_up_takes_nobodys_reply_along(stream: Stream) -> None:
    """Late replies to commands that nobody waits for any more are thrown away."""
    replies = stream.send_all([b"one", b"two"])
    after = stream.send(b"three")
    stream.data_received(b":1\r\n")
    replies.cancel()
    stream.data_received(b":2\r\n:3\r\n")
    assert await after == 3


async def test_no_commands_have_no_replies(stream: Stream) -> None:
    """Nothing is written, and nobody waits."""
    assert await stream.send_all([]) == []
    await asyncio.sleep(0)
    assert written(stream) == []
