"""Continues streams whose events have names: /v1/responses and /v1/messages.

`continuation.py` has the reasons and the conditions.

Such a stream is a sequence of *steps* (an item begins, a block ends, ...) with *runs* of deltas
between them. Two answers to one request are equal when their steps are equal, and the texts of
their runs: a run may be cut into deltas differently. So a `NamedTranscript` is a list of steps (a
hash each) and runs (a count and a hash each), and a `NamedReplay` walks along this list.

Random values are not compared but renamed: the client keeps the ids of the first answer. Sequence
numbers continue from the first answer. The second answer's texts of whole items (`*.done`,
`response.completed`) are passed on: they equal those of the deltas.

Only the events listed here are understood. Tools that the engine itself runs are not: they would
run twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from .choice_events import EventForm, NotReplayable, decode_known, is_blank_or_comment
from .continuation import Diverged

MAX_PARTS = 8192  # steps and runs of one answer: a few MiB of memory
_DONE = b"data: [DONE]"
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ID_KEYS = frozenset(("id", "item_id", "call_id"))
_NOT_COMPARED = _ID_KEYS | {"sequence_number", "signature", "logprobs", "usage"}

Object = dict[str, Any]
RunKey = tuple[str, int, int]  # type, item or block, part

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class NamedDelta(NamedTuple):
    """One event that adds text to a run."""

    run: RunKey
    text: str
    item: str | None = None  # the item's id
    logprobs: int = 0  # number of entries
    number: int | None = None  # the event's sequence number
    type: str = ""


class NamedEventSchema(Protocol):
    """The events of one endpoint."""

    numbered: bool  # each event has a sequence number

    def delta(self, name: str, data: bytes) -> NamedDelta | None:
        """Returns a delta's text; None if the event is no delta.

        Raises a DecodeError for a delta that carries more than text.
        """

    def cut(self, event: Object, chars: int, logprobs: int) -> None:
        """Removes the beginning of a delta, in place: so many characters and logprobs."""

    def step(self, event: Object) -> tuple[Object, list[str]]:
        """Returns the part of an event that must be equal in a second answer, and its random ids.

        Raises NotReplayable if the event is not understood.
        """


class _ResponsesDelta(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[msgspec.Raw] | None = None


_decode_responses_delta = msgspec.json.Decoder(_ResponsesDelta).decode


class ResponsesSchema:
    """The events of /v1/responses, as vLLM streams them."""

    numbered = True
    _DELTAS = frozenset(
        (
            "response.output_text.delta",
            "response.reasoning_text.delta",
            "response.function_call_arguments.delta",
            "response.custom_tool_call_input.delta",
        )
    )
    _WHOLE = frozenset(
        ("response.created", "response.in_progress", "response.completed", "response.incomplete")
    )
    _ITEMS = frozenset(("response.output_item.added", "response.output_item.done"))
    _ITEM_TYPES = frozenset(("message", "reasoning", "function_call", "custom_tool_call"))
    _PARTS = frozenset(
        (
            "response.content_part.added",
            "response.content_part.done",
            "response.output_text.done",
            "response.reasoning_part.added",
            "response.reasoning_part.done",
            "response.reasoning_text.done",
            "response.function_call_arguments.done",
            "response.custom_tool_call_input.done",
        )
    )

    def delta(self, name: str, data: bytes) -> NamedDelta | None:
        """Returns a delta's text; None if the event is no delta."""
        if name not in self._DELTAS:
            return None
        event = decode_known(_decode_responses_delta, data)
        run = (name, event.output_index, event.content_index)
        return NamedDelta(
            run,
            event.delta,
            event.item_id,
            len(event.logprobs or ()),
            event.sequence_number,
            event.type,
        )

    def cut(self, event: Object, chars: int, logprobs: int) -> None:
        """Removes the beginning of a delta, in place."""
        event["delta"] = event["delta"][chars:]
        if event.get("logprobs"):
            event["logprobs"] = event["logprobs"][logprobs:]

    def step(self, event: Object) -> tuple[Object, list[str]]:
        """Returns the part of an event that must be equal in a second answer, and its ids."""
        name = event["type"]
        if name in self._WHOLE:  # most fields of these events depend on the instance
            response = _object(event, "response")
            if response.get("background"):
                raise NotReplayable("an answer that one instance goes on with by itself")
            return {"type": name}, _strings(response, "id")
        if name in self._ITEMS:
            item = _object(event, "item")
            if item.get("type") not in self._ITEM_TYPES:
                raise NotReplayable(f"an item of type {item.get('type')!r:.40}")
            return event, _strings(item, "id", "call_id")
        if name in self._PARTS:
            return event, _strings(event, "item_id")
        raise NotReplayable(f"an event {name!r:.60}")


