"""Simulates a whole deployment: the proxy in front of P and D, or of colocated instances.

Disaggregated with overlap (`Handoff.overlap`), as in this project: the proxy queues a request until
a prefill replica has a free place, then starts both legs at once. D reserves KV for the prompt.
Layers move while P computes, so only the last layer is left after the prefill, unless the link is
slower. P holds its KV until D has received it. D computes the last prompt token and with it the
first token of the answer.

D keeps the prompts that it received and its answers, in its own prefix cache, as far as the sample
names their blocks. It reserves KV for a whole prompt and receives the rest only. Under the policy
prefix_aware P first reads from D what D has more of a prompt (bidirectional KV reuse). The lookup
takes D's next step. From its turn at P on the prompt waits for a limited time, and holds its KV
there; the engine computes others meanwhile.

Two flags of the proxy let D compute a prompt whole, in steps with its decodes, as a colocated
replica does: prompts below `min_prompt_bytes`, and with `spill` one prompt at each D at a time
while all places at P are taken.

Three quantities stay apart. An engine is busy for its steps, a link for the bytes of a hand-off.
Delays occupy neither: the path of a request outside the engine (`Deployment.path`), a link's
latency, the notice from the last byte to D's step, and a lookup at D. A link carries both
directions at once.

Without overlap (NixlConnector, DistServe) the decode leg starts when the prefill ends. Only then D
is chosen, reserves KV and receives all of the KV. Each P sends and each D receives one prompt after
the other.

The simulation is deterministic: only the policy power_of_two draws random numbers, from a seed.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ...fleet.conventions import (
    BYTES_PER_TOKEN,
    MIN_REUSE_BYTES,
    REQUEST_COST_BYTES,
    REUSE_POLICY,
)
from .batch import Batch
from .deployment import Deployment, ReplicaPool
from .misses import MissCounter
from .objective import Objective, SimulationResult
from .replica import Replica
from .request_table import RequestTable
from .routing import ReplicaChooser
from .workload import WorkloadSample

# Time in seconds, rank, order among equal ranks, request or -1, replica (None: an arrival), batch.
# At one moment requests and KV arrive first, then batches end, replica by replica, P before D. So
# the result does not depend on how many steps one event stands for.
SimulationEvent = tuple[float, int, int, int, Replica | None, Batch | None]
ARRIVAL_RANK = -1
REQUEST_COST_TOKENS = REQUEST_COST_BYTES // BYTES_PER_TOKEN
MIN_REUSE_TOKENS = MIN_REUSE_BYTES // BYTES_PER_TOKEN
# From a prompt's turn at P until P computes it without an answer to its lookup at D:
# REUSE_LOOKUP_SECONDS of protocol/prefill_leg.py.
LOOKUP_SECONDS = 0.25


def simulate(
    deployment: Deployment,
    sample: WorkloadSample,
    rate: float,
    objective: Objective | None = None,
    seed: int = 0,
    with_gaps: bool = False,
) -> SimulationResult:
    """Simulates all requests of `sample`, arriving at `rate` requests/s, to their end.

    With `objective` it stops as soon as too many requests have missed; then only `stopped` is
    meaningful. Gaps between tokens are recorded for an objective with ITL, or `with_gaps`.
    """
    return Simulation(deployment, sample, rate, objective, seed, with_gaps).run()


def simulate_closed(
    deployment: Deployment, sample: WorkloadSample, clients: int
) -> SimulationResult:
    """Simulates a closed loop: each of `clients` sends its next request when its last one ended."""
    simulation = Simulation(deployment, sample, 1.0, None, 0)
    simulation.close_loop(clients)
    return simulation.run()


class Simulation:
    """Discrete-event simulation of one deployment; receives the events of its replicas."""

    def __init__(
        self,
        deployment: Deployment,
        sample: WorkloadSample,
        rate: float,
        objective: Objective | None,
        seed: int,
        with_gaps: bool = False,
    ) -> None:
        self._deployment = deployment
        self._count = len(sample)
        self._counted = sample.counted
        self._arrivals = sample.arrivals(rate)
        has_itl = objective is not None and objective.itl is not None
        self._requests = requests = RequestTable(sample, with_gaps or has_itl)
        self._open_arrivals = self._count  # requests that come whatever happens, in order
        self._events: list[SimulationEvent] = []  # a heap
        self._event_order = self._count
        self._chooser = ReplicaChooser(deployment.policy, requests.prefixes, seed)
        self._prefills = self._replicas(deployment.prefill, requests, 0)
        self._decodes: list[Replica] = []
        if deployment.decode:
            self._decodes = self._replicas(deployment.decode, requests, len(self._prefills))
        self._prefill_of: list[Replica | None] = [None] * self._count  # by request
        self._decode_of: list[Replica | None] = [None] * self._count  # by request
        self._queue: list[int] = []  # request numbers, in the proxy
        self._queue_head = 0  # index of the next request to dispatch
        self._active_legs = 0  # at all prefill replicas
        self._finished_at = [-1.0] * self._count
        self._prefilled_at = [-1.0] * self._count
        self._reserved_at = [-1.0] * self._count  # reservation of KV at D
        self._transfer = [0.0] * self._count
        self._link_busy = 0.0  # seconds, all senders at P
        self._back_busy = 0.0  # seconds, all senders at D
        self._looks_up = [False] * self._count  # P asks D what it has of the prompt
        self._answered_at = [-1.0] * self._count  # when D has reported that
        self._read_back = [0] * self._count  # tokens that P read from D
        self._reads_back = (
            bool(requests.prefixes)
            and deployment.policy == REUSE_POLICY
            and deployment.handoff.reads_back
        )
        self._kv_arrived = [False] * self._count
        self._next_of_loop = self._count  # next request of a closed loop
        self._misses: MissCounter | None = None
        if objective:
            self._misses = MissCounter(objective, self._counted, self._count)

    def _replicas(self, pool: ReplicaPool, requests: RequestTable, first: int) -> list[Replica]:
        """Builds the replicas of a pool, numbered from `first`."""
        # With states DisaggConnector starts without prefix caching only.
        caches = not self._deployment.handoff.state_bytes
        return [
            Replica(self, requests, pool.latency, pool.kv, pool.rules, number, caches)
            for number in range(first, first + pool.count)
        ]

    def close_loop(self, clients: int) -> None:
        """Replaces the arrivals: a request of each client at once, each next one at an end."""
        first = min(clients, self._count)
        self._next_of_loop = self._open_arrivals = first
        self._arrivals = [0.0] * self._count

    def run(self) -> SimulationResult:
        """Processes events until none is left, or until too many requests have missed."""
        events = self._events
        arrivals = self._arrivals
        misses = self._misses
        arrived = 0
        while not (misses and misses.too_many):
            # Kept apart from the heap, which stays small. At one moment arrivals come first.
            if arrived < self._open_arrivals and (not events or arrivals[arrived] <= events[0][0]):
                self._on_arrival(arrivals[arrived], arrived)
                arrived += 1
                continue
            if not events:
                break
            now, _, _, r, replica, batch = heappop(events)
            if replica is None:
                self._on_arrival(now, r)
            elif batch is not None:
                if batch.end == now:  # else the batch was shortened and has ended before
                    replica.complete_batch(now, batch)
            elif r >= 0:
                self._on_landed(now, r, replica)
            else:
                replica.start_batch(now)
        replicas = (*self._prefills, *self._decodes)
        is_busy = any(replica.waiting or replica.running for replica in replicas)
        if is_busy and not (misses and misses.too_many):
            raise AssertionError("a simulation ended with requests in it")
        return self._result()

    # --- the proxy ---

    def _on_arrival(self, now: float, r: int) -> None:
        """Queues a request at the proxy, or submits it to a colocated replica."""
        requests = self._requests
        deployment = self._deployment
        prompt = requests.prompts[r]
        answer = requests.outputs[r] + 1  # one token to spare
        last = deployment.decode or deployment.prefill
        if prompt + 1 > deployment.prefill.kv or prompt + answer > last.kv:
            if self._misses:
                self._misses.on_refused(r)  # exceeds every replica: vLLM refuses it
            return
        if self._decodes:
            decode = self._decode_of_whole(now, r)
            if decode:
                self._submit_whole(now, r, decode)
                return
            self._queue.append(r)
            self._dispatch(now)
            return
        requests.tokens_left[r] = requests.outputs[r] - (not self._deployment.distserve)
        # To the proxy colocated instances are decode instances without a prefill instance.
        replica = self._chooser.choose_decode(now, self._prefills, r)
        self._count_whole(r, replica)
        replica.submit(now, r)

    def _decode_of_whole(self, now: float, r: int) -> Replica | None:
        """Returns the decode replica that computes a prompt whole; None for two legs."""
        deployment = self._deployment
        if BYTES_PER_TOKEN * self._requests.prompts[r] < deployment.min_prompt_bytes:
            return self._chooser.choose_decode(now, self._decodes)
        limit = deployment.handoff.concurrency
        if not deployment.spill or any(p.active_legs < limit for p in self._prefills):
            return None
        idle = [decode for decode in self._decodes if not decode.aggregated_requests]
        return self._chooser.choose_decode(now, idle, r) if idle else None

    def _submit_whole(self, now: float, r: int, decode: Replica) -> None:
        """Sends a request to a decode replica alone."""
        self._requests.tokens_left[r] = self._requests.outputs[r] - 1
        self._count_at_decode(r, decode)
        decode.aggregated_requests += 1
        decode.submit(now, r)

    def _dispatch(self, now: float) -> None:
        """Starts both legs of queued requests while a prefill replica has a free place."""
        handoff = self._deployment.handoff
        places = handoff.concurrency * len(self._prefills)
        # A deployment may have hundreds of ranks: none is looked at while all places are taken.
        while self._queue_head < len(self._queue) and self._active_legs < places:
            r = self._queue[self._queue_head]
            self._queue_head += 1
            prefill = self._chooser.choose_prefill(self._prefills, r, handoff.concurrency)
            prefill.active_legs += 1
            self._active_legs += 1
            self._count_at_prefill(r, prefill)
            self._requests.tokens_left[r] = self._requests.outputs[r]
            if handoff.overlap:
                self._decode_leg(now, r)
            if self._reads_back:
                self._looks_up[r] = self._reuse_pays(r)
            prefill.submit(now, r)

    def _reuse_pays(self, r: int) -> bool:
        """Returns whether the proxy lets P read KV of a prompt that D has."""
        requests = self._requests
        prefill, decode, prefixes = self._prefill_of[r], self._decode_of[r], requests.prefixes
        if not prefill or not decode or not prefixes:
            return False
        at_decode = decode.cached_tokens(prefixes[r])
        # To the proxy all that follows a prompt which D answered may be its answer.
        possible = at_decode if requests.kept is prefixes else requests.prompts[r]
        at_most = min(at_decode - 1, possible - MIN_REUSE_TOKENS)
        return at_most >= 0 and prefill.cached_tokens(prefixes[r]) <= at_most

    def _decode_leg(self, now: float, r: int) -> None:
        """Sends the decode leg to a decode replica."""
        decode = self._chooser.choose_decode(now, self._decodes, r)
        self._count_at_decode(r, decode)
        decode.expect_kv(now, r)

    def _count_at_prefill(self, r: int, replica: Replica) -> None:
        """Counts a request at its prefill replica."""
        self._chooser.count(replica)
        replica.load += self._requests.prompts[r]
        self._prefill_of[r] = replica

    def _count_at_decode(self, r: int, decode: Replica) -> None:
        """Counts a request at its decode replica."""
        self._count_whole(r, decode)
        self._decode_of[r] = decode

    def _count_whole(self, r: int, replica: Replica) -> None:
        """Counts a request, until its end, at its decode or colocated replica."""
        self._chooser.count(replica)
        replica.load += self._requests.prompts[r] + REQUEST_COST_TOKENS

    # --- events of the replicas ---

    def schedule(self, time: float, replica: Replica, batch: Batch | None) -> None:
        """Schedules the end of a batch, or a wake-up."""
        self._event_order += 1
        heappush(self._events, (time, replica.number, self._event_order, -1, replica, batch))

    def on_prompt_admitted(self, replica: Replica, now: float, r: int, cached: int) -> bool:
        """Reads from D what D has beyond the `cached` tokens; returns whether P waits for that."""
        decode = self._decode_of[r]
        if not self._looks_up[r] or not decode or replica is decode:
            return False
        at = now + LOOKUP_SECONDS
        # A D that still has no room for the prompt answers too late.
        if self._reserved_at[r] >= 0 and self._answered_at[r] <= at:
            requests = self._requests
            tokens = requests.cached_at_decode[r] - cached
            if tokens <= 0:
                return False
            handoff = self._deployment.handoff
            wire = handoff.wire_seconds(tokens)
            begin = self._occupy_link(max(now, self._answered_at[r]), wire, decode, replica)
            at = begin + wire + handoff.link.latency + handoff.notice
            self._back_busy += wire
            self._read_back[r] = tokens
            requests.computed[r] = cached + tokens
        self._schedule_landing(at, r, replica)
        return True

    def on_prefill_complete(self, replica: Replica, now: float, r: int) -> None:
        """Starts decoding on the same replica, or the hand-off to the decode replica."""
        requests = self._requests
        distserve = self._deployment.distserve
        # On a colocated replica, or on a decode replica: a whole prompt, or after a preemption.
        if not self._decodes or self._decode_of[r] is replica:
            if self._is_aggregated(r) and requests.first_token_at[r] < 0:
                replica.aggregated_requests -= 1
            if self._kv_arrived[r] or requests.first_token_at[r] >= 0:
                requests.tokens_left[r] -= 1  # `tokens_left` counted this token
            if requests.gaps:
                requests.gaps.on_token(now, r)
            self.on_first_token(now, r)
            if requests.tokens_left[r] > 0:
                replica.start_decoding(r)
                return
            replica.used -= requests.prefill_tokens[r]
            replica.running -= 1
            self.on_finished(replica, now, r)
            return
        if distserve:
            if requests.gaps:
                requests.gaps.on_token(now, r)
            self.on_first_token(now, r)
        self._prefilled_at[r] = now
        replica.active_legs -= 1
        self._active_legs -= 1
        replica.load -= requests.prompts[r]
        if not self._deployment.handoff.overlap:
            self._decode_leg(now, r)
        elif self._reserved_at[r] >= 0:
            self._start_handoff(now, r)
        self._dispatch(now)

    def on_kv_reserved(self, replica: Replica, now: float, r: int) -> None:
        """Starts the hand-off if the prefill has completed."""
        self._reserved_at[r] = now
        if self._reads_back:
            self._answered_at[r] = replica.lookup_ends(now)
        if self._prefilled_at[r] >= 0:
            self._start_handoff(now, r)

    def on_first_token(self, now: float, r: int) -> None:
        """Records TTFT, once."""
        if self._requests.first_token_at[r] >= 0:
            return
        self._requests.first_token_at[r] = now
        if self._misses:
            self._misses.on_first_token(r, self._ttft(r))

    def on_finished(self, replica: Replica, now: float, r: int) -> None:
        """Records the end of a request."""
        replica.load -= self._requests.prompts[r] + REQUEST_COST_TOKENS
        self._finished_at[r] = now
        if self._next_of_loop < self._count:
            self._send_next(now + self._path(r))
        if self._misses:
            gaps = self._requests.gaps
            self._misses.on_finished(r, self._tpot(r), gaps.longest[r] if gaps else 0.0)

    def _send_next(self, now: float) -> None:
        """Sends the next request of a closed loop."""
        r = self._next_of_loop
        self._next_of_loop += 1
        self._arrivals[r] = now
        heappush(self._events, (now, ARRIVAL_RANK, r, r, None, None))

    # --- hand-off ---

    def _start_handoff(self, now: float, r: int) -> None:
        """Schedules the arrival of KV at D.

        The prefill has completed, and D has reserved room.
        """
        handoff = self._deployment.handoff
        prefill = self._prefill_of[r]
        decode = self._decode_of[r]
        if prefill is None or decode is None:
            raise AssertionError("a request that moves has both instances")
        requests = self._requests
        wire = handoff.wire_seconds(requests.prompts[r] - requests.cached_at_decode[r])
        begin = now
        if handoff.overlap:
            begin = max(requests.prefill_started_at[r], self._reserved_at[r])
        start = self._occupy_link(begin, wire, prefill, decode)
        self._link_busy += wire
        last_layer = wire / handoff.layers  # cannot move before the prefill ends
        landed = max(start + wire, self._prefilled_at[r] + last_layer, now) + handoff.link.latency
        end = landed + handoff.notice
        self._transfer[r] = end - self._prefilled_at[r]
        if end > now:
            self._schedule_landing(end, r, decode)
        else:
            self._on_landed(now, r, decode)

    def _occupy_link(self, begin: float, wire: float, sender: Replica, receiver: Replica) -> float:
        """Returns when a transfer begins that takes `wire` seconds, `begin` at the earliest.

        Each replica sends one prompt at a time, and receives one.
        """
        start = max(begin, sender.sends_until, receiver.receives_until)
        sender.sends_until = receiver.receives_until = start + wire
        return start

    def _schedule_landing(self, at: float, r: int, receiver: Replica) -> None:
        """Schedules the arrival of KV at P or D."""
        self._event_order += 1
        heappush(self._events, (at, ARRIVAL_RANK, self._event_order, r, receiver, None))

    def _on_landed(self, now: float, r: int, receiver: Replica) -> None:
        """Starts the prefill at P after its lookup; or frees the KV at P and starts decoding."""
        prefill = self._prefill_of[r]
        if receiver is prefill:
            prefill.start_prefill(now, r)
            return
        self._kv_arrived[r] = True
        if prefill:
            prefill.release_kv(now, r)
        receiver.on_kv_arrived(now, r)

    # --- results ---

    def _is_aggregated(self, r: int) -> bool:
        """Returns whether a decode replica computes the whole prompt of a request."""
        return self._decode_of[r] is not None and self._prefill_of[r] is None

    def _path(self, r: int) -> float:
        """Returns the seconds of a request outside the engine."""
        return self._deployment.path.of(self._requests.prompts[r])

    def _ttft(self, r: int) -> float:
        """Returns the seconds from arrival to first token, at the client."""
        return self._requests.first_token_at[r] - self._arrivals[r] + self._path(r)

    def _busy_share(self, seconds: float, count: int) -> float:
        """Returns the mean share of the whole time in which one of `count` was busy."""
        whole = max(self._finished_at) - self._arrivals[0]
        return seconds / (whole * count) if count and whole > 0 else 0.0

    def _share_of_prompts(self, tokens: list[int]) -> float:
        """Returns the share of the counted prompts' tokens; 0 of prompts with unknown blocks."""
        if not self._requests.prefixes:
            return 0.0
        prompts = self._requests.prompts
        return sum(tokens[r] for r in self._counted) / sum(prompts[r] for r in self._counted)

    def _tpot(self, r: int) -> float:
        """Returns the seconds per token after the first; 0 for an answer of one token."""
        output = self._requests.outputs[r]
        distserve = self._deployment.distserve
        steps = output if distserve else output - 1
        return (self._finished_at[r] - self._requests.first_token_at[r]) / steps if steps else 0.0

    def _result(self) -> SimulationResult:
        """Computes the times of the requests that count."""
        first_at = self._requests.first_token_at
        finished_at = self._finished_at
        arrivals = self._arrivals
        numbers = self._counted
        replicas = (*self._prefills, *self._decodes)
        gaps = self._requests.gaps
        itl = None
        if gaps:
            itl = [gaps.longest[r] if finished_at[r] >= 0 else -1.0 for r in numbers]
        return SimulationResult(
            ttft=[self._ttft(r) if first_at[r] >= 0 else -1.0 for r in numbers],
            tpot=[self._tpot(r) if finished_at[r] >= 0 else -1.0 for r in numbers],
            latency=[
                finished_at[r] - arrivals[r] + self._path(r) if finished_at[r] >= 0 else -1.0
                for r in numbers
            ],
            transfer=[self._transfer[r] for r in numbers],
            path=[self._path(r) for r in numbers],
            prefill_busy=self._busy_share(sum(p.busy for p in self._prefills), len(self._prefills)),
            decode_busy=self._busy_share(sum(d.busy for d in self._decodes), len(self._decodes)),
            link_busy=self._busy_share(self._link_busy, len(self._prefills)),
            back_busy=self._busy_share(self._back_busy, len(self._decodes)),
            preemptions=sum(replica.preemptions for replica in replicas),
            stopped=bool(self._misses and self._misses.too_many),
            aggregated=sum(map(self._is_aggregated, numbers)) / len(numbers),
            at_decode=self._share_of_prompts(self._requests.cached_at_decode),
            read_back=self._share_of_prompts(self._read_back),
            itl=itl,
        )
