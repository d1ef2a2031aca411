"""Going on with a stream whose events have names: /v1/responses and /v1/messages. See
`continuation.py` for why and when.

Such a stream is a sequence of *steps* (an item begins, a block ends, ...) with *runs* of deltas
between them. Two answers to one request are the same when their steps are, and the texts of their
runs: how a run is cut into deltas may differ. So a `Transcript` is a list of steps (a hash) and
runs (a count and a hash), and a `NamedReplay` walks along it. What is random is not compared but
renamed: the client goes on with the ids of the first answer. Sequence numbers go on where they
were. The second answer's texts of whole items (`*.done`, `response.completed`) are passed on: they
are those of the deltas.

Only events that are listed here are understood. Tools that the engine runs by itself are not: they
would run twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from .continuation import Diverged, EventForm, NotReplayable, says_nothing

MAX_PARTS = 8192  # of one answer: a few MiB here
_DONE = b"data: [DONE]"
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ID_KEYS = frozenset(("id", "item_id", "call_id"))
_NOT_COMPARED = _ID_KEYS | {"sequence_number", "signature", "logprobs", "usage"}

Object = dict[str, Any]

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="sorted").encode


class NamedDelta(NamedTuple):
    """One more piece of a run."""

    run: tuple[str, int, int]  # its type, item or block, and part
    text: str
    item: str | None = None  # the item's id
    logprobs: int = 0  # how many
    number: int | None = None  # of the event
    type: str = ""


class NamedEventSchema(Protocol):
    """An endpoint's events."""

    numbered: bool  # each event has a sequence number

    def delta(self, name: str, data: bytes) -> NamedDelta | None:
        """The piece of text that an event says, if its name is that of a delta; a DecodeError if it
        says anything else.
        """

    def cut(self, event: Object, chars: int, logprobs: int) -> None:
        """Take the beginning of a delta away."""

    def step(self, event: Object) -> tuple[Object, list[str]]:
        """What is to be the same in another answer, and the ids that are not; NotTold when it is
        not understood.
        """


