"""Finds requests that vLLM passes over although they lack nothing.

Theory. vLLM goes over its queue in each step, and stops at a request for which there is no room, no
token or no place in the batch. If all three are left after a step, it has gone over the whole
queue. It has then passed over each request that waits for a load, for the place of its adapter, or
for tokens in flight. It has passed over any other one because the connector asked it to.

The connector may do that while a lookup runs, and after steps that compute nothing, for the sake of
ended loads. These are few steps. A request that is passed over in many waits for others without a
reason, perhaps for as long as they run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus
from world_config import MAX_REQUESTS, EngineSetup

MAX_STEPS_PASSED = 6  # without a fault it was 2 at most, with one 9 to 60
WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class UnfairWait(AssertionError):
    """A request that was passed over in too many steps."""


class TurnJudge:
    """Counts the steps of one engine in which it passes over each request."""

    def __init__(self, scheduler: Any, setup: EngineSetup, blocks_of_longest: int) -> None:
        """Judges a scheduler. `blocks_of_longest`: those that a longest request needs."""
        self._scheduler = scheduler
        self._setup = setup
        self._blocks_of_longest = blocks_of_longest
        self._steps_passed: Counter[str] = Counter()  # by request

    def on_step(self, output: Any) -> None:
        """Judges a step that was just scheduled; raises UnfairWait."""
        if not output.num_scheduled_tokens or not self._has_room(output):
            return
        for request in self._scheduler.requests.values():
            if self._lacks_nothing(request):
                name = request.request_id
                self._steps_passed[name] += 1
                if self._steps_passed[name] > MAX_STEPS_PASSED:
                    raise UnfairWait(f"{name} is passed over while others are computed")

    def _has_room(self, output: Any) -> bool:
        """Returns whether vLLM has gone over its whole queue."""
        scheduler = self._scheduler
        if output.preempted_req_ids or scheduler.pause_state is not PauseState.UNPAUSED:
            return False
        # Drafts take tokens, too: too many conditions for what they would show.
        if self._setup.drafted_tokens or len(scheduler.running) >= MAX_REQUESTS:
            return False
        if output.total_num_scheduled_tokens >= self._setup.chunk_tokens:
            return False
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        reserved = scheduler._inflight_prefill_reserved_blocks()
        return bool(free - reserved >= self._blocks_of_longest)

    def _lacks_nothing(self, request: Request) -> bool:
        """Returns whether nothing keeps a request waiting but the connector."""
        if request.status not in WAITING or request.num_stale_output_tokens:
            return False
        leg = self._scheduler.connector._scheduler._legs.legs.get(request.request_id)
        if leg is not None and leg.waits_for_kv:  # a lookup
            return False
        return self._has_place(request)

    def _has_place(self, request: Request) -> bool:
        """Returns whether the request's adapter has a place beside those of running requests."""
        if request.lora_request is None:
            return True
        running = [one.lora_request for one in self._scheduler.running if one.lora_request]
        used = {adapter.lora_int_id for adapter in running}
        return request.lora_request.lora_int_id in used or len(used) < self._setup.adapter_places
