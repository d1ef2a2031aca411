"""Serves one client by HTTP/1.1: runs one handler for its requests, one at a time.

`RequestReader` parses and checks requests, `ResponseEncoder` frames answers, and
`connection_state` decides. This file moves the bytes: transport, timers, tasks and flow control.

Order: the next request starts when the client has read the last answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from ...warning_limit import WarningLimit
from .connection_state import (
    LINGERING,
    NEXT_REQUEST,
    REFUSED,
    SWITCHING,
    AfterAnswer,
    deadline,
    lingers_on,
    refusal_at_deadline,
    step_after_answer,
)
from .headers import Headers
from .limits import ByteBudget, Limits
from .request import REQUEST_ID_HEADER, BodyLimit, HttpRequest
from .request_reader import RequestReader
from .response import JSON, ResponseEncoder, error_body
from .stall_timer import PAUSE_SECONDS, StallTimer
from .tcp_progress import acknowledged_bytes, has_unread_bytes

log = logging.getLogger(__name__)

STOPPING = "the proxy is being stopped"

Handler = Callable[[HttpRequest, "Connection"], Awaitable[None]]

# Called with each error status that the server answers without the handler. It may add headers.
OnRefused = Callable[[HttpRequest, "Connection", int], None]


class ConnectionHost(Protocol):
    """Accepts connections, and keeps them until they have closed."""

    handler: Handler
    on_refused: OnRefused
    limits: Limits
    body_limit: BodyLimit
    budget: ByteBudget  # of all its connections
    stalled_clients: WarningLimit
    failed_handlers: WarningLimit
    connections: set[Connection]
    stopping: bool

    @property
    def is_full(self) -> bool:
        """Returns whether there are more connections than `Limits.connections`."""

    def forget(self, connection: Connection) -> None:
        """Removes a connection that has closed, and whose handler has ended."""


class Connection(asyncio.Protocol):
    """Connects one client: passes its bytes to the reader and sends the handler's answers."""

    def __init__(self, server: ConnectionHost) -> None:
        self._server = server
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.Transport
        self._reader = RequestReader(server.limits, server.budget, server.body_limit)
        self._lingering_since = 0.0
        self._deadline: float | None = None  # of the present state; None while a handler runs
        self._deadline_timer: asyncio.Handle | None = None  # never later than the deadline
        self._timer_at = 0.0  # uvloop gives no time of a timer that is due at once
        self._handler_task: asyncio.Task[None] | None = None
        self._session_sink: Callable[[bytes], None] | None = None  # receives bytes after a switch
        self._reading_paused = False
        self._awaits_reader = False  # the next request waits until the client has read the answer
        self._drained: asyncio.Future[None] | None = None
        self._stall_timer: StallTimer | None = None
        self._closing_timer: StallTimer | None = None

        # For the handler.
        self.response = ResponseEncoder(HttpRequest())  # to the present request
        self.is_cut = False  # the server stops, and has cancelled the handler
        self.paused = False  # the client reads slower than the handler writes
        self.on_pause: Callable[[bool], None] | None = None

    @property
    def peer(self) -> str:
        """Returns the client's address, empty if the transport has none."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def is_busy(self) -> bool:
        """Returns whether a handler runs."""
        return self._handler_task is not None

    @property
    def path(self) -> str:
        """Returns the path of the request that is being answered."""
        return self.response.request.path

    @property
    def started(self) -> bool:
        """Returns whether the present answer has begun."""
        return self.response.started

    @property
    def ended(self) -> bool:
        """Returns whether the present answer is complete."""
        return self.response.ended

    # -- transport ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection; refuses it with 503 above `Limits.connections`."""
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._start_deadline()
        if self._server.stopping:  # accepted just before the listener closed
            self._close()
        elif self._server.is_full:
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the handler and gives back all counted bytes."""
        self._reader.close()
        self.on_pause = None
        if self._deadline_timer:
            self._deadline_timer.cancel()
        if self._closing_timer:
            self._closing_timer.stop()
        if self._handler_task:
            # A callback: a task that is cancelled before it runs does nothing by itself.
            self._handler_task.add_done_callback(lambda _: self._server.forget(self))
            self._handler_task.cancel()
        else:
            self._server.forget(self)
        self._set_write_pause(paused=False)

    def eof_received(self) -> None:
        """Closes the connection, as a client that sends nothing more has left."""
        self._close()
        # Its writes would be dropped, and its request's body is not counted any more.
        if self._handler_task:
            self._handler_task.cancel()

    def data_received(self, data: bytes) -> None:
        """Passes bytes to the session, the early bytes or the parser; drops them after an error."""
        if self._session_sink:
            self._session_sink(data)
        elif self._reader.state.drops_bytes:
            return
        elif self._handler_task or self._awaits_reader:
            self._keep_early_bytes(data)
        elif self._reader.state is not SWITCHING:
            self._read_bytes(data)

    def pause_writing(self) -> None:
        """Reports a full write buffer to the handler."""
        self._set_write_pause(paused=True)

    def resume_writing(self) -> None:
        """Reports a drained write buffer to the handler."""
        self._set_write_pause(paused=False)

    def _set_write_pause(self, paused: bool) -> None:
        # Handlers write nothing more during a pause, so a buffer that stays as large is a client
        # that reads nothing.
        if paused and not self._stall_timer:
            self._stall_timer = StallTimer(
                self._read_progress,
                self._server.limits.stall_seconds,
                self._abort_stalled_client,
            )
        elif not paused and self._stall_timer:
            self._stall_timer.stop()
            self._stall_timer = None
        self.paused = paused
        if self.on_pause:
            self.on_pause(paused)
        if not paused and self._drained and not self._drained.done():
            self._drained.set_result(None)
        if not paused and self._awaits_reader and not self._transport.is_closing():
            self._awaits_reader = False
            self._resume_requests()

    def _close(self) -> None:
        """Closes the connection once the client has read the bytes that are written.

        The counted bytes are given back at once.
        """
        if self._closing_timer:
            return
        self._reader.close()
        # A transport that closes waits without a limit for a client that reads nothing. It has a
        # timer even if its buffer is empty: below TLS is another buffer, whose size is not known.
        self._closing_timer = StallTimer(
            self._read_progress,
            self._server.limits.stall_seconds,
            self._abort_stalled_client,
        )
        # Last: TLS may report the client's end from within, which calls this again.
        self._transport.close()

    def _read_progress(self) -> tuple[int, int]:
        """Returns a value that changes with each byte that the client takes."""
        return self._transport.get_write_buffer_size(), acknowledged_bytes(self._transport)

    def _abort_stalled_client(self) -> None:
        """Closes the connection of a client that reads nothing; its handler and legs end too."""
        # Without unread bytes it has only not closed its end of TLS.
        if has_unread_bytes(self._transport):
            count = self._server.stalled_clients.note(time.monotonic())
            if count:
                log.warning(
                    "http: client %s: connection closed: the client has read nothing for %g s"
                    " (%d such clients since the last such line)",
                    self.peer,
                    self._server.limits.stall_seconds,
                    count,
                )
        self._transport.abort()

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading from the client."""
        if paused != self._reading_paused and not self._transport.is_closing():
            self._reading_paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -- reading requests --------------------------------------------------------------------------

    def _read_bytes(self, data: bytes) -> None:
        """Parses early bytes and `data`, and starts a request that became complete."""
        reader = self._reader
        state_before = reader.state
        reader.feed(data)
        if reader.ready:
            self._start_next_request()
        elif reader.state is not state_before:
            self._await_bytes()

    def _await_bytes(self) -> None:
        """Waits for the client's next bytes; every earlier request has been answered."""
        reader = self._reader
        # A client whose body has begun to come no longer waits for "100 Continue".
        if reader.continue_due and not reader.early_bytes:
            reader.continue_due = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._start_deadline()

    def _keep_early_bytes(self, data: bytes) -> None:
        """Keeps bytes of later requests, and refuses the connection when they are too many.

        Reading goes on, since the end of the connection arrives behind those bytes.
        """
        request = self.response.request
        fits = self._reader.keep_early(data, request)
        if fits:
            return
        if self._reader.state is SWITCHING:
            self._transport.abort()
            return
        # Complete requests are still answered; then the connection closes.
        self._reader.refuse_more()
        request.keep_alive = request.keep_alive and bool(self._reader.ready)

    def _start_deadline(self) -> None:
        """Starts the time that the present state may last."""
        end = deadline(self._reader.state, self._server.limits, time.monotonic())
        self._deadline = end
        timer = self._deadline_timer
        if timer and self._timer_at <= end:
            return  # an earlier timer sets the next one: cheaper than a timer for each request
        if timer:
            timer.cancel()
        self._set_timer(end)

    def _set_timer(self, at: float) -> None:
        self._deadline_timer = self._loop.call_at(at, self._on_deadline_timer)
        self._timer_at = at

    def _on_deadline_timer(self) -> None:
        """Ends a state that has lasted too long, else waits for its deadline."""
        self._deadline_timer = None
        if self._deadline is None:
            return
        now = time.monotonic()
        if now < self._deadline:
            self._set_timer(self._deadline)
        elif now - self._timer_at > PAUSE_SECONDS:
            # The time begins anew: what the client sent in a pause of this process is not read yet.
            self._start_deadline()
        else:
            self._on_deadline()

    def _on_deadline(self) -> None:
        """Refuses what has not come in time; ends an idle connection."""
        refusal = refusal_at_deadline(self._reader.state)
        if refusal:
            self._refuse(*refusal)
        elif self._is_still_read():
            self._start_deadline()
        else:
            # Not `abort`: the client may still read its last answer, of which a part is buffered.
            self._close()

    # -- answering ---------------------------------------------------------------------------------

    def _start_next_request(self) -> None:
        """Starts the handler of the oldest complete request, or answers its refusal."""
        self._deadline = None
        request = self._reader.ready.popleft()
        self.response = ResponseEncoder(request)
        if request.refusal:
            self._answer_refusal(request, *request.refusal)
            return
        self._handler_task = self._loop.create_task(self._handle(request))

    def _refuse(self, status: int, message: str) -> None:
        """Answers an error that no byte of a request has caused, and takes no more requests."""
        self._reader.refuse(status, message)
        self._start_next_request()

    def _answer_refusal(self, request: HttpRequest, status: int, message: str) -> None:
        headers = [JSON]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        self.identify()
        body = error_body(status, message, request_id=request.request_id)
        self._server.on_refused(request, self, status)
        self.answer(status, headers, body)
        self._linger()

    def _linger(self) -> None:
        """Writes no more, and drops the client's bytes until the client has read the answer."""
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._reader.linger()
        self._lingering_since = time.monotonic()
        self._start_deadline()

    def _is_still_read(self) -> bool:
        """Returns whether the client of a connection that lingers has more to read."""
        if self._reader.state is not LINGERING:
            return False
        # Nothing bounds how many come above the limit: each is kept for a short time only.
        if self._server.is_full:
            return False
        seconds = time.monotonic() - self._lingering_since
        return lingers_on(seconds, has_unread_bytes(self._transport))

    async def _handle(self, request: HttpRequest) -> None:
        """Runs the handler of a request, then goes on with the next request.

        The last step is part of this task, not a callback of its end. The next request of most
        clients would arrive before such a callback, and would have to be kept.
        """
        try:
            await self._server.handler(request, self)
        except Exception:
            if count := self._server.failed_handlers.note(time.monotonic()):
                log.exception(
                    "http: client %s: handler of %s %s failed; without an answer the connection"
                    " closes (%d such failures since the last such line)",
                    self.peer,
                    request.method,
                    request.logged_path,
                    count,
                )
        finally:
            self._on_handler_end(request)

    def _on_handler_end(self, request: HttpRequest) -> None:
        """Decides what follows an answer."""
        self._handler_task = None
        self.on_pause = None
        self._reader.release_body(request)
        if self._transport.is_closing():
            return
        step = step_after_answer(
            ended=self.response.ended,
            refuses_more=self._reader.state is REFUSED and not self._reader.ready,
            keeps_alive=self._keeps_alive(),
            reads_slowly=self.paused,
        )
        if step is NEXT_REQUEST:
            self._resume_requests()
            return
        match step:
            case AfterAnswer.ABORT:
                self._transport.abort()
            case AfterAnswer.LINGER:
                self._linger()
            case AfterAnswer.CLOSE:
                self._close()
            case AfterAnswer.AWAIT_READER:
                self._awaits_reader = True
                self.pause_reading(paused=True)

    def _resume_requests(self) -> None:
        """Starts the next request, from the bytes that have come already."""
        self.pause_reading(paused=False)
        if self._reader.ready:
            self._start_next_request()
            return
        self._await_bytes()
        if self._reader.early_bytes:
            self._read_bytes(b"")

    def _keeps_alive(self) -> bool:
        return self.response.request.keep_alive and not self._server.stopping

    def stop(self) -> None:
        """Closes the connection unless a handler runs; answers 503 to half a request."""
        if self._handler_task:
            return
        if self._reader.state.is_reading and not self._awaits_reader:
            self._refuse(503, STOPPING)
        elif self._reader.state is not LINGERING:
            self._close()

    def cut(self) -> None:
        """Has the handler end its answer with an error; without a handler closes at once."""
        self.is_cut = True
        if self._handler_task:
            self._handler_task.cancel()
        else:
            self.abort()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    # -- for the handler ---------------------------------------------------------------------------

    def identify(self) -> None:
        """Gives the present request an id if it has none, and its answer the same id.

        By this id the log lines of its engines can be joined.
        """
        request = self.response.request
        request_id = request.header(REQUEST_ID_HEADER)
        if not request_id:
            request_id = os.urandom(16).hex().encode()
            request.replace_header(REQUEST_ID_HEADER, request_id)
            request.has_made_id = True
        self.response.extra_headers.append((REQUEST_ID_HEADER, request_id))

    def rename(self, request_id: bytes) -> None:
        """Gives the present request and its answer another id in place of one made here."""
        request = self.response.request
        if request.has_made_id:
            request.replace_header(REQUEST_ID_HEADER, request_id)
            self.response.extra_headers = [
                (name, request_id if name == REQUEST_ID_HEADER else value)
                for name, value in self.response.extra_headers
            ]

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole answer."""
        data = self.response.encode_whole(status, headers, body, self._keeps_alive())
        if not self._transport.is_closing():
            self._transport.write(data)

    def start(self, status: int, headers: Headers) -> None:
        """Begins an answer of unknown length; `write` and `end` follow.

        The head is sent together with the first bytes written.
        """
        self.response.begin(status, headers, self._keeps_alive())

    def write(self, data: bytes) -> None:
        """Sends a part of an answer that `start` or `switch` began."""
        if data and not self._transport.is_closing():
            self._transport.write(self.response.encode_part(data))

    def end(self) -> None:
        """Ends an answer that `start` began."""
        last = self.response.encode_end()
        if last and not self._transport.is_closing():
            self._transport.write(last)

    def switch(self, headers: Headers, sink: Callable[[bytes], None]) -> None:
        """Answers 101 and passes the client's bytes to `sink` from here on.

        Early bytes go to `sink` first. `write` sends bytes unchanged afterwards.
        """
        self._transport.write(self.response.encode_switch(headers))
        self._session_sink = sink
        early = self._reader.take_early(len(self._reader.early_bytes))
        if early:
            sink(early)
        self.pause_reading(paused=False)

    async def drained(self) -> None:
        """Returns when the client has taken nearly all bytes written."""
        if self.paused:
            self._drained = self._loop.create_future()
            await self._drained
