"""Going on with a stream whose instance died: another one answers the request again, what the
client already has is taken away from that answer, and the rest is passed on as if nothing had
happened.

A second answer is the same answer only if it can be reproduced, so this is done when the request
says `"temperature": 0` or has a `seed` (`Body.reproducible`), and only if each event of the first
was understood. Here are the events of completions and chat completions, which are pieces of text;
`named_events.py` has those of other endpoints.

It is also *verified*: what is taken away must be, piece by piece and per choice, what was delivered
(text, content, reasoning, tool calls, token ids; of logprobs only how many, since their last digits
depend on the batch). When it is not, the client gets an error event, never two halves of different
answers.

The client sees one stream: the first one's `id` and `created`, no second role, the ids that its
tool calls began with. Usage and finish reason come from the answer that ended, and are those of an
undisturbed run. Where the two answers are cut into events differently, the rest of an event is one
event in the same form.

`Told` is what a client was told, in constant space: a count and a hash per choice and kind of
piece. While a stream runs its bytes are only kept (`streams.Tape`), and folded into a `Told` some
hundred events at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from ...errors import DisaggError

# How vLLM's events begin: who answers, since when.  All events of a stream begin so.
_IDENTITY = re.compile(rb'data: \{"id":"[^"]*","object":"[^"]*","created":\d+')
_DATA = b"data: "
_DONE = b"data: [DONE]"

Piece = str | list[Any]


class NotReplayable(DisaggError):
    """An event that we cannot follow, so that its stream cannot be continued."""


class Diverged(DisaggError):
    """The second answer is another one."""


class _FunctionDelta(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    arguments: str | None = None


class _ToolCallDelta(msgspec.Struct, forbid_unknown_fields=True):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _FunctionDelta | None = None


class _ChatDelta(msgspec.Struct, forbid_unknown_fields=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCallDelta] | None = None


class _ChoiceDelta(msgspec.Struct, forbid_unknown_fields=True):
    index: int = 0
    text: str | None = None
    delta: _ChatDelta | None = None
    logprobs: dict[str, list[Any] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _ChunkEvent(msgspec.Struct):
    choices: list[_ChoiceDelta]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


_event = msgspec.json.Decoder(_ChunkEvent).decode
_events = msgspec.json.Decoder(list[_ChunkEvent]).decode
_strings = msgspec.json.Decoder(list[str]).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode

WHOLE_INDEX = -1  # the index under which pieces go that belong to no choice


def identity(event: bytes) -> bytes:
    """The bytes with which a stream's events begin; NotTold when they are not vLLM's."""
    found = _IDENTITY.match(event)
    if not found:
        raise NotReplayable("an event of another kind")
    return found[0]


def says_nothing(event: bytes) -> bool:
    """Whether an event is none: a blank line more, or a comment."""
    return not event or (event.startswith(b":") and b"\n" not in event)


def _parse(event: bytes) -> _ChunkEvent:
    try:
        return _event(event[len(_DATA) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotReplayable(f"an event that this proxy cannot follow: {error}") from None


def _parse_all(events: bytes) -> list[_ChunkEvent]:
    try:
        return _events(events)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotReplayable(f"events that this proxy cannot follow: {error}") from None


def _plain(event: _ChunkEvent) -> tuple[int, str, str] | None:
    """(choice, kind, piece) of an event that says one piece of text and nothing else."""
    if len(event.choices) != 1 or event.prompt_token_ids or event.prompt_text:
        return None
    choice = event.choices[0]
    if choice.finish_reason or choice.logprobs or choice.token_ids or choice.prompt_token_ids:
        return None
    delta = choice.delta
    if delta is None:
        return (choice.index, "text", choice.text) if choice.text else None
    if (
        choice.text
        or not delta.content
        or delta.role
        or delta.reasoning
        or delta.reasoning_content
        or delta.tool_calls
    ):
        return None
    return choice.index, "content", delta.content


class EventForm(NamedTuple):
    """Events that say one piece of text each and are otherwise equal: what comes before and after
    that piece.
    """

    before: bytes
    after: bytes
    choice: int
    kind: str


def form_of(event: bytes) -> EventForm | None:
    """The form of a whole event, blank line included; None when it says anything else, or its text
    is escaped.
    """
    try:
        plain = _plain(_parse(event))
    except NotReplayable:
        return None
    if not plain:
        return None
    index, kind, piece = plain
    if "\\" in piece:  # in JSON it is two bytes, so the piece's end cannot be told
        return None
    begin = event.find(b'"%b":"' % kind.encode()) + len(kind) + 4
    form = EventForm(event[:begin], event[begin + len(piece.encode()) :], index, kind)
    again = form.before + b"x" + form.after
    return (
        form
        if event[begin:].startswith(piece.encode()) and _plain(_parse(again)) == (index, kind, "x")
        else None
    )


def _pieces(event: _ChunkEvent) -> Iterator[tuple[int, str, Piece]]:
    """All content of an event: choice, kind, piece."""
    if event.prompt_token_ids:
        yield WHOLE_INDEX, "prompt_token_ids", event.prompt_token_ids
    if event.prompt_text:
        yield WHOLE_INDEX, "prompt_text", event.prompt_text
    for choice in event.choices:
        if choice.text:
            yield choice.index, "text", choice.text
        if choice.delta:
            yield from _of_delta(choice.index, choice.delta)
        if choice.prompt_token_ids:
            yield choice.index, "prompt_token_ids", choice.prompt_token_ids
        if choice.token_ids:
            yield choice.index, "token_ids", choice.token_ids
        if choice.logprobs:
            for name, values in choice.logprobs.items():
                if values:
                    yield choice.index, f"logprobs.{name}", values


def _of_delta(index: int, delta: _ChatDelta) -> Iterator[tuple[int, str, Piece]]:
    if delta.role:
        yield index, "role", delta.role
    if delta.content:
        yield index, "content", delta.content
    if delta.reasoning:
        yield index, "reasoning", delta.reasoning
    if delta.reasoning_content:
        yield index, "reasoning_content", delta.reasoning_content
    for call in delta.tool_calls or ():
        if call.function and call.function.name:
            yield index, f"tool{call.index}.name", call.function.name
        if call.function and call.function.arguments:
            yield index, f"tool{call.index}.arguments", call.function.arguments


class _TextChannel:
    """All pieces of one kind, as a count and a hash."""

    __slots__ = ("_hash", "count")

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, kind: str, piece: Piece) -> None:
        self.count += len(piece)
        if isinstance(piece, str):
            self._hash.update(piece.encode())
        elif kind.endswith("token_ids"):
            self._hash.update(b"".join(b"%d," % token for token in piece))

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


class ChoiceTranscript:
    """What a client was told so far of a completion or a chat completion."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, str], _TextChannel] = {}
        self.finished: dict[int, str] = {}
        self.usage = False  # the event without choices, which is the last one
        self.identity = b""  # how all events begin
        self._done = False

    def replay(self) -> ChoiceReplay:
        return ChoiceReplay(self)

    def _content(self, events: Iterable[bytes]) -> Iterator[bytes]:
        """The JSON of events, each of which is one of ours; else NotTold."""
        for event in events:
            if says_nothing(event):
                continue
            if self._done:
                raise NotReplayable("an event after the last one")
            if event == _DONE:
                self._done = True
                continue
            if not self.identity:
                self.identity = identity(event)
            if not event.startswith(self.identity):
                raise NotReplayable("an event of another answer")
            yield event[len(_DATA) :]

    def add(self, events: Iterable[bytes]) -> None:
        """More events, whole ones; NotTold when one of them is not understood.

        Nearly all of them say one piece of text and nothing else: those in a row are noted
        together.
        """
        content = b",".join(self._content(events))
        row: list[str] = []
        key = (0, "text")
        for event in _parse_all(b"[" + content + b"]"):
            plain = _plain(event)
            if plain is None:
                self._add_row(key, row)
                self.note(event)
                continue
            index, kind, piece = plain
            if key != (index, kind):
                self._add_row(key, row)
                key = (index, kind)
            row.append(piece)
        self._add_row(key, row)

    def _add_row(self, key: tuple[int, str], row: list[str]) -> None:
        if row:
            channel = self.channels.get(key)
            if channel is None:
                channel = self.channels[key] = _TextChannel()
            channel.add(key[1], "".join(row))
            row.clear()

    def add_texts(self, form: EventForm, pieces: list[bytes]) -> None:
        """The same for the texts of events of one form, as they stood in JSON."""
        try:
            row = _strings(b'["' + b'","'.join(pieces) + b'"]')
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotReplayable(f"texts that this proxy cannot follow: {error}") from None
        if len(row) != len(pieces):
            raise NotReplayable("texts that are no texts")
        self._add_row((form.choice, form.kind), row)

    def note(self, event: _ChunkEvent) -> None:
        for index, kind, piece in _pieces(event):
            channel = self.channels.get((index, kind))
            if channel is None:
                channel = self.channels[index, kind] = _TextChannel()
            channel.add(kind, piece)
        for choice in event.choices:
            if choice.finish_reason:
                self.finished[choice.index] = choice.finish_reason
        if not event.choices:
            self.usage = True


