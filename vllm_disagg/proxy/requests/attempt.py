"""The state of one client request, in three parts by their lifetime.

    RequestContext    the request as its client sent it; never changes
    RequestProgress   outlives an attempt: its failures, and the stream that the client has
    Attempt           one plan: the legs that run, the answers that are open, the places taken

Places. A plan's places are taken before its attempt begins (`plans.py`). The attempt gives them
back, whatever ends it:

    at P    when the prefill leg has ended, and at the latest with the attempt
    at D    with the attempt
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple

import msgspec

from ..http.connection import Connection
from ..http.headers import Headers
from ..http.reasons import SAME_ELSEWHERE, Reason
from ..http.request import HttpRequest
from ..http.upstream_response import UpstreamResponse
from ..routing.fleet import Fleet, Instance
from ..routing.pairing import InstancePair
from ..routing.policies import RoutingQuery
from ..routing.prefill_queue import PrefillQueue
from ..telemetry.logs import FailedLegLog
from ..telemetry.meter import TrafficCounters
from .bodies import Body
from .failover import DEATH_REASONS, AttemptHistory
from .first_token import FirstTokenRelay
from .streams import StreamRecorder

MODEL_MAY_HAVE_FAILED = (
    "another instance has not what the request names, and one failed that may have it: {}"
)

LegName = Literal["prefill", "decode"]
AttemptPlan = InstancePair | Instance  # both legs, or a decode instance alone


class RequestContext(msgspec.Struct, frozen=True, eq=False):
    """One client request, with the connection for its answer."""

    request: HttpRequest
    headers: Headers  # the request's end-to-end headers, which its legs have too
    client: Connection
    meter: TrafficCounters
    body: Body
    query: RoutingQuery


class Leg(NamedTuple):
    """A request to one instance."""

    name: LegName
    instance: Instance
    sent_at: float


class AttemptFailure(msgspec.Struct, frozen=True, eq=False):
    """A leg failed in a way in which another instance may succeed."""

    leg: LegName
    reason: Reason
    detail: str
    answer: UpstreamResponse | None = None  # the instance's answer, for the client at the end


LegOutcome = UpstreamResponse | AttemptFailure  # an answer that has started, or a failure


class SuspectLeg(NamedTuple):
    """A leg that was answered with 5xx: its instance is to blame if another one can answer."""

    leg: Leg
    ended_at: float


class RequestProgress(msgspec.Struct, eq=False):
    """The part of a request's state that outlives its attempts."""

    history: AttemptHistory = msgspec.field(default_factory=AttemptHistory)
    failed_instances: list[Instance] = []  # not tried again
    suspects: list[SuspectLeg] = []
    recorder: StreamRecorder | None = None  # once a stream was started at the client
    # Of the last decode instance that failed, so that it may have what others answer 404 for.
    decode_failure: str = ""
    # The rung that followed when an instance declined the request, and the label of the fallback;
    # "" if none did.
    declined_rung: str = ""
    declined_reason: str = ""

    def on_attempt_failed(self, failure: AttemptFailure, answer_started: bool) -> None:
        """Brings the history up to date after a failed attempt."""
        if failure.reason in DEATH_REASONS:
            self.history.deaths += 1
        if failure.leg == "decode" and failure.reason != "declined":
            self.decode_failure = failure.detail
        self.history.answer_started = answer_started
        self.history.answer_resumable = bool(self.recorder and self.recorder.resumable)

    def blame_suspects(self, now: float) -> None:
        """Counts the 5xx answers as failures: another instance answered the same request."""
        for suspect in self.suspects:
            leg = suspect.leg
            leg.instance.on_leg_failed("5xx", now, leg.sent_at, suspect.ended_at)
        self.suspects.clear()


