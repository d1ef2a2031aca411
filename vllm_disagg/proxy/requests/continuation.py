"""Continues a stream whose instance died: another instance answers the request again.

The part of the second answer that the client already has is removed, and the rest is passed on, so
that the client sees one undisturbed stream.

When. A second answer equals the first only if it can be reproduced. So a stream is continued only
if the request has `"temperature": 0` or a `seed` (`Body.reproducible`), and only if each event of
the first answer was understood. This module has the events of completions and chat completions,
which are pieces of text; `named_events.py` has those of other endpoints.

Verification. The removed part must equal what was delivered, piece by piece and per choice: text,
content, reasoning, tool calls, token ids. Of logprobs only the tokens are compared, since the last
digits of the others depend on the batch. On a mismatch the client gets an error event, never two
halves of different answers.

Identity. The client sees one stream: the `id` and `created` of the first answer, no second role,
and the first ids of its tool calls. Usage and finish reason come from the answer that ended, and
are those of an undisturbed run. The two answers may be cut into events differently: the rest of an
event is sent as one event in the same form.

Fields. All that are not listed here are refused, since they may be more content: what the client
has of it would be sent again. A field whose value is null carries nothing, whatever its name.

Memory. A transcript holds the delivered content in constant space: a count and a hash per choice
and kind of piece. While a stream runs its bytes are only recorded (`streams.StreamRecorder`), and
folded into a transcript some hundred events at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...errors import DisaggError

# How vLLM's events begin: the answer's id and its time. All events of a stream begin alike.
_IDENTITY = re.compile(rb'data: \{"id":"[^"]*","object":"[^"]*","created":\d+')
_DATA = b"data: "
_DONE = b"data: [DONE]"
_NULL = msgspec.Raw(b"null")

T = TypeVar("T")
Piece = str | list[Any]
PieceKey = tuple[int, str]  # choice, kind


class NotReplayable(DisaggError):
    """An event is not understood, so that its stream cannot be continued."""


class Diverged(DisaggError):
    """The second answer differs from the first."""


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
    # Of the whole answer, with its end (vLLM 0.33): not read.
    weight_versions: msgspec.Raw = _NULL


class _ChunkEvent(msgspec.Struct, forbid_unknown_fields=True):
    choices: list[_ChoiceDelta]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    # Facts of the answer, its end or its instance: not read.
    id: msgspec.Raw = _NULL
    object: msgspec.Raw = _NULL
    created: msgspec.Raw = _NULL
    model: msgspec.Raw = _NULL
    usage: msgspec.Raw = _NULL
    service_tier: msgspec.Raw = _NULL
    system_fingerprint: msgspec.Raw = _NULL
    metrics: msgspec.Raw = _NULL
    kv_transfer_params: msgspec.Raw = _NULL


_decode_event = msgspec.json.Decoder(_ChunkEvent).decode
_decode_events = msgspec.json.Decoder(list[_ChunkEvent]).decode
_decode_strings = msgspec.json.Decoder(list[str]).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode

WHOLE_INDEX = -1  # the index of pieces that belong to no choice


def answer_identity(event: bytes) -> bytes:
    """Returns the bytes that all of a stream's events begin with; raises NotReplayable."""
    found = _IDENTITY.match(event)
    if not found:
        raise NotReplayable("an event of another kind")
    return found[0]


def is_blank_or_comment(event: bytes) -> bool:
    """Whether an event carries nothing: an extra blank line, or a comment."""
    return not event or (event.startswith(b":") and b"\n" not in event)


def decode_known(decode: Callable[[bytes], T], json: bytes) -> T:
    """Decodes JSON by a decoder that refuses unknown fields, but for those that are null.

    Raises a DecodeError.
    """
    try:
        return decode(json)
    except msgspec.ValidationError:
        return decode(_encode(_without_nulls(msgspec.json.decode(json))))


