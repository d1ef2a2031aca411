"""Verifies that answers which their engine calls complete were not cut off.

An engine that gets SIGTERM aborts its requests at once, or drains: it lets them finish and aborts
new ones. Most endpoints report an abort. A cut answer looks complete

* in `END_MARKS`,
* behind a tool's call in a whole answer; before vLLM 0.31 in a stream, too,
* where a stream of several choices lacks one that has no token,
* where it is the best beam of a search. Each step of a search is a new request, so that a draining
  engine aborts it, too. vLLM then gives the best of all beams, which may have ended long before.

But a stopping engine takes no new request. So one more token from it, requested *after* an answer,
proves that the answer was whole. Such answers are held until then: for about one step of the
engine. One such request serves all answers that were there before it.

An engine that drains refuses that token, too, although its answers are whole. An answer with a
tool's call had a token, so it was running and was not cut there: it needs no proof.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time

import msgspec
from packaging.version import InvalidVersion, Version

from ...protocol.peers import EngineInfo
from ...warning_limit import WarningLimit
from ..http.bearer import AcceptedKeys
from ..http.connection_pool import FULL_STATUSES, ConnectionPool, pool_of
from ..http.endpoint_schema import SCHEMAS
from ..http.error_replies import RequestFailed
from ..http.stall_timer import patient
from ..http.upstream_response import Unreachable
from ..routing.fleet import Instance
from .streams import aborted

log = logging.getLogger(__name__)

CHECK_TIMEOUT_SECONDS = 300.0  # the request waits behind the engine's other work
# Interval of checks that the engine is up, and of retries while the engine is full.
RETRY_SECONDS = 5.0
UNVERIFIABLE = (
    "such an answer is verified by one more token of its engine, which has no /v1/completions:"
    " ask the engine itself"
)

# No text of an answer matches: within JSON no line ends, and quotes are escaped. Marks that begin
# with plain bytes are searched ten times as fast as those that begin with a line.
_DONE = re.compile(rb"data: \[DONE\]\n")

# By path: matches the event that ends such a stream.
END_MARKS = {
    "/v1/responses": re.compile(rb"event: response\.(?:completed|incomplete)\n"),
    "/cohere/v2/chat": re.compile(rb'"type":"message-end"'),
    "/v1/audio/transcriptions": _DONE,
    "/v1/audio/translations": _DONE,
}

# By path: what vLLM writes over an abort, once an answer has a tool's call. An engine may stop
# after the first of several calls.
TOOL_MARKS = {
    "/v1/chat/completions": re.compile(rb'"finish_reason":"tool_calls"'),
    "/v1/messages": re.compile(rb'"stop_reason":"tool_use"'),
}

# The first one that writes it in streams only over the model's own end.
_SHOWS_ABORTS_IN_STREAMS = Version("0.31")
# In the last events of a chat, unless vLLM's `--fingerprint-mode` leaves it out.
_FINGERPRINT = re.compile(rb'"system_fingerprint":"vllm-([^"-]+)-')

# By path: matches the event that ends a stream of several choices, or of a search by beams.
CHOICES_END_MARKS = dict.fromkeys(("/v1/completions", "/v1/chat/completions"), _DONE)

# Paths whose streams end in an event for that. A stream without it was cut off. A killed process
# does not show where a body has neither a length nor chunks.
PATHS_WITH_LAST_EVENT = frozenset((*SCHEMAS, *END_MARKS))


class _CompleteAnswer(msgspec.Struct):
    status: str


_decode_answer = msgspec.json.Decoder(_CompleteAnswer).decode


def end_mark_of(path: str, may_end_unseen: bool = False) -> re.Pattern[bytes] | None:
    """Returns what matches the first event that a stream's end is held from; None to hold none."""
    end_mark = END_MARKS.get(path) or TOOL_MARKS.get(path)
    return CHOICES_END_MARKS.get(path, end_mark) if may_end_unseen else end_mark