class ChoiceReplay:
    """A second answer, without what was told of it already. Ends (`caught_up`) where the first one
    broke off.
    """

    lasts = False  # what comes after it needs no more than `rename`

    def __init__(self, told: ChoiceTranscript) -> None:
        self.rename: tuple[bytes, bytes] | None = (
            None  # how this answer's events begin, and the client's
        )
        self._told = told
        self._seen = ChoiceTranscript()
        self._missing = {key for key, channel in told.channels.items() if channel.count}

    @property
    def caught_up(self) -> bool:
        return (
            not self._missing
            and self._told.finished.keys() <= self._seen.finished.keys()
            and self._seen.usage >= self._told.usage
        )

    def event(self, raw: bytes) -> bytes:
        """What is new in an event, as an event; empty when nothing is.  Diverged, NotTold."""
        if says_nothing(raw):
            return raw  # a sign of life
        if raw == _DONE:
            if not self.caught_up:
                raise Diverged("the answer made again is shorter")
            return raw
        if not self.rename:
            self.rename = (identity(raw), self._told.identity)
        old, new = self._compare(_parse(raw))
        if any(index in new for index, _ in self._missing):
            raise Diverged("the answer made again is another one")
        if not new:
            return b""
        return _cut(raw, old) if old else raw

    def _compare(self, event: _ChunkEvent) -> tuple[dict[tuple[int, str], int], set[int]]:
        """How much of each piece the client has; the choices of which there is more than that."""
        old: dict[tuple[int, str], int] = {}
        new: set[int] = set()
        for index, kind, piece in _pieces(event):
            taken = self._take(index, kind, piece)
            if taken:
                old[index, kind] = taken
            if taken < len(piece):
                new.add(index)
        for choice in event.choices:
            if choice.finish_reason and self._finish(choice.index, choice.finish_reason):
                new.add(choice.index)
        if not event.choices:
            if self._missing:
                raise Diverged("the answer made again is shorter")
            if not self._told.usage:
                new.add(WHOLE_INDEX)
            self._seen.usage = True
        return old, new

    def _take(self, index: int, kind: str, piece: Piece) -> int:
        """How much of a piece was told already; Diverged when that was something else."""
        key = (index, kind)
        told = self._told.channels.get(key)
        if told is None or key not in self._missing:
            if index in self._told.finished:
                raise Diverged("the answer made again is longer")
            return 0
        seen = self._seen.channels.setdefault(key, _TextChannel())
        part = piece[: told.count - seen.count]
        if kind.endswith(".name") and len(part) < len(
            piece
        ):  # another function, whose name begins alike
            raise Diverged("the answer made again is another one")
        seen.add(kind, part)
        if seen.count == told.count:
            if seen.digest != told.digest:
                raise Diverged("the answer made again is another one")
            self._missing.discard(key)
        return len(part)

    def _finish(self, index: int, reason: str) -> bool:
        """Whether a choice's end is news."""
        self._seen.finished[index] = reason
        if any(key[0] == index for key in self._missing):
            raise Diverged("the answer made again is shorter")
        told = self._told.finished.get(index)
        if told not in (None, reason):
            raise Diverged("the answer made again ends otherwise")
        return told is None


