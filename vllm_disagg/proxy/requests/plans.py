"""Chooses the instances of each attempt, and takes their places.

    first_plan   a wait, if no decode instance is up and one may come back (`decode_wait.py`); then
                 a pair from the prefill queue; or one decode instance, where two legs cannot serve
                 the request, do not pay, or find no pair
    next_plan    after a failure: the step that `failover.py` decides, within the retry budget;
                 a short wait before it, if only a decode instance is missing

A next plan is chosen while the failed attempt still has its places, and takes its own after these
were given back. So a request in the prefill queue gets a place that becomes free first.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ..http.error_replies import RequestFailed
from ..http.reasons import SERVER_DEATHS
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
from ..routing.policies import Policy
from ..routing.prefill_queue import QueueFull, QueueTimeout
from ..routing.queues import Queues
from ..settings import ProxySettings
from ..telemetry.metrics import Metrics
from .attempt import Attempt, AttemptFailure, AttemptPlan, RequestContext, RequestProgress
from .failover import (
    CHARGED_REASONS,
    DEATH_REASONS,
    REFUSALS,
    Alternatives,
    AttemptHistory,
    NextStep,
    RetryBudget,
    next_step,
)

# Of an instance that has ended, or soon will.
ENDING_REASONS = DEATH_REASONS | SERVER_DEATHS


class AttemptPlans:
    """Chooses instances for the attempts of all requests."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        queues: Queues,
        metrics: Metrics,
        settings: ProxySettings,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._prefill_queue = queues.prefill
        self._decode_wait = queues.decode
        self._metrics = metrics
        self._concurrency = settings.prefill_concurrency
        self._min_prompt_bytes = settings.min_prompt_bytes
        self._spill = settings.spill
        self._retry_budget = RetryBudget()

    # -- the first attempt -------------------------------------------------------------------------

    async def first_plan(self, context: RequestContext) -> AttemptPlan:
        """Returns a plan with its places taken, after a wait in the queue if necessary.

        Raises RequestFailed.
        """
        self._retry_budget.earn()
        came_at = time.monotonic()
        await self._wait_for_decode(context, came_at)
        if self._needs_one_instance(context):
            return self._take_any_decode(context)
        idle = self._spill_instance(context) if self._spill else None
        if idle:
            self.take_places(context, idle)
            return idle
        pair = await self._wait_for_pair(context, came_at)
        if pair:
            return pair
        return self._take_any_decode(context)

    async def _wait_for_decode(self, context: RequestContext, came_at: float) -> bool:
        """Waits while no decode instance serves the request and one may come back.

        Returns whether it has waited.
        """
        if self._fleet.has_decode_for(context.query.model):
            return False
        try:
            has_waited = await self._decode_wait.wait(context.query, came_at)
        except QueueFull as error:
            raise RequestFailed(429, str(error), retry_after=1) from None
        context.meter.queue_seconds = time.monotonic() - context.meter.began
        return has_waited

    def _needs_one_instance(self, context: RequestContext) -> bool:
        """Whether one decode instance serves the request alone."""
        # A client that names a rank means one of one instance: two legs cannot both honour that.
        if context.body.aggregated_reason or context.query.rank:
            return True
        return prefers_aggregated(self._fleet, self._policy, context.query, self._min_prompt_bytes)

    def _spill_instance(self, context: RequestContext) -> Instance | None:
        """Returns an idle decode instance if every prefill instance is full."""
        now = time.monotonic()
        choice = choose(self._fleet, self._policy, self._concurrency, context.query, now)
        if choice != "busy":
            return None
        idle = choose_spill(self._fleet, self._policy, now, context.query)
        if idle:
            self._metrics.fell_back("prefill_full")
        return idle

    async def _wait_for_pair(self, context: RequestContext, came_at: float) -> InstancePair | None:
        """Returns a pair with its places taken; None if no two instances fit."""
        try:
            pair = await self._prefill_queue.acquire(context.query, context.request.priority)
            # The last decode instance may have gone down meanwhile.
            if not pair and await self._wait_for_decode(context, came_at):
                pair = await self._prefill_queue.acquire(context.query, context.request.priority)
        except QueueFull as error:
            raise RequestFailed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise RequestFailed(503, str(error), retry_after=5) from None
        finally:
            waited = time.monotonic() - context.meter.began
            self._metrics.queue.observe(waited)
            context.meter.queue_seconds = waited
        if not pair and self._fleet.with_role("prefill"):
            self._metrics.fell_back("no_pair")
        return pair

    def _take_any_decode(self, context: RequestContext) -> Instance:
        """Returns a decode instance with its place taken; raises RequestFailed."""
        decode = choose_decode(self._fleet, self._policy, time.monotonic(), query=context.query)
        if not decode:
            raise RequestFailed(503, "no decode instance can be used at the moment", retry_after=5)
        self.take_places(context, decode)
        return decode

    # -- after a failure ---------------------------------------------------------------------------

    async def next_plan(self, attempt: Attempt, failure: AttemptFailure) -> AttemptPlan | None:
        """Returns the next attempt's plan, whose places `take_places` takes; None to give up."""
        context = attempt.context
        progress = attempt.progress
        progress.on_attempt_failed(failure, context.client.started)
        step, plan = self._choose_next(attempt, failure)
        if step is NextStep.GIVE_UP and _lacks_decode(progress.history, failure):
            attempt.end_prefill_leg()  # its KV has no reader any more
            with suppress(QueueFull):
                failed = progress.failed_instances
                await self._decode_wait.wait(context.query, time.monotonic(), failed)
            step, plan = self._choose_next(attempt, failure)
        if step is NextStep.GIVE_UP or not self._can_afford(failure, time.monotonic()):
            if failure.reason not in REFUSALS:
                self._metrics.failed_over("none")
                context.request.rung = "none"
            return None
        context.request.rung = step.value
        if failure.reason == "declined":
            # All others may refuse it, too: `on_served` counts.
            progress.declined_rung = step.value
            progress.declined_reason = _fallback_reason(failure, progress.history)
        else:
            self._metrics.failed_over(step.value)
            self._metrics.fell_back(_fallback_reason(failure, progress.history))
        return plan

    def _choose_next(
        self, attempt: Attempt, failure: AttemptFailure
    ) -> tuple[NextStep, AttemptPlan | None]:
        """Returns the next step and its plan; no plan to give up."""
        context = attempt.context
        progress = attempt.progress
        now = time.monotonic()
        failed = progress.failed_instances
        # A server that fails one rank has often died with all of them: another server goes first.
        avoided = (self._fleet.with_other_ranks(failed), failed)
        pair: Choice = "none"
        other_decode: Instance | None = None
        for avoid in avoided:
            if attempt.pair and not isinstance(pair, InstancePair):
                pair = choose(
                    self._fleet, self._policy, self._concurrency, context.query, now, avoid
                )
            if not other_decode:
                other_decode = choose_decode(self._fleet, self._policy, now, avoid, context.query)
            alternatives = Alternatives(
                isinstance(pair, InstancePair), attempt.decode.up, other_decode is not None
            )
            step = next_step(failure.leg, failure.reason, progress.history, alternatives)
            # Behind a death another rank of that server is the last choice: it is probably dead,
            # and a second death would end the request.
            if failure.reason in DEATH_REASONS and step is not NextStep.GIVE_UP:
                break
        if step is NextStep.PAIR and isinstance(pair, InstancePair):
            return step, pair
        return step, attempt.decode if step is NextStep.SAME_DECODE else other_decode

    def on_served(self, progress: RequestProgress) -> None:
        """Counts the fallback of a request that was served although an instance declined it."""
        if progress.declined_rung:
            self._metrics.failed_over(progress.declined_rung)
            self._metrics.fell_back(progress.declined_reason)

    def _can_afford(self, failure: AttemptFailure, now: float) -> bool:
        """Pays for the next attempt; returns False if the retry budget is exhausted."""
        return failure.reason not in CHARGED_REASONS or self._retry_budget.spend(now)

    def take_places(self, context: RequestContext, plan: AttemptPlan) -> None:
        """Counts the request at the instances of a plan."""
        if isinstance(plan, InstancePair):
            self._prefill_queue.take(plan)
        else:
            record_choice(self._fleet, self._policy, context.query, time.monotonic(), plan)
            plan.add_request(context.query.prompt_bytes)


def _lacks_decode(history: AttemptHistory, failure: AttemptFailure) -> bool:
    """Whether an instance has ended, and another decode instance would be tried if there was one.

    No request waits for one because of a refusal, or while its instance lives.
    """
    if failure.reason not in ENDING_REASONS:
        return False
    one_decode = Alternatives(pair=False, same_decode=False, other_decode=True)
    return next_step(failure.leg, failure.reason, history, one_decode) is not NextStep.GIVE_UP


def _fallback_reason(failure: AttemptFailure, history: AttemptHistory) -> str:
    """Returns the label of the metric of fallbacks."""
    if failure.leg == "prefill":
        return f"prefill_{failure.reason}"
    return "decode_in_stream" if history.answer_started else "decode_failed"
