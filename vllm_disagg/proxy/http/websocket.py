"""WebSockets: after the instance's 101 a client and an instance are joined, byte for byte, until
either goes.

The proxy adds one thing: a session that breaks off between two frames ends with a Close frame that
says why (RFC 6455, 5.5.1), so that no client takes it for an end in order. Therefore the frames
that the instance sends are counted, and not looked into.
"""

from __future__ import annotations

from .error_replies import RequestFailed
from .headers import end_to_end
from .reasons import Reason
from .server import Connection
from .stall_timer import StallTimer
from .upstream import Unreachable, UpstreamResponse

CLOSE_OPCODE = 8
CLOSE_CODES = {
    502: 1014,
    503: 1012,
}  # HTTP's words in a WebSocket's: bad gateway, service restart; any other is 1011
IDLE_SECONDS = 75.0  # seconds in which neither side says anything; vLLM pings every 20 s


class FrameReader:
    """Where the bytes of one direction stand: between two frames, or within one."""

    def __init__(self) -> None:
        self._head = bytearray()  # of a frame, until it is complete
        self._left = 0  # bytes of the present frame to come
        self.closed = False  # a Close frame went by

    def feed(self, data: bytes) -> None:
        at, head = 0, self._head
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            head.append(data[at])
            at += 1
            if len(head) < 2:
                continue
            length, mask = head[1] & 127, head[1] >> 7
            more = {126: 2, 127: 8}.get(length, 0)
            if len(head) == 2 + more + 4 * mask:
                self._left = int.from_bytes(head[2 : 2 + more]) if more else length
                self.closed = self.closed or head[0] & 15 == CLOSE_OPCODE
                head.clear()

    def close(self, status: int, message: str) -> bytes:
        """A server's Close frame, or nothing where none can stand."""
        if self.closed or self._head or self._left:
            return b""
        self.closed = True
        reason = message.encode()[:120].decode(errors="ignore").encode()
        return (
            bytes((128 | CLOSE_OPCODE, 2 + len(reason)))
            + CLOSE_CODES.get(status, 1011).to_bytes(2)
            + reason
        )


async def join(client: Connection, answer: UpstreamResponse) -> None:
    """Pass everything on, both ways, until the instance closes the session; Unreachable when it
    broke it off, Failed when nobody says anything. If the client leaves, the caller is cancelled.
    """
    frames, meter = FrameReader(), client.meter
    if not meter:
        raise TypeError("a session without a meter")
    client.meter, meter.is_session = None, True  # it has no events, only bytes

    def to_client(data: bytes) -> None:
        frames.feed(data)
        meter.sent += len(data)
        client.write(data)

    def to_instance(data: bytes) -> None:
        meter.received += len(data)
        answer.send(data)

    reason: Reason = "timeout"
    client.close_frame, client.on_pause = frames.close, answer.pause_reading
    answer.on_send_pause(client.pause_reading)
    client.switch(end_to_end(answer.headers), to_instance)
    idle = StallTimer(
        lambda: (meter.sent, meter.received),
        IDLE_SECONDS,
        lambda: answer.reject(reason, f"nobody said anything for {IDLE_SECONDS:g} s"),
    )
    try:
        await answer.pipe(to_client, paused=client.paused)
    except Unreachable as error:
        if error.reason == reason:  # nobody's fault
            raise RequestFailed(504, error.detail) from None
        if not frames.closed:
            raise
    finally:
        idle.stop()
    if not frames.closed:
        raise Unreachable("reset", "it closed the connection")
    client.end()
    await client.drained()
