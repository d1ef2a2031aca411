"""Reads one answer of an instance, from its head to its last byte.

A body is either collected (`first_byte`, `read_until`, `read`) or passed on as it arrives (`pipe`).
In `pipe` a chunk costs one call and wakes no task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ...errors import DisaggError
from .headers import Headers, find
from .reasons import Reason

JSON_TYPE = b"application/json"
_decode_any = msgspec.json.Decoder(msgspec.Raw).decode
HOLD_BYTES = 256 * 1024  # of an answer's body, held until the body is read


class Unreachable(DisaggError):
    """Reports that no complete answer came. `reason` is one of `reasons.Reason`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class UnknownName(Unreachable):
    """Reports that DNS does not know an instance's host: its connections may still be open."""

    def __init__(self, detail: str) -> None:
        super().__init__("refused", detail)


class ResponseSource(Protocol):
    """Receives the bytes of an answer, and sends bytes after a 101."""

    body_sink: Callable[[bytes], None] | None
    on_send_pause: Callable[[bool], None] | None

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading."""

    def send(self, data: bytes) -> None:
        """Sends bytes after a 101."""

    def close(self) -> None:
        """Closes at once."""


def _discard(_: bytes) -> None:
    """Drops bytes of a rejected answer."""


class UpstreamResponse:
    """Receives one answer, from its head to its last byte.

    Methods that wait raise Unreachable when the answer cannot become complete.
    """

    def __init__(self, connection: ResponseSource) -> None:
        self._connection = connection
        self.sent_at = time.monotonic()
        self.status = 0  # until the head is here
        self.headers: Headers = []
        self.is_stream = False  # the body is a stream of server-sent events
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._max_held_bytes = HOLD_BYTES
        self._sink: Callable[[bytes], None] | None = None
        self._reads_all = False
        self._complete = False
        self._error: Unreachable | None = None
        self._changed: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Returns when status and headers are here."""
        while not self.status:
            await self._next_change()

    async def first_byte(self) -> None:
        """Returns when the body's first byte is here, or the body's end."""
        while not self._held and not self._complete:
            await self._next_change()

    async def read_until(self, found: Callable[[bytes], bool], max_bytes: int) -> bool:
        """Collects the body until `found` returns True, the body ends, or `max_bytes` are here.

        `found` gets each chunk once, in order. Returns False only for a body that is complete.
        """
        self._max_held_bytes = max_bytes
        chunks_seen = 0
        self.pause_reading(paused=False)  # the smaller limit may have stopped it
        while True:
            for chunk in self._held[chunks_seen:]:
                chunks_seen += 1
                if found(chunk):
                    return True
            if self._complete:
                return False
            if self._held_bytes > max_bytes:
                return True
            await self._next_change()

    def peek(self) -> bytes:
        """Returns the part of the body that is here and was not passed to a sink."""
        held = self._held
        if len(held) > 1:
            held[:] = [b"".join(held)]
        return held[0] if held else b""

    def is_cut_json(self) -> bool:
        """Returns whether the body so far is an incomplete JSON text."""
        content_type = find(self.headers, b"content-type").partition(b";")[0].strip().lower()
        if self._sink or content_type != JSON_TYPE or find(self.headers, b"content-encoding"):
            return False
        # Errors may have no body.
        if self.status != 200 and not self.peek():
            return False
        try:
            _decode_any(self.peek())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True
        return False

    async def read(self) -> bytes:
        """Returns the whole body."""
        if not self._complete:
            self._reads_all = True
            self.pause_reading(paused=False)
        while not self._complete:
            await self._next_change()
        return self.peek()

    async def pipe(self, sink: Callable[[bytes], None], paused: bool = False) -> None:
        """Passes the body to `sink` as it arrives; returns at its end."""
        self.pause_reading(paused)
        held = self._held
        self._held = []
        self._sink = sink
        for chunk in held:
            if self._error:  # rejected by the sink
                break
            sink(chunk)
        if not (self._error or self._complete):
            self._connection.body_sink = sink
        while self._error or not self._complete:
            await self._next_change()

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading from the instance."""
        if not self._complete:
            self._connection.pause_reading(paused)

    def send(self, data: bytes) -> None:
        """Sends bytes to the instance after a 101."""
        if not self._complete and not self._error:
            self._connection.send(data)

    def on_send_pause(self, callback: Callable[[bool], None]) -> None:
        """Sets the function called with True when the send buffer is full, and with False after."""
        self._connection.on_send_pause = callback

    def close(self) -> None:
        """Gives up the rest of the answer; the engine then sees its client leave and aborts."""
        if not self._complete and not self._error:
            self._error = Unreachable("reset", "given up")
            self._connection.close()

    def reject(self, reason: Reason, detail: str) -> None:
        """Gives up the answer as a failure; tasks that wait for its body get Unreachable."""
        self._sink = _discard
        if not self._complete:
            self._connection.body_sink = _discard
        if not self._error:  # even of an answer that is complete
            self._error = Unreachable(reason, detail)
            self._notify()
        if not self._complete:  # else the connection may carry another exchange by now
            self._connection.close()

    def _next_change(self) -> asyncio.Future[None]:
        """Returns a future that is done at the next change; raises Unreachable after a failure."""
        if self._error:
            raise self._error
        self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _notify(self) -> None:
        """Wakes the task that waits, if any."""
        changed = self._changed
        self._changed = None
        if changed and not changed.done():
            changed.set_result(None)

    # -- called by the connection ------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        """Takes the answer's head."""
        self.status = status
        self.headers = headers
        self.is_stream = find(headers, b"content-type").startswith(b"text/event-stream")
        if self._changed:
            self._notify()

    def on_chunk(self, data: bytes) -> None:
        """Takes bytes of the body, and stops reading when too many are held."""
        if self._sink:
            self._sink(data)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._max_held_bytes and not self._reads_all:
            self._connection.pause_reading(paused=True)
        if self._changed:
            self._notify()

    def on_complete(self) -> None:
        """Ends the body."""
        if not self._error:
            self._complete = True
            if self._changed:
                self._notify()

    def on_failure(self, error: Unreachable) -> None:
        """Ends the answer with an error, unless it has ended already."""
        if not self._complete and not self._error:
            self._error = error
            self._notify()
