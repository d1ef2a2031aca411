"""Sends HTTP/1.1 requests to one instance, one at a time per connection.

States of a connection to an instance (`UpstreamState`):

    IDLE -> AWAITING_HEAD -> READING_BODY -> COMPLETE -> IDLE ...
                  '-- a 101 --> SWITCHING -> SWITCHED
    any state -> CLOSED

An *exchange* is one request and its answer. COMPLETE lasts until all bytes that came together with
the answer's end are parsed: any byte behind it is an answer without a request. SWITCHING lasts
until the parser has stopped behind the 101. SWITCHED: bytes pass both ways until either side
closes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, cast

import httptools
import msgspec

from .headers import Headers, find
from .reasons import CUT_OFF_DETAIL, Reason
from .upstream_response import Unreachable, UpstreamResponse

QUICKACK: int = getattr(socket, "TCP_QUICKACK", 0)  # Linux has it
# Of an answer, with the 1xx heads before it. For embeddings as bytes vLLM has a header that
# describes each of them, in some 150 bytes.
MAX_HEAD_BYTES = 4 * 1024 * 1024
CLOSED_DETAIL = "the connection was closed"


class UpstreamState(Enum):
    """Names the states of a connection; the module's docstring describes them."""

    IDLE = auto()
    AWAITING_HEAD = auto()
    READING_BODY = auto()
    COMPLETE = auto()
    SWITCHING = auto()
    SWITCHED = auto()
    CLOSED = auto()


# In Python 3.11 each look-up of an Enum's member takes 0.1 us, and a leg needs about fifteen.
IDLE = UpstreamState.IDLE
AWAITING_HEAD = UpstreamState.AWAITING_HEAD
READING_BODY = UpstreamState.READING_BODY
COMPLETE = UpstreamState.COMPLETE
SWITCHING = UpstreamState.SWITCHING
SWITCHED = UpstreamState.SWITCHED
CLOSED = UpstreamState.CLOSED

WITHOUT_REQUEST = (IDLE, COMPLETE, CLOSED)  # no answer is due, nor more of one


class ConnectionOwner(Protocol):
    """Keeps connections to one instance."""

    connections: set[UpstreamConnection]
    chunks_received: int
    unused_ends: int

    def release(self, connection: UpstreamConnection) -> None:
        """Takes back a connection whose exchange has ended."""


class _Exchange(msgspec.Struct, eq=False):
    """Holds one request's part of a connection."""

    answer: UpstreamResponse | None = None  # until the answer has ended
    upgrade: bytes = b""  # the protocol that the request offers
    headers: Headers = []
    head_bytes: int = 0  # received until the answer's head is complete
    got_bytes: bool = False  # of the answer
    keep_alive: bool = False  # the connection may carry another exchange