def _without_nulls(value: Any) -> Any:
    """Returns a JSON value without the fields that are null, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _parse(event: bytes) -> _ChunkEvent:
    try:
        return decode_known(_decode_event, event[len(_DATA) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotReplayable(f"an event that this proxy cannot follow: {error}") from None


def _parse_all(events: bytes) -> list[_ChunkEvent]:
    try:
        return decode_known(_decode_events, events)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotReplayable(f"events that this proxy cannot follow: {error}") from None


def _single_text(event: _ChunkEvent) -> tuple[int, str, str] | None:
    """Returns (choice, kind, text) of an event that carries one text and nothing else."""
    if len(event.choices) != 1 or event.prompt_token_ids or event.prompt_text:
        return None
    choice = event.choices[0]
    if choice.finish_reason or choice.logprobs or choice.token_ids or choice.prompt_token_ids:
        return None
    delta = choice.delta
    if delta is None:
        return (choice.index, "text", choice.text) if choice.text else None
    if choice.text or not delta.content:
        return None
    if delta.role or delta.reasoning or delta.reasoning_content or delta.tool_calls:
        return None
    return choice.index, "content", delta.content


class EventForm(NamedTuple):
    """The bytes around the text of events that carry one text each and are otherwise equal."""

    before: bytes
    after: bytes
    choice: int
    kind: str


def form_of(event: bytes) -> EventForm | None:
    """Returns the form of an event, blank line included.

    None if the event carries more than one text, or if the text is escaped in JSON.
    """
    try:
        single = _single_text(_parse(event))
    except NotReplayable:
        return None
    if not single:
        return None
    index, kind, text = single
    # A backslash is two bytes in JSON, so that the end of the text would be misplaced.
    if "\\" in text:
        return None
    begin = event.find(b'"%b":"' % kind.encode()) + len(kind) + 4
    form = EventForm(event[:begin], event[begin + len(text.encode()) :], index, kind)
    if not event[begin:].startswith(text.encode()):
        return None
    # Proof by trial: the form around another text must parse to that text alone.
    trial = _single_text(_parse(form.before + b"x" + form.after))
    return form if trial == (index, kind, "x") else None


def _pieces(event: _ChunkEvent) -> Iterator[tuple[int, str, Piece]]:
    """Yields all content of an event as (choice, kind, piece)."""
    if event.prompt_token_ids:
        yield WHOLE_INDEX, "prompt_token_ids", event.prompt_token_ids
    if event.prompt_text:
        yield WHOLE_INDEX, "prompt_text", event.prompt_text
    for choice in event.choices:
        if choice.text:
            yield choice.index, "text", choice.text
        if choice.delta:
            yield from _delta_pieces(choice.index, choice.delta)
        if choice.prompt_token_ids:
            yield choice.index, "prompt_token_ids", choice.prompt_token_ids
        if choice.token_ids:
            yield choice.index, "token_ids", choice.token_ids
        if choice.logprobs:
            for name, values in choice.logprobs.items():
                if values:
                    yield choice.index, f"logprobs.{name}", values


def _delta_pieces(index: int, delta: _ChatDelta) -> Iterator[tuple[int, str, Piece]]:
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


def _logged_tokens(kind: str, logprobs: list[Any]) -> list[Any]:
    """Returns the tokens that a list of logprobs names; empty for a list of numbers."""
    if kind == "logprobs.tokens":
        return logprobs
    if kind == "logprobs.content":
        return [entry.get("token") for entry in logprobs if isinstance(entry, dict)]
    return []


class _TextChannel:
    """All pieces of one kind, as a count and a hash."""

    __slots__ = ("_hash", "count")

    def __init__(self) -> None:
        self.count = 0  # characters of text, or items of a list
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, kind: str, piece: Piece) -> None:
        self.count += len(piece)
        if isinstance(piece, str):
            self._hash.update(piece.encode())
        elif kind.endswith("token_ids"):
            self._hash.update(b"".join(b"%d," % token for token in piece))
        else:
            self._hash.update(b"".join(_encode([token]) for token in _logged_tokens(kind, piece)))

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


class ChoiceTranscript:
    """The content of a completion or chat completion that a client has received."""

    def __init__(self) -> None:
        self.channels: dict[PieceKey, _TextChannel] = {}
        self.finish_reasons: dict[int, str] = {}  # by choice
        self.usage_sent = False  # in the event without choices, which is the last one
        self.identity = b""  # the bytes that all events begin with
        self._done = False

    def replay(self) -> ChoiceReplay:
        """Returns the comparison for a second answer."""
        return ChoiceReplay(self)

    def _json_of(self, events: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the JSON of each event; raises NotReplayable for an event of another answer."""
        for event in events:
            if is_blank_or_comment(event):
                continue
            if self._done:
                raise NotReplayable("an event after the last one")
            if event == _DONE:
                self._done = True
                continue
            if not self.identity:
                self.identity = answer_identity(event)
            if not event.startswith(self.identity):
                raise NotReplayable("an event of another answer")
            yield event[len(_DATA) :]

    def add(self, events: Iterable[bytes]) -> None:
        """Adds whole events; raises NotReplayable if one of them is not understood.

        Nearly all of them carry one text and nothing else: consecutive ones are hashed together.
        """
        content = b",".join(self._json_of(events))
        texts: list[str] = []
        key: PieceKey = (0, "text")
        for event in _parse_all(b"[" + content + b"]"):
            single = _single_text(event)
            if single is None:
                self._add_joined(key, texts)
                self._add_event(event)
                continue
            index, kind, text = single
            if key != (index, kind):
                self._add_joined(key, texts)
                key = (index, kind)
            texts.append(text)
        self._add_joined(key, texts)

    def _add_joined(self, key: PieceKey, texts: list[str]) -> None:
        """Adds consecutive texts of one channel, and empties their list."""
        if texts:
            self._channel(key).add(key[1], "".join(texts))
            texts.clear()

    def _channel(self, key: PieceKey) -> _TextChannel:
        channel = self.channels.get(key)
        if channel is None:
            channel = self.channels[key] = _TextChannel()
        return channel

    def add_texts(self, form: EventForm, pieces: list[bytes]) -> None:
        """Adds the texts of events of one form, in their JSON spelling; raises NotReplayable."""
        try:
            texts = _decode_strings(b'["' + b'","'.join(pieces) + b'"]')
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotReplayable(f"texts that this proxy cannot follow: {error}") from None
        if len(texts) != len(pieces):
            raise NotReplayable("texts that are no texts")
        self._add_joined((form.choice, form.kind), texts)

    def _add_event(self, event: _ChunkEvent) -> None:
        for index, kind, piece in _pieces(event):
            self._channel((index, kind)).add(kind, piece)
        for choice in event.choices:
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason
        if not event.choices:
            self.usage_sent = True


