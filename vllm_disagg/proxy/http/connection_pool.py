"""Keeps connections to one instance, and sends requests over them.

Retry: vLLM closes idle connections after 5 s, so the pool stops using them earlier. A kept
connection may still die before the first byte of its answer. That shows nothing about the engine,
and the request is sent once more on a new connection.

A lost route: the network of this machine may be gone for a second only. An attempt to connect goes
on then for CONNECT_SECONDS, as TCP does where packets are lost.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections import deque
from urllib.parse import urlsplit

from .addresses import AllowedNetworks, check_url, literal, split_rank
from .headers import FORWARDED_HEADER, RANK_HEADER, Headers, head
from .reasons import Reason
from .stall_timer import patient
from .tls import UpstreamTrust
from .upstream import CLOSED_DETAIL, UpstreamConnection
from .upstream_response import UnknownName, Unreachable, UpstreamResponse

IDLE_SECONDS = 4.0  # below vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE
CONNECT_SECONDS = 2.0
# Of a connection that this process cannot open, to whatever instance.
LOCAL_ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    errno.EADDRNOTAVAIL,  # no port of this machine is left, or it has no address of that family
    # Of a look-up that got no answer from DNS. An unknown name (EAI_NONAME) is an answer.
    *(socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM),
)
# No packet could be sent, or a router has no way. Neither shows whether the instance lives.
ROUTE_ERRORS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
ROUTE_RETRY_SECONDS = 0.1
FULL_STATUSES = (429, 503)  # answers of an API server whose engine takes no more requests

_LEFT_DETAIL = "it has left the fleet"


class ConnectionPool:
    """Keeps the connections to one instance.

    For a data parallel rank, every request carries the rank's header.
    """

    def __init__(
        self,
        url: str,
        trust: UpstreamTrust | None = None,
        networks: AllowedNetworks | None = None,
        *,
        of_proxy: bool = False,
    ) -> None:
        """Raises ConfigError for a bad URL.

        `trust`: certificates for an https URL; by default those of this system.
        `networks`: allowed networks of the instance; by default any.
        `of_proxy`: whether a proxy sends these requests, so that no other proxy takes them.
        """
        base, rank = split_rank(check_url(url, "URL"))
        parts = urlsplit(base)
        secure = parts.scheme == "https"
        self._address = (str(parts.hostname), parts.port or (443 if secure else 80))
        self._trust = (trust or UpstreamTrust()) if secure else None
        own_fields: Headers = [(b"host", parts.netloc.encode())]
        if of_proxy:
            own_fields.append((FORWARDED_HEADER, b"1"))
        self._has_rank = rank is not None
        if rank is not None:
            own_fields.append((RANK_HEADER, b"%d" % rank))
        # What follows method and path in each request.
        self._head_start = head(b" HTTP/1.1", own_fields).removesuffix(b"\r\n\r\n")
        self._networks = networks
        self._accepted_at = ""  # the address that has accepted a connection last
        self.connections: set[UpstreamConnection] = set()
        self.chunks_received = 0  # any of them shows that the instance lives
        # Kept connections that the instance's side has ended, as the end of its process does.
        self.unused_ends = 0
        self._idle: deque[UpstreamConnection] = deque()
        self.closed = False  # no new connections

    def close(self) -> None:
        """Closes all connections for good: the instance has left the fleet."""
        self.closed = True
        self.abort()

    async def send(
        self, method: str, path: str, headers: Headers, body: bytes = b"", upgrade: bytes = b""
    ) -> UpstreamResponse:
        """Sends a request; returns when the answer's head is here. The caller closes the answer.

        `headers`: only end-to-end ones.
        `upgrade`: the protocol to offer, on a new connection; a status of 101 means that the
        instance has switched to it. Raises Unreachable.
        """
        request_head = self._request_head(method, path, headers, len(body), upgrade)
        connection = None if upgrade else self._take_idle()
        connection = connection or await self._connect()
        while True:
            answer = connection.send_request(request_head, body, upgrade)
            try:
                await answer.head()
                if 300 <= answer.status < 400:  # not for clients: its Location names the engine
                    raise Unreachable("garbled", f"it answered {answer.status}")
                return answer
            except Unreachable as error:
                answer.close()
                if not self._may_retry(connection):
                    raise
                first_error = error
            except BaseException:
                answer.close()
                raise
            try:
                connection = await self._connect()
            except Unreachable:
                # The instance died with this request: the first error describes that.
                raise first_error from None

    def _request_head(
        self, method: str, path: str, headers: Headers, body_bytes: int, upgrade: bytes
    ) -> bytes:
        if self._has_rank:
            headers = [header for header in headers if header[0] != RANK_HEADER]
        if upgrade:
            own = [(b"connection", b"Upgrade"), (b"upgrade", upgrade)]
        else:
            own = [(b"content-length", b"%d" % body_bytes)]
        return head(f"{method} {path}".encode() + self._head_start, headers + own)

    def _may_retry(self, connection: UpstreamConnection) -> bool:
        """Returns whether a request that failed on this connection may be sent once more."""
        return connection.died_unused and not self.closed

    def abort(self, reason: Reason = "reset", detail: str = CLOSED_DETAIL) -> None:
        """Closes every connection; tasks that wait on one get Unreachable."""
        for connection in list(self.connections):
            connection.give_up(reason, detail)

    def release(self, connection: UpstreamConnection) -> None:
        """Takes back a connection whose exchange has ended, and closes those idle for too long."""
        now = time.monotonic()
        connection.idle_since = now
        self._idle.append(connection)
        while now - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.popleft().close()

    def _take_idle(self) -> UpstreamConnection | None:
        """Returns the connection used last, if vLLM has surely not closed it; else None."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            is_fresh = connection.is_open and now - connection.idle_since <= IDLE_SECONDS
            # An authority that is trusted no more may have signed an earlier certificate.
            if is_fresh and connection.tls is self._tls():
                return connection
            connection.close()
        return None

    def _tls(self) -> ssl.SSLContext | None:
        """Returns the context for new connections; None for an http URL."""
        return self._trust.context if self._trust else None

    async def _connect(self) -> UpstreamConnection:
        if self.closed:
            raise Unreachable("refused", _LEFT_DETAIL)
        lost_route = ""
        try:
            async with patient(CONNECT_SECONDS):
                while True:
                    try:
                        return await self._open()
                    except OSError as error:
                        if error.errno is None or error.errno not in ROUTE_ERRORS:
                            raise
                        lost_route = f": {os.strerror(error.errno)}"
                    await asyncio.sleep(ROUTE_RETRY_SECONDS)
        except TimeoutError:
            detail = f"no connection within {CONNECT_SECONDS:.0f} s{lost_route}"
            raise Unreachable("no_connection", detail) from None
        except ssl.SSLError as error:
            detail = getattr(error, "verify_message", "") or error.reason
            raise Unreachable("refused", f"TLS: {detail}") from None
        # ValueError: a name that no host can have, such as one with a label of 64 bytes.
        except (OSError, ValueError) as error:
            detail = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in LOCAL_ERRORS:
                raise Unreachable("local", f"this proxy cannot connect: {detail}") from None
            if isinstance(error, socket.gaierror):
                raise UnknownName(detail) from None
            raise Unreachable("refused", detail) from None

    async def _open(self) -> UpstreamConnection:
        """Connects to the first address that accepts.

        DNS may answer differently each time. So each answer is checked against the allowed
        networks, directly before it is used.
        """
        host, port = self._address
        if literal(host) and not self._networks:
            return await self._open_to(host)
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = [str(info[4][0]) for info in infos]
        addresses = found
        if self._networks:
            addresses = [address for address in found if self._networks.allow(address)]
            if not addresses:
                raise Unreachable("refused", self._networks.refusal(found[0]))
        errors: dict[str, OSError] = {}
        for address in addresses:
            try:
                connection = await self._open_to(address)
            except OSError as error:
                errors[address] = error
            else:
                self._accepted_at = address
                return connection
        raise self._telling(errors)

    def _telling(self, errors: dict[str, OSError]) -> OSError:
        """Returns the error that tells whether the instance is gone, of those by address."""
        # The engine may listen at one of them only, and this machine may lack IPv6 for another one.
        if self._accepted_at in errors:
            return errors[self._accepted_at]
        of_others = (*LOCAL_ERRORS, *ROUTE_ERRORS)
        of_instance = [error for error in errors.values() if error.errno not in of_others]
        return (of_instance or list(errors.values()))[-1]

    async def _open_to(self, address: str) -> UpstreamConnection:
        host, port = self._address
        tls = self._tls()
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: UpstreamConnection(self),
            address,
            port,
            ssl=tls,
            server_hostname=host if tls else None,  # the name that the certificate must have
        )
        connection.tls = tls
        return connection


def pool_of(pools: dict[str, ConnectionPool], url: str) -> ConnectionPool:
    """Returns an instance's pool; raises Unreachable when the instance has left the fleet."""
    pool = pools.get(url)
    if pool is None:
        raise Unreachable("refused", _LEFT_DETAIL)
    return pool
