"""Writes a stream to its client in whole events, and records its content for a continuation.

Bytes take the first path that fits:

1. Nearly all events of a stream are equal but for one piece of text (`EventForm`). A chunk that is
   such an event is written, and its text recorded.
2. Any other chunk is split into events. These are checked for an engine's failure, an engine's
   abort and the answer's end; then they are written and recorded. Those that end a part of the
   answer are written with the next event, which shows that the part has ended.

Recorded bytes are folded into a `Transcript` when there are many of them. Only folding, the events
after a failure, and finding the form parse JSON. None of them parses a large event: from there on
the stream is not recorded (`sse.PARSED_LIMIT_BYTES`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import msgspec

from ..http import sse
from ..http.reasons import STOPPING_DETAIL, Reason
from ..http.sse import DONE, ERROR, EVENT_ERROR, EVENT_FAILED, is_error
from . import named_events
from .choice_events import EventForm, NotReplayable, form_of, is_blank_or_comment
from .continuation import ChoiceTranscript, Diverged

LAST_EVENTS = (DONE, b'data: {"type":"message_stop"}\n\n')
LAST_EVENT_LINES = (b"\nevent: response.completed\n", b"\nevent: response.incomplete\n")
# In the last events of a stopping engine; for messages it gives no reason at all. The same bytes
# may stand in text of a client that an answer repeats: `aborted` parses the events that have them.
ABORTS = (
    b'"finish_reason":"abort"',
    b'"delta":{"stop_reason":null',
)
# By path: matches an event that ends a text, a block or an item. vLLM ends the open one before it
# gives an answer up, as of 0.33 also before it reports a failure: then it is the end of a part.
_PART_ENDS = {
    "/v1/responses": re.compile(rb"event: response\.[a-z_]+\.done\n"),
    "/v1/messages": re.compile(
        rb'event: content_block_stop\n|event: content_block_delta\n.*"type":"signature_delta"'
    ),
}
# How messages of vLLM's API server begin after its engine's death: before 0.33, and as of 0.33.
# No text of a client looks so: within JSON its quotes are escaped.
_DEATH = re.compile(
    rb'"message": ?"(?:EngineCore encountered an issue'
    rb"|The server had an error while processing your request)"
)
# Of the events that are held back: those that end a text, its part, its item and the answer. Each
# may be as large as an event can be, since vLLM repeats the text in all, in three its logprobs.
MAX_HELD_EVENTS = 4
FOLD_BYTES = 16 * 1024  # recorded bytes that are kept until they are folded
PIECE_OVERHEAD_BYTES = 48  # memory that a recorded piece of text takes beside its own
NO_FORM = EventForm(b"\0", b"\0", 0, "")  # fits no event

Stop = Callable[[Reason, str], None]  # ends an instance's answer: reason, detail


class AnyReplay(Protocol):
    """Compares a second answer with the transcript of the first."""

    @property
    def sees_all_events(self) -> bool:
        """Whether all events must pass `new_part`, since each needs more than `identity_rename`."""

    @property
    def identity_rename(self) -> tuple[bytes, bytes] | None:
        """The bytes that this answer's events begin with, and those of the client's events."""

    @property
    def caught_up(self) -> bool:
        """Whether this answer has reached the end of the transcript."""

    def new_part(self, raw: bytes) -> bytes:
        """Returns the part of an event that is new, as the client's next event; b"" for none.

        Raises Diverged or NotReplayable.
        """


class Transcript(Protocol):
    """The content of an answer that a client has received, by one endpoint's schema."""

    def add(self, events: Iterable[bytes]) -> None:
        """Adds events; raises NotReplayable for an event that the endpoint is not known to have."""

    def add_texts(self, form: EventForm, pieces: list[bytes]) -> None:
        """Adds the texts of events of one form; raises NotReplayable."""

    def replay(self) -> AnyReplay:
        """Returns the comparison for a second answer."""


