"""Connects a client's WebSocket with an instance: after the instance's 101 bytes pass both ways.

The proxy adds one thing. A session that breaks between two frames ends with a Close frame that has
the reason (RFC 6455, 5.5.1), so a client does not take it for a normal end. Therefore the proxy
tracks the borders of the instance's frames. It does not look at their content.

States of the direction to the client (`FrameReader`):

    between frames -> frame head -> payload -> between frames ...
    after a Close frame: closed
"""

from __future__ import annotations

from .connection import Connection
from .error_replies import RequestFailed
from .headers import end_to_end
from .reasons import Reason
from .stall_timer import StallTimer
from .upstream_response import Unreachable, UpstreamResponse

CLOSE_OPCODE = 8
CLOSE_CODES = {502: 1014, 503: 1012}  # by HTTP status: bad gateway, service restart; others 1011
IDLE_SECONDS = 75.0  # without a byte from either side; vLLM pings every 20 s

# Of a frame's head (RFC 6455, 5.2).
_FIXED_HEAD_BYTES = 2
_MASK_BYTES = 4
_LENGTH_BYTES = {126: 2, 127: 8}  # size of the extended length, by the value of the short one
_FINAL_BIT = 128
_OPCODE_MASK = 15
_MAX_REASON_BYTES = 120  # a Close frame's payload has at most 125 bytes


class FrameReader:
    """Tracks whether a direction is between two frames or within one."""

    def __init__(self) -> None:
        self._head = bytearray()  # of a frame, until it is complete
        self._payload_left = 0  # bytes of the present frame to come
        self.closed = False  # a Close frame has passed

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the direction."""
        position = 0
        while position < len(data):
            if self._payload_left:
                step = min(self._payload_left, len(data) - position)
                self._payload_left -= step
                position += step
            else:
                self._feed_head(data[position])
                position += 1

    def _feed_head(self, byte: int) -> None:
        head = self._head
        head.append(byte)
        if len(head) < _FIXED_HEAD_BYTES:
            return
        short_length = head[1] & 127
        masked = head[1] >> 7
        length_bytes = _LENGTH_BYTES.get(short_length, 0)
        if len(head) < _FIXED_HEAD_BYTES + length_bytes + _MASK_BYTES * masked:
            return
        self._payload_left = short_length
        if length_bytes:
            length = head[_FIXED_HEAD_BYTES : _FIXED_HEAD_BYTES + length_bytes]
            self._payload_left = int.from_bytes(length)
        self.closed = self.closed or head[0] & _OPCODE_MASK == CLOSE_OPCODE
        head.clear()

    def close(self, status: int, message: str) -> bytes:
        """Returns a server's Close frame, or nothing within a frame or after a Close frame."""
        if self.closed or self._head or self._payload_left:
            return b""
        self.closed = True
        # Cutting may split a character: decoding drops its first part.
        reason = message.encode()[:_MAX_REASON_BYTES].decode(errors="ignore").encode()
        code = CLOSE_CODES.get(status, 1011).to_bytes(2)
        return bytes((_FINAL_BIT | CLOSE_OPCODE, len(code) + len(reason))) + code + reason


async def join(client: Connection, answer: UpstreamResponse) -> None:
    """Passes bytes both ways until the instance closes the session.

    Raises Unreachable when the instance breaks the session, and RequestFailed (504) after
    IDLE_SECONDS without a byte. If the client leaves, the calling task is cancelled.
    """
    frames = FrameReader()
    meter = client.response.meter
    if not meter:
        raise TypeError("a session without a meter")
    # The connection would count events of a stream; a session has bytes only.
    client.response.meter = None
    meter.is_session = True

    def to_client(data: bytes) -> None:
        frames.feed(data)
        meter.sent += len(data)
        client.write(data)

    def to_instance(data: bytes) -> None:
        meter.received += len(data)
        answer.send(data)

    idle_reason: Reason = "timeout"

    def on_idle() -> None:
        answer.reject(idle_reason, f"nobody said anything for {IDLE_SECONDS:g} s")

    client.response.close_frame = frames.close
    client.on_pause = answer.pause_reading
    answer.on_send_pause(client.pause_reading)
    client.switch(end_to_end(answer.headers), to_instance)
    idle_timer = StallTimer(lambda: (meter.sent, meter.received), IDLE_SECONDS, on_idle)
    try:
        await answer.pipe(to_client, paused=client.paused)
    except Unreachable as error:
        if error.reason == idle_reason:  # no failure of the instance
            raise RequestFailed(504, error.detail) from None
        if not frames.closed:
            raise
    finally:
        idle_timer.stop()
    if not frames.closed:
        raise Unreachable("reset", "it closed the connection")
    client.end()
    await client.drained()
