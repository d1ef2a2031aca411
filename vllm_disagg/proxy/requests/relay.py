"""Runs one request of generation from its queue to the last byte of its answer.

Legs. A leg is the request that the proxy sends to an instance for one client request:

    aggregated      one leg: D computes the prompt and the answer
    prefill only    one leg: P answers, because one token is asked and no KV needs to move
    in turn         NixlConnector: P's leg, then D's leg with the parameters of P's answer
    concurrent      this project's connector: both legs at once, D reads the KV while P computes

Course of a request:

    wait in the prefill queue -> attempt -> the decode leg's answer goes to the client as it comes

    either leg is refused (4xx)   that answer goes to the client, the other leg is cancelled
    P answers 429                 another P that has room is tried first
    either leg fails              the next step of the ladder in `failover.py`: the same request on
                                  other instances
    ... after the answer started  the same, and the delivered part is not sent again
                                  (`continuation.py`)
    no step is left               the last failure as an answer, or as an event in the stream and
                                  [DONE]
    the client left, or timeout   both legs are cancelled

When an answer has started. A whole answer has started when it is complete. A stream has started at
its first event of content (`first_content.py`): an engine sends comments and `response.created`
before it has computed anything, so these do not predict the outcome. They are held back, up to a
bound.

What may take over. Until the decode leg's answer has started, P's failure or refusal ends the
attempt, and any other answer may replace it. After that P's leg has no influence. Only an answer
that was recorded in full and can be reproduced may be continued, by another instance's answer that
equals the delivered part. Nothing replaces a whole answer that the client has, and no second
status, header or role is ever sent in a stream.

Blame. A failure counts against its instance at once, except a 5xx: the request itself may be its
cause. That one counts when another instance has answered the request (`_blame_suspects`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...fleet.grants import MARGIN_SECONDS, REQUEST_KEY, VERSION, Grant, mint, new_transfer
from ..http.error_replies import RequestFailed
from ..http.headers import RANK_HEADER, end_to_end, find
from ..http.reasons import Reason
from ..http.server import Connection, HttpRequest
from ..http.sse import DONE, ERROR
from ..http.upstream import HOLD_BYTES, ConnectionPool, Unreachable, UpstreamResponse, pool_of
from ..membership.discovery import NIXL_PREFILL, card_in, engine_in, params_in
from ..routing.fleet import Fleet, Instance
from ..routing.pairing import (
    Choice,
    InstancePair,
    choose,
    choose_decode,
    choose_spill,
    prefers_aggregated,
    record_choice,
)
from ..routing.policies import Policy, RoutingQuery
from ..routing.prefill_queue import PrefillQueue, QueueFull, QueueTimeout
from ..settings import ProxySettings
from ..telemetry.meter import TrafficCounters
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import Tracing
from .bodies import Body
from .completeness import END_MARKS, CompletenessCheck, doubtful
from .failover import (
    CHARGED_REASONS,
    DEATH_REASONS,
    Alternatives,
    AttemptHistory,
    NextStep,
    RetryBudget,
    next_step,
)
from .first_content import ContentState, FirstContentDetector
from .forward import Forwarder
from .streams import StreamRecorder, aborted, engine_failed, failure_in

log = logging.getLogger(__name__)

# After P's refusal, the time in which D may refuse too: D's refusal is about the client's request,
# P's about its leg.
SECOND_WORD_SECONDS = 0.2
SESSION_HEADER = b"x-session-id"
_REQUEST_ID_HEADER = b"x-request-id"
# How often a request's size may be contained in the events before the first content: two of them
# repeat parts of the request.
MAX_ECHOES = 4
MAX_ERROR_BYTES = 500  # bytes of an error event that are passed on to a client

LegName = Literal["prefill", "decode"]
AttemptPlan = InstancePair | Instance  # both legs, or a decode instance alone


@dataclass(slots=True, frozen=True)
class AttemptFailure:
    """A leg failed in a way in which another instance may succeed."""

    leg: LegName
    reason: Reason
    detail: str
    answer: UpstreamResponse | None = None  # the instance's answer, for the client at the end


class SuspectLeg(NamedTuple):
    """An instance that answered 5xx: to blame if another instance answers the same request."""

    instance: Instance
    started_at: float
    ended_at: float


@dataclass(slots=True)
class RequestContext:
    """One client request and the state of its attempts.  Times: the event loop's clock."""

    request: HttpRequest
    client: Connection
    meter: TrafficCounters
    body: Body
    started_at: float
    query: RoutingQuery = field(default_factory=lambda: RoutingQuery(0))
    # A pair whose place at P is taken, and not handed to a prefill leg yet.
    unstarted_pair: InstancePair | None = None
    prefill_task: asyncio.Task[UpstreamResponse | AttemptFailure] | None = None
    decode: Instance | None = None  # counts this request as in flight
    history: AttemptHistory = field(default_factory=AttemptHistory)
    failed_instances: list[Instance] = field(default_factory=list)  # not tried again
    suspects: list[SuspectLeg] = field(default_factory=list)
    answers: list[UpstreamResponse] = field(default_factory=list)  # to be closed
    recorder: StreamRecorder | None = None  # once a stream was started at the client


