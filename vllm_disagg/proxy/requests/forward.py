"""Forwards requests unchanged: to one instance, to the one that holds an id, or to all.

An instance fails a request if it cannot be reached, cuts its answer off, or answers 429 or 5xx.
Then another one is asked, `MAX_RETRIES` times at most. Repeats after answers of instances that live
have a budget, as in the ladder of `failover.py`. Where only one instance holds an id, its 429 or
5xx is the answer.

An instance that has no such thing (404) is no failure: the next one is asked, since it may have
loaded the adapter that the request names.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ..http import routes
from ..http.connection import Connection
from ..http.connection_pool import ConnectionPool, pool_of
from ..http.error_replies import RequestFailed
from ..http.headers import Headers, end_to_end, find
from ..http.reasons import CUT_OFF_DETAIL, SAME_ELSEWHERE, STOPPING_DETAIL, Reason
from ..http.request import REQUEST_ID_HEADER, HttpRequest
from ..http.response import JSON, error_body
from ..http.upstream_response import Unreachable, UpstreamResponse
from ..http.websocket import join
from ..routing.fleet import Fleet, Instance
from ..routing.pairing import record_choice
from ..routing.policies import Policy, RoutingQuery
from ..telemetry.logs import FailedForwardLog
from .attempt import MODEL_MAY_HAVE_FAILED, Leg, RequestProgress, SuspectLeg
from .completeness import END_MARKS, PATHS_WITH_LAST_EVENT, CompletenessCheck, doubtful
from .failover import CHARGED_REASONS, RetryBudget
from .streams import StreamRecorder, aborted, failure_in

MAX_RETRIES = 2
# When a client of these leaves, vLLM aborts all requests that have the client's id.
AUDIO_PATHS = "/v1/audio/"
# What vLLM answers with status 400 to a score by labels' probabilities whose request was aborted.
_CUT_SCORE = re.compile(rb'"message": ?"No logprobs available for item ')


class _ServedModel(msgspec.Struct):
    id: str


class _ServedModels(msgspec.Struct):
    data: list[msgspec.Raw]


_decode_model = msgspec.json.Decoder(_ServedModel).decode
_decode_models = msgspec.json.Decoder(_ServedModels).decode


class Forwarder:
    """Forwards requests that are not disaggregated."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        pools: dict[str, ConnectionPool],
        completeness: CompletenessCheck,
    ) -> None:
        self.fleet = fleet
        self._policy = policy
        self._pools = pools
        self._completeness = completeness
        self._retry_budget = RetryBudget()
        self._failures = FailedForwardLog()

    async def forward(
        self,
        request: HttpRequest,
        client: Connection,
        candidates: list[Instance],
        held_by_one: bool = False,
        absent: bool = False,
    ) -> int:
        """Forwards a request to the first candidate that answers; returns the answer's status.

        An answer "no such thing" counts only from the last candidate. `absent`: it counts from
        none, since an instance that cannot be asked may have the thing. `held_by_one`: one instance
        alone has the thing, so its failure is the answer. Raises RequestFailed if none answers.
        """
        error: Unreachable | None = None
        failures = 0
        is_missing = False
        progress = RequestProgress()
        is_trial = routes.needs_engine(request.path)
        self._retry_budget.earn()
        for position, instance in enumerate(candidates):
            record_choice(
                self.fleet,
                self._policy,
                RoutingQuery(0),
                time.monotonic(),
                instance,
                is_trial=is_trial,
            )
            # An instance that failed may have been the one with the thing, so that after a failure
            # no other's 404 counts.
            is_last_try = position + 1 == len(candidates)
            is_last_word = not error and is_last_try and not absent
            may_repeat = not is_last_try and failures < MAX_RETRIES
            leg = Leg("decode", instance, time.monotonic())
            try:
                status = await self._try_instance(
                    request,
                    client,
                    instance,
                    skip_missing=not is_last_word,
                    skip_failed=may_repeat and not held_by_one,
                )
            except Unreachable as failure:
                is_last = client.started or not may_repeat or failure.reason in SAME_ELSEWHERE
                self._failures.write(request, instance.url, str(failure), is_last)
                self._note_failure(progress, leg, failure.reason)
                error = failure
                failures += 1
                if is_last:
                    break
                continue
            if status is not None:
                if is_trial:
                    _note_answer(instance, status)
                if status == 200:
                    progress.blame_suspects(time.monotonic())
                return status
            is_missing = True
        if error and is_missing and not (held_by_one or client.started):
            raise RequestFailed(503, MODEL_MAY_HAVE_FAILED.format(error), retry_after=5)
        if not error:
            which = "an instance that may have it cannot" if absent else "no instance can"
            raise RequestFailed(503, f"{which} be used at the moment", retry_after=5)
        raise RequestFailed(502, f"the instance failed: {error}")

    def _note_failure(self, progress: RequestProgress, leg: Leg, reason: Reason) -> None:
        now = time.monotonic()
        if reason == "5xx":  # the request itself may be the cause: see `blame_suspects`
            progress.suspects.append(SuspectLeg(leg, now))
        elif reason != "busy" and reason not in SAME_ELSEWHERE:
            self.fleet.on_leg_failed(leg.instance, reason, now, leg.sent_at)

    async def _try_instance(
        self,
        request: HttpRequest,
        client: Connection,
        instance: Instance,
        skip_missing: bool,
        skip_failed: bool,
    ) -> int | None:
        """Forwards a request to one instance; returns the answer's status.

        None if the instance has no such thing and `skip_missing` is set. `skip_failed`: another one
        may answer instead of one that fails. Raises Unreachable.
        """
        with _counted(instance):
            answer: UpstreamResponse | None = None
            try:
                answer = await pool_of(self._pools, instance.url).send(
                    request.method,
                    request.target,
                    _headers_for_engine(request),
                    request.body,
                    request.upgrade,
                )
                if answer.status == 101:
                    await join(client, answer)
                    return 101
                if skip_missing and _is_missing(request, answer.status):
                    return None
                if answer.status == 200 and answer.is_stream:
                    return await self._forward_stream(client, instance, answer)
                content = await answer.read()
                if await self._is_cut_off(request, instance, answer.status, content):
                    raise Unreachable("stopping", STOPPING_DETAIL)
                reason = _failure_reason(answer.status, content)
                if skip_failed and reason and self._can_afford(reason):
                    raise Unreachable(reason, f"it answered {answer.status}")
            finally:
                if answer:
                    answer.close()
            client.answer(answer.status, _headers_for_client(request.path, answer), content)
            await client.drained()
            return answer.status

    def _can_afford(self, reason: Reason) -> bool:
        """Pays for a repeat; returns False if the retry budget is exhausted."""
        return reason not in CHARGED_REASONS or self._retry_budget.spend(time.monotonic())

    async def _is_cut_off(
        self, request: HttpRequest, instance: Instance, status: int, content: bytes
    ) -> bool:
        """Whether an answer, which is no failure by its status, was cut off by the engine's end."""
        if status != 200:
            return status == 400 and bool(_CUT_SCORE.search(content))
        # /derender answers with text that the client sent, which may look like an abort.
        if aborted(content) and not request.path.endswith("/derender"):
            return True
        if not doubtful(request.path, content):
            return False
        return not await self._completeness.is_engine_running(instance)

    async def _forward_stream(
        self, client: Connection, instance: Instance, answer: UpstreamResponse
    ) -> int:
        await answer.first_byte()
        client.start(answer.status, _headers_for_client(client.path, answer))
        end_mark = END_MARKS.get(client.path)
        recorder = StreamRecorder(client.write, record=False, end_mark=end_mark)
        client.on_pause = answer.pause_reading
        compressed = bool(find(answer.headers, b"content-encoding"))
        sink = recorder.start_answer(answer.reject, compressed)
        await answer.pipe(sink, paused=client.paused)
        if client.path in PATHS_WITH_LAST_EVENT and not (compressed or recorder.has_ended):
            raise Unreachable("reset", CUT_OFF_DETAIL)
        if recorder.held and not await self._completeness.is_engine_running(instance):
            raise Unreachable("stopping", STOPPING_DETAIL)
        recorder.finish()
        client.end()
        await client.drained()
        return answer.status

    async def models(
        self, request: HttpRequest, client: Connection, groups: list[list[Instance]]
    ) -> int:
        """Answers with the models of several groups as one list; returns the status.

        The instances of a group serve the same models. A group is left out if each of them fails.
        Raises RequestFailed if no group answers.
        """
        answers = await asyncio.gather(*(self._fetch_any(request, group) for group in groups))
        answers = [answer for answer in answers if not _failure_reason(answer[0], answer[2])]
        if not answers:
            raise RequestFailed(503, "no instance has told its models", retry_after=5)
        known: dict[str, msgspec.Raw] = {}
        for status, headers, content in answers:
            if status != 200:
                client.answer(status, headers, content)
                return status
            for model in _decode_models(content).data:
                known.setdefault(_decode_model(model).id, model)
        merged = {"object": "list", "data": list(known.values())}
        client.answer(200, [JSON], msgspec.json.encode(merged))
        return 200

    async def everywhere(self, request: HttpRequest, client: Connection) -> int:
        """Forwards a request to all instances, and answers with the answer of highest status.

        Raises RequestFailed if an instance is not up.
        """
        # Data parallel ranks share an API server, which gets the request once.
        by_server = {i.server: i for i in self.fleet.instances}
        instances = list(by_server.values())
        if not instances or not all(instance.up for instance in self.fleet.instances):
            raise RequestFailed(
                503,
                "not every instance can be reached at the moment, and all must do this",
                retry_after=5,
            )
        answers = await asyncio.gather(*(self._fetch(request, instance) for instance in instances))
        for instance in self.fleet.instances:
            instance.needs_probe = True  # its models' names may have changed
        status, headers, content = max(answers, key=lambda answer: answer[0])
        client.answer(status, headers, content)
        await client.drained()
        return status

    async def _fetch_any(
        self, request: HttpRequest, instances: list[Instance]
    ) -> tuple[int, Headers, bytes]:
        """Returns the answer of the first instance that does not fail, else the last one's."""
        for instance in instances:
            answer = status, _, content = await self._fetch(request, instance)
            if not _failure_reason(status, content):
                break
        return answer

    async def _fetch(self, request: HttpRequest, instance: Instance) -> tuple[int, Headers, bytes]:
        """Forwards a request and returns (status, headers, content); 502 if there is no answer."""
        answer: UpstreamResponse | None = None
        try:
            headers = end_to_end(request.headers, request=True)
            answer = await pool_of(self._pools, instance.url).send(
                request.method, request.target, headers, request.body
            )
            return answer.status, end_to_end(answer.headers), await answer.read()
        except Unreachable as error:
            self.fleet.on_leg_failed(instance, error.reason, time.monotonic())
            request.failure = f"{instance.url} failed: {error}"
            message = "an instance failed, others may have done it"
            return 502, [JSON], error_body(502, message, request_id=request.request_id)
        finally:
            if answer:
                answer.close()