class ChoiceReplay:
    """Compares a second answer with a transcript, and removes what the client already has.

    It has `caught_up` when the second answer reaches the point where the first one broke off.
    """

    sees_all_events = False  # the events after that point need no more than `identity_rename`

    def __init__(self, transcript: ChoiceTranscript) -> None:
        # The bytes that this answer's events begin with, and those of the client's events.
        self.identity_rename: tuple[bytes, bytes] | None = None
        self._transcript = transcript
        self._seen = ChoiceTranscript()  # the part of this answer that was compared
        self._unmatched = {key for key, channel in transcript.channels.items() if channel.count}

    @property
    def caught_up(self) -> bool:
        """Whether all of the transcript was found in this answer."""
        return (
            not self._unmatched
            and self._transcript.finish_reasons.keys() <= self._seen.finish_reasons.keys()
            and self._seen.usage_sent >= self._transcript.usage_sent
        )

    def new_part(self, raw: bytes) -> bytes:
        """Returns the new part of an event, as an event; b"" if nothing is new.

        Raises Diverged or NotReplayable.
        """
        if is_blank_or_comment(raw):
            return raw  # a keep-alive
        if raw == _DONE:
            if not self.caught_up:
                raise Diverged("the answer made again is shorter")
            return raw
        if not self.identity_rename:
            self.identity_rename = (answer_identity(raw), self._transcript.identity)
        old_lengths, new_choices = self._compare(_parse(raw))
        if any(index in new_choices for index, _ in self._unmatched):
            raise Diverged("the answer made again is another one")
        if not new_choices:
            return b""
        return _without_old(raw, old_lengths) if old_lengths else raw

    def _compare(self, event: _ChunkEvent) -> tuple[dict[PieceKey, int], set[int]]:
        """Returns the delivered length of each piece, and the choices with new content."""
        old_lengths: dict[PieceKey, int] = {}
        new_choices: set[int] = set()
        for index, kind, piece in _pieces(event):
            old_length = self._match_piece(index, kind, piece)
            if old_length:
                old_lengths[index, kind] = old_length
            if old_length < len(piece):
                new_choices.add(index)
        for choice in event.choices:
            if choice.finish_reason and self._is_new_finish(choice.index, choice.finish_reason):
                new_choices.add(choice.index)
        if not event.choices:
            if self._unmatched:
                raise Diverged("the answer made again is shorter")
            if not self._transcript.usage_sent:
                new_choices.add(WHOLE_INDEX)
            self._seen.usage_sent = True
        return old_lengths, new_choices

    def _match_piece(self, index: int, kind: str, piece: Piece) -> int:
        """Returns how much of a piece the client has; raises Diverged if that part differs."""
        key = (index, kind)
        recorded = self._transcript.channels.get(key)
        if recorded is None or key not in self._unmatched:
            if index in self._transcript.finish_reasons:
                raise Diverged("the answer made again is longer")
            return 0
        seen = self._seen.channels.setdefault(key, _TextChannel())
        old_part = piece[: recorded.count - seen.count]
        # A function's name comes in one piece: this is another function whose name begins alike.
        if kind.endswith(".name") and len(old_part) < len(piece):
            raise Diverged("the answer made again is another one")
        seen.add(kind, old_part)
        if seen.count == recorded.count:
            if seen.digest != recorded.digest:
                raise Diverged("the answer made again is another one")
            self._unmatched.discard(key)
        return len(old_part)

    def _is_new_finish(self, index: int, reason: str) -> bool:
        """Whether the end of a choice is new to the client; raises Diverged."""
        self._seen.finish_reasons[index] = reason
        if any(key[0] == index for key in self._unmatched):
            raise Diverged("the answer made again is shorter")
        recorded = self._transcript.finish_reasons.get(index)
        if recorded not in (None, reason):
            raise Diverged("the answer made again ends otherwise")
        return recorded is None


