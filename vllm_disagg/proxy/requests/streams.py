"""A stream on its way to the client: whole events only, and a memory of what was said.

The usual way of a chunk is short. Nearly all events of a stream are equal but for one piece of text
(`Form`): a chunk that is such an event is written, and its piece kept. Of other chunks it is looked
at whether they end with a whole event and say that the engine failed. What is kept is folded into a
`Told` when it is much; only that, what follows a failure, and finding the form look into JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import msgspec

from ..http import sse
from ..http.reasons import Reason
from ..http.sse import DONE, ERROR, EVENT_ERROR, EVENT_FAILED, is_error
from . import named_events
from .continuation import (
    ChoiceTranscript,
    Diverged,
    EventForm,
    NotReplayable,
    form_of,
    says_nothing,
)

LAST_EVENTS = (DONE, b'data: {"type":"message_stop"}\n\n')
# in what an engine that is being stopped says to everybody; for messages it gives no reason at all
ABORTS = (
    b'"finish_reason":"abort"',
    b'"delta":{"stop_reason":null',
    # these bytes may also stand in what a client wrote, and be answered as they are: then `aborted`
    # looks closer
)
FOLD_BYTES = 16 * 1024  # bytes kept as they came
PIECE_OVERHEAD_BYTES = 48  # bytes of memory that a piece takes beside its own
NO_FORM = EventForm(b"\0", b"\0", 0, "")  # fits nothing

Stop = Callable[[Reason, str], None]


class AnyReplay(Protocol):
    """A second answer, compared with what was told of the first."""

    @property
    def lasts(self) -> bool:
        """Whether it must see all events, since each needs more than `rename`."""

    @property
    def rename(self) -> tuple[bytes, bytes] | None:
        """How this answer's events begin, and the client's."""

    @property
    def caught_up(self) -> bool:
        """Whether the client has no more than this answer."""

    def event(self, raw: bytes) -> bytes:
        """What is new in an event, as the client's next event; empty when nothing is. Diverged,
        NotTold.
        """


class Transcript(Protocol):
    """What a client was told of an answer, in an endpoint's own words."""

    def add(self, events: Iterable[bytes]) -> None:
        """More events; NotTold when one of them is not one that this endpoint is known to have."""

    def add_texts(self, form: EventForm, pieces: list[bytes]) -> None:
        """Texts of events of one form; NotTold."""

    def replay(self) -> AnyReplay: ...


_TRANSCRIPTS: dict[str, Callable[[], Transcript]] = {  # of other paths no stream is continued
    "/v1/completions": ChoiceTranscript,
    "/v1/chat/completions": ChoiceTranscript,
    "/v1/responses": partial(named_events.NamedTranscript, named_events.ResponsesSchema()),
    "/v1/messages": partial(named_events.NamedTranscript, named_events.MessagesSchema()),
}


class _ChoiceText(msgspec.Struct):
    finish_reason: str | None = None


class _MessageDelta(msgspec.Struct, frozen=True):
    stop_reason: str | None = ""


class _TextEvent(msgspec.Struct):
    """An answer, or an event of one."""

    type: str = ""
    choices: list[_ChoiceText] = []
    delta: _MessageDelta = _MessageDelta()


_said = msgspec.json.Decoder(_TextEvent).decode


def engine_failed(data: bytes) -> bool:
    """Whether bytes begin with an event in which an engine says that it failed, and not that the
    request is wrong.
    """
    event = data.partition(b"\n\n")[0]
    return is_error(event) and sse.failed(sse.data_of(event) or b"")


def aborted(content: bytes) -> bool:
    """Whether an answer, or one of the events in it, is one that its engine gave up: no error by
    its status, and not what was asked for.
    """
    if ABORTS[0] not in content and ABORTS[1] not in content:
        return False
    events = (
        [content]
        if content.startswith(b"{")
        else [line[6:] for line in content.split(b"\n") if line.startswith(b"data: {")]
    )
    return any(_is_given_up(event) for event in events)


