"""Whether an answer's stream has begun: with its first event of content, or with the end of the
answer.

What comes before is no beginning: comments (keep-alives), `response.created` and the like, a role.
vLLM sends those before its engine has computed anything, so they say nothing about the request's
success. An answer that begins with an error event has failed. Pure, and cheap: each event up to the
first of content is read once, nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from ..http import sse


class ContentState(Enum):
    """How far a stream is."""

    NOT_YET = "not yet"  # nothing of it is content
    CONTENT = "content"  # text, reasoning, a tool call, a token, or the answer's end
    FAILED = "failed"  # an error event came first


# Before the first content.  All other types are content, also those that are unknown here.
_PREFACES = frozenset(
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


class _ContentBlock(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""


class _TypedEvent(msgspec.Struct):
    type: str = ""
    content_block: _ContentBlock | None = None


class _FirstChoice(msgspec.Struct):
    delta: dict[str, Any] = {}
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _FirstChunk(msgspec.Struct):
    choices: list[_FirstChoice] = []


_typed = msgspec.json.Decoder(_TypedEvent).decode
_chunk = msgspec.json.Decoder(_FirstChunk).decode


def _is_typed_preface(data: bytes) -> bool:
    event = _typed(data)
    block = event.content_block
    if event.type == "content_block_start" and block:
        return block.type in ("text", "thinking") and not (block.text or block.thinking)
    return event.type in _PREFACES


def _is_role(data: bytes) -> bool:
    """Whether all that a chunk of a chat completion says is who speaks."""
    choices = _chunk(data).choices
    return bool(choices) and all(
        "role" in choice.delta
        and not (choice.finish_reason or choice.token_ids)
        and not any(value for name, value in choice.delta.items() if name != "role")
        for choice in choices
    )


# By path.  A path that is not here has no events before the first content.
_PREFACE: dict[str, Callable[[bytes], bool]] = {
    "/v1/chat/completions": _is_role,
    "/v1/responses": _is_typed_preface,
    "/v1/messages": _is_typed_preface,
}


class FirstContentDetector:
    """Reads a stream until it has begun.  `failure`: the error event that it began with."""

    __slots__ = ("_cutter", "_is_preface", "failure", "state")

    def __init__(self, path: str) -> None:
        self._is_preface = _PREFACE.get(path)
        self._cutter = sse.EventSplitter()
        self.state = ContentState.NOT_YET
        self.failure = b""

    def feed(self, data: bytes) -> ContentState:
        """More bytes of the body; the state after them.  CONTENT and FAILED are final."""
        if self.state is not ContentState.NOT_YET:
            return self.state
        try:
            events = self._cutter.feed(data)
        except sse.EventTooLarge:
            self.state = ContentState.CONTENT  # for who reads it to refuse
            return self.state
        for event in events.split(b"\n\n"):
            self.state = self._state_after(event)
            if self.state is not ContentState.NOT_YET:
                self._cutter.clear()
                break
        return self.state

    def _state_after(self, event: bytes) -> ContentState:
        data = sse.data_of(event)
        if not data:
            return ContentState.NOT_YET
        if sse.failed(data):
            self.failure = event
            return ContentState.FAILED
        try:
            is_preface = self._is_preface and self._is_preface(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            is_preface = False
        return ContentState.NOT_YET if is_preface else ContentState.CONTENT
