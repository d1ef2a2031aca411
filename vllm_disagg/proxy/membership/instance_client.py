"""Sends this proxy's own requests to instances: health checks, probes, reads of
metrics, and the nudges between two of these.

Two failures have the same words whichever request meets them: a lost name and a refused connection.
"""

from __future__ import annotations

from ..http.bearer import AcceptedKeys
from ..http.connection_pool import ConnectionPool
from ..http.stall_timer import patient
from ..http.upstream_response import Unreachable
from ..routing.fleet import Instance

NO_NAME = "DNS does not know its name"


class UnexpectedAnswer(Exception):
    """Reports an answer that vLLM does not give.  `status`: of the answer."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


def connection_refusal(error: Unreachable) -> str:
    """Returns why an instance that refuses connections is down."""
    return f"refuses connections: {error.detail}"


class InstanceClient:
    """Sends requests with the engines' API key."""

    def __init__(self, pools: dict[str, ConnectionPool], keys: AcceptedKeys) -> None:
        self._pools = pools
        self._keys = keys

    async def request(
        self, instance: Instance, method: str, path: str, *, body: bytes = b"", timeout: float
    ) -> bytes:
        """Returns the body of an answer with status 200.

        Raises Unreachable, TimeoutError, or UnexpectedAnswer for another status.
        """
        async with patient(timeout):
            answer = await self._pools[instance.url].send(
                method, path, self._keys.own_headers, body
            )
            try:
                content = await answer.read()
            finally:
                answer.close()
        if answer.status != 200:
            raise UnexpectedAnswer(f"{method} {path} answered {answer.status}", answer.status)
        return content
