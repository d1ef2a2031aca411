"""Runs the legs of one attempt until its answer has started.

    one decode instance   one leg, aggregated
    a pair                prefill only: P answers the client
                          in turn: NixlConnector's legs, one after the other
                          concurrent: this project's connector, both legs at once

Concurrent legs. The first leg to end decides:

    D's answer has started, D fails or refuses   D's outcome
    P fails                                      P's failure
    P refuses                                    D's outcome if it comes soon; otherwise D alone
                                                 decides, since P's limits may be its own
    P has computed the prompt                    D's outcome, when it comes

Late dispatch (`--decode-dispatch late`): D's leg is sent when P's is nearly over, by the times of
P's last prompts. D then holds blocks for a shorter time.

P's answer may begin the client's stream, before D's has started (`first_token.py`).

P's leg goes on after D's answer has started, since D may still read KV. The end of the attempt ends
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from ...fleet.grants import MARGIN_SECONDS, REQUEST_KEY, VERSION, Grant, mint, new_transfer
from ...fleet.keys import FleetKey
from ..http.cancel_scope import CancelScope, TimeLimit
from ..http.connection_pool import ConnectionPool, pool_of
from ..http.upstream_response import Unreachable, UpstreamResponse
from ..membership.engine_answers import NIXL_PREFILL, params_in
from ..routing.fleet import Instance
from ..routing.pairing import InstancePair
from ..settings import ProxySettings
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import Tracing
from .attempt import Attempt, AttemptFailure, Leg, LegName, LegOutcome
from .bodies import whole_body
from .completeness import CompletenessCheck
from .leg_answers import CUT_OFF, find_problem, may_be_cut_off, until_started, verify_prefill

# After P's refusal, the time in which D may refuse or fail too. Else D serves the request alone, or
# refuses it then.
DECODE_REFUSAL_SECONDS = 0.2
# Of the expected time of a prefill leg: then a late decode leg is sent. The rest is for D's API
# server and scheduler, and for the bytes of all but the last layers.
LATE_SHARE = 0.8


class LegRunner:
    """Sends the legs of attempts."""

    def __init__(
        self,
        pools: dict[str, ConnectionPool],
        completeness: CompletenessCheck,
        metrics: Metrics,
        tracing: Tracing,
        settings: ProxySettings,
    ) -> None:
        """`pools`: connections by instance URL."""
        self._pools = pools
        self._completeness = completeness
        self._metrics = metrics
        self._tracing = tracing
        self._key = settings.key
        self._is_late = settings.decode_dispatch == "late"
        self._prefill_timeout = settings.prefill_timeout
        self._prefill_limit = TimeLimit(settings.prefill_timeout)

    def run_legs(self, attempt: Attempt) -> Coroutine[Any, Any, LegOutcome]:
        """Returns, once awaited, an answer that has started, or the failure of a leg."""
        context = attempt.context
        pair = attempt.pair
        if not pair:
            return self._run_aggregated(attempt)
        context.request.mode = "disaggregated"
        context.meter.paired(pair.prefill.url, pair.decode.url)
        if attempt.ends_at_prefill:
            # P has the token when it has the prompt, so that no KV needs to move.
            return self._prefill_leg(attempt, pair, whole_body(context.body, pair.prefill))
        if pair.prefill.connector == "nixl":
            return self._run_in_turn(attempt, pair)
        return self._run_concurrently(attempt, pair)

    async def _run_aggregated(self, attempt: Attempt) -> LegOutcome:
        """Runs the request on a decode instance alone."""
        context = attempt.context
        instance = attempt.decode
        if not context.client.started:
            context.request.mode = "whole"
            context.meter.paired("", instance.url)
        instance.aggregated_requests += 1
        try:
            body = whole_body(context.body, instance)
            return await self._send(attempt, "decode", instance, body)
        finally:
            instance.aggregated_requests -= 1

    async def _run_in_turn(self, attempt: Attempt, pair: InstancePair) -> LegOutcome:
        """Runs NixlConnector's two legs: P's answer has the parameters of D's leg."""
        request_body = attempt.context.body
        answer = await self._prefill_leg(attempt, pair, request_body.prefill_body(NIXL_PREFILL))
        if not isinstance(answer, UpstreamResponse):
            return answer
        attempt.release_prefill_place()
        params = params_in(await answer.read())
        body = request_body.decode_body(params) if params else request_body.aggregated_body()
        return await self._send(attempt, "decode", pair.decode, body)

    async def _run_concurrently(self, attempt: Attempt, pair: InstancePair) -> LegOutcome:
        """Runs both legs; returns D's answer, or the first failure or refusal."""
        attempt.grants = mint_grants(self._key, pair, self._prefill_timeout, time.monotonic())
        prefill_grant, decode_grant = attempt.grants
        prefill_body = attempt.context.body.prefill_body({REQUEST_KEY: prefill_grant})
        decode_body = attempt.context.body.decode_body({REQUEST_KEY: decode_grant})
        prefill = attempt.start_prefill_leg(
            pair, self._verified_prefill_leg(attempt, pair, prefill_body)
        )
        await asyncio.sleep(0)  # P's request is sent first: D waits for P
        # Of a prompt that P reads from D, P asks at once.
        if self._is_late and not pair.bidirectional_reuse:
            expected = pair.prefill.prefill_times.least(pair.uncached_bytes)
            await asyncio.wait([prefill], timeout=LATE_SHARE * expected)
            if prefill.done() and not _is_computed(prefill):
                return prefill.result()
        with CancelScope(prefill.get_loop()) as decode_leg:
            prefill.add_done_callback(lambda _: _end_decode_leg(decode_leg, prefill))
            outcome = await self._send(attempt, "decode", pair.decode, decode_body)
            if attempt.first_token and isinstance(outcome, UpstreamResponse):
                attempt.first_token.on_decode_started()
            return outcome  # also behind P's end: a D that has failed must not get it again
        return prefill.result()

    async def _prefill_leg(self, attempt: Attempt, pair: InstancePair, body: bytes) -> LegOutcome:
        """Runs a prefill leg within its timeout."""
        instance = pair.prefill
        began = time.monotonic()
        try:
            with self._prefill_limit.start():
                answer = await self._send(attempt, "prefill", instance, body)
        except TimeoutError:
            leg = Leg("prefill", instance, began)
            return attempt.record_failure(
                leg, "timeout", f"no answer within {self._prefill_timeout:g} s"
            )
        if not isinstance(answer, UpstreamResponse):
            return answer
        if answer.status != 200:
            return AttemptFailure("prefill", "declined", f"it answered {answer.status}", answer)
        seconds = time.monotonic() - began
        self._metrics.prefill_leg.observe(seconds)
        instance.prefill_times.add(pair.uncached_bytes, seconds)
        attempt.prompt_computed(pair)
        self._tracing.prefilled(attempt.context.request)
        attempt.context.meter.prefill_done(seconds)
        return answer

    async def _verified_prefill_leg(
        self, attempt: Attempt, pair: InstancePair, body: bytes
    ) -> LegOutcome:
        """Runs a prefill leg, and verifies that the process named in D's grant answered."""
        began = time.monotonic()
        answer = await self._prefill_leg(attempt, pair, body)
        if not isinstance(answer, UpstreamResponse):
            return answer
        content = await answer.read()
        path = attempt.context.request.path
        problem = verify_prefill(path, pair, content, began, time.monotonic())
        if problem:
            return AttemptFailure("prefill", "stale", problem)
        if attempt.first_token:
            attempt.first_token.on_prefill_answer(content)
        return answer

    async def _send(
        self, attempt: Attempt, name: LegName, instance: Instance, body: bytes
    ) -> LegOutcome:
        """Sends a leg; returns when its answer has started (a stream) or is complete (all else)."""
        leg = Leg(name, instance, time.monotonic())
        instance.step_monitor.on_request_sent(leg.sent_at)
        try:
            answer, error_event = await self._exchange(attempt, leg, body)
        except Unreachable as error:
            return attempt.record_failure(leg, error.reason, str(error))
        error_event = attempt.without_grants(error_event)
        attempt.close_at_end(answer)
        problem = find_problem(attempt.context.request.path, answer, error_event)
        if not problem and may_be_cut_off(attempt, instance, answer):
            is_running = await self._completeness.is_engine_running(instance)
            problem = None if is_running else CUT_OFF
        if problem:
            return attempt.record_failure(leg, problem.reason, problem.detail, problem.answer)
        now = time.monotonic()
        instance.on_leg_succeeded(now)
        if answer.status == 200:
            instance.step_monitor.on_step_seen(now)
            attempt.progress.blame_suspects(now)
        if answer.status == 429:  # another instance may have room
            attempt.progress.failed_instances.append(instance)
            return AttemptFailure(name, "busy", "it answered 429", answer)
        if answer.status == 404 and name == "decode":
            # Another one may have the adapter, or the path. One that replaced another has neither
            # the adapters that were loaded at run time, nor always the same version.
            attempt.progress.failed_instances.append(instance)
            return AttemptFailure(name, "declined", "it answered 404", answer)
        return answer

    async def _exchange(
        self, attempt: Attempt, leg: Leg, body: bytes
    ) -> tuple[UpstreamResponse, bytes]:
        """Returns a leg's answer once it has started, and an error event at its start.

        Raises Unreachable.
        """
        request = attempt.context.request
        instance = leg.instance
        headers = attempt.context.headers
        if request.spans:
            headers = self._tracing.leg(request, headers, instance.role, instance.url)
        pool = pool_of(self._pools, instance.url)
        answer = await pool.send("POST", request.target, headers, body)
        if leg.name == "decode" and attempt.first_token:
            attempt.first_token.on_decode_head(answer)
        try:
            error_event = await until_started(request, answer)
        except BaseException:  # also when the leg is cancelled: the engine then aborts it at once
            answer.close()
            raise
        return answer, error_event


