"""Answers that their engine calls complete, and that may have been cut.

An engine that gets SIGTERM gives up its answers at once. Most endpoints say so; those in `ENDS` do
not: what is cut there looks complete. But such an engine takes no new request, so whoever gets one
more token out of it *after* an answer knows that the answer was whole. Those answers are held until
then: for about one step of the engine, and one such request serves all answers that were there
before it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ..http.headers import Headers
from ..http.upstream import FULL_STATUSES, ConnectionPool, Unreachable, pool_of
from ..routing.fleet import Instance
from .streams import aborted

log = logging.getLogger(__name__)

CHECK_TIMEOUT_SECONDS = 300.0  # seconds; it waits behind the engine's other work
# seconds: so often, while it waits behind the engine's other work, it is seen whether the engine
# lives
RETRY_SECONDS = 5.0

# by path: in the event with which such a stream says that it is complete; no JSON text can hold
# these bytes
END_MARKS = {
    "/v1/responses": b"event: response.completed\n",
    "/cohere/v2/chat": b'"type":"message-end"',
    "/v1/audio/transcriptions": b"data: [DONE]",
    "/v1/audio/translations": b"data: [DONE]",
}


class _WholeAnswer(msgspec.Struct):
    status: str


_answer = msgspec.json.Decoder(_WholeAnswer).decode


def doubtful(path: str, answer: bytes) -> bool:
    """Whether a whole answer with status 200 may be one that was cut."""
    if path not in END_MARKS:
        return False
    try:
        # gpt-oss: what is cut is "cancelled", or "incomplete" as if it had reached its limit.
        return _answer(answer).status not in ("queued", "in_progress", "failed")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # has no status


class CompletenessCheck:
    """Asks instances whether they are still at work."""

    def __init__(self, pools: dict[str, ConnectionPool], api_key: str) -> None:
        self._pools = pools
        self._headers: Headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._running: dict[str, asyncio.Task[bool]] = {}  # by URL
        self._next: dict[
            str, asyncio.Task[bool]
        ] = {}  # not sent yet, so that it is later than all answers that wait for it

    async def works(self, instance: Instance) -> bool:
        """Whether an engine that has answered is at work still, so that its answer was whole."""
        url = instance.url
        if url not in self._next:
            self._next[url] = asyncio.create_task(self._after(self._running.get(url), instance))
        return await asyncio.shield(self._next[url])

    async def _after(self, before: asyncio.Task[bool] | None, instance: Instance) -> bool:
        if before:
            await asyncio.wait((before,))
        url = instance.url
        self._running[url] = self._next.pop(url)
        asking = asyncio.create_task(self._ask(url, instance.model))
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                while (
                    not asking.done() and instance.up
                ):  # one request: another might meet another life of the engine
                    await asyncio.wait((asking,), timeout=RETRY_SECONDS)
            return asking.done() and asking.result()
        except TimeoutError:
            log.warning(
                "%s was asked for one more token: no answer within %.0f s",
                url,
                CHECK_TIMEOUT_SECONDS,
            )
            return False
        finally:
            asking.cancel()
            del self._running[url]

    async def _ask(self, url: str, model: str) -> bool:
        body = msgspec.json.encode(
            {"model": model, "prompt": "probe", "max_tokens": 1, "temperature": 0}
        )
        try:
            while True:
                answer = await pool_of(self._pools, url).send(
                    "POST", "/v1/completions", self._headers, body
                )
                try:
                    if answer.status not in FULL_STATUSES:
                        return answer.status == 200 and not aborted(await answer.read())
                finally:
                    answer.close()
                await asyncio.sleep(RETRY_SECONDS)
        except Unreachable as error:
            log.warning("%s was asked for one more token: %s", url, error)
            return False
