"""Detects when a streamed answer has started: at its first event of content.

Events before that are prefaces: comments (keep-alives), `response.created` and the like, a role.
vLLM sends them before its engine has computed anything, so they prove nothing about the request's
success. An answer whose first other event is an error has failed.

Each answer has a token, and an event for it. But a stopping engine aborts a request that has no
token yet, and vLLM's streams then have no event for the abort: only those behind all choices.

Pure, and cheap: each event up to the first of content is parsed once, and none after it. Nor is a
large one (`sse.PARSED_LIMIT_BYTES`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from ..http import sse


class ContentState(Enum):
    """The progress of a stream; all but NOT_YET are final."""

    NOT_YET = "not yet"  # prefaces alone
    CONTENT = "content"  # text, reasoning, a tool call, a token, or a reason to finish
    FAILED = "failed"  # an error event came before any content
    EMPTY = "empty"  # the answer's end came before any content


# Types of events before the first content.  All other types, also unknown ones, are content.
_PREFACE_TYPES = frozenset(
    (
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_part.added",
        "response.reasoning_summary_part.added",
        "message_start",
        "ping",
    )
)
_PREFACE_LINES = frozenset(b"event: " + name.encode() for name in _PREFACE_TYPES)


class _ContentBlock(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""


class _MessageUsage(msgspec.Struct, frozen=True):
    output_tokens: int | None = None


class _TypedEvent(msgspec.Struct):
    type: str = ""
    content_block: _ContentBlock | None = None
    usage: _MessageUsage = _MessageUsage()


class _FirstChoice(msgspec.Struct):
    delta: dict[str, Any] = {}
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _FirstChunk(msgspec.Struct):
    choices: list[_FirstChoice] | None = None


_decode_typed = msgspec.json.Decoder(_TypedEvent).decode
_decode_chunk = msgspec.json.Decoder(_FirstChunk).decode


def _is_typed_preface(data: bytes) -> bool:
    event = _decode_typed(data)
    block = event.content_block
    if event.type == "content_block_start" and block:
        return block.type in ("text", "thinking") and not (block.text or block.thinking)
    return event.type in _PREFACE_TYPES


def _is_role(data: bytes) -> bool:
    """Whether a chunk of a chat completion carries nothing but the speaker's role."""
    choices = _decode_chunk(data).choices or []
    return bool(choices) and all(
        "role" in choice.delta
        and not (choice.finish_reason or choice.token_ids)
        and not any(value for name, value in choice.delta.items() if name != "role")
        for choice in choices
    )


def _is_end_of_choices(data: bytes) -> bool:
    """Whether an event comes behind all choices: the usage alone, or the end."""
    return data == b"[DONE]" or _decode_chunk(data).choices == []


def _is_end_of_message(data: bytes) -> bool:
    event = _decode_typed(data)
    return event.type == "message_delta" and event.usage.output_tokens == 0


# By path.  An answer of another path has an event for its abort, or is in END_MARKS.
_END_TESTS: dict[str, Callable[[bytes], bool]] = {
    "/v1/completions": _is_end_of_choices,
    "/v1/chat/completions": _is_end_of_choices,
    "/v1/messages": _is_end_of_message,
}
# By path.  On all other paths no event comes before the first content.
_PREFACE_TESTS: dict[str, Callable[[bytes], bool]] = {
    "/v1/chat/completions": _is_role,
    "/v1/responses": _is_typed_preface,
    "/v1/messages": _is_typed_preface,
}


class FirstContentDetector:
    """Reads a stream until it has started or failed.

    `failure` is the error event that came instead of content, or empty.
    """

    __slots__ = ("_is_end", "_is_preface", "_splitter", "failure", "state")

    def __init__(self, path: str) -> None:
        self._is_preface = _PREFACE_TESTS.get(path)
        self._is_end = _END_TESTS.get(path)
        self._splitter = sse.EventSplitter()
        self.state = ContentState.NOT_YET
        self.failure = b""

    def feed(self, data: bytes) -> ContentState:
        """Reads more bytes of the body; returns the state after them."""
        if self.state is not ContentState.NOT_YET:
            return self.state
        try:
            events = self._splitter.feed(data)
        except sse.EventTooLarge:
            # The reader of the content refuses it, with an error of its own.
            self.state = ContentState.CONTENT
            return self.state
        for event in events.split(b"\n\n"):
            self.state = self._state_after(event)
            if self.state is not ContentState.NOT_YET:
                self._splitter.clear()
                break
        return self.state

    def _state_after(self, event: bytes) -> ContentState:
        if len(event) > sse.PARSED_LIMIT_BYTES:
            return self._state_after_large(event)
        data = sse.data_of(event)
        if not data:
            return ContentState.NOT_YET
        if sse.failed(data):
            self.failure = event
            return ContentState.FAILED
        try:
            if self._is_end and self._is_end(data):
                return ContentState.EMPTY
            if self._is_preface and self._is_preface(data):
                return ContentState.NOT_YET
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # an event of another shape is content
        return ContentState.CONTENT

    def _state_after_large(self, event: bytes) -> ContentState:
        """Returns the state after an event that is not parsed; its name may show a preface.

        An error is content here: the reader of the content sees it.
        """
        first_line = event[: event.find(b"\n")]
        is_comment = event.startswith(b":") and b"\n" not in event
        is_preface = self._is_preface is _is_typed_preface and first_line in _PREFACE_LINES
        return ContentState.NOT_YET if is_comment or is_preface else ContentState.CONTENT