class _TextDelta(msgspec.Struct, tag="text_delta", forbid_unknown_fields=True):
    text: str


class _ThinkingDelta(msgspec.Struct, tag="thinking_delta", forbid_unknown_fields=True):
    thinking: str


class _JsonDelta(msgspec.Struct, tag="input_json_delta", forbid_unknown_fields=True):
    partial_json: str


class _SignatureDelta(msgspec.Struct, tag="signature_delta", forbid_unknown_fields=True):
    signature: str


class _BlockDelta(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    index: int
    delta: _TextDelta | _ThinkingDelta | _JsonDelta | _SignatureDelta


_decode_block_delta = msgspec.json.Decoder(_BlockDelta).decode


class MessagesSchema:
    """The events of /v1/messages, as vLLM streams them."""

    numbered = False
    _FIELDS = ("text", "thinking", "partial_json")
    _BLOCK_TYPES = frozenset(("text", "thinking", "tool_use"))

    def delta(self, name: str, data: bytes) -> NamedDelta | None:
        """Returns a delta's text; None if the event is no delta."""
        if name != "content_block_delta":
            return None
        event = decode_known(_decode_block_delta, data)
        for kind in self._FIELDS:
            if (text := getattr(event.delta, kind, None)) is not None:
                return NamedDelta((kind, event.index, 0), text, type=event.type)
        return None  # a signature, which is a step

    def cut(self, event: Object, chars: int, logprobs: int) -> None:
        """Removes the beginning of a delta, in place."""
        delta = event["delta"]
        for kind in self._FIELDS:
            if kind in delta:
                delta[kind] = delta[kind][chars:]

    def step(self, event: Object) -> tuple[Object, list[str]]:
        """Returns the part of an event that must be equal in a second answer, and its ids."""
        name = event["type"]
        if name == "message_start":
            return {"type": name}, _strings(_object(event, "message"), "id")
        if name == "content_block_start":
            block = _object(event, "content_block")
            if block.get("type") not in self._BLOCK_TYPES:
                raise NotReplayable(f"a block of type {block.get('type')!r:.40}")
            return event, _strings(block, "id")
        if name in ("content_block_delta", "content_block_stop", "message_delta", "message_stop"):
            return event, []
        raise NotReplayable(f"an event {name!r:.60}")


def _object(event: Object, name: str) -> Object:
    """Returns an event's field that must be an object; raises NotReplayable."""
    found = event.get(name)
    if not isinstance(found, dict):
        raise NotReplayable(f"an event without its {name}")
    return found


def _strings(source: Object, *names: str) -> list[str]:
    """Returns the named fields that are strings."""
    return [source[name] for name in names if isinstance(source.get(name), str)]


def _without_random(value: Any) -> Any:
    """Returns a JSON value without its random fields, at any depth."""
    if isinstance(value, dict):
        return {
            name: _without_random(part) for name, part in value.items() if name not in _NOT_COMPARED
        }
    if isinstance(value, list):
        return [_without_random(part) for part in value]
    return value


@dataclass(frozen=True)
class EventStep:
    """An event that is no delta: a hash of its compared fields, and its random ids."""

    digest: bytes
    ids: list[str]


@dataclass
class DeltaRun:
    """Consecutive deltas of one text: counts and a hash."""

    key: RunKey
    item: str | None = None
    chars: int = 0
    logprobs: int = 0
    hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, text: str, logprobs: int) -> None:
        """Adds a delta's text and its number of logprobs."""
        self.chars += len(text)
        self.logprobs += logprobs
        self.hash.update(text.encode())

    def snapshot(self) -> DeltaRun:
        """Returns a copy that later deltas do not change."""
        return DeltaRun(self.key, self.item, self.chars, self.logprobs, self.hash.copy())


