"""Events of completions and chat completions: the pieces of text that each of them carries.

Fields that are not listed here are refused, since they may be more content: what the client has of
it would be sent again. A field whose value is null carries nothing, whatever its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...errors import DisaggError

# How vLLM's events begin: the answer's id and its time. All events of a stream begin alike.
_IDENTITY = re.compile(rb'data: \{"id":"[^"]*","object":"[^"]*","created":\d+')
DATA = b"data: "
_NULL = msgspec.Raw(b"null")

T = TypeVar("T")
Piece = str | list[Any]
PieceKey = tuple[int, str]  # choice, kind


class NotReplayable(DisaggError):
    """An event is not understood, so that its stream cannot be continued."""


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


class ChunkEvent(msgspec.Struct, forbid_unknown_fields=True):
    """One event of a completion or chat completion."""

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


_decode_event = msgspec.json.Decoder(ChunkEvent).decode
_decode_events = msgspec.json.Decoder(list[ChunkEvent]).decode
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


def parse(event: bytes) -> ChunkEvent:
    """Parses an event; raises NotReplayable if it is not understood."""
    try:
        return decode_known(_decode_event, event[len(DATA) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotReplayable(f"an event that this proxy cannot follow: {error}") from None


def parse_all(events: bytes) -> list[ChunkEvent]:
    """Parses a JSON list of events without their `data: `; raises NotReplayable."""
    try:
        return decode_known(_decode_events, events)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotReplayable(f"events that this proxy cannot follow: {error}") from None


def single_text(event: ChunkEvent) -> tuple[int, str, str] | None:
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
        single = single_text(parse(event))
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
    trial = single_text(parse(form.before + b"x" + form.after))
    return form if trial == (index, kind, "x") else None


def event_pieces(event: ChunkEvent) -> Iterator[tuple[int, str, Piece]]:
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


def without_old(raw: bytes, old_lengths: dict[PieceKey, int]) -> bytes:
    """Returns an event without the beginnings of its pieces, in characters or items."""
    event = _decode(raw[len(DATA) :])
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
    return DATA + _encode(event)


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
