"""One simulated vLLM instance: continuous batching with a paged KV cache.

The simulation covers chunked prefill, preemption and pipelining. A batch holds one token of every
decoding sequence and, within the token budget, chunks of prompts, oldest first. While all sequences
only decode, one batch covers many steps. New work calls `wake`, which ends such a batch after the
running step. `tests/property/test_planner.py` compares this with a simulation of one step at a
time.

Pipelining (pp > 1) follows vLLM: up to pp batches are in flight, each with sequences of its own. A
stage serves in order of arrival, so the end of a batch is known at its start.

KV is counted in tokens (vLLM: in blocks of 16). KV of a whole prompt is reserved before its first
chunk (vLLM's scheduler_reserve_full_isl) or, for a prompt from a prefill replica, before its
transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import msgspec

from ..cost.latency import LatencyModel
from .batch import Batch, DecodeGroup
from .prefix_cache import PrefixCache
from .request_table import RequestTable
from .token_gaps import GroupGaps, TokenGaps


class SchedulingRules(msgspec.Struct, frozen=True):
    """Scheduling rules of a replica."""

    budget: int = 8192  # tokens of a step: max_num_batched_tokens
    sequences: int = 256  # that run at once: max_num_seqs
    # True: chunks share steps with decodes (Sarathi). False: whole prompts first (vLLM of 2023).
    chunked: bool = True
    multi_step: bool = True  # many decode steps at once; False only to test that it changes nothing


class ReplicaListener(Protocol):
    """Receiver of a replica's events."""

    def on_prefill_complete(self, replica: Replica, now: float, r: int) -> None:
        """Handles the end of the last chunk of a prompt."""

    def on_prompt_admitted(self, replica: Replica, now: float, r: int, cached: int) -> bool:
        """Handles the reservation of KV for a prompt; returns whether it waits for others' KV."""

    def on_kv_reserved(self, replica: Replica, now: float, r: int) -> None:
        """Handles the reservation of KV for a request from a prefill replica."""

    def on_first_token(self, now: float, r: int) -> None:
        """Handles the first token of an answer."""

    def on_finished(self, replica: Replica, now: float, r: int) -> None:
        """Handles the last token of an answer."""

    def schedule(self, time: float, replica: Replica, batch: Batch | None) -> None:
        """Schedules the end of `batch`, or a wake-up if it is None."""