def _step(schema: NamedEventSchema, event: Object) -> EventStep:
    compared, ids = schema.step(event)
    canonical = _encode_sorted(_without_random(compared))
    return EventStep(hashlib.blake2b(canonical, digest_size=16).digest(), ids)


def _name_and_data(event: bytes) -> tuple[str, bytes]:
    """Returns name and data of an event, which must have these two lines only.

    Raises NotReplayable.
    """
    first, _, second = event.partition(b"\n")
    if not first.startswith(b"event: ") or not second.startswith(b"data: {") or b"\n" in second:
        raise NotReplayable("an event of another kind")
    return first[7:].decode(), second[6:]


class _EventReader:
    """Parses one answer's events, and verifies that none is missing."""

    def __init__(self, schema: NamedEventSchema) -> None:
        self.schema = schema
        self.events_read = 0
        self.done = False

    def read(self, raw: bytes) -> tuple[NamedDelta | None, Object]:
        """Returns (delta, {}) for a delta, else (None, event); raises NotReplayable."""
        if self.done:
            raise NotReplayable("an event after the last one")
        try:
            name, data = _name_and_data(raw)
            delta = self.schema.delta(name, data)
            event = {} if delta else _decode(data)
        except _DECODE_ERRORS as error:
            raise NotReplayable(f"an event that this proxy cannot follow: {error}") from None
        number = delta.number if delta else event.get("sequence_number")
        if self.schema.numbered and number != self.events_read:
            raise NotReplayable("an event out of sequence")
        if (delta.type if delta else event.get("type")) != name:
            raise NotReplayable("an event of two names")
        self.events_read += 1
        return delta, event


class NamedTranscript:
    """The steps and runs of an answer that a client has received."""

    def __init__(self, schema: NamedEventSchema) -> None:
        self.schema = schema
        self.parts: list[EventStep | DeltaRun] = []
        self.created_at: object = None  # of the answer
        self._reader = _EventReader(schema)

    @property
    def event_count(self) -> int:
        """The number of events that the client has received, without comments."""
        return self._reader.events_read

    def add(self, events: Iterable[bytes]) -> None:
        """Adds whole events; raises NotReplayable if one of them is not understood."""
        for raw in events:
            if is_blank_or_comment(raw):
                continue
            if raw == _DONE:
                self._reader.done = True
                continue
            delta, event = self._reader.read(raw)
            if delta:
                self._add_delta(delta)
            else:
                self._add_step(event)

    def add_texts(self, form: EventForm, pieces: list[bytes]) -> None:
        """Raises NotReplayable: events with names have no form."""
        raise NotReplayable("texts without their events")

    def _add_delta(self, delta: NamedDelta) -> None:
        run = self.parts[-1] if self.parts else None
        if not isinstance(run, DeltaRun) or run.key != delta.run:
            if not delta.text:  # an empty text begins no run
                return
            run = DeltaRun(delta.run, delta.item)
            self._append(run)
        run.add(delta.text, delta.logprobs)

    def _add_step(self, event: Object) -> None:
        step = _step(self.schema, event)
        if self.created_at is None and isinstance(response := event.get("response"), dict):
            self.created_at = response.get("created_at")
        self._append(step)

    def _append(self, part: EventStep | DeltaRun) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise NotReplayable("an answer of too many parts")
        self.parts.append(part)

    def replay(self) -> NamedReplay:
        """Returns the comparison for a second answer."""
        return NamedReplay(self)