# By path. Streams of other paths are not continued.
_TRANSCRIPTS: dict[str, Callable[[], Transcript]] = {
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
    """The fields of a whole answer, or of one event, that show an abort."""

    type: str = ""
    choices: list[_ChoiceText] = []
    delta: _MessageDelta = _MessageDelta()


_decode_event = msgspec.json.Decoder(_TextEvent).decode


def engine_failed(data: bytes) -> bool:
    """Whether bytes begin with an error event that is the engine's failure, not the request's."""
    if not is_error(data):
        return False
    event = data.partition(b"\n\n")[0]
    if len(event) > sse.PARSED_LIMIT_BYTES:
        return True  # errors of requests are short
    return sse.failed(sse.data_of(event) or b"")


def aborted(content: bytes) -> bool:
    """Whether an engine aborted an answer, although the answer's status is a success.

    `content`: a whole JSON answer, or events of a stream.
    """
    if ABORTS[0] not in content and ABORTS[1] not in content:
        return False
    if content.startswith(b"{"):
        return _is_aborted_event(content)
    lines = content.split(b"\n")
    return any(_is_aborted_event(line[6:]) for line in lines if line.startswith(b"data: {"))


def _is_aborted_event(json: bytes) -> bool:
    try:
        event = _decode_event(json)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if event.type == "message_delta" and event.delta.stop_reason is None:
        return True
    return any(choice.finish_reason == "abort" for choice in event.choices)


def failure_in(content: bytes) -> Reason:
    """Returns the reason that an engine's error text means.

    vLLM's API server outlives its engine for a moment, and reports the engine's death.
    """
    return "died" if _DEATH.search(content) else "5xx"


def _is_empty(events: bytes) -> bool:
    """Whether events carry nothing."""
    # Most events begin with a field: those are not looked at.
    is_doubtful = events.startswith((b":", b"\n"))
    return is_doubtful and all(map(is_blank_or_comment, events.split(b"\n\n")))


def _has_large_event(data: bytes) -> bool:
    """Returns whether an event is too large to be parsed, or all of them are together."""
    limit = sse.PARSED_LIMIT_BYTES
    if len(data) <= limit:
        return False
    # Ends of a part come with the next event, and each of them may be as large.
    if len(data) > (MAX_HELD_EVENTS + 1) * limit:
        return True
    return any(len(event) > limit for event in data.split(b"\n\n"))


def _length_without_ends(part_end: re.Pattern[bytes], events: bytes) -> int:
    """Returns the bytes of whole events before the last ones, if these end parts.

    Comments between and behind these count with them.
    """
    length = position = len(events)
    for event in reversed(events.split(b"\n\n")[:-1]):
        position -= len(event) + 2
        if part_end.match(event):
            length = position
        elif not is_blank_or_comment(event):
            break
    return length


def _discard(_: bytes) -> None:
    """Takes the bytes of an answer that is of no use."""


class StreamRecorder:
    """Writes one client's stream, whose events come from one instance or several in turn.

    The calls of a stream:

        start_answer -> feed* -> finish                   one instance serves it
        start_answer -> feed* -> stop, or the end of the connection
          -> start_answer -> feed* -> finish              another instance continues it

    `stop` is called from within `feed`, with a reason, when the instance's answer is of no use.

    `record`: record the content for another instance, if the events of `path` are understood.
    `end_mark`: matches the event that is held back with all that follows.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        record: bool,
        end_mark: re.Pattern[bytes] | None = None,
        path: str = "",
    ) -> None:
        self._write = write
        self._transcript: Transcript = _TRANSCRIPTS.get(path, ChoiceTranscript)()
        self._record = record and path in _TRANSCRIPTS
        self._end_mark = end_mark
        self.held = bytearray()  # events from the end mark on, not written yet
        self._part_end = _PART_ENDS.get(path)
        self._held_ends = b""  # the last events, if they end parts, until the next one
        self._stop: Stop
        self._splitter = sse.EventSplitter()
        self._partial_event = self._splitter.parts  # the same list, for the short path of `feed`
        self._form = NO_FORM
        self._chunks_without_form = 0
        self._recorded_events: list[bytes] = []
        self._recorded_texts: list[bytes] = []  # of events of the form, after _recorded_events
        self._recorded_bytes = 0
        self._started = False  # the client has more than comments
        # The bytes that the present instance's events begin with, and those of the client's events.
        self._identity_rename: tuple[bytes, bytes] | None = None
        self._replay: AnyReplay | None = None
        self._last_written = b""
        self._last_events = b""  # the last ones of the present answer, as its instance sent them
        self.clean_error: Callable[[bytes], bytes] = bytes  # takes out what no client may see
        self.error_event = b""  # the instance's report that it failed
        self.continued = False  # by a second instance

    def start_answer(self, stop: Stop, compressed: bool = False) -> Callable[[bytes], None]:
        """Begins an instance's answer; returns the function that takes its bytes.

        `stop` is called if they are of no use. `compressed`: the events cannot be parsed.
        """
        if self._started and (compressed or not self.resumable):
            stop("diverged", "what was sent of the first answer cannot be continued")
            return _discard
        self._stop = stop
        self._splitter.reset()
        self.error_event = b""
        self._last_events = b""
        self.held = bytearray()
        self._held_ends = b""
        self._identity_rename = None
        self._form = NO_FORM
        self._replay = self._transcript.replay() if self._started else None
        self.continued = self.continued or self._started
        if compressed:
            self._started = True
            self._record = False
            return self._write
        return self.feed

    @property
    def is_complete(self) -> bool:
        """Whether the last event is one that ends an answer."""
        return self._last_written.endswith(LAST_EVENTS)

    @property
    def has_ended(self) -> bool:
        """Whether the present answer's last event ends an answer, or is an error."""
        # The end of the body ends its last event.
        events = (self._last_events + self._splitter.rest()).rstrip(b"\n").split(b"\n\n")
        last = next((event for event in reversed(events) if not is_blank_or_comment(event)), b"")
        is_named_end = any(line in b"\n" + last for line in LAST_EVENT_LINES)
        return is_named_end or (last + b"\n\n").endswith(LAST_EVENTS) or is_error(last)

    @property
    def resumable(self) -> bool:
        """Whether another answer can continue here: nothing was sent, or all of it was recorded."""
        if self._record:
            self._fold()
        return self._record or not self._started

    def feed(self, data: bytes) -> None:
        """Takes bytes of a stream, cut anywhere."""
        before, after, _, _ = self._form
        if data.startswith(before) and data.endswith(after) and not self._partial_event:
            text = data[len(before) : -len(after)]
            # A quote would end the text: then more than the text differs from the form.
            if text and b'"' not in text:
                self._write(data)
                if self._record:
                    self._recorded_texts.append(text)
                    self._recorded_bytes += len(text) + PIECE_OVERHEAD_BYTES
                    if self._recorded_bytes > FOLD_BYTES:
                        self._fold()
                return
        try:
            events = self._splitter.feed(data)
        except sse.EventTooLarge as error:
            self._stop("too_large", str(error))
            return
        if events:
            self._feed_events(events)

    def _feed_events(self, data: bytes) -> None:
        """Takes whole events of any kind, also those with which an engine ends."""
        self._last_events = self._last_events if _is_empty(data) else data
        self._deliver(self._good_events(self._held_ends + data))

    def _deliver(self, data: bytes) -> None:
        """Writes and records events, but what the client has, and what waits for the end."""
        if data and self._replay:
            data = self._new_parts(self._replay, data)
        if self._identity_rename:
            data = data.replace(*self._identity_rename)
        if data and self._end_mark:
            data = self._before_end(self._end_mark, data)
        if not data:
            return
        self._last_written = data
        self._write(data)
        if not self._started:
            self._started = not _is_empty(data)
        self._remember(data)

    def _good_events(self, data: bytes) -> bytes:
        """Returns the events before a failure or an abort; holds the last ends of parts back."""
        self._held_ends = b""
        if ERROR in data or EVENT_ERROR in data or EVENT_FAILED in data:
            data = self._before_error(self.clean_error(data))
        if ABORTS[0] in data or ABORTS[1] in data:
            data = self._before_abort(data)
        if self._part_end:
            length = _length_without_ends(self._part_end, data)
            self._held_ends = data[length:]
            data = data[:length]
            self._limit_held(self._held_ends, "it ends parts again and again")
        return data

    def _remember(self, data: bytes) -> None:
        """Records written events; looks for the form in the 1st, 2nd, 4th, 8th ... of them."""
        if _has_large_event(data):
            self._record = False
            return
        if self._record:
            if self._recorded_texts:
                self._fold()  # keeps the order of texts and events
            self._recorded_events.append(data)
            self._recorded_bytes += len(data)
            if self._recorded_bytes > FOLD_BYTES:
                self._fold()
        self._chunks_without_form += 1
        count = self._chunks_without_form
        is_power_of_two = count & (count - 1) == 0
        needs_long_path = self._identity_rename or self._replay or self.held
        if is_power_of_two and not needs_long_path:
            self._form = form_of(data) or self._form

    def _before_error(self, data: bytes) -> bytes:
        """Returns the events before one that reports a failure, and stops there."""
        position = 0
        for event in data.split(b"\n\n"):
            if is_error(event) and (self._replay or engine_failed(event)):
                self.error_event = event
                self._stop(failure_in(event), "it said so in its stream")
                return data[:position]
            position += len(event) + 2
        return data

    def _before_end(self, end_mark: re.Pattern[bytes], data: bytes) -> bytes:
        """Returns the events before the one with the end mark, and holds the others back."""
        position = 0
        if not self.held:
            found = end_mark.search(data)
            if not found:
                return data
            blank_line = data.rfind(b"\n\n", 0, found.start())
            if blank_line >= 0:
                position = blank_line + 2
            if self._part_end:  # they are as doubtful as the end
                position = _length_without_ends(self._part_end, data[:position])
            self._form = NO_FORM  # all later events are held, too
        self.held += data[position:]
        self._limit_held(self.held, "it goes on after its end")
        return data[:position]

    def _limit_held(self, held: bytes | bytearray, detail: str) -> None:
        if len(held) > MAX_HELD_EVENTS * sse.EVENT_LIMIT_BYTES:
            self._stop("garbled", detail)

    def _before_abort(self, data: bytes) -> bytes:
        """Returns the events before one that aborts the answer, and stops there."""
        events = data.split(b"\n\n")
        for position, event in enumerate(events):
            if aborted(event):
                self._stop("stopping", STOPPING_DETAIL)
                return b"".join(before + b"\n\n" for before in events[:position])
        return data

    def _new_parts(self, replay: AnyReplay, data: bytes) -> bytes:
        """Returns the parts of a second answer's events that the client does not have."""
        new_events = []
        *events, _ = data.split(b"\n\n")
        for position, event in enumerate(events):
            if not replay.sees_all_events and replay.caught_up and replay.identity_rename:
                self._replay = None
                new_events += events[position:]
                break
            try:
                if len(event) > sse.PARSED_LIMIT_BYTES:
                    raise NotReplayable("an event too large to compare")
                new = replay.new_part(event)
            except (Diverged, NotReplayable) as error:
                self._stop("diverged", str(error))
                break
            if new:
                new_events.append(new)
        rename = replay.identity_rename
        self._identity_rename = rename if rename and rename[0] != rename[1] else None
        return b"".join(event + b"\n\n" for event in new_events)

    def finish(self) -> bool:
        """Writes the events that are held back, after the answer has ended as it should.

        Returns False, and writes nothing, if a second answer is shorter than the first.
        """
        if self._replay and self._partial_event:
            return False
        ends, self._held_ends = self._held_ends, b""
        self._deliver(ends)
        if self._replay and not self._replay.caught_up:
            return False
        if self.held:
            self._write(bytes(self.held))
        if self._partial_event:
            self._write(self._splitter.rest())
        return True

    def _fold(self) -> None:
        """Replaces recorded bytes by their content in the transcript."""
        events = b"".join(self._recorded_events).split(b"\n\n")
        texts = self._recorded_texts
        self._recorded_events = []
        self._recorded_texts = []
        self._recorded_bytes = 0
        try:
            self._transcript.add(events)
            if texts:
                self._transcript.add_texts(self._form, texts)
        except NotReplayable:
            self._record = False