class Relay:
    """Runs requests of generation on a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        pools: dict[str, ConnectionPool],
        prefill_queue: PrefillQueue,
        metrics: Metrics,
        settings: ProxySettings,
    ) -> None:
        """`pools`: connections by instance URL."""
        self.fleet = fleet
        self.policy = policy
        self.metrics = metrics
        self.tracing = Tracing(settings.traces_endpoint)
        self._pools = pools
        self._prefill_queue = prefill_queue
        self._key = settings.key
        self._patience = settings.prefill_timeout
        self._concurrency = settings.prefill_concurrency
        self._min_prompt_bytes = settings.min_prompt_bytes
        self._spill = settings.spill
        self._retry_budget = RetryBudget()
        self._completeness = CompletenessCheck(pools, next(iter(settings.api_keys), ""))
        self.forwarder = Forwarder(fleet, policy, pools, self._completeness)

    async def generate(self, context: RequestContext) -> int:
        """Serves a request until its last byte is sent; returns the status that the client got.

        In every case no leg runs and no place is taken afterwards. Raises RequestFailed for
        failures that the client has not been answered.
        """
        request = context.request
        session = find(request.headers, SESSION_HEADER)
        context.query = context.body.routing_query(session, self.policy.name == "prefix_aware")
        context.query.rank = find(request.headers, RANK_HEADER)
        context.query.path = request.path
        self._retry_budget.earn()
        try:
            plan = await self._first_plan(context)
            while True:
                outcome = await self._attempt(context, plan)
                if isinstance(outcome, UpstreamResponse):
                    server = _answering_instance(context, plan)
                    result = await self._deliver(context, server, outcome)
                    if isinstance(result, int):
                        self._record_answer(context, result)
                        return result
                    outcome = result
                following = self._next_plan(context, plan, outcome)
                if following is None:
                    return await self._give_up(context, outcome)
                self._end_attempt(context)
                plan = following
                if isinstance(plan, InstancePair):
                    plan.take(self.fleet, self.policy, _now())
                    context.unstarted_pair = plan
                    context.decode = plan.decode
        finally:
            self._end_attempt(context)

    # -- before the first attempt ------------------------------------------------------------------

    async def _first_plan(self, context: RequestContext) -> AttemptPlan:
        """Returns the instances of the first attempt, after a wait in the queue if necessary."""
        query = context.query
        # A client that names a rank means one of one instance: two legs cannot both honour that.
        if (
            context.body.aggregated_reason
            or query.rank
            or prefers_aggregated(self.fleet, self.policy, query, self._min_prompt_bytes)
        ):
            return self._any_decode(context)
        if self._spill:
            choice = choose(self.fleet, self.policy, self._concurrency, query, _now())
            if choice == "busy":
                idle = choose_spill(self.fleet, self.policy, _now(), query)
                if idle:
                    self.metrics.fell_back("prefill_full")
                    return idle
        return await self._wait_for_pair(context) or self._any_decode(context)

    async def _wait_for_pair(self, context: RequestContext) -> InstancePair | None:
        """Returns a pair with its places taken; None if no two instances fit."""
        try:
            pair = await self._prefill_queue.acquire(context.query, context.request.priority)
            context.unstarted_pair = pair
        except QueueFull as error:
            raise RequestFailed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise RequestFailed(503, str(error), retry_after=5) from None
        finally:
            waited = _now() - context.started_at
            self.metrics.queue.observe(waited)
            context.meter.queue_seconds = waited
        if pair:
            context.decode = pair.decode
        elif self.fleet.with_role("prefill"):
            self.metrics.fell_back("no_pair")
        return pair

    # -- after an attempt --------------------------------------------------------------------------

    def _record_answer(self, context: RequestContext, status: int) -> None:
        """Notes for bidirectional KV reuse that D has the KV of prompt and answer."""
        if status == 200 and context.decode and not context.body.one_token:
            self.policy.record_answer(context.query, context.decode)

    def _end_attempt(self, context: RequestContext) -> None:
        """Ends all legs of the request, and gives back its places."""
        if context.prefill_task:
            context.prefill_task.cancel()
            context.prefill_task = None
        self._release_prefill_place(context)
        decode = context.decode
        context.decode = None
        if decode:
            decode.remove_request(context.query.prompt_bytes)
        for answer in context.answers:
            answer.close()
        context.answers.clear()

    def _release_prefill_place(self, context: RequestContext) -> None:
        pair = context.unstarted_pair
        context.unstarted_pair = None
        if pair:
            self._prefill_queue.release(pair)

    # -- one attempt -------------------------------------------------------------------------------

    async def _attempt(
        self, context: RequestContext, plan: AttemptPlan
    ) -> UpstreamResponse | AttemptFailure:
        """Returns an answer that has started, or the failure of a leg."""
        context.history.attempts += 1
        if isinstance(plan, Instance):
            return await self._run_aggregated(context, plan)
        context.history.pair_attempts += 1
        context.request.mode = "disaggregated"
        context.meter.paired(plan.prefill.url, plan.decode.url)
        if context.body.one_token:
            # P has the token when it has the prompt, so that no KV needs to move.
            return await self._prefill_leg(context, plan, context.body.aggregated_body())
        if plan.prefill.connector == "nixl":
            return await self._run_in_turn(context, plan)
        return await self._run_concurrently(context, plan)

    async def _run_aggregated(
        self, context: RequestContext, instance: Instance
    ) -> UpstreamResponse | AttemptFailure:
        """Runs the request on a decode instance alone."""
        if not context.client.started:
            context.request.mode = "whole"
            context.meter.paired("", instance.url)
        record_choice(self.fleet, self.policy, context.query, _now(), instance)
        instance.add_request(context.query.prompt_bytes)
        context.decode = instance
        instance.aggregated_requests += 1
        try:
            body = context.body.aggregated_body()
            return await self._send_leg(context, "decode", instance, body)
        finally:
            instance.aggregated_requests -= 1

    async def _run_in_turn(
        self, context: RequestContext, pair: InstancePair
    ) -> UpstreamResponse | AttemptFailure:
        """Runs NixlConnector's two legs: P's answer has the parameters of D's leg."""
        answer = await self._prefill_leg(context, pair, context.body.prefill_body(NIXL_PREFILL))
        if isinstance(answer, AttemptFailure) or answer.status != 200:
            return answer
        self._release_prefill_place(context)
        params = params_in(await answer.read())
        body = context.body.decode_body(params) if params else context.body.aggregated_body()
        return await self._send_leg(context, "decode", pair.decode, body)

    async def _run_concurrently(
        self, context: RequestContext, pair: InstancePair
    ) -> UpstreamResponse | AttemptFailure:
        """Runs both legs at once; returns D's answer, or the first failure or refusal."""
        prefill_grant, decode_grant = self._mint_grants(pair)
        prefill_body = context.body.prefill_body({REQUEST_KEY: prefill_grant})
        decode_body = context.body.decode_body({REQUEST_KEY: decode_grant})
        prefill = asyncio.create_task(self._verified_prefill_leg(context, pair, prefill_body))
        context.prefill_task = prefill
        # From here on the end of the prefill leg gives back the place at P.
        context.unstarted_pair = None
        prefill.add_done_callback(lambda _: self._prefill_queue.release(pair))
        decode = asyncio.create_task(self._send_leg(context, "decode", pair.decode, decode_body))
        try:
            await _first_of(prefill, decode)
            if decode.done():
                return await decode
            prefill_outcome = prefill.result()
            if isinstance(prefill_outcome, AttemptFailure):
                return prefill_outcome
            if prefill_outcome.status != 200:
                await asyncio.wait((decode,), timeout=SECOND_WORD_SECONDS)
                if decode.done():
                    refusal = decode.result()
                    if isinstance(refusal, UpstreamResponse) and 400 <= refusal.status < 500:
                        return refusal
                return prefill_outcome
            return await decode
        finally:
            decode.cancel()

    def _mint_grants(self, pair: InstancePair) -> tuple[str, str]:
        """Returns the signed grants of the prefill leg and of the decode leg."""
        prefill_engine = pair.prefill.engine
        decode_engine = pair.decode.engine
        if not prefill_engine or not decode_engine:
            raise TypeError("a pair without engines")  # pairs are made of probed engines only
        transfer = new_transfer()
        # The transfer of bidirectional KV reuse, from D to P.
        reuse_transfer = new_transfer() if pair.bidirectional_reuse else None
        lifetime = self._patience + MARGIN_SECONDS
        prefill_grant = Grant(
            VERSION,
            "prefill",
            transfer,
            prefill_engine.incarnation,
            decode_engine.workers if reuse_transfer else [],
            self._patience,
            reuse_transfer,
            pair.prefill.engine_clock_after(lifetime, _now()),
        )
        decode_grant = Grant(
            VERSION,
            "decode",
            transfer,
            decode_engine.incarnation,
            prefill_engine.workers,
            self._patience,
            reuse_transfer,
            pair.decode.engine_clock_after(lifetime, _now()),
        )
        return mint(self._key, prefill_grant), mint(self._key, decode_grant)

    # -- one leg -----------------------------------------------------------------------------------

    async def _prefill_leg(
        self, context: RequestContext, pair: InstancePair, body: bytes
    ) -> UpstreamResponse | AttemptFailure:
        """Runs a prefill leg within the patience."""
        instance = pair.prefill
        started_at = _now()
        try:
            async with asyncio.timeout(self._patience):
                answer = await self._send_leg(context, "prefill", instance, body)
        except TimeoutError:
            detail = f"no answer within {self._patience:g} s"
            return self._leg_failure(context, "prefill", instance, "timeout", detail, started_at)
        if isinstance(answer, UpstreamResponse) and answer.status == 429:
            context.failed_instances.append(instance)
            return AttemptFailure("prefill", "busy", "it answered 429", answer)
        if isinstance(answer, UpstreamResponse) and answer.status == 200:
            seconds = _now() - started_at
            self.metrics.prefill_leg.observe(seconds)
            self.tracing.prefilled(context.request)
            context.meter.prefill_done(seconds)
        return answer

    async def _verified_prefill_leg(
        self, context: RequestContext, pair: InstancePair, body: bytes
    ) -> UpstreamResponse | AttemptFailure:
        """Runs a prefill leg, and verifies that the process named in D's grant answered."""
        answer = await self._prefill_leg(context, pair, body)
        if isinstance(answer, UpstreamResponse) and answer.status == 200:
            problem = self._identity_problem(context, pair, await answer.read())
            if problem:
                return AttemptFailure("prefill", "stale", problem)
        return answer

    def _identity_problem(self, context: RequestContext, pair: InstancePair, content: bytes) -> str:
        """Returns why a prefill leg's answer is of no use for D; "" if it is."""
        instance = pair.prefill
        engine = engine_in(content)
        card = card_in(content)
        if card:
            instance.set_clock(card.clock, _now())
        if card and not engine:
            # Its clock may differ from what the proxy assumed. D's may too, and D reports nothing.
            instance.needs_probe = True
            pair.decode.needs_probe = True
            return "the prefill instance has refused its grant"
        if not engine or engine.rank != instance.rank:
            # An old version of vLLM at a new endpoint ignores grants; or it was restarted without
            # the connector, or with more ranks.
            instance.unsupported_paths.add(context.request.path)
            instance.needs_probe = True
            if engine:
                return "another data parallel rank answered"
            return "the prefill instance says nothing of KV transfers"
        if not instance.engine or engine.incarnation != instance.engine.incarnation:
            instance.on_probe_answered(instance.model, engine, instance.models)
            instance.needs_probe = True
            return "the prefill instance was restarted"
        return ""

    async def _send_leg(
        self, context: RequestContext, leg: LegName, instance: Instance, body: bytes
    ) -> UpstreamResponse | AttemptFailure:
        """Sends a leg; returns when its answer has started (a stream) or is complete (all else)."""
        answer: UpstreamResponse | None = None
        keep_answer = False
        started_at = _now()
        instance.step_monitor.on_request_sent(started_at)
        try:
            headers = self.tracing.leg(context.request, instance.role, instance.url)
            answer = await pool_of(self._pools, instance.url).send(
                "POST", context.request.target, headers, body
            )
            error_event = await self._until_started(context, answer)
            keep_answer = True
        except Unreachable as error:
            detail = str(error)
            return self._leg_failure(context, leg, instance, error.reason, detail, started_at)
        finally:
            if answer and not keep_answer:
                answer.close()
        context.answers.append(answer)
        problem = await self._answer_problem(context, leg, instance, answer, error_event)
        if problem:
            reason, detail, error_answer = problem
            return self._leg_failure(
                context, leg, instance, reason, detail, started_at, error_answer
            )
        instance.on_leg_succeeded(_now())
        if answer.status == 200:
            instance.step_monitor.on_step_seen(_now())
            self._blame_suspects(context)
        return answer

    async def _answer_problem(
        self,
        context: RequestContext,
        leg: LegName,
        instance: Instance,
        answer: UpstreamResponse,
        error_event: bytes,
    ) -> tuple[Reason, str, UpstreamResponse | None] | None:
        """Returns (reason, detail, answer for the client at the end) if an answer is a failure.

        None for a good answer, and for a refusal of the client's request.
        """
        if error_event:
            return failure_in(error_event), _error_detail(error_event), None
        if answer.status >= 500 or engine_failed(answer.peek()):
            return failure_in(answer.peek()), f"it answered {answer.status}", answer
        if await self._is_aborted(context, leg, instance, answer):
            return "died", "it is being stopped", None
        if not 200 <= answer.status < 500:
            return "garbled", f"it answered {answer.status}", answer
        return None

    async def _until_started(self, context: RequestContext, answer: UpstreamResponse) -> bytes:
        """Waits until an answer has started or is complete; returns an error event at its start."""
        if answer.status != 200 or not answer.is_stream:
            await answer.read()
            return b""
        if find(answer.headers, b"content-encoding"):  # compressed: events cannot be parsed
            await answer.first_byte()
            return b""
        detector = FirstContentDetector(context.request.path)
        max_held_bytes = HOLD_BYTES + MAX_ECHOES * len(context.request.body)
        if not await answer.read_until(
            lambda data: detector.feed(data) is not ContentState.NOT_YET, max_held_bytes
        ):
            detector.feed(b"\n\n")  # the end of the body ends its last event
            if detector.state is ContentState.NOT_YET:
                raise Unreachable("died", "the stream ended before its first content")
        return detector.failure

    async def _is_aborted(
        self, context: RequestContext, leg: LegName, instance: Instance, answer: UpstreamResponse
    ) -> bool:
        """Whether a stopping engine aborted this answer; of a stream, its beginning is judged."""
        path = context.request.path
        content = answer.peek()
        if aborted(content):
            return True
        if answer.status != 200 or answer.is_stream:
            return False
        # A whole message has a stop reason; an aborted one has not.
        is_message = path == "/v1/messages" and b'"type":"message"' in content
        if is_message and b'"stop_reason":' not in content:
            return True
        for_client = leg == "decode" or context.body.one_token
        if not for_client or not doubtful(path, content):
            return False
        return not await self._completeness.is_engine_running(instance)

    def _leg_failure(
        self,
        context: RequestContext,
        leg: LegName,
        instance: Instance,
        reason: Reason,
        detail: str,
        started_at: float,
        answer: UpstreamResponse | None = None,
    ) -> AttemptFailure:
        """Records the failure of a leg that was sent at `started_at`, and returns it."""
        log.warning(
            "relay: request %s: %s failed a %s leg: %s; another attempt follows, if one is left",
            # The client may have chosen it.
            find(context.request.headers, _REQUEST_ID_HEADER)[:128].decode("ascii", "replace"),
            instance.url,
            leg,
            detail,
        )
        context.failed_instances.append(instance)
        if reason == "5xx":
            # Perhaps every instance answers this request so: see `_blame_suspects`.
            context.suspects.append(SuspectLeg(instance, started_at, _now()))
        elif reason != "diverged":
            instance.on_leg_failed(reason, _now(), started_at)
        return AttemptFailure(leg, reason, detail, answer)

    def _blame_suspects(self, context: RequestContext) -> None:
        """Counts the 5xx answers as failures: another instance answered the same request."""
        for instance, started_at, ended_at in context.suspects:
            instance.on_leg_failed("5xx", _now(), started_at, ended_at)
        context.suspects.clear()

    # -- after a failure ---------------------------------------------------------------------------

    def _next_plan(
        self, context: RequestContext, plan: AttemptPlan, failure: AttemptFailure
    ) -> AttemptPlan | None:
        """Returns the instances of the next attempt; None to give up."""
        now = _now()
        history = context.history
        history.deaths += failure.reason in DEATH_REASONS
        history.answer_started = context.client.started
        history.answer_resumable = bool(context.recorder and context.recorder.resumable)
        avoid = context.failed_instances
        pair: Choice = "none"
        if isinstance(plan, InstancePair):
            decode = plan.decode
            pair = choose(self.fleet, self.policy, self._concurrency, context.query, now, avoid)
        else:
            decode = plan
        other_decode = choose_decode(self.fleet, self.policy, now, avoid, context.query)
        alternatives = Alternatives(
            isinstance(pair, InstancePair), decode.up, other_decode is not None
        )
        step = next_step(failure.leg, failure.reason, history, alternatives)
        if step is NextStep.GIVE_UP or (
            failure.reason in CHARGED_REASONS and not self._retry_budget.spend(now)
        ):
            # "busy": the client is asked to come back, and nothing has failed.
            if failure.reason != "busy":
                self.metrics.failed_over("none")
            return None
        self.metrics.failed_over(step.value)
        self.metrics.fell_back(_fallback_reason(failure, history))
        if step is NextStep.PAIR and isinstance(pair, InstancePair):
            return pair
        return decode if step is NextStep.SAME_DECODE else other_decode

    async def _give_up(self, context: RequestContext, failure: AttemptFailure) -> int:
        """Answers the client with the failure: with the instance's own answer, if it sent one.

        Returns the status, or raises RequestFailed.
        """
        if context.client.started:
            recorder = context.recorder
            # The error event of a second answer has that answer's ids, unless it is a plain one.
            if recorder and recorder.error_event:
                error_event = recorder.error_event
                if not recorder.continued or error_event.startswith(ERROR):
                    context.client.write(error_event + b"\n\n" + DONE)
                    context.client.end()
                    return 500
        elif failure.answer:
            return await self._deliver_whole(context, failure.answer)
        raise RequestFailed(502, f"the {failure.leg} instance failed: {failure.detail}")

    def _any_decode(self, context: RequestContext) -> Instance:
        """Returns a decode instance for an aggregated request; raises RequestFailed."""
        decode = choose_decode(
            self.fleet, self.policy, _now(), context.failed_instances, context.query
        )
        if not decode:
            raise RequestFailed(503, "no decode instance can be used at the moment", retry_after=5)
        return decode

    # -- delivery ----------------------------------------------------------------------------------

    async def _deliver(
        self, context: RequestContext, server: Instance, answer: UpstreamResponse
    ) -> int | AttemptFailure:
        """Sends a started answer of `server` to the client; returns its status, or its failure."""
        if answer.status == 200 and answer.is_stream:
            return await self._deliver_stream(context, server, answer)
        if context.client.started:
            # The client has a stream; this is a refusal, or an answer of another kind.
            detail = f"another instance answered {answer.status}"
            return AttemptFailure("decode", "diverged", detail)
        return await self._deliver_whole(context, answer)

    async def _deliver_whole(self, context: RequestContext, answer: UpstreamResponse) -> int:
        content = await answer.read()
        context.client.answer(answer.status, end_to_end(answer.headers), content)
        await context.client.drained()
        return answer.status

    async def _deliver_stream(
        self, context: RequestContext, server: Instance, answer: UpstreamResponse
    ) -> int | AttemptFailure:
        """Sends a stream, or continues the one that the client has."""
        client = context.client
        compressed = bool(find(answer.headers, b"content-encoding"))
        recorder = context.recorder
        if not recorder:
            client.start(answer.status, end_to_end(answer.headers))
            recorder = context.recorder = self._make_recorder(context, server, compressed)
        client.on_pause = answer.pause_reading
        sink = recorder.start_answer(answer.reject, compressed)
        try:
            await answer.pipe(sink, paused=client.paused)
        except Unreachable as error:
            # A connection that broke after the last event does no harm.
            if not recorder.is_complete:
                detail = str(error)
                return self._leg_failure(
                    context, "decode", server, error.reason, detail, answer.sent_at
                )
        else:
            if recorder.held and not await self._completeness.is_engine_running(server):
                detail = "it is being stopped"
                return self._leg_failure(context, "decode", server, "died", detail, answer.sent_at)
            if not recorder.finish():
                return AttemptFailure("decode", "diverged", "the answer made again is shorter")
        client.end()
        await client.drained()
        return answer.status

    def _make_recorder(
        self, context: RequestContext, server: Instance, compressed: bool
    ) -> StreamRecorder:
        """Returns the writer of a client's stream; it records if another D could continue it."""
        path = context.request.path
        record = context.body.reproducible and not compressed
        record = record and any(d is not server for d in self.fleet.with_role("decode"))
        return StreamRecorder(context.client.write, record, END_MARKS.get(path, b""), path)


def _error_detail(event: bytes) -> str:
    """Returns one line for people about an error event."""
    return f"it began with an error: {event[:MAX_ERROR_BYTES].decode(errors='replace')}"


def _fallback_reason(failure: AttemptFailure, history: AttemptHistory) -> str:
    """Returns the label of the metric of fallbacks."""
    if failure.leg == "prefill":
        return f"prefill_{failure.reason}"
    return "decode_in_stream" if history.answer_started else "decode_failed"


def _answering_instance(context: RequestContext, plan: AttemptPlan) -> Instance:
    """Returns the instance that answers the client in this attempt."""
    if isinstance(plan, Instance):
        return plan
    return plan.prefill if context.body.one_token else plan.decode


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Waits until one of the tasks is done: `asyncio.wait` at two thirds of its time."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_done(_: asyncio.Task[Any]) -> None:
        if not done.done():
            done.set_result(None)

    for task in tasks:
        task.add_done_callback(on_done)
    await done


def _now() -> float:
    return asyncio.get_running_loop().time()