def _headers_for_engine(request: HttpRequest) -> Headers:
    """Returns a request's headers, with an id that no other request has where that matters."""
    headers = end_to_end(request.headers, request=True)
    if not request.path.startswith(AUDIO_PATHS):
        return headers
    suffix = b"-" + os.urandom(8).hex().encode()
    return [
        (name, value + suffix if name == REQUEST_ID_HEADER else value) for name, value in headers
    ]


def _headers_for_client(path: str, answer: UpstreamResponse) -> Headers:
    """Returns an answer's headers; without the engine's id where the client has another one."""
    headers = end_to_end(answer.headers)
    if not path.startswith(AUDIO_PATHS):
        return headers
    return [header for header in headers if header[0] != REQUEST_ID_HEADER]


def _failure_reason(status: int, content: bytes) -> Reason | None:
    """Returns why another instance may answer better; None for a good answer or a refusal."""
    if status == 429:
        return "busy"
    return failure_in(content) if status >= 500 else None


def _note_answer(instance: Instance, status: int) -> None:
    """Closes the circuit breaker of an instance whose engine has answered."""
    if status < 500:
        instance.on_leg_succeeded(time.monotonic())


def _is_missing(request: HttpRequest, status: int) -> bool:
    """Whether an instance answers that it has no such thing; 403: no such WebSocket."""
    return status == 404 or (status == 403 and bool(request.upgrade))


@contextmanager
def _counted(instance: Instance) -> Iterator[None]:
    """Counts a request as in flight at an instance."""
    instance.in_flight += 1
    try:
        yield
    finally:
        instance.in_flight -= 1