class UpstreamConnection(asyncio.Protocol):
    """Connects to an instance and carries one exchange at a time."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._state = IDLE
        self._exchange = _Exchange()
        self._exchanges = 0  # so far
        self._given_up = False  # with its instance
        self._reading_paused = False
        self.tls: ssl.SSLContext | None = None  # with which it was opened
        self.body_sink: Callable[[bytes], None] | None = None  # of the answer's body, in `pipe`
        self.on_send_pause: Callable[[bool], None] | None = None
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """Returns whether bytes can still be sent."""
        return not self._transport.is_closing()

    @property
    def died_unused(self) -> bool:
        """Returns whether a kept connection ended before the first byte of its last answer.

        False if its instance was given up: then the end has a reason.
        """
        was_kept = self._exchanges > 1
        return was_kept and not (self._exchange.got_bytes or self._given_up)

    def send_request(self, head: bytes, body: bytes, upgrade: bytes = b"") -> UpstreamResponse:
        """Sends a request and returns its answer, still without a head.

        `upgrade`: the protocol that the request offers. After a 101 all bytes are the answer's
        body.
        """
        answer = UpstreamResponse(self)
        self._exchange = _Exchange(answer, upgrade)
        self._exchanges += 1
        self.body_sink = None
        if self.is_open:
            self._state = AWAITING_HEAD
            self._transport.writelines((head, body) if body else (head,))  # one system call
        else:  # it was reset before the request
            self._fail("reset", CLOSED_DETAIL)
        return answer

    def send(self, data: bytes) -> None:
        """Sends bytes after a 101."""
        if self.is_open:
            self._transport.write(data)

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading."""
        if paused != self._reading_paused and self.is_open:
            self._reading_paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def give_up(self, reason: Reason, detail: str) -> None:
        """Closes because the instance is given up; its request is not sent there again."""
        self._given_up = True
        self._fail(reason, detail)

    def close(self) -> None:
        """Closes at once; the end of the connection then does not complete an answer."""
        self._state = CLOSED
        self._transport.abort()

    def _fail(self, reason: Reason, detail: str) -> None:
        answer = self._exchange.answer
        self._exchange.answer = None
        self.body_sink = None
        if answer:
            answer.on_failure(Unreachable(reason, detail))
        self.close()

    # -- transport ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection with its owner."""
        self._transport = cast(asyncio.Transport, transport)
        self._owner.connections.add(self)
        if QUICKACK and (sock := transport.get_extra_info("socket")):
            # The receiver of a stream sends no data, so the kernel acknowledges each token alone.
            # Without quick acknowledgements one ACK covers several tokens.
            sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Completes an answer that ends with the connection; any other answer fails."""
        self._owner.connections.discard(self)
        self._owner.unused_ends += self._is_unused()
        answer = self._exchange.answer
        if answer and not exc and self._ends_with_close():
            # The connection of a killed process ends like this too.
            if answer.is_cut_json():
                self._fail("reset", CUT_OFF_DETAIL)
            else:
                self.on_message_complete()
        self._fail("reset", str(exc or CLOSED_DETAIL))

    def _is_unused(self) -> bool:
        """Returns whether this is a kept connection, without a byte since its last answer."""
        if self._state is UpstreamState.AWAITING_HEAD:
            return self.died_unused
        return self._state is UpstreamState.IDLE and self._exchanges > 0

    def _ends_with_close(self) -> bool:
        """Returns whether the end of the connection is the end of the present answer."""
        if self._state is SWITCHED:
            return True
        headers = self._exchange.headers
        framed = find(headers, b"content-length") or find(headers, b"transfer-encoding")
        return self._state is READING_BODY and not framed

    def pause_writing(self) -> None:
        """Reports a full send buffer."""
        if self.on_send_pause:
            self.on_send_pause(True)

    def resume_writing(self) -> None:
        """Reports a drained send buffer."""
        if self.on_send_pause:
            self.on_send_pause(False)

    def data_received(self, data: bytes) -> None:
        """Parses the answer, and returns the connection to its owner at the answer's end."""
        self._exchange.got_bytes = True
        self._owner.chunks_received += 1
        if self._state is SWITCHED:
            self.on_body(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._switch(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._fail("garbled", str(error))
            return
        if self._state is READING_BODY:
            return
        if self._state is AWAITING_HEAD:
            self._exchange.head_bytes += len(data)
            if self._exchange.head_bytes > MAX_HEAD_BYTES:
                self._fail("too_large", f"its answer's head is larger than {MAX_HEAD_BYTES} bytes")
        elif self._state is COMPLETE:
            self._end_exchange()

    def _switch(self, rest: bytes) -> None:
        """Begins to pass bytes both ways; `rest` came behind the 101."""
        if self._state is SWITCHING:
            self._state = SWITCHED
            if rest:
                self.on_body(rest)

    def _end_exchange(self) -> None:
        """Returns the connection to its owner, or closes it."""
        self.pause_reading(paused=False)
        if self._exchange.keep_alive and not self._exchange.upgrade:
            self._state = IDLE
            self._owner.release(self)
        else:
            self.close()

    # -- parser ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Closes the connection on an answer without a request (parser callback)."""
        if self._state in WITHOUT_REQUEST:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collects one header (parser callback)."""
        if self._state is AWAITING_HEAD:  # else it is a trailer
            self._exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Reports the answer's head; heads of 1xx are skipped (parser callback)."""
        status = self._parser.get_status_code()
        exchange = self._exchange
        if status == 101 and not self._accepts_switch():
            self._fail("garbled", "it switches to another protocol")
        elif status < 200 and status != 101:
            exchange.headers = []
        elif exchange.answer and self._state is AWAITING_HEAD:
            switches = status == 101
            self._state = SWITCHING if switches else READING_BODY
            exchange.answer.on_head(status, exchange.headers)

    def _accepts_switch(self) -> bool:
        """Returns whether a 101 names the protocol that the request has offered."""
        upgrade = self._exchange.upgrade
        protocol = find(self._exchange.headers, b"upgrade").lower()
        return bool(upgrade) and self._parser.should_upgrade() and protocol == upgrade

    def on_body(self, body: bytes) -> None:
        """Passes bytes of the body on (parser callback)."""
        if self.body_sink:
            self.body_sink(body)
        elif self._exchange.answer:
            self._exchange.answer.on_chunk(body)

    def on_message_complete(self) -> None:
        """Ends the answer; a 101 ends with its connection instead (parser callback)."""
        exchange = self._exchange
        if exchange.answer and self._state in (READING_BODY, SWITCHED):
            self._state = COMPLETE
            self.body_sink = None
            exchange.keep_alive = self._parser.should_keep_alive()
            answer = exchange.answer
            exchange.answer = None
            answer.on_complete()
