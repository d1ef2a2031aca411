"""Names the states of a client's connection, and decides on each event between two requests. Pure.

States (`ConnectionState`):

    IDLE -> READING_HEAD -> READING_BODY -> IDLE ...
     | |         |               |
     | +---------+---------------+--> REFUSED -> (answered) -> LINGERING -> closed
     '-- a WebSocket's handshake --> SWITCHING; `Connection.switch` starts the session

IDLE: no byte of the next request has come. READING_HEAD, READING_BODY: the parser works on one.
REFUSED: an error ended the parsing; complete requests before the error are still answered.
LINGERING: the last answer is sent, and further bytes are dropped until the client has read it.
SWITCHING: nothing is parsed any more.

Deadlines: each state has one, and arriving bytes do not extend it. That of LINGERING is extended
while the client has not read all (`lingers_on`). No deadline runs while a handler runs.
"""

from __future__ import annotations

from enum import Enum, auto

from .limits import LINGER_SECONDS, MAX_LINGER_SECONDS, Limits
from .request import Refusal


class ConnectionState(Enum):
    """Names the states of a connection; the module's docstring describes them."""

    IDLE = auto()
    READING_HEAD = auto()
    READING_BODY = auto()
    REFUSED = auto()
    LINGERING = auto()
    SWITCHING = auto()

    # Enum's own is a function in Python, and the transitions of each request need it.
    __hash__ = object.__hash__

    @property
    def is_reading(self) -> bool:
        """Returns whether a part of a request is here, and the rest may come."""
        return self is READING_HEAD or self is READING_BODY

    @property
    def drops_bytes(self) -> bool:
        """Returns whether bytes from the client have no meaning any more."""
        return self is REFUSED or self is LINGERING


# In Python 3.11 each look-up of an Enum's member takes 0.1 us, and a request needs about thirty.
IDLE = ConnectionState.IDLE
READING_HEAD = ConnectionState.READING_HEAD
READING_BODY = ConnectionState.READING_BODY
REFUSED = ConnectionState.REFUSED
LINGERING = ConnectionState.LINGERING
SWITCHING = ConnectionState.SWITCHING

SUCCESSORS: dict[ConnectionState, tuple[ConnectionState, ...]] = {
    IDLE: (READING_HEAD, REFUSED, SWITCHING),
    READING_HEAD: (READING_BODY, REFUSED),
    READING_BODY: (IDLE, REFUSED),
    REFUSED: (LINGERING,),
    LINGERING: (),
    SWITCHING: (),
}


def successor(state: ConnectionState, wanted: ConnectionState) -> ConnectionState:
    """Returns the wanted state; raises RuntimeError unless it is the present one or may follow."""
    if wanted is not state and wanted not in SUCCESSORS[state]:
        raise RuntimeError(f"a connection cannot go from {state.name} to {wanted.name}")
    return wanted


def deadline(state: ConnectionState, limits: Limits, now: float) -> float:
    """Returns the moment at which a state that begins now has lasted too long."""
    if state is IDLE:
        return now + limits.idle_seconds
    if state is READING_HEAD:
        return now + limits.header_seconds
    if state is READING_BODY:
        return now + limits.body_seconds
    return now + LINGER_SECONDS


def refusal_at_deadline(state: ConnectionState) -> Refusal | None:
    """Returns the answer to a request that came too slowly; None: the connection only closes."""
    return (408, "the request did not arrive in time") if state.is_reading else None


def lingers_on(seconds: float, has_unread_bytes: bool) -> bool:
    """Returns whether a connection that lingers since so many seconds does so for longer.

    Its end may reset the connection, and then the client loses the unread bytes.
    """
    return has_unread_bytes and seconds < MAX_LINGER_SECONDS


class AfterAnswer(Enum):
    """Names the steps that may follow when a handler has returned."""

    ABORT = auto()  # the answer has no end, and only a cut shows that to the client
    LINGER = auto()  # nothing is read any more; the client may still be sending
    CLOSE = auto()
    AWAIT_READER = auto()  # the next request waits until the client has read this answer
    NEXT_REQUEST = auto()


NEXT_REQUEST = AfterAnswer.NEXT_REQUEST  # of nearly all answers; see the constants above


def step_after_answer(
    ended: bool, refuses_more: bool, keeps_alive: bool, reads_slowly: bool
) -> AfterAnswer:
    """Returns the step after an answer.

    `ended`: the answer is complete. `refuses_more`: the client's next bytes were refused, and no
    complete request waits before them. `reads_slowly`: much of the answer is still unread.
    """
    if not ended:
        return AfterAnswer.ABORT
    if refuses_more:
        return AfterAnswer.LINGER
    if not keeps_alive:
        return AfterAnswer.CLOSE
    if reads_slowly:
        return AfterAnswer.AWAIT_READER
    return NEXT_REQUEST