def doubtful(path: str, answer: bytes, engine: EngineInfo | None = None) -> bool:
    """Whether a complete-looking answer with status 200 may have been cut off.

    `engine`: the one that gave it; None if it is not known.
    """
    if path in TOOL_MARKS:
        drains = engine is not None and engine.drains
        return not drains and bool(TOOL_MARKS[path].search(answer))
    if path not in END_MARKS:
        return False
    try:
        # gpt-oss: a cut answer is "cancelled", or "incomplete" as if it had reached its limit.
        return _decode_answer(answer).status not in ("queued", "in_progress", "failed")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # has no status


def doubtful_stream(path: str, may_end_unseen: bool, end: bytes, engine: EngineInfo | None) -> bool:
    """Whether a stream may have been cut off, although it has an end.

    `end`: its events from the one of `end_mark_of` on; empty if it needs none.
    """
    if path not in TOOL_MARKS or may_end_unseen:
        return bool(end)
    if not end or (engine and engine.drains):
        return False
    found = _FINGERPRINT.search(end)
    version = found[1].decode(errors="replace") if found else engine.version if engine else ""
    return not _shows_aborts_in_streams(version)


@functools.lru_cache
def _shows_aborts_in_streams(version: str) -> bool:
    try:
        return Version(version) >= _SHOWS_ABORTS_IN_STREAMS
    except InvalidVersion:
        return False


class CompletenessCheck:
    """Requests one more token of instances, to prove that their last answers were whole."""

    def __init__(self, pools: dict[str, ConnectionPool], keys: AcceptedKeys) -> None:
        self._pools = pools
        self._keys = keys
        self._failures = WarningLimit()
        self._running: dict[str, asyncio.Task[bool | None]] = {}  # by URL
        # By URL: not sent yet, so they will be later than all answers that wait for them.
        self._next: dict[str, asyncio.Task[bool | None]] = {}

    async def is_engine_running(self, instance: Instance) -> bool:
        """Whether an engine still works after its answer, so that the answer was whole.

        Raises RequestFailed for an engine without /v1/completions: that shows no end of it.
        """
        url = instance.url
        if url not in self._next:
            self._next[url] = asyncio.create_task(
                self._check_after(self._running.get(url), instance)
            )
        # Shielded: other answers wait for the same check.
        is_running = await asyncio.shield(self._next[url])
        if is_running is None:
            raise RequestFailed(501, UNVERIFIABLE)
        return is_running

    async def _check_after(
        self, previous: asyncio.Task[bool | None] | None, instance: Instance
    ) -> bool | None:
        if previous:
            await asyncio.wait((previous,))
        url = instance.url
        self._running[url] = self._next.pop(url)
        request = asyncio.create_task(self._request_token(url, instance.model))
        try:
            async with patient(CHECK_TIMEOUT_SECONDS):
                # One request only: after a restart a second one would meet another process.
                while not request.done() and instance.up:
                    await asyncio.wait((request,), timeout=RETRY_SECONDS)
            return request.result() if request.done() else False
        except TimeoutError:
            log.warning(
                "completeness: %s did not produce one more token within %.0f s;"
                " its last answers count as cut off",
                url,
                CHECK_TIMEOUT_SECONDS,
            )
            return False
        finally:
            request.cancel()
            del self._running[url]

    async def _request_token(self, url: str, model: str) -> bool | None:
        """Requests one token, again while the engine is full; returns whether it was produced.

        None if the engine has no /v1/completions.
        """
        body = msgspec.json.encode(
            {"model": model, "prompt": "probe", "max_tokens": 1, "temperature": 0}
        )
        try:
            while True:
                answer = await pool_of(self._pools, url).send(
                    "POST", "/v1/completions", self._keys.own_headers, body
                )
                try:
                    if answer.status == 404:
                        return None
                    if answer.status not in FULL_STATUSES:
                        return answer.status == 200 and not aborted(await answer.read())
                finally:
                    answer.close()
                await asyncio.sleep(RETRY_SECONDS)
        except Unreachable as error:
            if count := self._failures.note(time.monotonic()):
                log.warning(
                    "completeness: %s did not produce one more token: %s; its last answers count as"
                    " cut off (%d such failures of any instance since the last such line)",
                    url,
                    error,
                    count,
                )
            return False
