"""Server-sent events: cutting a stream into whole events, and reading one event.  Pure.

An event ends with a blank line, and a line ends with LF, CRLF or CR. vLLM writes LF; `Cutter` turns
the others into LF, which says the same, so that all else here knows one line end.
"""

from __future__ import annotations

import msgspec

from ...errors import DisaggError

EVENT_LIMIT_BYTES = (
    64 * 1024 * 1024
)  # one event; twice the largest request, since logprobs of an echoed prompt fit
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error"'  # cannot stand within a JSON text, where quotes are escaped
EVENT_ERROR, EVENT_FAILED = b"event: error\n", b"event: response.failed\n"  # nor can a line end
# Error types of requests that are wrong: another instance would say the same.
_CLIENTS_FAULT = frozenset(
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
    """One event of more than EVENT_LIMIT_BYTES."""


class EventSplitter:
    """Cuts a stream into whole events. Each byte is searched once and joined once, however it
    arrives.
    """

    __slots__ = ("_after_cr", "_size", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []  # of an event that is not complete yet; always the same list
        self._size = 0
        self._after_cr = False

    def feed(self, data: bytes) -> bytes:
        """The events that are complete now, in LF; EventTooLarge."""
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        parts = self.parts
        if not parts and data.endswith(b"\n\n"):
            return data
        end = data.rfind(b"\n\n") + 2
        if end == 1:  # not found: perhaps it lies across the border
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
        self.parts.clear()
        self._size = 0

    def reset(self) -> None:
        """Another stream begins."""
        self.clear()
        self._after_cr = False

    def rest(self) -> bytes:
        """The beginning of an event that is not complete."""
        return b"".join(self.parts)

    def _keep(self, data: bytes) -> None:
        self.parts.append(data)
        self._size += len(data)
        if self._size > EVENT_LIMIT_BYTES:
            raise EventTooLarge(f"an event of more than {EVENT_LIMIT_BYTES >> 20} MiB")

    def _with_lf(self, data: bytes) -> bytes:
        """A CR ends its line at once; an LF right after it belongs to it."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(event: bytes) -> bytes | None:
    """What an event's data lines hold; None when it has none, as a comment."""
    lines = [
        line for line in event.split(b"\n") if line.startswith((b"data:", b"\xef\xbb\xbfdata:"))
    ]
    if not lines:
        return None
    return b"\n".join(line.partition(b":")[2].removeprefix(b" ") for line in lines)


def is_error(event: bytes) -> bool:
    """Whether an event is an error, in any of the forms that vLLM's endpoints have."""
    return event.startswith((ERROR, EVENT_ERROR, EVENT_FAILED))


class _ErrorCode(msgspec.Struct):
    code: int | str | None = None
    type: str | None = None


class _ErrorEvent(msgspec.Struct):
    """All forms of an error event: `{"error": {...}}`, Anthropic's with a type beside it, OpenAI's
    flat one, and a response that failed.
    """

    type: str = ""
    code: int | str | None = None
    error: _ErrorCode | None = None


_failed = msgspec.json.Decoder(_ErrorEvent).decode


def failed(data: bytes) -> bool:
    """Whether an event's data says that the engine failed, and not that the request is wrong."""
    try:
        event = _failed(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data.startswith((b'{"error"', b'{"type":"error"'))
    if event.error is None:
        return event.type == "response.failed" or (
            event.type == "error" and event.code not in _CLIENTS_FAULT
        )
    if isinstance(event.error.code, int):
        return event.error.code >= 500
    return event.error.type not in _CLIENTS_FAULT and event.error.code not in _CLIENTS_FAULT