class Replica:
    """Simulated vLLM instance that holds `kv` tokens."""

    def __init__(
        self,
        listener: ReplicaListener,
        requests: RequestTable,
        latency: LatencyModel,
        kv: int,
        rules: SchedulingRules,
        number: int = 0,
        caches_prefixes: bool = True,
    ) -> None:
        self.listener = listener
        self.number = number  # among all replicas: the order in which batches end at one moment
        self.requests = requests
        self.latency = latency
        self.kv = kv
        self.rules = rules
        self.used = 0  # tokens of KV that running and parked requests hold
        self.running = 0  # requests that hold KV
        # For routing: tokens of prompts to compute; of a decode or colocated replica those of all
        # its requests, and a cost for each.
        self.load = 0
        self.active_legs = 0
        self.last_choice = 0  # number of the last choice that fell on it
        # Of a decode replica: requests of which it computes the whole prompt, not yet to the end.
        self.aggregated_requests = 0
        self.waiting: deque[int] = deque()  # without KV
        self._awaiting_kv: set[int] = set()  # their KV comes from a prefill replica
        self.prefilling: deque[int] = deque()  # with KV, chunks left
        self._with_gaps = requests.gaps is not None
        self.ready = DecodeGroup(self._with_gaps)  # decodes that are not in flight
        has_cache = requests.prefixes and caches_prefixes
        self.cache = PrefixCache(requests.block) if has_cache else None
        self._in_flight: deque[Batch] = deque()
        self._stage_free_at = [0.0] * latency.pp  # seconds, for each stage
        # Seconds until its link has sent, and received, what it has begun.
        self.sends_until = 0.0
        self.receives_until = 0.0
        self.preemptions = 0
        self.busy = 0.0  # seconds in which its first stage computes
        self._wake_at = 0.0  # time of the requested wake-up
        self._join_count = 0
        self._decode_times: dict[int, tuple[float, float, float, float]] = {}

    def cached_tokens(self, ids: Sequence[int]) -> int:
        """Returns the tokens of a prompt's leading blocks that the prefix cache holds."""
        return self.cache.match(ids) * self.cache.block if self.cache else 0

    def lookup_ends(self, now: float) -> float:
        """Returns when a request that has just reserved KV reports which blocks were cached.

        vLLM finds them at the start of its next step, and they are final when that step ends.
        """
        if not self._in_flight:
            return now
        batch = self._in_flight[-1]
        # The next step is taken to be as long as the running one.
        return batch.end + self.latency.pp * (batch.first + batch.growth * (batch.steps - 1))

    def held_tokens(self, now: float) -> int:
        """Returns the tokens of KV that requests hold after the steps completed by now."""
        return self.used + self._tokens_grown(now)

    def groups(self) -> list[DecodeGroup]:
        """Returns the groups of sequences that decode here."""
        return [self.ready, *(batch.group for batch in self._in_flight)]

    # --- called by the simulation ---

    def submit(self, now: float, r: int) -> None:
        """Queues a request for prefill on this replica."""
        self.waiting.append(r)
        self.wake(now)

    def expect_kv(self, now: float, r: int) -> None:
        """Queues a request that receives its KV from a prefill replica.

        Reserves KV at once if there is room.
        """
        self._awaiting_kv.add(r)
        self.waiting.append(r)
        self._reserve_kv(now)

    def start_prefill(self, now: float, r: int) -> None:
        """Starts a prompt that waited, with its KV, for what a decode replica has of it."""
        self.prefilling.append(r)
        self.wake(now)

    def on_kv_arrived(self, now: float, r: int) -> None:
        """Starts decoding a request after its KV transfer."""
        self._awaiting_kv.discard(r)
        if self.cache and self.requests.prefixes:
            self.cache.add(self.requests.prefixes[r])
        self.start_decoding(r)
        self.wake(now)

    def release_kv(self, now: float, r: int) -> None:
        """Frees the KV of a request."""
        self.used -= self.requests.prefill_tokens[r]
        self.running -= 1
        self._reserve_kv(now)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Starts new work as soon as the running step ends."""
        if not self._shorten_batch(now):
            self.start_batch(now)

    def _shorten_batch(self, now: float) -> bool:
        """Ends a batch of many steps after the running step.

        Returns whether such a batch is running.
        """
        batch = self._in_flight[0] if self._in_flight else None
        if not batch or batch.steps == 1:
            return False
        steps = batch.steps_until(now - batch.start)
        if steps < batch.steps:
            batch.steps = steps
            batch.end = batch.start + batch.elapsed(steps)
            self.listener.schedule(batch.end, self, batch)
        return True

    # --- batches ---

    def start_batch(self, now: float) -> None:
        """Starts a batch if there is work, a free first stage and fewer than pp in flight."""
        in_flight = self._in_flight
        if len(in_flight) >= self.latency.pp:
            return
        if now < self._stage_free_at[0]:
            if self._wake_at < self._stage_free_at[0] and (
                self.ready.n or self.prefilling or self.waiting
            ):
                self._wake_at = self._stage_free_at[0]
                self.listener.schedule(self._wake_at, self, None)
            return
        batch = self._compose_batch(now)
        if not batch:
            return
        in_flight.append(batch)
        self.listener.schedule(batch.end, self, batch)
        self._reserve_kv(now)  # for requests behind a prompt that this step has begun
        if self.latency.pp > 1:
            self.start_batch(now)  # schedules a wake-up

    def complete_batch(self, now: float, batch: Batch) -> None:
        """Ends a batch that has passed the last stage."""
        self._in_flight.popleft()
        self.busy += now - batch.start if self.latency.pp == 1 else batch.first
        requests = self.requests
        listener = self.listener
        group = batch.group
        if group.n:
            first = batch.start + batch.first if batch.steps > 1 else now
            for r in group.without_first_token:
                listener.on_first_token(first, r)
            group.without_first_token.clear()
            if requests.gaps and group.gaps:
                self._record_gaps(requests.gaps, group.gaps, batch, first, now)
            grown = group.n * batch.steps
            group.steps += batch.steps
            group.contexts += grown
            self.used += grown
            ends = group.ends
            while ends and ends[0][0] <= group.steps:
                r = heappop(ends)[1]
                self._leave_group(group, r)
                if self.cache and requests.kept:
                    self.cache.add(requests.kept[r])
                listener.on_finished(self, now, r)
            self._merge_ready(group)
        for r in batch.prompts:
            if self.cache and requests.prefixes:
                self.cache.add(requests.prefixes[r])
            listener.on_prefill_complete(self, now, r)
        self._reserve_kv(now)
        self.start_batch(now)

    def _record_gaps(
        self, gaps: TokenGaps, group_gaps: GroupGaps, batch: Batch, first: float, now: float
    ) -> None:
        """Records the gaps of a completed batch, whose first step ended at `first`."""
        before = batch.group.steps
        gaps.on_step(group_gaps, before + 1, first)
        if batch.steps > 1:
            # Contexts grow, so the last step is the longest.
            longest = batch.first + batch.growth * (batch.steps - 1)
            gaps.on_steps(group_gaps, before + batch.steps, longest, now)

    def _compose_batch(self, now: float) -> Batch | None:
        """Selects the sequences and chunks of the next batch, with its times; None without work."""
        group = self.ready
        rules = self.rules
        if group.n and self.used + group.n > self.kv:
            self._preempt(group)
        finishing: list[int] = []
        tokens = 0
        squares = 0
        if self.prefilling or self.waiting:
            budget = rules.budget - group.n if rules.chunked else rules.budget
            tokens, squares = self._schedule_chunks(now, finishing, budget)
        if tokens and not rules.chunked:
            group = DecodeGroup(False)  # decoding sequences wait for the prompts
        elif tokens or group.n:
            self.ready = DecodeGroup(self._with_gaps)
        else:
            return None
        batch = Batch(group, finishing, now)
        if tokens:
            self._time_mixed(batch, tokens, squares)
        else:
            self._time_decode(batch)
        return batch

    def _schedule_chunks(self, now: float, finishing: list[int], budget: int) -> tuple[int, int]:
        """Selects prompt chunks for this step, and appends completed prompts to `finishing`.

        Returns the tokens of the chunks, and their squares as latency models count them.
        """
        requests = self.requests
        tokens = 0
        squares = 0
        whole = not self.rules.chunked
        while budget > 0:
            if not self.prefilling:
                if not self._admit_waiting(now):
                    break
                continue
            r = self.prefilling[0]
            done = requests.computed[r]
            remaining = requests.prefill_tokens[r] - done
            take = min(remaining, budget)
            if whole and not tokens:  # a prompt longer than the budget runs alone
                take = remaining
            if take < remaining and whole:
                break
            if requests.prefill_started_at[r] < 0:
                requests.prefill_started_at[r] = now
            tokens += take
            squares += take * (2 * done + take)
            requests.computed[r] = done + take
            budget -= take
            if take == remaining:
                finishing.append(self.prefilling.popleft())
        return tokens, squares

    def _time_mixed(self, batch: Batch, tokens: int, squares: int) -> None:
        """Computes the end of a batch of one step with prompts."""
        group = batch.group
        latency = self.latency
        first = latency.mixed(tokens, squares, group.n, group.contexts, True)
        later = 0.0
        if latency.pp > 1:
            later = latency.mixed(tokens, squares, group.n, group.contexts, False)
        self._pass_stages(batch, first, later)

    def _time_decode(self, batch: Batch) -> None:
        """Computes steps and end of a batch that only decodes."""
        group = batch.group
        n = group.n
        times = self._decode_times.get(n)
        if not times:
            times = (*self.latency.decode(n, True), *self.latency.decode(n, False))
            self._decode_times[n] = times
        first = times[0] + times[1] * group.contexts
        if self.latency.pp > 1:
            self._pass_stages(batch, first, times[2] + times[3] * group.contexts)
            return
        if self.rules.multi_step:
            # Until a sequence ends, or the KV cache is full.
            until_end = group.ends[0][0] - group.steps
            batch.steps = max(1, min(until_end, (self.kv - self.used) // n))
        batch.first = first
        batch.growth = times[1] * n
        batch.end = batch.start + batch.elapsed(batch.steps)

    def _pass_stages(self, batch: Batch, first: float, later: float) -> None:
        """Computes the end of a batch that passes the stages, each first come, first served.

        `first` is the time of the first stage in seconds, `later` of each other one.
        """
        free = self._stage_free_at
        end = batch.start + first
        batch.first = first
        if len(free) > 1:
            free[0] = end
            for stage in range(1, len(free)):
                end = max(end, free[stage]) + later
                free[stage] = end
        batch.end = end

    # --- KV ---

    def _admit_waiting(self, now: float) -> bool:
        """Reserves KV for the oldest waiting prompt and starts its prefill, or its lookup at D.

        Returns whether the prompt fits.
        """
        if not self.waiting:
            return False
        requests = self.requests
        r = self.waiting[0]
        if r in self._awaiting_kv or not self._kv_fits(r):
            return False
        cached = requests.computed[r] = self._take_kv(r)
        if not self.listener.on_prompt_admitted(self, now, r, cached):
            self.prefilling.append(r)
        return True

    def _reserve_kv(self, now: float) -> None:
        """Reserves KV for requests from prefill replicas at the head of the queue."""
        if not self.waiting or self.waiting[0] not in self._awaiting_kv:
            return
        grown = self._tokens_grown(now)
        has_reserved = False
        while self.waiting:
            r = self.waiting[0]
            if r not in self._awaiting_kv or not self._kv_fits(r, grown):
                break
            if not has_reserved:
                self._shorten_batch(now)  # its steps may rely on this room
                has_reserved = True
            self.requests.cached_at_decode[r] = self._take_kv(r, grown)
            self.listener.on_kv_reserved(self, now, r)

    def _tokens_grown(self, now: float) -> int:
        """Returns the tokens that completed steps of the batch in flight have added to `used`.

        A step that ends at `now` is not completed: at one moment batches end last.
        """
        batch = self._in_flight[0] if self._in_flight else None
        if not batch or batch.steps == 1:
            return 0
        return batch.group.n * (batch.steps_until(now - batch.start) - 1)

    def _kv_fits(self, r: int, grown: int = 0) -> bool:
        """Returns whether a request can take its KV, beside `grown` tokens not yet in `used`."""
        # One more token for each running request, so that no request is admitted only to be
        # preempted at once.
        held = self.used + grown + self.requests.prefill_tokens[r] + self.running
        return self.running < self.rules.sequences and held < self.kv

    def _take_kv(self, r: int, grown: int = 0) -> int:
        """Moves the head of the queue to the running requests.

        Returns the tokens of its prompt that the prefix cache has; one at least is computed.
        """
        requests = self.requests
        self.waiting.popleft()
        self.used += requests.prefill_tokens[r]
        self.running += 1
        if not self.cache or not requests.prefixes:
            return 0
        hit = self.cache.hit(requests.prefixes[r])
        # The blocks that were hit are among those that the request holds now.
        self.cache.shrink((self.kv - self.used - grown) // self.cache.block + hit)
        return min(hit * self.cache.block, requests.prefill_tokens[r] - 1)

    def _preempt(self, group: DecodeGroup) -> None:
        """Moves the latest requests back to the head of the queue until a step fits.

        They recompute prompt and answer.
        """
        requests = self.requests
        while group.n and self.used + group.n > self.kv:
            end, r = max(group.ends, key=lambda entry: requests.join_order[entry[1]])
            group.ends.remove((end, r))
            heapify(group.ends)
            if r in group.without_first_token:
                group.without_first_token.remove(r)
            requests.prefill_tokens[r] = requests.context_base[r] + group.steps
            requests.tokens_left[r] = end - group.steps
            self._leave_group(group, r)
            self.waiting.appendleft(r)
            self.preemptions += 1

    # --- decoding ---

    def start_decoding(self, r: int) -> None:
        """Adds a request with complete KV to the next decode batch."""
        group = self.ready
        requests = self.requests
        requests.context_base[r] = requests.prefill_tokens[r] - group.steps
        requests.join_order[r] = self._join_count
        self._join_count += 1
        group.n += 1
        group.contexts += requests.prefill_tokens[r]
        heappush(group.ends, (group.steps + requests.tokens_left[r], r))
        if requests.first_token_at[r] < 0:
            group.without_first_token.append(r)
        if group.gaps:
            group.gaps.joined.append(r)

    def _leave_group(self, group: DecodeGroup, r: int) -> None:
        """Removes a sequence from its group and frees its KV."""
        if self.requests.gaps and group.gaps:
            self.requests.gaps.leave(group.gaps, r)
        context = self.requests.context_base[r] + group.steps
        group.n -= 1
        group.contexts -= context
        self.used -= context
        self.running -= 1

    def _merge_ready(self, group: DecodeGroup) -> None:
        """Merges a returning group with the sequences that became ready meanwhile."""
        ready = self.ready
        if not ready.n:
            self.ready = group
            return
        if ready.n > group.n:
            group, ready = ready, group
        if self.requests.gaps and group.gaps and ready.gaps:
            self.requests.gaps.merge(ready.gaps, (r for _, r in ready.ends), group.gaps)
        shift = group.steps - ready.steps
        base = self.requests.context_base
        for end, r in ready.ends:
            heappush(group.ends, (end + shift, r))
            base[r] -= shift
        group.n += ready.n
        group.contexts += ready.contexts
        group.without_first_token += ready.without_first_token
        self.ready = group