class Attempt:
    """One attempt to serve a request by the instances of a plan; a context manager.

    After the `with` block no place is taken and no answer is open. A prefill leg that still ran is
    cancelled; it gives back its place when the cancellation has reached it.
    """

    def __init__(
        self,
        context: RequestContext,
        progress: RequestProgress,
        plan: AttemptPlan,
        fleet: Fleet,
        prefill_queue: PrefillQueue,
        failed_legs: FailedLegLog,
    ) -> None:
        """`plan`: its places are taken already, and belong to this attempt from here on."""
        self.context = context
        self.progress = progress
        self.pair: InstancePair | None = None  # None: the decode instance serves alone
        self.first_token: FirstTokenRelay | None = None  # None: the stream begins with D's token
        self.grants: tuple[str, ...] = ()  # of its legs
        if isinstance(plan, InstancePair):
            self.pair = plan
            self.decode = plan.decode
        else:
            self.decode = plan
        # The prefill instance answers the client: the token that it makes is all of the answer.
        self.ends_at_prefill = context.body.one_token and self._is_prefill_answer_exact()
        self.server = self.decode  # the instance that answers the client
        if self.pair and self.ends_at_prefill:
            self.server = self.pair.prefill
        # A pair whose place at P is taken, and not handed to a concurrent prefill leg.
        self._unstarted_pair = self.pair
        self._fleet = fleet
        self._prefill_queue = prefill_queue
        self._failed_legs = failed_legs
        self._prefill_leg: asyncio.Task[LegOutcome] | None = None
        self._open_answers: list[UpstreamResponse] = []

    def _is_prefill_answer_exact(self) -> bool:
        """Whether the decode instance, which answers all longer requests, would answer the same.

        An adapter may have other files there, which only a transfer compares.
        """
        if not self.pair:
            return False
        prefill = self.pair.prefill.engine
        decode = self.pair.decode.engine
        if not prefill or not decode or not prefill.answer_settings:
            return False
        is_adapter = self.context.query.model not in ("", self.pair.decode.model)
        return prefill.answer_settings == decode.answer_settings and not is_adapter

    def __enter__(self) -> Attempt:
        self.progress.history.attempts += 1
        if self.pair:
            self.progress.history.pair_attempts += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.end_prefill_leg()
        self.decode.remove_request(self.context.query.prompt_bytes)
        for answer in self._open_answers:
            answer.close()

    def start_prefill_leg(
        self, pair: InstancePair, leg: Coroutine[Any, Any, LegOutcome]
    ) -> asyncio.Task[LegOutcome]:
        """Starts a prefill leg beside the decode leg; its end gives back the place at P."""
        task = asyncio.get_running_loop().create_task(leg)
        self._prefill_leg = task
        self._unstarted_pair = None
        task.add_done_callback(lambda _: self._prefill_queue.release(pair))
        return task

    def end_prefill_leg(self) -> None:
        """Ends the prefill leg, and so gives back its place; it has no effect on one that ended."""
        if self._prefill_leg:
            self._prefill_leg.cancel()
        self.release_prefill_place()

    def prompt_computed(self, pair: InstancePair) -> None:
        """Counts a prompt that P has computed, for the estimate of P's rate."""
        self._prefill_queue.backlog.on_prompt_computed(pair.uncached_bytes)

    def release_prefill_place(self) -> None:
        """Gives back the place at P, unless a started leg does that or it was done before."""
        pair = self._unstarted_pair
        self._unstarted_pair = None
        if pair:
            self._prefill_queue.release(pair)

    def without_grants(self, error: bytes) -> bytes:
        """Returns an error for the client: in some of them vLLM repeats the body of a leg."""
        for grant in self.grants:
            error = error.replace(grant.encode(), b"...")
        return error

    def close_at_end(self, answer: UpstreamResponse) -> None:
        """Takes an answer that is closed at the end of the attempt."""
        self._open_answers.append(answer)

    def record_failure(
        self, leg: Leg, reason: Reason, detail: str, answer: UpstreamResponse | None = None
    ) -> AttemptFailure:
        """Records that a leg failed, and returns the failure.

        `answer`: the instance's own answer, if the client may get it.
        """
        request = self.context.request
        request.failure = f"{leg.instance.url} failed a {leg.name} leg: {detail}"
        self._failed_legs.write(request, leg.instance.url, leg.name, detail)
        now = time.monotonic()
        self.progress.failed_instances.append(leg.instance)
        if reason == "5xx":
            # The request itself may be the cause: see `blame_suspects`.
            self.progress.suspects.append(SuspectLeg(leg, now))
        elif reason not in SAME_ELSEWHERE:
            self._fleet.on_leg_failed(leg.instance, reason, now, leg.sent_at)
        return AttemptFailure(leg.name, reason, detail, answer)