def mint_grants(key: FleetKey, pair: InstancePair, patience: float, now: float) -> tuple[str, str]:
    """Returns the signed grants of the prefill leg and of the decode leg."""
    prefill_engine = pair.prefill.engine
    decode_engine = pair.decode.engine
    if not prefill_engine or not decode_engine:
        raise TypeError("a pair without engines")  # pairs are made of probed engines only
    transfer = new_transfer()
    # The transfer of bidirectional KV reuse, from D to P.
    reuse_transfer = new_transfer() if pair.bidirectional_reuse else None
    lifetime = patience + MARGIN_SECONDS
    prefill_grant = Grant(
        VERSION,
        "prefill",
        transfer,
        prefill_engine.incarnation,
        decode_engine.workers if reuse_transfer else [],
        patience,
        reuse_transfer,
        pair.prefill.engine_clock_after(lifetime, now),
    )
    decode_grant = Grant(
        VERSION,
        "decode",
        transfer,
        decode_engine.incarnation,
        prefill_engine.workers,
        patience,
        reuse_transfer,
        pair.decode.engine_clock_after(lifetime, now),
    )
    return mint(key, prefill_grant), mint(key, decode_grant)


def _end_decode_leg(decode_leg: CancelScope, prefill: asyncio.Task[LegOutcome]) -> None:
    """Ends a decode leg whose prefill leg has failed, or was refused some time ago."""
    if prefill.cancelled():  # by the end of the attempt
        return
    if _is_computed(prefill):
        return
    if _is_failed(prefill):
        decode_leg.cancel()
    else:
        loop = asyncio.get_running_loop()
        loop.call_later(DECODE_REFUSAL_SECONDS, decode_leg.cancel)


def _is_failed(prefill: asyncio.Task[LegOutcome]) -> bool:
    """Whether a prefill leg that has ended failed, in a way in which another P may succeed."""
    if prefill.exception():
        return True
    outcome = prefill.result()
    return isinstance(outcome, AttemptFailure) and outcome.reason != "declined"


def _is_computed(prefill: asyncio.Task[LegOutcome]) -> bool:
    """Whether a prefill leg that has ended has computed the prompt."""
    return not prefill.exception() and isinstance(prefill.result(), UpstreamResponse)