class _ResponsesDelta(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[msgspec.Raw] | None = None


_responses_delta = msgspec.json.Decoder(_ResponsesDelta).decode


class ResponsesSchema:
    """/v1/responses, as vLLM streams it."""

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
        if name not in self._DELTAS:
            return None
        event = _responses_delta(data)
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
        event["delta"] = event["delta"][chars:]
        if event.get("logprobs"):
            event["logprobs"] = event["logprobs"][logprobs:]

    def step(self, event: Object) -> tuple[Object, list[str]]:
        name = event["type"]
        if name in self._WHOLE:  # of which much depends on the instance
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


_block_delta = msgspec.json.Decoder(_BlockDelta).decode


class MessagesSchema:
    """/v1/messages, as vLLM streams it."""

    numbered = False
    _FIELDS = ("text", "thinking", "partial_json")
    _BLOCK_TYPES = frozenset(("text", "thinking", "tool_use"))

    def delta(self, name: str, data: bytes) -> NamedDelta | None:
        if name != "content_block_delta":
            return None
        event = _block_delta(data)
        for kind in self._FIELDS:
            if (text := getattr(event.delta, kind, None)) is not None:
                return NamedDelta((kind, event.index, 0), text, type=event.type)
        return None  # a signature: a step

    def cut(self, event: Object, chars: int, logprobs: int) -> None:
        delta = event["delta"]
        for kind in self._FIELDS:
            if kind in delta:
                delta[kind] = delta[kind][chars:]

    def step(self, event: Object) -> tuple[Object, list[str]]:
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
    found = event.get(name)
    if not isinstance(found, dict):
        raise NotReplayable(f"an event without its {name}")
    return found


def _strings(found: Object, *names: str) -> list[str]:
    return [found[name] for name in names if isinstance(found.get(name), str)]


def _compared(value: Any) -> Any:
    """A value without what is random in it."""
    if isinstance(value, dict):
        return {name: _compared(part) for name, part in value.items() if name not in _NOT_COMPARED}
    return [_compared(part) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class EventStep:
    """An event that is no delta."""

    digest: bytes
    ids: list[str]


@dataclass
class DeltaRun:
    """Deltas in a row."""

    key: tuple[str, int, int]
    item: str | None = None
    chars: int = 0
    logprobs: int = 0
    hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, text: str, logprobs: int) -> None:
        self.chars += len(text)
        self.logprobs += logprobs
        self.hash.update(text.encode())

    def frozen(self) -> DeltaRun:
        return DeltaRun(self.key, self.item, self.chars, self.logprobs, self.hash.copy())


def _step(schema: NamedEventSchema, event: Object) -> EventStep:
    said, ids = schema.step(event)
    return EventStep(hashlib.blake2b(_sorted(_compared(said)), digest_size=16).digest(), ids)


def _opened(event: bytes) -> tuple[str, bytes]:
    """Name and data of an event, which is made of just these two lines; else NotTold."""
    first, _, second = event.partition(b"\n")
    if not first.startswith(b"event: ") or not second.startswith(b"data: {") or b"\n" in second:
        raise NotReplayable("an event of another kind")
    return first[7:].decode(), second[6:]


class _EventReader:
    """Reads one answer's events, and sees that none is missing."""

    def __init__(self, schema: NamedEventSchema) -> None:
        self.schema = schema
        self.events = 0
        self.done = False

    def read(self, raw: bytes) -> tuple[NamedDelta | None, Object]:
        """An event: as a delta, or whole; NotTold."""
        if self.done:
            raise NotReplayable("an event after the last one")
        try:
            name, data = _opened(raw)
            delta = self.schema.delta(name, data)
            event = {} if delta else _decode(data)
        except _FAULTS as error:
            raise NotReplayable(f"an event that this proxy cannot follow: {error}") from None
        number = delta.number if delta else event.get("sequence_number")
        if self.schema.numbered and number != self.events:
            raise NotReplayable("an event out of sequence")
        if (delta.type if delta else event.get("type")) != name:
            raise NotReplayable("an event of two names")
        self.events += 1
        return delta, event


class NamedTranscript:
    """What a client was told so far."""

    def __init__(self, schema: NamedEventSchema) -> None:
        self.schema = schema
        self.told: list[EventStep | DeltaRun] = []
        self.created: object = None  # when the answer was
        self._reader = _EventReader(schema)

    @property
    def events(self) -> int:
        return self._reader.events

    def add(self, events: Iterable[bytes]) -> None:
        for raw in events:
            if says_nothing(raw):
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
        raise NotReplayable("texts without their events")

    def _add_delta(self, delta: NamedDelta) -> None:
        run = self.told[-1] if self.told else None
        if not isinstance(run, DeltaRun) or run.key != delta.run:
            if not delta.text:  # nothing begins with nothing
                return
            run = DeltaRun(delta.run, delta.item)
            self._append(run)
        run.add(delta.text, delta.logprobs)

    def _add_step(self, event: Object) -> None:
        step = _step(self.schema, event)
        if self.created is None and isinstance(response := event.get("response"), dict):
            self.created = response.get("created_at")
        self._append(step)

    def _append(self, part: EventStep | DeltaRun) -> None:
        if len(self.told) >= MAX_PARTS:
            raise NotReplayable("an answer of too many parts")
        self.told.append(part)

    def replay(self) -> NamedReplay:
        return NamedReplay(self)


class NamedReplay:
    """A second answer: what the client has of it is compared and left out, and the rest made part
    of the first.
    """

    lasts = True  # every event is to be renamed and numbered
    rename: tuple[bytes, bytes] | None = None

    def __init__(self, told: NamedTranscript) -> None:
        self._schema = told.schema
        self._reader = _EventReader(told.schema)
        self._told = [part.frozen() if isinstance(part, DeltaRun) else part for part in told.told]
        self._at = 0  # all before is the same in both answers
        self._seen: DeltaRun | None = None  # as much of the run at hand as was seen
        self._ids: dict[str, str] = {}  # this answer's, and the client's
        self._events = told.events
        self._created = told.created

    @property
    def caught_up(self) -> bool:
        return self._at == len(self._told)

    def event(self, raw: bytes) -> bytes:
        """What is new in an event, as the client's next event; empty when nothing is. Diverged,
        NotTold.
        """
        if says_nothing(raw):
            return raw  # a sign of life
        if raw == _DONE:
            if not self.caught_up:
                raise Diverged("the answer made again is shorter")
            self._reader.done = True
            return raw
        delta, event = self._reader.read(raw)
        if delta is None:
            return b"" if self._is_told(_step(self._schema, event)) else self._renamed(event)
        chars, logprobs = self._taken(delta)
        if not self.caught_up or (chars and chars == len(delta.text)):
            return b""
        event = _decode(_opened(raw)[1])
        if chars:
            self._schema.cut(event, chars, logprobs)
        return self._renamed(event)

    def _is_told(self, step: EventStep) -> bool:
        if self.caught_up:
            return False
        told = self._told[self._at]
        if (
            not isinstance(told, EventStep)
            or told.digest != step.digest
            or len(told.ids) != len(step.ids)
        ):
            raise Diverged("the answer made again is another one")
        for mine, theirs in zip(step.ids, told.ids, strict=True):
            self._learn(mine, theirs)
        self._at += 1
        return True

    def _taken(self, delta: NamedDelta) -> tuple[int, int]:
        """How many characters and logprobs of a delta the client has."""
        if self.caught_up or not delta.text:
            return 0, 0
        told = self._told[self._at]
        if not isinstance(told, DeltaRun) or told.key != delta.run:
            raise Diverged("the answer made again is another one")
        if self._seen is None:
            self._seen = DeltaRun(told.key)
            if delta.item is not None and told.item is not None:
                self._learn(delta.item, told.item)
        seen = self._seen
        text = delta.text[: told.chars - seen.chars]
        logprobs = max(0, min(delta.logprobs, told.logprobs - seen.logprobs))
        seen.add(text, delta.logprobs)
        if seen.chars == told.chars:
            if seen.hash.digest() != told.hash.digest():
                raise Diverged("the answer made again is another one")
            self._at, self._seen = self._at + 1, None
            if len(text) < len(delta.text) and not self.caught_up:
                raise Diverged("the answer made again is longer")
        return len(text), logprobs

    def _learn(self, mine: str, theirs: str) -> None:
        if self._ids.setdefault(mine, theirs) != theirs:
            raise Diverged("the answer made again has other ids")

    def _renamed(self, event: Object) -> bytes:
        """An event as the next one of the first answer."""
        if self._schema.numbered:
            event["sequence_number"] = self._events
        if self._created is not None and isinstance(event.get("response"), dict):
            event["response"]["created_at"] = self._created
        self._events += 1
        for place, name in _ids_in(event):
            place[name] = self._ids.get(place[name], place[name])
        return b"event: %b\ndata: %b" % (str(event["type"]).encode(), _encode(event))


def _ids_in(value: Any) -> Iterator[tuple[Object, str]]:
    """Where ids are in an event."""
    if isinstance(value, list):
        for part in value:
            yield from _ids_in(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name in _ID_KEYS and isinstance(part, str):
                yield value, name
            else:
                yield from _ids_in(part)
