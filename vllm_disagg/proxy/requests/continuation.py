"""Continues a stream whose instance died: another instance answers the request again.

The part of the second answer that the client already has is removed, and the rest is passed on, so
that the client sees one undisturbed stream.

When. A second answer equals the first only if it can be reproduced. So a stream is continued only
if the request has `"temperature": 0` or a `seed` (`Body.reproducible`), and only if each event of
the first answer was understood. `choice_events.py` has the events of completions and chat
completions, which are pieces of text; `named_events.py` has those of other endpoints.

Verification. The removed part must equal what was delivered, piece by piece and per choice: text,
content, reasoning, tool calls, token ids. Of logprobs only the tokens are compared, since the last
digits of the others depend on the batch. On a mismatch the client gets an error event, never two
halves of different answers.

Identity. The client sees one stream: the `id` and `created` of the first answer, no second role,
and the first ids of its tool calls. Usage and finish reason come from the answer that ended, and
are those of an undisturbed run. The two answers may be cut into events differently: the rest of an
event is sent as one event in the same form.

Memory. A transcript holds the delivered content in constant space: a count and a hash per choice
and kind of piece. While a stream runs its bytes are only recorded (`streams.StreamRecorder`), and
folded into a transcript some hundred events at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ...errors import DisaggError
from .choice_events import (
    DATA,
    WHOLE_INDEX,
    ChunkEvent,
    EventForm,
    NotReplayable,
    Piece,
    PieceKey,
    answer_identity,
    event_pieces,
    is_blank_or_comment,
    parse,
    parse_all,
    single_text,
    without_old,
)

_DONE = b"data: [DONE]"
_decode_strings = msgspec.json.Decoder(list[str]).decode
_encode = msgspec.json.Encoder().encode


class Diverged(DisaggError):
    """The second answer differs from the first."""


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
            yield event[len(DATA) :]

    def add(self, events: Iterable[bytes]) -> None:
        """Adds whole events; raises NotReplayable if one of them is not understood.

        Nearly all of them carry one text and nothing else: consecutive ones are hashed together.
        """
        content = b",".join(self._json_of(events))
        texts: list[str] = []
        key: PieceKey = (0, "text")
        for event in parse_all(b"[" + content + b"]"):
            single = single_text(event)
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

    def _add_event(self, event: ChunkEvent) -> None:
        for index, kind, piece in event_pieces(event):
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
        old_lengths, new_choices = self._compare(parse(raw))
        if any(index in new_choices for index, _ in self._unmatched):
            raise Diverged("the answer made again is another one")
        if not new_choices:
            return b""
        return without_old(raw, old_lengths) if old_lengths else raw

    def _compare(self, event: ChunkEvent) -> tuple[dict[PieceKey, int], set[int]]:
        """Returns the delivered length of each piece, and the choices with new content."""
        old_lengths: dict[PieceKey, int] = {}
        new_choices: set[int] = set()
        for index, kind, piece in event_pieces(event):
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
