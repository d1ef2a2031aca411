"""Splits a stream into server-sent events, and reads one event. Pure.

An event ends with a blank line, and a line ends with LF, CRLF or CR. vLLM writes LF.
`EventSplitter` turns the others into LF, which has the same meaning, so all other code handles one
line end.
"""

from __future__ import annotations

import msgspec

from ...errors import DisaggError

# Of one event: twice the largest request, which leaves room for logprobs of an echoed prompt.
EVENT_LIMIT_BYTES = 64 * 1024 * 1024
# Of one event, or of one chunk's events, whose JSON is parsed: that takes up to 20 ms, in which all
# other streams wait. A chunk that is larger has an event of more than half of this.
PARSED_LIMIT_BYTES = 1024 * 1024
DONE = b"data: [DONE]\n\n"
# No content of an event can contain these: within a JSON text quotes and line ends are escaped.
ERROR = b'data: {"error"'
EVENT_ERROR = b"event: error\n"
EVENT_FAILED = b"event: response.failed\n"
# Error types of invalid requests, which another instance would refuse too.
_CLIENT_ERROR_TYPES = frozenset(
    (
        "invalid_request_error",
        "not_found_error",
        "permission_error",
        "authentication_error",
        "request_too_large",
        "BadRequestError",
        "NotFoundError",
    )
)


class EventTooLarge(DisaggError):
    """Reports an event of more than EVENT_LIMIT_BYTES."""


class EventSplitter:
    """Splits a stream into whole events; searches and joins each byte once."""

    __slots__ = ("_after_cr", "_size", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []  # of an incomplete event; always the same list object
        self._size = 0
        self._after_cr = False

    def feed(self, data: bytes) -> bytes:
        """Returns the events that are complete now, with LF; raises EventTooLarge."""
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        parts = self.parts
        if not parts and data.endswith(b"\n\n"):
            return data
        end = data.rfind(b"\n\n") + 2
        if end == 1:  # not found; the blank line may cross the border of two chunks
            end = 1 if parts and parts[-1].endswith(b"\n") and data.startswith(b"\n") else 0
        if not end:
            if data:
                self._keep(data)
            return b""
        events = b"".join([*parts, data[:end]]) if parts else data[:end]
        self.clear()
        if end < len(data):
            self._keep(data[end:])
        return events

    def clear(self) -> None:
        """Drops the incomplete event."""
        self.parts.clear()
        self._size = 0

    def reset(self) -> None:
        """Begins another stream."""
        self.clear()
        self._after_cr = False

    def rest(self) -> bytes:
        """Returns the bytes of the incomplete event."""
        return b"".join(self.parts)

    def _keep(self, data: bytes) -> None:
        self.parts.append(data)
        self._size += len(data)
        if self._size > EVENT_LIMIT_BYTES:
            raise EventTooLarge(f"an event of more than {EVENT_LIMIT_BYTES >> 20} MiB")

    def _with_lf(self, data: bytes) -> bytes:
        """Returns the data with LF as line end. An LF directly behind a CR belongs to the CR."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(event: bytes) -> bytes | None:
    """Returns the content of an event's data lines; None without any, as in a comment."""
    lines = [
        line for line in event.split(b"\n") if line.startswith((b"data:", b"\xef\xbb\xbfdata:"))
    ]
    if not lines:
        return None
    return b"\n".join(line.partition(b":")[2].removeprefix(b" ") for line in lines)


def is_error(event: bytes) -> bool:
    """Returns whether an event is an error, in any form of vLLM's endpoints."""
    return event.startswith((ERROR, EVENT_ERROR, EVENT_FAILED))


class _ErrorCode(msgspec.Struct):
    code: int | str | None = None
    type: str | None = None


class _ErrorEvent(msgspec.Struct):
    """Decodes all forms of an error event.

    They are `{"error": {...}}`, Anthropic's with a type next to it, OpenAI's flat one, and a
    response that failed.
    """

    type: str = ""
    code: int | str | None = None
    error: _ErrorCode | None = None


_decode_error = msgspec.json.Decoder(_ErrorEvent).decode


def failed(data: bytes) -> bool:
    """Returns whether an event's data reports a failed engine, not an invalid request."""
    try:
        event = _decode_error(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data.startswith((b'{"error"', b'{"type":"error"'))
    if event.error is None:
        if event.type == "response.failed":
            return True
        return event.type == "error" and event.code not in _CLIENT_ERROR_TYPES
    if isinstance(event.error.code, int):
        return event.error.code >= 500
    return (
        event.error.type not in _CLIENT_ERROR_TYPES and event.error.code not in _CLIENT_ERROR_TYPES
    )
