"""One ext_proc exchange as a transition table without I/O: what Envoy sent, what has to be done next.

Owns the order of messages of one HTTP request: headers, one buffered body, perhaps trailers, then nothing that
matters. Knows no protobuf, no gRPC and no decision; ``server`` turns messages into events and actions into
answers. Bodies of other ext_proc modes arrive in pieces: they are collected until the end of the stream, up to
the limit, and a second end of stream is answered neutrally (seen with FULL_DUPLEX bodies over 1 MB).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from extproc.types import RequestHead


class Phase(Enum):
    """Where the exchange stands."""

    IDLE = auto()
    BODY = auto()
    ANSWERED = auto()


class Event(Enum):
    """What came from Envoy, already told apart by whether the stream of the request ends with it."""

    HEADERS = auto()
    HEADERS_LAST = auto()
    BODY = auto()
    BODY_LAST = auto()
    REQUEST_TRAILERS = auto()
    RESPONSE = auto()


class Action(Enum):
    """What the server has to do."""

    #: Answer this message with "continue" and nothing else.
    CONTINUE = auto()
    #: Decide now, then answer this message with the decision.
    DECIDE = auto()
    #: Refuse now: the declared or collected body is over the limit.
    TOO_LARGE = auto()
    #: Refuse now: Envoy is configured to show the body in pieces or not at all, so no answer could still route it.
    UNUSABLE_MODE = auto()
    #: Envoy broke the order of messages; end the stream with an error.
    PROTOCOL_ERROR = auto()


#: (phase, event) -> (next phase, action). Every pair that is absent is a protocol error.
TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, Action]] = {
    (Phase.IDLE, Event.HEADERS): (Phase.BODY, Action.CONTINUE),
    (Phase.IDLE, Event.HEADERS_LAST): (Phase.ANSWERED, Action.DECIDE),
    (Phase.BODY, Event.BODY): (Phase.BODY, Action.CONTINUE),
    (Phase.BODY, Event.BODY_LAST): (Phase.ANSWERED, Action.DECIDE),
    (Phase.BODY, Event.REQUEST_TRAILERS): (Phase.ANSWERED, Action.DECIDE),
    (Phase.ANSWERED, Event.BODY): (Phase.ANSWERED, Action.CONTINUE),
    (Phase.ANSWERED, Event.BODY_LAST): (Phase.ANSWERED, Action.CONTINUE),
    (Phase.ANSWERED, Event.REQUEST_TRAILERS): (Phase.ANSWERED, Action.CONTINUE),
    (Phase.ANSWERED, Event.RESPONSE): (Phase.ANSWERED, Action.CONTINUE),
    # A local reply of Envoy's own (its 413, say) reaches the response path before any decision.
    (Phase.BODY, Event.RESPONSE): (Phase.BODY, Action.CONTINUE),
    (Phase.IDLE, Event.RESPONSE): (Phase.IDLE, Action.CONTINUE),
}


@dataclass(slots=True)
class Exchange:
    """State of one exchange; feed it events in order.

    ``buffered`` says that Envoy hands over the whole body in one message, so that a body message is the last one
    even without ``end_of_stream`` (a body followed by trailers). ``max_body_bytes`` bounds what is collected.
    """

    max_body_bytes: int
    buffered: bool = True
    phase: Phase = Phase.IDLE
    head: RequestHead | None = None
    _pieces: list[bytes] | None = None
    _size: int = 0

    @property
    def body(self) -> bytes:
        """The body so far; the message's own object where it came in one piece."""
        if not self._pieces:
            return b""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def forget_body(self) -> None:
        """Let go of the body once it is decided on; the exchange itself lives on to the end of the response."""
        self._pieces = None

    def headers(self, head: RequestHead, *, last: bool, whole_body: bool = True) -> Action:
        """The request's head; refuses at once when the declared length is over the limit.

        ``whole_body`` says that Envoy announced the one body mode in which a decision on the body can route the request.
        """
        action = self._step(Event.HEADERS_LAST if last else Event.HEADERS)
        if action is Action.PROTOCOL_ERROR:
            return action
        self.head = head
        if not whole_body and not last:
            self.phase = Phase.ANSWERED
            return Action.UNUSABLE_MODE
        declared = head.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > self.max_body_bytes:
            self.phase = Phase.ANSWERED
            return Action.TOO_LARGE
        return action

    def body_piece(self, data: bytes, *, last: bool) -> Action:
        """A piece of the request body, or the whole of it."""
        collecting = self.phase is Phase.BODY
        action = self._step(Event.BODY_LAST if last or self.buffered else Event.BODY)
        if not collecting or action is Action.PROTOCOL_ERROR:
            return action
        self._size += len(data)
        if self._size > self.max_body_bytes:
            self._pieces = None
            self.phase = Phase.ANSWERED
            return Action.TOO_LARGE
        if data:
            if self._pieces is None:
                self._pieces = []
            self._pieces.append(data)
        return action

    def request_trailers(self) -> Action:
        """Trailers of the request; the body before them is complete."""
        return self._step(Event.REQUEST_TRAILERS)

    def response_message(self) -> Action:
        """Anything of the response path; kvgate never decides there."""
        return self._step(Event.RESPONSE)

    def _step(self, event: Event) -> Action:
        self.phase, action = TRANSITIONS.get((self.phase, event), (self.phase, Action.PROTOCOL_ERROR))
        return action
