"""One request's journey, told in one place.

  queue -> both legs at once -> the decode leg's answer, as it comes, to the client
  either leg refuses (4xx) -> that answer goes to the client, the other leg is cancelled
  ... P with a 429         -> another P that has room, first
  either leg fails         -> the next step of the ladder in `failover.py`: other instances, the same request
  ... in a stream          -> the same, and what the client has already is not sent again (`continuation.py`)
  nothing is left          -> the last failure as an answer, or as an event in the stream and [DONE]
  client left, or out of time: both legs are cancelled

A decode answer has begun when it is complete, or a stream's first event of content is here
(`first_content.py`). What an engine sends before, as comments and `response.created`, says nothing
about how it ends: that is held back, up to a bound, so that until then P's failure or refusal
counts, and any other answer may take its place.
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
    better_whole,
    choose,
    choose_decode,
    chosen,
    spill,
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
    step,
)
from .first_content import ContentState, FirstContentDetector
from .forward import Forwarder
from .streams import StreamRecorder, aborted, engine_failed, failure_in

log = logging.getLogger(__name__)

# seconds in which D may refuse too: its words are about what the client asked, P's about its leg
SECOND_WORD_SECONDS = 0.2
SESSION_HEADER = b"x-session-id"
# how often a request's size may stand in what an engine sends before its content: two events repeat
# parts of it
MAX_ECHOES = 4
MAX_ERROR_BYTES = 500  # bytes of an error event that a client is told


@dataclass(slots=True, frozen=True)
class AttemptFailure:
    """A leg failed in a way that another instance might not."""

    leg: Literal["prefill", "decode"]
    reason: Reason
    detail: str
    answer: UpstreamResponse | None = None  # what it answered instead


Plan = InstancePair | Instance  # both legs, or a decode instance alone


class SuspectLeg(NamedTuple):
    """An instance that answered 5xx: guilty if another does better."""

    instance: Instance
    began: float  # the leg,
    ended: float


@dataclass(slots=True)
class RequestContext:
    """A request on its way."""

    request: HttpRequest
    client: Connection
    meter: TrafficCounters
    body: Body
    began: float
    ask: RoutingQuery = field(default_factory=lambda: RoutingQuery(0))
    place: InstancePair | None = None  # at a prefill instance, not yet handed to a prefill leg
    prefill: asyncio.Task[UpstreamResponse | AttemptFailure] | None = None
    decode: Instance | None = None  # counts it as in flight
    past: AttemptHistory = field(default_factory=AttemptHistory)
    failed: list[Instance] = field(default_factory=list)  # not asked again
    suspects: list[SuspectLeg] = field(default_factory=list)
    answers: list[UpstreamResponse] = field(default_factory=list)
    tape: StreamRecorder | None = None


class Relay:
    """Runs requests on a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        pools: dict[str, ConnectionPool],
        admission: PrefillQueue,
        metrics: Metrics,
        settings: ProxySettings,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.metrics = metrics
        self.tracing = Tracing(settings.traces_endpoint)
        self._pools = pools
        self._admission = admission
        self._key = settings.key
        self._patience = settings.patience
        self._concurrency = settings.prefill_concurrency
        self._threshold = settings.min_prompt_bytes
        self._spill = settings.spill
        self._budget = RetryBudget()
        self._vouching = CompletenessCheck(pools, next(iter(settings.api_keys), ""))
        self.passing = Forwarder(fleet, policy, pools, self._vouching)

    async def generate(self, trip: RequestContext) -> int:
        """The whole journey; the status it ended with. Afterwards nothing of the request is left
        anywhere.
        """
        trip.ask = trip.body.ask(
            find(trip.request.headers, SESSION_HEADER), self.policy.name == "prefix_aware"
        )
        trip.ask.rank = find(trip.request.headers, RANK_HEADER)
        trip.ask.path = trip.request.path
        self._budget.earn()
        try:
            plan = await self._first(trip)
            while True:
                outcome = await self._attempt(trip, plan)
                if isinstance(outcome, UpstreamResponse):
                    result = await self._deliver(trip, _server(trip, plan), outcome)
                    if isinstance(result, int):
                        self._answered(trip, result)
                        return result
                    outcome = result
                following = self._next(trip, plan, outcome)
                if following is None:
                    return await self._give_up(trip, outcome)
                self._leave(trip)
                plan = following
                if isinstance(plan, InstancePair):
                    plan.take(self.fleet, self.policy, _now())
                    trip.place, trip.decode = plan, plan.decode
        finally:
            self._leave(trip)

    async def _first(self, trip: RequestContext) -> Plan:
        """How a request is to be served if nothing goes wrong."""
        # A client that names a rank means one of one instance, which two legs cannot both honour.
        if (
            trip.body.whole
            or trip.ask.rank
            or better_whole(self.fleet, self.policy, trip.ask, self._threshold)
        ):
            return self._other(trip)
        full = (
            self._spill
            and choose(self.fleet, self.policy, self._concurrency, trip.ask, _now()) == "busy"
        )
        if full and (idle := spill(self.fleet, self.policy, _now(), trip.ask)):
            self.metrics.fell_back("prefill_full")
            return idle
        return await self._queue(trip) or self._other(trip)

    async def _queue(self, trip: RequestContext) -> InstancePair | None:
        try:
            trip.place = pair = await self._admission.acquire(trip.ask, trip.request.priority)
        except QueueFull as error:
            raise RequestFailed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise RequestFailed(503, str(error), retry_after=5) from None
        finally:
            self.metrics.queue.observe(waited := _now() - trip.began)
            trip.meter.queue_seconds = waited
        if pair:
            trip.decode = pair.decode
        elif self.fleet.of("prefill"):
            self.metrics.fell_back("no_pair")
        return pair

    def _answered(self, trip: RequestContext, status: int) -> None:
        if status == 200 and trip.decode and not trip.body.one_token:
            self.policy.answered(trip.ask, trip.decode)

    def _leave(self, trip: RequestContext) -> None:
        """End whatever runs for the request, and give back its places."""
        if trip.prefill:
            trip.prefill.cancel()
            trip.prefill = None
        self._release(trip)
        decode, trip.decode = trip.decode, None
        if decode:
            decode.leave(trip.ask.size)
        for answer in trip.answers:
            answer.close()
        trip.answers.clear()

    def _release(self, trip: RequestContext) -> None:
        """Give back the place at the prefill instance."""
        place, trip.place = trip.place, None
        if place:
            self._admission.release(place)

    # -- one attempt -------------------------------------------------------------------------------

    async def _attempt(self, trip: RequestContext, plan: Plan) -> UpstreamResponse | AttemptFailure:
        """An answer to deliver, begun, or what went wrong."""
        trip.past.attempts += 1
        if isinstance(plan, Instance):
            return await self._alone(trip, plan)
        trip.past.pairs += 1
        trip.request.mode = "disaggregated"
        trip.meter.paired(plan.prefill.url, plan.decode.url)
        if trip.body.one_token:
            return await self._at_prefill(trip, plan)
        if plan.prefill.kind == "nixl":
            return await self._in_turn(trip, plan)
        return await self._both(trip, plan)

    async def _alone(
        self, trip: RequestContext, instance: Instance
    ) -> UpstreamResponse | AttemptFailure:
        """A decode instance serves all of it."""
        if not trip.client.started:
            trip.request.mode = "whole"
            trip.meter.paired("", instance.url)
        chosen(self.fleet, self.policy, trip.ask, _now(), instance)
        instance.enter(trip.ask.size)
        trip.decode = instance
        instance.whole += 1
        try:
            return await self._ask(trip, "decode", instance, trip.body.plain())
        finally:
            instance.whole -= 1

    async def _at_prefill(
        self, trip: RequestContext, pair: InstancePair
    ) -> UpstreamResponse | AttemptFailure:
        """One token is wanted: the prefill instance has it when it has the prompt, and no KV needs
        to move.
        """
        return await self._leg(trip, pair, trip.body.plain())

    async def _in_turn(
        self, trip: RequestContext, pair: InstancePair
    ) -> UpstreamResponse | AttemptFailure:
        """NixlConnector's two legs: what P answers is what D is asked with."""
        answer = await self._leg(trip, pair, trip.body.prefill(NIXL_PREFILL))
        if isinstance(answer, AttemptFailure) or answer.status != 200:
            return answer
        self._release(trip)
        params = params_in(await answer.read())
        return await self._ask(
            trip, "decode", pair.decode, trip.body.decode(params) if params else trip.body.plain()
        )

    async def _both(
        self, trip: RequestContext, pair: InstancePair
    ) -> UpstreamResponse | AttemptFailure:
        """Both legs at once."""
        prefill_engine, decode_engine = pair.prefill.engine, pair.decode.engine
        if not prefill_engine or not decode_engine:  # no pair is made of such
            raise TypeError("a pair without engines")
        transfer, back = new_transfer(), new_transfer() if pair.reads_back else None
        there = decode_engine.workers if back else []
        p_end, d_end = (
            each.clock_after(self._patience + MARGIN_SECONDS, _now())
            for each in (pair.prefill, pair.decode)
        )
        for_p = Grant(
            VERSION,
            "prefill",
            transfer,
            prefill_engine.incarnation,
            there,
            self._patience,
            back,
            p_end,
        )
        of_p = prefill_engine.workers
        for_d = Grant(
            VERSION,
            "decode",
            transfer,
            decode_engine.incarnation,
            of_p,
            self._patience,
            back,
            d_end,
        )
        prefill_body = trip.body.prefill({REQUEST_KEY: mint(self._key, for_p)})
        decode_body = trip.body.decode({REQUEST_KEY: mint(self._key, for_d)})
        trip.prefill = prefill = asyncio.create_task(self._prefill(trip, pair, prefill_body))
        trip.place = None
        prefill.add_done_callback(lambda _: self._admission.release(pair))
        decode = asyncio.create_task(self._ask(trip, "decode", pair.decode, decode_body))
        try:
            await _first_of(prefill, decode)
            if not decode.done():
                outcome = prefill.result()
                if isinstance(outcome, AttemptFailure):
                    return outcome
                if outcome.status != 200:
                    await asyncio.wait((decode,), timeout=SECOND_WORD_SECONDS)
                    own = decode.result() if decode.done() else None
                    return (
                        own
                        if isinstance(own, UpstreamResponse) and 400 <= own.status < 500
                        else outcome
                    )
            return await decode
        finally:
            decode.cancel()

    async def _leg(
        self, trip: RequestContext, pair: InstancePair, body: bytes
    ) -> UpstreamResponse | AttemptFailure:
        """A prefill leg."""
        began = _now()
        try:
            async with asyncio.timeout(self._patience):
                answer = await self._ask(trip, "prefill", pair.prefill, body)
        except TimeoutError:
            words = f"no answer within {self._patience:g} s"
            return self._failure(trip, "prefill", pair.prefill, "timeout", words, began)
        if isinstance(answer, UpstreamResponse) and answer.status == 429:
            trip.failed.append(pair.prefill)
            return AttemptFailure("prefill", "busy", "it answered 429", answer)
        if isinstance(answer, UpstreamResponse) and answer.status == 200:
            self.metrics.prefill_leg.observe(seconds := _now() - began)
            self.tracing.prefilled(trip.request)
            trip.meter.prefill_done(seconds)
        return answer

    async def _prefill(
        self, trip: RequestContext, pair: InstancePair, body: bytes
    ) -> UpstreamResponse | AttemptFailure:
        """The prefill leg. A success is an answer of the very process that the decode leg was told
        to read from.
        """
        instance = pair.prefill
        answer = await self._leg(trip, pair, body)
        if isinstance(answer, UpstreamResponse) and answer.status == 200:
            content = await answer.read()
            engine = engine_in(content)
            if card := card_in(content):
                instance.tells_clock(card.clock, _now())
            if (
                card and not engine
            ):  # if our notion of its clock is wrong, so may be that of D's, which says nothing
                instance.needs_probe = pair.decode.needs_probe = True
                return AttemptFailure(
                    "prefill", "stale", "the prefill instance has refused its grant"
                )
            if not engine or engine.rank != instance.rank:
                # As old versions of vLLM at new endpoints, or it was restarted without the
                # connector, or with more ranks.
                instance.deaf.add(trip.request.path)
                instance.needs_probe = True
                words = (
                    "another data parallel rank answered"
                    if engine
                    else "the prefill instance says nothing of KV transfers"
                )
                return AttemptFailure("prefill", "stale", words)
            if not instance.engine or engine.incarnation != instance.engine.incarnation:
                instance.probed(instance.model, engine, instance.models)
                instance.needs_probe = True
                return AttemptFailure("prefill", "stale", "the prefill instance was restarted")
        return answer

    async def _ask(
        self,
        trip: RequestContext,
        leg: Literal["prefill", "decode"],
        instance: Instance,
        body: bytes,
    ) -> UpstreamResponse | AttemptFailure:
        """Send a leg; return when its answer has begun (a stream) or is complete (all else)."""
        answer: UpstreamResponse | None = None
        good, began = False, _now()
        instance.stepping.asked(began)
        try:
            headers = self.tracing.leg(trip.request, instance.role, instance.url)
            answer = await pool_of(self._pools, instance.url).send(
                "POST", trip.request.target, headers, body
            )
            failed = await self._beginning(trip, answer)
            good = True
        except Unreachable as error:
            return self._failure(trip, leg, instance, error.reason, str(error), began)
        finally:
            if answer and not good:
                answer.close()
        trip.answers.append(answer)
        if failed:
            return self._failure(trip, leg, instance, failure_in(failed), _words(failed), began)
        if answer.status >= 500 or engine_failed(answer.peek()):
            reason = failure_in(answer.peek())
            return self._failure(
                trip, leg, instance, reason, f"it answered {answer.status}", began, answer
            )
        if await self._given_up(trip, leg, instance, answer):
            return self._failure(trip, leg, instance, "died", "it is being stopped", began)
        if not 200 <= answer.status < 500:
            return self._failure(
                trip, leg, instance, "garbled", f"it answered {answer.status}", began, answer
            )
        instance.leg_succeeded(_now())
        if answer.status == 200:
            instance.stepping.lived(_now())
            self._convict(trip)
        return answer

    async def _beginning(self, trip: RequestContext, answer: UpstreamResponse) -> bytes:
        """Return when an answer has begun or is complete; the error that a stream begins with."""
        if answer.status != 200 or not answer.is_stream:
            await answer.read()
            return b""
        if find(answer.headers, b"content-encoding"):  # its events cannot be seen
            await answer.first_byte()
            return b""
        beginning = FirstContentDetector(trip.request.path)
        most = HOLD_BYTES + MAX_ECHOES * len(trip.request.body)
        if not await answer.read_until(
            lambda data: beginning.feed(data) is not ContentState.NOT_YET, most
        ):
            beginning.feed(b"\n\n")  # an end of the body ends its last event
            if beginning.state is ContentState.NOT_YET:
                raise Unreachable("died", "the stream ended before its first content")
        return beginning.failure

    async def _given_up(
        self, trip: RequestContext, leg: str, instance: Instance, answer: UpstreamResponse
    ) -> bool:
        """Whether this is no answer, but what an engine that is being stopped leaves of one. Of a
        stream: its beginning.
        """
        path, said = trip.request.path, answer.peek()
        if aborted(said):
            return True
        if answer.status != 200 or answer.is_stream:
            return False
        if path == "/v1/messages" and b'"type":"message"' in said and b'"stop_reason":' not in said:
            return True
        for_client = leg == "decode" or trip.body.one_token
        return for_client and doubtful(path, said) and not await self._vouching.works(instance)

    def _failure(
        self,
        trip: RequestContext,
        leg: Literal["prefill", "decode"],
        instance: Instance,
        reason: Reason,
        detail: str,
        began: float,
        answer: UpstreamResponse | None = None,
    ) -> AttemptFailure:
        """Note that a leg, sent at `began`, has failed."""
        log.warning("%s failed a %s leg: %s", instance.url, leg, detail)
        trip.failed.append(instance)
        if reason == "5xx":  # perhaps this request gets a 500 from everybody
            trip.suspects.append(SuspectLeg(instance, began, _now()))
        elif reason != "diverged":
            instance.leg_failed(reason, _now(), began)
        return AttemptFailure(leg, reason, detail, answer)

    def _convict(self, trip: RequestContext) -> None:
        """The request is fine, so it was those instances that failed."""
        for instance, began, ended in trip.suspects:
            instance.leg_failed("5xx", _now(), began, ended)
        trip.suspects.clear()

    # -- after a failure ---------------------------------------------------------------------------

    def _next(self, trip: RequestContext, plan: Plan, failure: AttemptFailure) -> Plan | None:
        """The next attempt; None when there is none."""
        now, past = _now(), trip.past
        past.deaths += failure.reason in DEATH_REASONS
        past.begun = trip.client.started
        past.resumable = bool(trip.tape and trip.tape.resumable)
        at_p = failure.leg == "prefill"
        decode = plan.decode if isinstance(plan, InstancePair) else plan
        pair: Choice = "none"
        if isinstance(plan, InstancePair):
            pair = choose(self.fleet, self.policy, self._concurrency, trip.ask, now, trip.failed)
        other = choose_decode(self.fleet, self.policy, now, trip.failed, trip.ask)
        todo = step(
            failure.leg,
            failure.reason,
            past,
            Alternatives(isinstance(pair, InstancePair), decode.up, other is not None),
        )
        if todo is NextStep.GIVE_UP or (
            failure.reason in CHARGED_REASONS and not self._budget.spend(now)
        ):
            if (
                failure.reason != "busy"
            ):  # then the client is told to come back, and nothing has failed
                self.metrics.failed_over("none")
            return None
        self.metrics.failed_over(todo.value)
        why = (
            f"prefill_{failure.reason}"
            if at_p
            else "decode_in_stream"
            if past.begun
            else "decode_failed"
        )
        self.metrics.fell_back(why)
        if todo is NextStep.PAIR and isinstance(pair, InstancePair):
            return pair
        return decode if todo is NextStep.SAME else other

    async def _give_up(self, trip: RequestContext, failure: AttemptFailure) -> int:
        """Tell the client that it failed: in the instance's words if it said something."""
        if trip.client.started:
            tape = trip.tape
            if (
                tape and tape.error and (not tape.continued or tape.error.startswith(ERROR))
            ):  # others have that answer's ids
                trip.client.write(tape.error + b"\n\n" + DONE)
                trip.client.end()
                return 500
            raise RequestFailed(502, f"the {failure.leg} instance failed: {failure.detail}")
        if failure.answer:
            return await self._pass_on(trip, failure.answer)
        raise RequestFailed(502, f"the {failure.leg} instance failed: {failure.detail}")

    def _other(self, trip: RequestContext) -> Instance:
        decode = choose_decode(self.fleet, self.policy, _now(), trip.failed, trip.ask)
        if not decode:
            raise RequestFailed(503, "no decode instance can be used at the moment", retry_after=5)
        return decode

    # -- delivery ----------------------------------------------------------------------------------

    async def _deliver(
        self, trip: RequestContext, at: Instance, answer: UpstreamResponse
    ) -> int | AttemptFailure:
        """Give an answer to the client; its status, or how it broke off."""
        if answer.status == 200 and answer.is_stream:
            return await self._stream(trip, at, answer)
        if trip.client.started:  # with a stream; now a refusal came, or an answer of another kind
            return AttemptFailure(
                "decode", "diverged", f"another instance answered {answer.status}"
            )
        return await self._pass_on(trip, answer)

    async def _pass_on(self, trip: RequestContext, answer: UpstreamResponse) -> int:
        trip.client.answer(answer.status, end_to_end(answer.headers), await answer.read())
        await trip.client.drained()
        return answer.status

    async def _stream(
        self, trip: RequestContext, at: Instance, answer: UpstreamResponse
    ) -> int | AttemptFailure:
        client, tape = trip.client, trip.tape
        raw = bool(find(answer.headers, b"content-encoding"))  # its events cannot be seen
        if not tape:
            client.start(answer.status, end_to_end(answer.headers))
            keep = (
                trip.body.reproducible
                and not raw
                and any(d is not at for d in self.fleet.of("decode"))
            )
            path = trip.request.path
            trip.tape = tape = StreamRecorder(client.write, keep, END_MARKS.get(path, b""), path)
        client.on_pause = answer.pause_reading
        try:
            await answer.pipe(tape.source(answer.reject, raw), paused=client.paused)
        except Unreachable as error:
            if not tape.done:
                return self._failure(trip, "decode", at, error.reason, str(error), answer.sent_at)
        else:
            if tape.held and not await self._vouching.works(at):
                return self._failure(
                    trip, "decode", at, "died", "it is being stopped", answer.sent_at
                )
            if not tape.flush():
                return AttemptFailure("decode", "diverged", "the answer made again is shorter")
        client.end()
        await client.drained()
        return answer.status


def _words(event: bytes) -> str:
    """An error event in a line for people."""
    return f"it began with an error: {event[:MAX_ERROR_BYTES].decode(errors='replace')}"


def _server(trip: RequestContext, plan: Plan) -> Instance:
    """Whose answer the client gets."""
    if isinstance(plan, Instance):
        return plan
    return plan.prefill if trip.body.one_token else plan.decode


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Return when one of them is done: `asyncio.wait`, at a third less."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(_: asyncio.Task[Any]) -> None:
        if not done.done():
            done.set_result(None)

    for task in tasks:
        task.add_done_callback(tell)
    await done


def _now() -> float:
    return asyncio.get_running_loop().time()