class NamedReplay:
    """Compares a second answer with a transcript, and rewrites its rest as part of the first."""

    sees_all_events = True  # every event gets the first answer's ids and numbers
    identity_rename: tuple[bytes, bytes] | None = None

    def __init__(self, transcript: NamedTranscript) -> None:
        self._schema = transcript.schema
        self._reader = _EventReader(transcript.schema)
        self._parts = [
            part.snapshot() if isinstance(part, DeltaRun) else part for part in transcript.parts
        ]
        self._position = 0  # all parts before it are equal in both answers
        self._run_seen: DeltaRun | None = None  # the second answer's part of the run at _position
        self._client_ids: dict[str, str] = {}  # by id of this answer
        self._events_sent = transcript.event_count
        self._created_at = transcript.created_at

    @property
    def caught_up(self) -> bool:
        """Whether all of the transcript was found in this answer."""
        return self._position == len(self._parts)

    def new_part(self, raw: bytes) -> bytes:
        """Returns the new part of an event, as the client's next event; b"" if nothing is new.

        Raises Diverged or NotReplayable.
        """
        if is_blank_or_comment(raw):
            return raw  # a keep-alive
        if raw == _DONE:
            if not self.caught_up:
                raise Diverged("the answer made again is shorter")
            self._reader.done = True
            return raw
        delta, event = self._reader.read(raw)
        if delta is None:
            if self._match_step(_step(self._schema, event)):
                return b""
            return self._renamed(event)
        chars, logprobs = self._match_delta(delta)
        if not self.caught_up or (chars and chars == len(delta.text)):
            return b""
        event = _decode(_name_and_data(raw)[1])
        if chars:
            self._schema.cut(event, chars, logprobs)
        return self._renamed(event)

    def _match_step(self, step: EventStep) -> bool:
        """Whether the client has a step; raises Diverged if the transcript differs here."""
        if self.caught_up:
            return False
        recorded = self._parts[self._position]
        if (
            not isinstance(recorded, EventStep)
            or recorded.digest != step.digest
            or len(recorded.ids) != len(step.ids)
        ):
            raise Diverged("the answer made again is another one")
        for own_id, client_id in zip(step.ids, recorded.ids, strict=True):
            self._map_id(own_id, client_id)
        self._position += 1
        return True

    def _match_delta(self, delta: NamedDelta) -> tuple[int, int]:
        """Returns how many characters and logprobs of a delta the client has; raises Diverged."""
        if self.caught_up or not delta.text:
            # As in the transcript, an empty text adds its logprobs to the run that it is in.
            if self._run_seen and self._run_seen.key == delta.run:
                self._run_seen.add("", delta.logprobs)
            return 0, 0
        recorded = self._parts[self._position]
        if not isinstance(recorded, DeltaRun) or recorded.key != delta.run:
            raise Diverged("the answer made again is another one")
        if self._run_seen is None:
            self._run_seen = DeltaRun(recorded.key)
            if delta.item is not None and recorded.item is not None:
                self._map_id(delta.item, recorded.item)
        seen = self._run_seen
        text = delta.text[: recorded.chars - seen.chars]
        logprobs = max(0, min(delta.logprobs, recorded.logprobs - seen.logprobs))
        seen.add(text, delta.logprobs)
        if seen.chars == recorded.chars:
            if seen.hash.digest() != recorded.hash.digest():
                raise Diverged("the answer made again is another one")
            self._position += 1
            self._run_seen = None
            if len(text) < len(delta.text) and not self.caught_up:
                raise Diverged("the answer made again is longer")
        return len(text), logprobs

    def _map_id(self, own_id: str, client_id: str) -> None:
        if self._client_ids.setdefault(own_id, client_id) != client_id:
            raise Diverged("the answer made again has other ids")

    def _renamed(self, event: Object) -> bytes:
        """Returns an event as the next one of the first answer."""
        if self._schema.numbered:
            event["sequence_number"] = self._events_sent
        if self._created_at is not None and isinstance(event.get("response"), dict):
            event["response"]["created_at"] = self._created_at
        self._events_sent += 1
        for holder, name in _ids_in(event):
            holder[name] = self._client_ids.get(holder[name], holder[name])
        return b"event: %b\ndata: %b" % (str(event["type"]).encode(), _encode(event))


def _ids_in(value: Any) -> Iterator[tuple[Object, str]]:
    """Yields each place of an id in an event: (object, key)."""
    if isinstance(value, list):
        for part in value:
            yield from _ids_in(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name in _ID_KEYS and isinstance(part, str):
                yield value, name
            else:
                yield from _ids_in(part)
