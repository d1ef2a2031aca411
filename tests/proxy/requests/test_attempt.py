"""Tests the end of an attempt: its places, legs and answers, in every way in which it can end."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import pytest

from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.endpoint_schema import SCHEMAS
from vllm_disagg.proxy.http.reasons import Reason
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.upstream import UpstreamConnection
from vllm_disagg.proxy.http.upstream_response import UpstreamResponse
from vllm_disagg.proxy.requests import bodies
from vllm_disagg.proxy.requests.attempt import (
    Attempt,
    AttemptFailure,
    Leg,
    LegOutcome,
    RequestContext,
    RequestProgress,
)
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.policies import Policy, RoutingQuery
from vllm_disagg.proxy.routing.prefill_queue import PrefillQueue
from vllm_disagg.proxy.telemetry.logs import FailedLegLog
from vllm_disagg.proxy.telemetry.meter import HistogramBuckets, TrafficCounters

PROMPT_BYTES = 7
FAILURE = AttemptFailure("prefill", "reset", "the connection was closed")


class FakeConnection:
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class Pair:
    """Holds a prefill and a decode instance, and makes attempts on them."""

    def __init__(self) -> None:
        self.prefill = Instance("p", "prefill")
        self.decode = Instance("d", "decode")
        for instance in (self.prefill, self.decode):
            worker = WorkerInfo(instance.url, "a", "b")
            engine = EngineInfo(instance.url, "both", [worker], {}, answer_settings="s")
            instance.on_probe_answered("m", engine)
        self.fleet = Fleet([self.prefill, self.decode])
        self.queue = PrefillQueue(self.fleet, Policy(), 1, 9, 9.0)
        self.progress = RequestProgress()

    async def attempt(self, **fields: object) -> Attempt:
        """Returns an attempt of both legs, with its places taken."""
        context = self.context(**fields)
        pair = await self.queue.acquire(context.query)
        assert pair and self.places == (1, 1, PROMPT_BYTES)
        return Attempt(context, self.progress, pair, self.fleet, self.queue, FailedLegLog())

    def context(self, **fields: object) -> RequestContext:
        """Returns a request with these fields in its body."""
        path = "/v1/completions"
        raw = json.dumps({"prompt": "hello", **fields}).encode()
        return RequestContext(
            HttpRequest("POST", path, body=raw),
            [],
            cast(Connection, None),
            TrafficCounters(HistogramBuckets(())),
            bodies.parse(raw, SCHEMAS[path]),
            RoutingQuery(PROMPT_BYTES, path=path),
        )

    @property
    def places(self) -> tuple[int, int, int]:
        """Legs at P, requests at D, and bytes of their prompts at D."""
        return self.prefill.prefill_legs, self.decode.in_flight, self.decode.context_bytes


async def test_places_are_given_back_whatever_ends_the_attempt() -> None:
    pair = Pair()
    for error in (ZeroDivisionError, asyncio.CancelledError, TimeoutError):
        with pytest.raises(error), await pair.attempt():
            raise error
        assert pair.places == (0, 0, 0)


async def test_a_decode_instance_alone_gives_back_one_place() -> None:
    pair = Pair()
    context = pair.context()
    pair.decode.add_request(context.query.prompt_bytes)
    progress, plan = pair.progress, pair.decode
    with Attempt(context, progress, plan, pair.fleet, pair.queue, FailedLegLog()) as attempt:
        assert attempt.server is attempt.decode is pair.decode and attempt.pair is None
    assert pair.places == (0, 0, 0)
    assert (pair.progress.history.attempts, pair.progress.history.pair_attempts) == (1, 0)


async def test_the_place_at_p_is_given_back_once() -> None:
    pair = Pair()
    with await pair.attempt() as attempt:
        attempt.release_prefill_place()
        assert pair.places == (0, 1, PROMPT_BYTES)
        attempt.release_prefill_place()
    assert pair.places == (0, 0, 0)


async def test_the_end_of_a_prefill_leg_gives_back_its_place() -> None:
    pair = Pair()
    computed = asyncio.Event()

    async def leg() -> LegOutcome:
        await computed.wait()
        return FAILURE

    with await pair.attempt() as attempt:
        assert attempt.pair
        task = attempt.start_prefill_leg(attempt.pair, leg())
        attempt.release_prefill_place()  # the leg has the place
        await asyncio.sleep(0)
        assert pair.places == (1, 1, PROMPT_BYTES)
        computed.set()
        assert await task is FAILURE
        await asyncio.sleep(0)
        assert pair.places == (0, 1, PROMPT_BYTES)
    assert pair.places == (0, 0, 0)


@pytest.mark.parametrize("started", [False, True])
async def test_the_end_of_an_attempt_cancels_its_prefill_leg(started: bool) -> None:
    pair = Pair()

    async def leg() -> LegOutcome:
        await asyncio.Event().wait()
        return FAILURE

    with await pair.attempt() as attempt:
        assert attempt.pair
        task = attempt.start_prefill_leg(attempt.pair, leg())
        if started:
            await asyncio.sleep(0)
    await asyncio.wait((task,), timeout=50)
    assert task.cancelled()
    await asyncio.sleep(0)
    assert pair.places == (0, 0, 0)


async def test_a_place_that_was_given_back_serves_the_queue() -> None:
    pair = Pair()
    with await pair.attempt():
        waiting = asyncio.create_task(pair.queue.acquire(RoutingQuery(1)))
        await asyncio.sleep(0)
        assert len(pair.queue) == 1
    assert await waiting


async def test_open_answers_are_closed() -> None:
    pair = Pair()
    connections = [FakeConnection(), FakeConnection()]
    with await pair.attempt() as attempt:
        for connection in connections:
            attempt.close_at_end(UpstreamResponse(cast(UpstreamConnection, connection)))
        assert not any(connection.closed for connection in connections)
    assert [connection.closed for connection in connections] == [1, 1]


@pytest.mark.parametrize(
    ("reason", "at_once", "after_success"),
    [("reset", 1, 1), ("garbled", 1, 1), ("5xx", 0, 1), ("diverged", 0, 0)],
)
async def test_the_failures_that_count(reason: Reason, at_once: int, after_success: int) -> None:
    pair = Pair()
    now = asyncio.get_running_loop().time()
    with await pair.attempt() as attempt:
        failure = attempt.record_failure(Leg("decode", pair.decode, now), reason, "why")
    assert (failure.leg, failure.reason, failure.detail) == ("decode", reason, "why")
    assert pair.progress.failed_instances == [pair.decode]
    assert pair.decode.consecutive_failures == at_once
    pair.progress.blame_suspects(now)
    assert pair.decode.consecutive_failures == after_success
    failed_at = pair.decode.last_failure_at
    pair.progress.blame_suspects(now + 10.0)
    assert pair.decode.consecutive_failures == after_success, "each failure counts once"
    assert pair.decode.last_failure_at == failed_at


async def test_p_answers_a_request_for_one_token() -> None:
    pair = Pair()
    with await pair.attempt(max_tokens=1) as attempt:
        assert attempt.server is pair.prefill
    with await pair.attempt(max_tokens=2) as attempt:
        assert attempt.server is pair.decode


async def test_a_failed_attempt_is_history() -> None:
    progress = RequestProgress()
    reasons: tuple[Reason, ...] = ("5xx", "stopping")
    for reason in reasons:
        progress.on_attempt_failed(AttemptFailure("prefill", reason, ""), answer_started=False)
    assert progress.history.deaths == 0
    progress.on_attempt_failed(AttemptFailure("prefill", "died", ""), answer_started=True)
    history = progress.history
    assert (history.deaths, history.answer_started, history.answer_resumable) == (1, True, False)