def _without_old(raw: bytes, old_lengths: dict[PieceKey, int]) -> bytes:
    """Returns an event without the beginnings of its pieces, in characters or items."""
    event = _decode(raw[len(_DATA) :])
    for name in ("prompt_token_ids", "prompt_text"):
        if old_lengths.get((WHOLE_INDEX, name)):
            event[name] = None
    for choice in event["choices"]:
        index = choice.get("index", 0)
        lengths = {kind: n for (of_choice, kind), n in old_lengths.items() if of_choice == index}
        for kind in ("text", "token_ids"):
            if kind in lengths:
                choice[kind] = choice[kind][lengths[kind] :]
        if "prompt_token_ids" in lengths:
            choice["prompt_token_ids"] = None
        if choice.get("delta"):
            _strip_delta(choice["delta"], lengths)
        if choice.get("logprobs"):
            rest = {
                name: values[lengths.get(f"logprobs.{name}", 0) :] if values else values
                for name, values in choice["logprobs"].items()
            }
            choice["logprobs"] = rest if any(rest.values()) else None
    return _DATA + _encode(event)


def _strip_delta(delta: dict[str, Any], old_lengths: dict[str, int]) -> None:
    """Removes from a chat delta, in place, what the client has."""
    if "role" in old_lengths:
        del delta["role"]
    for kind in ("content", "reasoning", "reasoning_content"):
        if kind in old_lengths:
            delta[kind] = delta[kind][old_lengths[kind] :]
    new_calls = []
    for call in delta.get("tool_calls") or ():
        prefix = f"tool{call.get('index', 0)}"
        function = call.get("function") or {}
        if f"{prefix}.name" in old_lengths:
            # The client has this call under the id of the first answer.
            call.pop("id", None)
            call.pop("type", None)
            function.pop("name")
        if f"{prefix}.arguments" in old_lengths:
            old_length = old_lengths[f"{prefix}.arguments"]
            function["arguments"] = function["arguments"][old_length:]
        if function.get("name") or function.get("arguments"):
            new_calls.append(call)
    if new_calls:
        delta["tool_calls"] = new_calls
    else:
        delta.pop("tool_calls", None)
