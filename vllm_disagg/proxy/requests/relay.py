"""Runs one request of generation from its queue to the last byte of its answer.

Legs. A leg is the request that the proxy sends to an instance for one client request:

    aggregated      one leg: D computes the prompt and the answer
    prefill only    one leg: P answers, because one token is asked and no KV needs to move
    in turn         NixlConnector: P's leg, then D's leg with the parameters of P's answer
    concurrent      this project's connector: both legs at once, D reads the KV while P computes

Course of a request:

    wait in the prefill queue -> attempt -> the decode leg's answer goes to the client as it comes

    D refuses its leg (4xx)       that answer goes to the client, P's leg is cancelled
    D answers 404                 another D alone may have what the request names
    P refuses its leg             D alone serves the request, or refuses it
    either answers 429            another instance that has room is tried first
    either leg fails              the next step of the ladder in `failover.py`: the same request on
                                  other instances
    ... after the answer started  the same, and the delivered part is not sent again
                                  (`continuation.py`)
    no step is left               the last failure as an answer, or as an event in the stream and
                                  [DONE]
    the client left, or timeout   both legs are cancelled

Files. `plans.py` chooses the instances of each attempt, from the queue or after a failure. The end
of an `Attempt` ends its legs and gives back its places. `legs.py` runs the legs, `leg_answers.py`
judges their answers, and `delivery.py` sends one of them to the client.

When an answer has started. A whole answer has started when it is complete. A stream has started at
its first event of content (`first_content.py`): an engine sends comments and `response.created`
before it has computed anything, so these do not predict the outcome. They are held back, up to a
bound. Some streams begin sooner, with P's first token (`first_token.py`); any D's answer then
continues them.

What may take over. Until the decode leg's answer has started, P's failure or refusal ends the
attempt. Any other answer may then replace it. Later P's leg has no influence. An answer may be
continued only if it was recorded in full and can be reproduced. The other instance's answer must
equal the delivered part. Nothing replaces a whole answer that the client has. No second status,
header or role is ever sent in a stream.

Blame. A failure counts against its instance at once, with these exceptions:

    5xx                     the request itself may be the cause: the failure counts when another
                            instance has answered the request (`RequestProgress.blame_suspects`)
    429                     does not count: the instance is full, not broken
    P refuses (4xx)         does not count
    another process is P    does not count, and the instance is probed
    a second answer differs does not count: the first one may be the wrong one
"""

from __future__ import annotations

from functools import partial

from ..http.bearer import AcceptedKeys
from ..http.connection import Connection
from ..http.connection_pool import ConnectionPool
from ..http.headers import RANK_HEADER, end_to_end
from ..http.request import HttpRequest
from ..http.upstream_response import UpstreamResponse
from ..routing.fleet import Fleet
from ..routing.policies import Policy
from ..routing.queues import Queues
from ..settings import ProxySettings
from ..telemetry.logs import FailedLegLog
from ..telemetry.meter import TrafficCounters
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import Tracing
from .attempt import Attempt, AttemptFailure, RequestContext, RequestProgress
from .bodies import Body
from .completeness import CompletenessCheck
from .delivery import Delivery
from .first_token import FirstTokens
from .forward import Forwarder
from .legs import LegRunner
from .plans import AttemptPlans

SESSION_HEADER = b"x-session-id"
DIFFERENT_FIRST_TOKEN = "its first token is not the one that the prefill instance made"


class Relay:
    """Runs requests of generation on a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        pools: dict[str, ConnectionPool],
        queues: Queues,
        metrics: Metrics,
        keys: AcceptedKeys,
        settings: ProxySettings,
    ) -> None:
        """`pools`: connections by instance URL."""
        self.fleet = fleet
        self.policy = policy
        self.metrics = metrics
        self.tracing = Tracing(settings.traces_endpoint)
        self._prefill_queue = queues.prefill
        self._failed_legs = FailedLegLog()
        completeness = CompletenessCheck(pools, keys)
        self.forwarder = Forwarder(fleet, policy, pools, completeness)
        self._plans = AttemptPlans(fleet, policy, queues, metrics, settings)
        self._legs = LegRunner(pools, completeness, metrics, self.tracing, settings)
        self._delivery = Delivery(fleet, completeness)
        self._first_tokens = FirstTokens(settings.first_token, metrics.first_token)

    async def generate(
        self,
        request: HttpRequest,
        client: Connection,
        meter: TrafficCounters,
        body: Body,
    ) -> int:
        """Serves a request until its last byte is sent; returns the status that the client got.

        In every case no leg runs and no place is taken afterwards. Raises RequestFailed for
        failures that the client has not been answered.
        """
        session = request.header(SESSION_HEADER)
        query = body.routing_query(session, self.policy.name == "prefix_aware")
        query.rank = request.header(RANK_HEADER)
        query.path = request.path
        headers = end_to_end(request.headers, request=True)
        context = RequestContext(request, headers, client, meter, body, query)
        progress = RequestProgress()
        plan = await self._plans.first_plan(context)
        while True:
            with Attempt(
                context, progress, plan, self.fleet, self._prefill_queue, self._failed_legs
            ) as attempt:
                result = await self._run(attempt)
                if isinstance(result, int):
                    if result == 200:
                        self._plans.on_served(progress)
                    return result
                next_plan = await self._plans.next_plan(attempt, result)
                if next_plan is None:
                    return await self._delivery.deliver_failure(attempt, result)
            self._plans.take_places(context, next_plan)
            plan = next_plan

    async def _run(self, attempt: Attempt) -> int | AttemptFailure:
        """Runs the legs of an attempt, and delivers the answer; returns its status or a failure."""
        context = attempt.context
        if attempt.pair and not context.client.started:
            attempt.first_token = self._first_tokens.relay(
                attempt.pair,
                context.request.path,
                context.body,
                partial(self._delivery.begin_stream, attempt),
            )
        answer = await self._legs.run_legs(attempt)
        if not isinstance(answer, UpstreamResponse):
            return answer
        result = await self._delivery.deliver_answer(attempt, answer)
        if not isinstance(result, int):
            return _blamed_on_first_token(attempt, result)
        if result == 200 and not attempt.ends_at_prefill:
            # For bidirectional KV reuse: D now has the KV of prompt and answer.
            self.policy.record_answer(context.query, attempt.decode)
        return result


def _blamed_on_first_token(attempt: Attempt, failure: AttemptFailure) -> AttemptFailure:
    """Returns the failure, in other words if D's first token was not the one that was sent."""
    first_token = attempt.first_token
    if failure.reason != "diverged" or not first_token or not first_token.is_sent:
        return failure
    first_token.on_difference()
    return AttemptFailure(failure.leg, failure.reason, DIFFERENT_FIRST_TOKEN)