def _is_given_up(event: bytes) -> bool:
    try:
        said = _said(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    is_cut = said.type == "message_delta" and said.delta.stop_reason is None
    return is_cut or any(choice.finish_reason == "abort" for choice in said.choices)


def failure_in(content: bytes) -> Reason:
    """What an engine's words of failure mean: vLLM's API server outlives its engine a little, and
    says so.
    """
    return "died" if b"EngineCore" in content else "5xx"


def _drop(_: bytes) -> None:
    """Where the bytes of an answer go that is of no use."""


class StreamRecorder:
    """Everything that one client gets of one stream, be it from one instance or from several after
    each other.

    `keep`: remember what was said, for another instance, if `path` is an endpoint whose events are
    understood. `hold`: what stands in the event from which on all is held.
    """

    def __init__(
        self, write: Callable[[bytes], None], keep: bool, hold: bytes = b"", path: str = ""
    ) -> None:
        self._write = write
        self._told: Transcript = _TRANSCRIPTS.get(path, ChoiceTranscript)()
        self._keep = keep and path in _TRANSCRIPTS
        self._hold = hold
        self.held = bytearray()
        self._stop: Stop
        self._cutter = sse.EventSplitter()
        self._parts = self._cutter.parts  # of an event that is not complete yet
        self._form = NO_FORM
        self._odd = 0  # chunks that were of no form that we knew
        self._kept: list[bytes] = []
        self._pieces: list[bytes] = []  # of events of the form, after those that were kept whole
        self._size = 0
        self._begun = False  # the client has more than comments
        self._rename: tuple[bytes, bytes] | None = (
            None  # how the present instance's events begin, and the client's
        )
        self._replay: AnyReplay | None = None
        self._last = b""  # what was written last
        self.error = b""  # the event in which the instance said that it failed
        self.continued = False  # by a second instance

    def source(self, stop: Stop, raw: bool = False) -> Callable[[bytes], None]:
        """A new instance's answer begins: where its bytes go. `stop` is called when they are of no
        use. `raw`: its events cannot be seen, as it is compressed.
        """
        if self._begun and (raw or not self.resumable):
            stop("diverged", "what was sent of the first answer cannot be continued")
            return _drop
        self._stop = stop
        self._cutter.reset()
        self.error, self.held = b"", bytearray()
        self._rename, self._form = None, NO_FORM
        self._replay = self._told.replay() if self._begun else None
        self.continued = self.continued or self._begun
        if raw:
            self._begun, self._keep = True, False
            return self._write
        return self.feed

    @property
    def done(self) -> bool:
        """Whether the last event said that it is the last."""
        return self._last.endswith(LAST_EVENTS)

    @property
    def resumable(self) -> bool:
        """Whether another answer could take over here: nothing was told, or all of it was
        understood.
        """
        if self._keep:
            self._fold()
        return self._keep or not self._begun

    def feed(self, data: bytes) -> None:
        """Bytes of a stream."""
        before, after, _, _ = self._form
        if data.startswith(before) and data.endswith(after) and not self._parts:
            piece = data[len(before) : -len(after)]
            if piece and b'"' not in piece:  # nothing but one more piece
                self._write(data)
                if self._keep:
                    self._pieces.append(piece)
                    self._size += len(piece) + PIECE_OVERHEAD_BYTES
                    if self._size > FOLD_BYTES:
                        self._fold()
                return
        try:
            events = self._cutter.feed(data)
        except sse.EventTooLarge as error:
            self._stop("garbled", str(error))
            return
        if events:
            self._feed_events(events)

    def _feed_events(self, data: bytes) -> None:
        """Whole events of any kind, an engine's last words too."""
        if (ERROR in data or EVENT_ERROR in data or EVENT_FAILED in data) and not (
            data := self._before_error(data)
        ):
            return
        if (ABORTS[0] in data or ABORTS[1] in data) and not (data := self._before_abort(data)):
            return
        if self._replay and not (data := self._news(self._replay, data)):
            return
        if self._rename:
            data = data.replace(*self._rename)
        if (
            self._hold
            and (self.held or self._hold in data)
            and not (data := self._before_end(data))
        ):
            return
        self._last = data
        self._write(data)
        self._begun = self._begun or not all(map(says_nothing, data.split(b"\n\n")))
        self._remember(data)

    def _remember(self, data: bytes) -> None:
        """Keep bytes that were written; learn from them, now and then."""
        if self._keep:
            if self._pieces:
                self._fold()
            self._kept.append(data)
            self._size += len(data)
            if self._size > FOLD_BYTES:
                self._fold()
        self._odd += 1
        if self._odd & (self._odd - 1) == 0 and not (self._rename or self._replay or self._hold):
            self._form = form_of(data) or self._form

    def _before_error(self, data: bytes) -> bytes:
        """Data up to an event in which the instance says that it failed."""
        at = 0
        for event in data.split(b"\n\n"):
            if is_error(event) and (self._replay or engine_failed(event)):
                self.error = event
                self._stop(failure_in(event), "it said so in its stream")
                return data[:at]
            at += len(event) + 2
        return data

    def _before_end(self, data: bytes) -> bytes:
        """Data up to the event with which the instance calls its answer complete."""
        at = 0 if self.held else data.rfind(b"\n\n", 0, data.find(self._hold)) + 2
        if at == 1:  # not found
            at = 0
        self.held += data[at:]
        if len(self.held) > sse.EVENT_LIMIT_BYTES:
            self._stop("garbled", "it goes on after its end")
        return data[:at]

    def _before_abort(self, data: bytes) -> bytes:
        """Data up to the event with which the instance gives an answer up, if there is one."""
        events = data.split(b"\n\n")
        for at, event in enumerate(events):
            if aborted(event):
                self._stop("died", "it is being stopped")
                return b"".join(before + b"\n\n" for before in events[:at])
        return data

    def _news(self, replay: AnyReplay, data: bytes) -> bytes:
        """What the client has not, of events of an answer made again."""
        news = []
        *events, _ = data.split(b"\n\n")
        for at, event in enumerate(events):
            if not replay.lasts and replay.caught_up and replay.rename:
                self._replay = None
                news += events[at:]
                break
            try:
                new = replay.event(event)
            except (Diverged, NotReplayable) as error:
                self._stop("diverged", str(error))
                break
            if new:
                news.append(new)
        self._rename = replay.rename
        return b"".join(event + b"\n\n" for event in news)

    def flush(self) -> bool:
        """The stream ended as it should, and what is left belongs to it; False when it ended too
        early.
        """
        if self._replay and (self._parts or not self._replay.caught_up):
            return False
        if self.held:
            self._write(bytes(self.held))
        if self._parts:
            self._write(self._cutter.rest())
        return True

    def _fold(self) -> None:
        """Forget bytes and keep what they said."""
        events, pieces = b"".join(self._kept).split(b"\n\n"), self._pieces
        self._kept, self._pieces, self._size = [], [], 0
        try:
            self._told.add(events)
            if pieces:
                self._told.add_texts(self._form, pieces)
        except NotReplayable:
            self._keep = False
