"""A stream on its way to the client: whole events only, and a memory of what was said.

The usual way of a chunk is short.  Nearly all events of a stream are equal but for one piece of text (`Form`): a chunk that
is such an event is written, and its piece kept.  Of other chunks it is looked at whether they end with a whole event and
say that the engine failed.  What is kept is folded into a `Told` when it is much; only that, what follows a failure, and
finding the form look into JSON.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .continuation import Diverged, Form, NotTold, Replay, Told, form_of, identity
from .failover import Reason

DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error"'  # cannot stand within a JSON text, where quotes are escaped
ABORTS = (  # in what an engine that is being stopped says to everybody; for messages it gives no reason at all
    b'"finish_reason":"abort"',
    b'"delta":{"stop_reason":null',
)  # these bytes may also stand in what a client wrote, and be answered as they are: then `aborted` looks closer
FOLD = 16 * 1024  # bytes kept as they came
PIECE = 48  # bytes of memory that a piece takes beside its own
NO_FORM = Form(b"\0", b"\0", 0, "")  # fits nothing

Stop = Callable[[Reason, str], None]


class _Error(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _Error


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _MessageDelta(msgspec.Struct, frozen=True):
    stop_reason: str | None = ""


class _Said(msgspec.Struct):
    """An answer, or an event of one."""

    type: str = ""
    choices: list[_Choice] = []
    delta: _MessageDelta = _MessageDelta()


_error = msgspec.json.Decoder(_ErrorEvent).decode
_said = msgspec.json.Decoder(_Said).decode


def engine_failed(event: bytes) -> bool:
    """Whether bytes begin with an event in which an engine says that it failed, and not that the request is wrong."""
    if not event.startswith(ERROR):
        return False
    try:
        return _error(event.partition(b"\n")[0].removeprefix(b"data: ")).error.code >= 500
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def aborted(content: bytes) -> bool:
    """Whether an answer, or one of the events in it, is one that its engine gave up: no error by its status, and not what
    was asked for."""
    if ABORTS[0] not in content and ABORTS[1] not in content:
        return False
    events = [content] if content.startswith(b"{") else [line[6:] for line in content.split(b"\n") if line.startswith(b"data: {")]
    return any(_is_given_up(event) for event in events)


def _is_given_up(event: bytes) -> bool:
    try:
        said = _said(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    is_cut = said.type == "message_delta" and said.delta.stop_reason is None
    return is_cut or any(choice.finish_reason == "abort" for choice in said.choices)


def failure_in(content: bytes) -> Reason:
    """What an engine's words of failure mean: vLLM's API server outlives its engine a little, and says so."""
    return "died" if b"EngineCore" in content else "5xx"


class Tape:
    """Everything that one client gets of one stream, be it from one instance or from several after each other.

    `keep`: remember what was said, for another instance.  `hold`: what stands in the event from which on all is held."""

    def __init__(self, write: Callable[[bytes], None], keep: bool, hold: bytes = b"") -> None:
        self._write = write
        self._keep = keep
        self._hold = hold
        self.held = b""
        self._stop: Stop
        self._part = b""  # of an event that is not complete yet
        self._form = NO_FORM
        self._odd = 0  # chunks that were of no form that we knew
        self._kept: list[bytes] = []
        self._pieces: list[bytes] = []  # of events of the form, after those that were kept whole
        self._size = 0
        self._told = Told()
        self._identity = b""  # how the client's events begin
        self._rename: tuple[bytes, bytes] | None = None  # how the present instance's begin, and the client's
        self._replay: Replay | None = None
        self._last = b""  # what was written last
        self.error = b""  # the event in which the instance said that it failed

    def source(self, stop: Stop) -> Callable[[bytes], None]:
        """A new instance's answer begins: where its bytes go.  `stop` is called when they are of no use."""
        self._stop = stop
        self._part, self.error = b"", b""
        if not (self._kept or self._identity):
            return self.feed
        self._fold()
        self._rename, self._replay, self._form = None, Replay(self._told), NO_FORM
        return self._feed_again

    @property
    def done(self) -> bool:
        """Whether the last event said [DONE]."""
        return self._last.endswith(DONE)

    @property
    def resumable(self) -> bool:
        """Whether another answer could take over here."""
        if self._keep:
            self._fold()
        return self._keep

    def feed(self, data: bytes) -> None:
        """Bytes of a stream that goes on where the client is."""
        before, after, _, _ = self._form
        if data.startswith(before) and data.endswith(after) and not self._part:
            piece = data[len(before) : -len(after)]
            if piece and b'"' not in piece:  # nothing but one more piece
                self._write(data)
                if self._keep:
                    self._pieces.append(piece)
                    self._size += len(piece) + PIECE
                    if self._size > FOLD:
                        self._fold()
                return
        self._feed_any(data)

    def _feed_any(self, data: bytes) -> None:
        """Bytes of any kind: parts of events, several events, an engine's last words."""
        if self._part:
            data = self._part + data
            self._part = b""
        if not data.endswith(b"\n\n"):
            end = data.rfind(b"\n\n") + 2
            if end == 1:  # not found
                end = 0
            data, self._part = data[:end], data[end:]
        if data:
            if ERROR in data and not (data := self._before_error(data)):
                return
            if (ABORTS[0] in data or ABORTS[1] in data) and not (data := self._before_abort(data)):
                return
            if self._hold and (self.held or self._hold in data) and not (data := self._before_end(data)):
                return
            self._last = data
            if self._rename:
                data = data.replace(*self._rename)
            self._write(data)
            self._remember(data)

    def _remember(self, data: bytes) -> None:
        """Keep bytes that were written; learn from them, now and then."""
        if self._keep:
            if self._pieces:
                self._fold()
            self._kept.append(data)
            self._size += len(data)
            if self._size > FOLD:
                self._fold()
        self._odd += 1
        if self._odd & (self._odd - 1) == 0 and not (self._rename or self._hold):
            self._form = form_of(data) or self._form

    def _before_error(self, data: bytes) -> bytes:
        """Data up to an event in which the instance says that it failed."""
        at = data.find(ERROR)
        if engine_failed(data[at:]):
            self.error = data[at:].partition(b"\n\n")[0]
            self._stop(failure_in(self.error), "it said so in its stream")
            return data[:at]
        return data

    def _before_end(self, data: bytes) -> bytes:
        """Data up to the event with which the instance calls its answer complete."""
        at = 0 if self.held else data.rfind(b"\n\n", 0, data.find(self._hold)) + 2
        if at == 1:  # not found
            at = 0
        self.held += data[at:]
        return data[:at]

    def _before_abort(self, data: bytes) -> bytes:
        """Data up to the event with which the instance gives an answer up, if there is one."""
        events = data.split(b"\n\n")
        for at, event in enumerate(events):
            if aborted(event):
                self._stop("died", "it is being stopped")
                return b"".join(before + b"\n\n" for before in events[:at])
        return data

    def _feed_again(self, data: bytes) -> None:
        """Bytes of an answer made again, until it has caught up with what the client has."""
        if not self._replay:
            self.feed(data)
            return
        if self.error:
            return
        *events, self._part = (self._part + data).split(b"\n\n")
        for at, event in enumerate(events):
            if aborted(event):
                self._before_abort(event)
                return
            if event.startswith(ERROR):
                self.error = event
                self._stop(failure_in(event), "it said so in its stream")
                return
            if not self._rename and (now := identity(event)):
                self._rename = (now, self._identity)
            try:
                news = self._replay.event(event)
            except (Diverged, NotTold) as error:
                self._stop("diverged", str(error))
                return
            if news:
                self.feed_event(news)
            if self._replay.caught_up:
                self._replay = None
                self._rest(events[at + 1 :])
                return

    def feed_event(self, event: bytes) -> None:
        part, self._part = self._part, b""
        self.feed(event + b"\n\n")
        self._part = part

    def _rest(self, events: list[bytes]) -> None:
        part, self._part = self._part, b""
        self.feed(b"".join(event + b"\n\n" for event in events) + part)

    def flush(self) -> bool:
        """The stream ended as it should, and what is left belongs to it; False when it ended too early."""
        if self._replay:
            return False
        if self.held:
            self._write(self.held)
        if self._part:
            self._write(self._part)
        return True

    def _fold(self) -> None:
        """Forget bytes and keep what they said."""
        events, pieces = b"".join(self._kept).split(b"\n\n"), self._pieces
        self._kept, self._pieces, self._size = [], [], 0
        try:
            self._told.add(events)
            if pieces:
                self._told.add_texts(self._form, pieces)
            if not self._identity:
                first = next((event for event in events if event.startswith(b"data: {")), b"")
                self._identity = identity(first)
                if first and not self._identity:
                    raise NotTold("events of another kind")
        except NotTold:
            self._keep = False
