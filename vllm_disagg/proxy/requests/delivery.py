"""Delivers a started answer to its client: whole, as a stream, or as a stream's continuation.

A stream is written by the request's `StreamRecorder`, which outlives the attempts. A second answer
continues it: the recorder compares that answer with the part that the client has, and writes the
rest. If no instance can continue, the client gets the last failure.
"""

from __future__ import annotations

import asyncio

from ..http.error_replies import RequestFailed
from ..http.headers import end_to_end, find
from ..http.reasons import CUT_OFF_DETAIL, STOPPING_DETAIL
from ..http.sse import DONE, ERROR
from ..http.upstream_response import Unreachable, UpstreamResponse
from ..routing.fleet import Fleet
from .attempt import MODEL_MAY_HAVE_FAILED, Attempt, AttemptFailure, Leg
from .bodies import LARGE_BYTES
from .completeness import (
    PATHS_WITH_LAST_EVENT,
    CompletenessCheck,
    doubtful_stream,
    end_mark_of,
)
from .streams import StreamRecorder

MODEL_MAY_BE_ELSEWHERE = (
    "no instance that can be asked has this model, and one that may have it has not answered yet"
)


class Delivery:
    """Writes answers to clients."""

    def __init__(self, fleet: Fleet, completeness: CompletenessCheck) -> None:
        self._fleet = fleet
        self._completeness = completeness

    async def deliver_answer(
        self, attempt: Attempt, answer: UpstreamResponse
    ) -> int | AttemptFailure:
        """Sends a started answer to the client; returns its status, or its failure."""
        client = attempt.context.client
        if answer.status == 200 and answer.is_stream:
            return await self._deliver_stream(attempt, answer)
        if client.started:
            # The client has a stream; this is a refusal, or an answer of another kind.
            detail = f"another instance answered {answer.status}"
            return AttemptFailure("decode", "diverged", detail)
        return await self._deliver_whole(attempt, answer)

    def begin_stream(self, attempt: Attempt, answer: UpstreamResponse, events: bytes) -> bool:
        """Begins the client's stream with `events`, under the head of D's answer, which follows.

        Returns False if the stream has begun already.
        """
        client = attempt.context.client
        if client.started:
            return False
        client.start(answer.status, end_to_end(answer.headers))
        path = attempt.context.request.path
        recorder = StreamRecorder(client.write, True, end_mark_of(path), path)
        attempt.progress.recorder = recorder
        recorder.start_answer(answer.reject)(events)
        return True

    async def deliver_failure(self, attempt: Attempt, failure: AttemptFailure) -> int:
        """Ends the request with its last failure: with the instance's own answer, if it sent one.

        Returns the status, or raises RequestFailed.
        """
        client = attempt.context.client
        is_404 = failure.leg == "decode" and failure.reason == "declined"
        decode_failure = attempt.progress.decode_failure
        if not client.started and is_404 and decode_failure:
            raise RequestFailed(503, MODEL_MAY_HAVE_FAILED.format(decode_failure), retry_after=5)
        if not client.started and failure.answer:
            return await self._deliver_whole(attempt, failure.answer)
        error_event = _last_error_event(attempt.progress.recorder)
        if client.started and error_event:
            client.write(error_event + b"\n\n" + DONE)
            client.end()
            return 500
        raise RequestFailed(502, f"the {failure.leg} instance failed: {failure.detail}")

    async def _deliver_whole(self, attempt: Attempt, answer: UpstreamResponse) -> int:
        """Sends a whole answer to the client; returns its status. Raises RequestFailed."""
        context = attempt.context
        if answer.status == 404 and self._fleet.is_model_uncertain(context.query.model):
            raise RequestFailed(503, MODEL_MAY_BE_ELSEWHERE, retry_after=5)
        content = await answer.read()
        if answer.status >= 400:
            clean = attempt.without_grants
            is_large = len(content) > LARGE_BYTES
            content = await asyncio.to_thread(clean, content) if is_large else clean(content)
        context.client.answer(answer.status, end_to_end(answer.headers), content)
        await context.client.drained()
        return answer.status

    async def _deliver_stream(
        self, attempt: Attempt, answer: UpstreamResponse
    ) -> int | AttemptFailure:
        """Sends a stream, or continues the one that the client has."""
        client = attempt.context.client
        server = attempt.server
        leg = Leg("decode", server, answer.sent_at)
        compressed = bool(find(answer.headers, b"content-encoding"))
        recorder = attempt.progress.recorder
        if not recorder:
            client.start(answer.status, end_to_end(answer.headers))
            recorder = self._make_recorder(attempt, compressed)
            attempt.progress.recorder = recorder
        recorder.clean_error = attempt.without_grants
        client.on_pause = answer.pause_reading
        sink = recorder.start_answer(answer.reject, compressed)
        try:
            await answer.pipe(sink, paused=client.paused)
        except Unreachable as error:
            # A connection that broke after the last event does no harm.
            if not recorder.is_complete:
                return attempt.record_failure(leg, error.reason, str(error))
        else:
            path = attempt.context.request.path
            may_end = path not in PATHS_WITH_LAST_EVENT
            if not (may_end or compressed or recorder.has_ended):
                return attempt.record_failure(leg, "reset", CUT_OFF_DETAIL)
            unseen = attempt.context.body.may_end_unseen
            is_doubtful = doubtful_stream(path, unseen, bytes(recorder.held), server.engine)
            if is_doubtful and not await self._completeness.is_engine_running(server):
                return attempt.record_failure(leg, "stopping", STOPPING_DETAIL)
            if not recorder.finish():
                return AttemptFailure("decode", "diverged", "the answer made again is shorter")
        client.end()
        await client.drained()
        return answer.status

    def _make_recorder(self, attempt: Attempt, compressed: bool) -> StreamRecorder:
        """Returns the writer of a client's stream; it records if another D could continue it."""
        context = attempt.context
        path = context.request.path
        decodes = self._fleet.with_role("decode")
        record = (
            context.body.reproducible
            and not compressed
            and any(decode is not attempt.server for decode in decodes)
        )
        end_mark = end_mark_of(path, context.body.may_end_unseen)
        return StreamRecorder(context.client.write, record, end_mark, path)


def _last_error_event(recorder: StreamRecorder | None) -> bytes:
    """Returns the instance's own error event, if the client's stream may end with it."""
    if not recorder:
        return b""
    # The error event of a second answer has that answer's ids, unless it is a plain one.
    if recorder.continued and not recorder.error_event.startswith(ERROR):
        return b""
    return recorder.error_event