def _cut(raw: bytes, old: dict[tuple[int, str], int]) -> bytes:
    """An event without the first `old` characters or items of its pieces."""
    event = _decode(raw[len(_DATA) :])
    for name in ("prompt_token_ids", "prompt_text"):
        if old.get((WHOLE_INDEX, name)):
            event[name] = None
    for choice in event["choices"]:
        index = choice.get("index", 0)
        mine = {kind: count for (of, kind), count in old.items() if of == index}
        for kind in ("text", "token_ids"):
            if kind in mine:
                choice[kind] = choice[kind][mine[kind] :]
        if "prompt_token_ids" in mine:
            choice["prompt_token_ids"] = None
        if choice.get("delta"):
            _cut_delta(choice["delta"], mine)
        if choice.get("logprobs"):
            left = {
                k: v[mine.get(f"logprobs.{k}", 0) :] if v else v
                for k, v in choice["logprobs"].items()
            }
            choice["logprobs"] = left if any(left.values()) else None
    return _DATA + _encode(event)


def _cut_delta(delta: dict[str, Any], old: dict[str, int]) -> None:
    if "role" in old:
        del delta["role"]
    for kind in ("content", "reasoning", "reasoning_content"):
        if kind in old:
            delta[kind] = delta[kind][old[kind] :]
    left = []
    for call in delta.get("tool_calls") or ():
        mark, function = f"tool{call.get('index', 0)}", call.get("function") or {}
        if f"{mark}.name" in old:  # the client knows this call, by the id of the first answer
            call.pop("id", None)
            call.pop("type", None)
            function.pop("name")
        if f"{mark}.arguments" in old:
            function["arguments"] = function["arguments"][old[f"{mark}.arguments"] :]
        if function.get("name") or function.get("arguments"):
            left.append(call)
    if left:
        delta["tool_calls"] = left
    else:
        delta.pop("tool_calls", None)
