"""Listens on one port, and keeps the connections of its clients."""

from __future__ import annotations

import asyncio
import math
import ssl

from ...warning_limit import WarningLimit
from .connection import Connection, Handler, OnRefused
from .limits import ByteBudget, Limits
from .request import BodyLimit
from .stall_timer import patient

CUT_SECONDS = 1.0  # for clients to read the error with which their cut request ends


class Server:
    """Listens on one port and owns its connections."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        body_limit: BodyLimit | None = None,
        on_refused: OnRefused | None = None,
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.body_limit = body_limit or (lambda _: limits.body_bytes)
        self.on_refused = on_refused or (lambda *_: None)
        self.budget = ByteBudget(limits.all_bodies_bytes)
        self.stalled_clients = WarningLimit()
        self.failed_handlers = WarningLimit()
        self.connections: set[Connection] = set()
        self.stopping = False
        self._listener: asyncio.Server
        self._all_closed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Returns whether there are more connections than `Limits.connections`."""
        return 0 < self.limits.connections < len(self.connections)

    @property
    def running_requests(self) -> int:
        """Returns how many requests have a handler that runs."""
        return sum(connection.is_busy for connection in self.connections)

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, shared: bool = False
    ) -> int:
        """Listens, on a `shared` port beside other processes; returns the bound port.

        Raises OSError when the port is taken.
        """
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self),
            host,
            port,
            backlog=2048,
            ssl=tls,
            ssl_handshake_timeout=self.limits.header_seconds if tls else None,
            # uvloop's own 30 s would also end for a client that still reads. `_closing_timer` has
            # the limit: a time without progress.
            ssl_shutdown_timeout=math.inf if tls else None,
            reuse_port=shared or None,
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> int:
        """Takes no more requests, waits `grace` seconds for running ones, then cuts them.

        Returns how many were cut.
        """
        cut = 0
        self.stopping = True
        self._listener.close()
        for connection in list(self.connections):
            connection.stop()
        if self.connections:
            self._all_closed.clear()
            if not await self._are_all_closed(grace):
                cut = self.running_requests
                for connection in list(self.connections):
                    connection.cut()
                await self._are_all_closed(CUT_SECONDS)
                for connection in list(self.connections):
                    connection.abort()
        return cut

    async def _are_all_closed(self, seconds: float) -> bool:
        """Returns whether all connections close within so many seconds."""
        try:
            async with patient(seconds):
                await self._all_closed.wait()
        except TimeoutError:
            return False
        return True

    def forget(self, connection: Connection) -> None:
        """Removes a connection that has closed, and whose handler has ended."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_closed.set()
