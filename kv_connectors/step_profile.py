"""Measures the steps of an engine under its own traffic, for `vllm-disagg plan --live`.

The times are those of the engine's loop, not of the forward pass. A step keeps the engine busy
from the end of the step before it, or from the arrival of a request at an idle engine, to its own
end. So the time holds scheduler, sampler, messages to the workers, the connector and waiting for a
core. It needs no event on a GPU and no synchronisation, and is also right when vLLM schedules a
step while the one before it runs: steps end in the order in which they were scheduled.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vllm_disagg.product_sums import (
    ARRIVAL_QUANTITIES,
    LANDING_QUANTITIES,
    STEP_QUANTITIES,
    ProductSums,
    steps_of_both_kinds,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

EXPORT_INTERVAL_SECONDS = 1.0  # between two exports: each one is a message to the API server
MAX_STEPS_IN_FLIGHT = 64  # vLLM has as many as pipeline stages, or two
# In which KV may have landed that is reported now: workers report it with the next step's end.
RECENT_STEPS = 4
# A longer step was paused, or compiled: one of 60 s in 3,000 makes a fit of the others 50 % worse.
MAX_DECODE_STEP_SECONDS = 5.0
MAX_PROMPT_STEP_SECONDS = 30.0  # `engine_stall_timeout`: D does not wait for a longer one

# `STEP_QUANTITIES` without the seconds; empty of a step that is left out.
StepComposition = tuple[int, int, int, int, int, int] | tuple[()]


class StepProfile:
    """Adds the composition and the seconds of each step to sums. All times are of one clock."""

    def __init__(self) -> None:
        """Creates a profile without steps."""
        self._decode_steps = ProductSums(STEP_QUANTITIES)  # without tokens of prompts
        self._prompt_steps = ProductSums(STEP_QUANTITIES)
        self._arrivals = ProductSums(ARRIVAL_QUANTITIES)
        self._landings = ProductSums(LANDING_QUANTITIES)
        self._landed_at: list[float] = []  # of KV that is reported with the running step's end
        self._unfinished: set[str] = set()  # ids of requests
        # Compositions of scheduled steps that have not ended; None for one without work.
        self._in_flight: deque[StepComposition | None] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._busy_since: float | None = None  # None: the engine is idle
        self._last_step = (0.0, 0.0)  # when it began to keep the engine busy, and ended
        # The same of the last ones with work.
        self._recent_steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._exported_at = 0.0

    def on_arrived(self, request_id: str, now: float, seconds: float) -> None:
        """Notes a new request: an idle engine is busy from now on.

        `seconds`: since the API server took it. vLLM's loop sees it after the running step.
        """
        began, ended = self._last_step
        self._arrivals.add((1, max(0.0, ended - max(began, now - seconds))))
        self._unfinished.add(request_id)
        if self._busy_since is None:
            self._busy_since = now

    def on_finished(self, request_id: str) -> None:
        """Notes the end of a request."""
        self._unfinished.discard(request_id)

    def on_scheduled(self, output: SchedulerOutput) -> None:
        """Notes a step that begins when all steps before it have ended."""
        self._in_flight.append(compose(output))

    def on_kv_landed(self, at: float) -> None:
        """Notes when a prompt's KV was in place; its engine computes the end of its step first."""
        self._landed_at.append(at)

    def on_step_ended(self, now: float) -> None:
        """Adds the oldest step that has not ended yet."""
        if not self._in_flight:
            return
        composition = self._in_flight.popleft()
        is_decode = composition and not composition[1]
        longest = MAX_DECODE_STEP_SECONDS if is_decode else MAX_PROMPT_STEP_SECONDS
        # After its last request an engine may end a step whose token vLLM drops.
        if self._busy_since is not None and now - self._busy_since <= longest:
            self._last_step = (self._busy_since, now)
            if composition is not None:
                self._recent_steps.append(self._last_step)
            if composition:
                sums = self._prompt_steps if composition[1] else self._decode_steps
                sums.add((*composition, now - self._busy_since))
        self._busy_since = now if self._unfinished else None
        if self._landed_at:
            self._add_landings()

    def _add_landings(self) -> None:
        """Adds the waits of landed KV; it waits for no step of an idle engine."""
        for at in self._landed_at:
            waits = [ended - at for began, ended in self._recent_steps if began <= at < ended]
            self._landings.add((1, sum(waits)))
        self._landed_at = []

    def take(self, now: float) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Returns the sums over steps, arrivals and landings since the last export, by name.

        All are empty before the next one is due.
        """
        if now - self._exported_at < EXPORT_INTERVAL_SECONDS:
            return {}, {}, {}
        self._exported_at = now
        steps = steps_of_both_kinds(self._decode_steps.take(), self._prompt_steps.take())
        return steps, self._arrivals.take(), self._landings.take()


def compose(output: SchedulerOutput) -> StepComposition | None:
    """Returns the composition of a step; None without work.

    One with speculative tokens is left out: the planner simulates one token a step. A request that
    computes one token counts as decoding, also D's last prompt token.
    """
    counts = output.num_scheduled_tokens
    if not counts:
        return None
    if output.scheduled_spec_decode_tokens:
        return ()
    cached = output.scheduled_cached_reqs
    new = output.scheduled_new_reqs
    contexts = sum(cached.num_computed_tokens) + len(counts)
    contexts += sum(request.num_computed_tokens for request in new)
    if output.total_num_scheduled_tokens == len(counts):
        return 1, 0, 0, 0, len(counts), contexts
    # Few of the requests have chunks, and a loop over all takes longer than the rest.
    tokens = 0
    squares = 0
    chunks = {request_id: count for request_id, count in counts.items() if count != 1}
    computed = {request.req_id: request.num_computed_tokens for request in new}
    for request_id, count in chunks.items():
        if request_id in computed:
            done = computed[request_id]
        else:
            done = cached.num_computed_tokens[cached.req_ids.index(request_id)]
        tokens += count
        squares += count * (2 * done + count)
        contexts -= done + 1
    return 1, 1, tokens, squares, len(counts) - len(chunks), contexts
