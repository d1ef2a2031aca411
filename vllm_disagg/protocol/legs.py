"""Legs of one engine: turns the calls of vLLM's scheduler into events for the workers.

A state machine that does no I/O: `now` comes with the call that needs it.

A *leg* is the request that the proxy sends to one engine for one client request. Each request with
a valid grant has one leg. A leg has one state for its main transfer and one for bidirectional KV
reuse: `prefill_leg.py` and `decode_leg.py`. The reuse is a transfer with another id.

vLLM's scheduler makes these calls, in this order:

    on_arrived            once, before vLLM looks the prompt up in its prefix cache
    tokens_to_load        when the request's turn comes; repeated until there is room
    on_blocks_allocated   after each allocation of blocks; with the tokens to load
    on_scheduled          in each step that computes the request
    on_preempted          when vLLM takes the blocks of a running request
    on_step_scheduled     in each step, whatever it computes
    take_events           in each step; the events go to all workers with that step
    on_lookup_counts      when ranks have reported how much the other engine has cached
    on_load_finished      when all ranks have ended a load, with or without success
    on_finished           once; decides whether the blocks stay until the workers release them
    on_released           when the workers have released them

Rules, checked by `validate` and in the seeded worlds; of rule 9 these check the asking alone:
  1. Each LoadRequested has the blocks of all its tokens.
  2. Each leg ends each of its transfers once: PrefillFinished or BlocksRevoked where it serves,
     LoadSkipped, LoadCancelled or the end of the load where it reads.
  3. The workers get no event about blocks after their BlocksRevoked.
  4. Blocks that vLLM has taken back are revoked in the very next step, before they are reused.
  5. No leg waits without a limit: a lookup has a deadline, and the workers bound each load.
  6. After a step that computes nothing, no load begins while a request whose load has ended waits
     for its turn.
  7. After a step that computes nothing, while a request whose load has ended waits for its turn,
     each request yields its own turn once.
  8. Handed-over prompts together hold at most `max_handover_blocks`; one alone may hold more.
     Blocks that they share count once.
  9. P is asked to keep the prompt of a request that waits for blocks here: at once and every
     third of its lease, for `MAX_QUEUE_SECONDS` at most. Not while this engine computes nothing:
     its blocks may be for loads from that very P, which may have none beside the prompts it keeps.

A request without a leg is an ordinary one: calls for it have no effect.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping

from .decode_leg import DecodeLeg, DecodeState
from .events import BlocksRevoked
from .incoming_transfer import MIN_KEEPALIVE_SECONDS
from .prefill_leg import PrefillLeg
from .request_leg import Blocks, CacheFacts, LegFacts, RequestLeg, StepEvents

# P's cache is full of prompts for an engine that falls behind, if this is long.  With a lease it
# must end before the proxy gives up requests that wait for that P, for 60 s by default.
MAX_QUEUE_SECONDS = 30.0
# Since a step has computed anything.  One may be empty while all requests that run are in another
# stage of a pipeline.
IDLE_SECONDS = 1.0


class EngineLegs:
    """Holds the legs of one engine and collects the events of the next step."""

    def __init__(self, cache: CacheFacts) -> None:
        """Creates the machine without any leg."""
        self.cache = cache
        self.legs: dict[str, RequestLeg] = {}  # by vLLM's request id
        # Legs that may read back, by that transfer: workers report their counts by transfer.
        self._lookups: dict[str, PrefillLeg] = {}
        # Requests whose load has ended, until vLLM gives them blocks for the next step.
        self._awaiting_turn: set[str] = set()
        self._is_idle = False  # the last step has computed nothing
        self._yields_turns = False  # in vLLM's next scan of its queue
        self._has_yielded = False  # any request, in the last scan
        # Blocks of finished prompts that were handed over, by request; and the prompts by block,
        # because prompts with an equal start share its blocks.
        self._handover_blocks: dict[str, set[int]] = {}
        self._handovers_by_block: Counter[int] = Counter()
        self._computed_at = -math.inf  # when a step has computed anything
        # Decode legs that may still wait for blocks: (when P is asked next, until when, request).
        self._queued: list[tuple[float, float, str]] = []  # a heap
        # One object for all legs, so that their events reach the workers in the order of the calls.
        self._step = StepEvents()

    @property
    def waits_for_kv(self) -> bool:
        """Whether a request can only go on after a report of the workers."""
        # With it the scheduler's adapter slows down idle steps, which else may take the core of the
        # very prefill that computes this KV.
        return any(leg.waits_for_kv for leg in self.legs.values())

    def is_loading(self, request: str) -> bool:
        """Returns whether the workers will report the end of a decode leg's load."""
        leg = self.legs.get(request)
        return isinstance(leg, DecodeLeg) and leg.waits_for_kv

    # New legs -------------------------------------------------------------------------------------
    def add_prefill(self, facts: LegFacts) -> None:
        """Adds the leg of a request that this engine computes for another one."""
        leg = PrefillLeg(facts, self.cache, self._step)
        self.legs[facts.request] = leg
        if facts.reuse is not None:
            self._lookups[facts.reuse] = leg

    def add_decode(self, facts: LegFacts, now: float) -> None:
        """Adds the leg of a request that another engine computes for this one."""
        self.legs[facts.request] = DecodeLeg(facts, self.cache, self._step)
        heapq.heappush(self._queued, (now, now + MAX_QUEUE_SECONDS, facts.request))

    def refuse(self, request: str) -> None:
        """Makes a new leg an ordinary request, and informs the other engine at once."""
        # The leg stays as LOCAL, like one that has loaded: only `on_finished` forgets legs.
        self.legs[request].on_refused()

    def refuse_transfer(self, transfer: str) -> None:
        """Informs the receivers of a transfer that no leg of this engine serves it."""
        # There is no leg to end.  The sender remembers the ending, so that a receiver that comes
        # later is refused at once and need not wait until its load stalls.
        self._step.for_sender.append(BlocksRevoked(transfer))

    # vLLM's calls ---------------------------------------------------------------------------------
    def on_arrived(self, request: str) -> None:
        """Starts the lookup of a prefill leg that may reuse KV."""
        # Only P looks up: D loads what P computes, however much that is.
        leg = self.legs.get(request)
        if isinstance(leg, PrefillLeg):
            leg.on_arrived()

    def tokens_to_load(
        self,
        request: str,
        cached_tokens: int,
        now: float,
    ) -> int | None:
        """Returns how many prompt tokens come from the other engine; None if not known yet.

        `cached_tokens`: the tokens before them, from this engine's prefix cache.
        """
        leg = self.legs.get(request)
        # Rule 7.  After a failed load the request yields without it, and a step may be empty.
        if self._yields_turns or (leg is not None and leg.yields_turn):
            self._has_yielded = True
        if self._yields_turns:
            return None
        # 0 and not None: vLLM must not wait for an ordinary request.
        if leg is None:
            return 0
        tokens = leg.tokens_to_load(cached_tokens, now)
        # Rule 6.  After a failed load vLLM goes on reserving blocks for the request, and a new load
        # must fit beside them.  If it does not, vLLM stops its scan there.  With priorities the
        # failed request may be behind, and no request would ever run again.  None lets the scan
        # go on.  While steps compute, the request may wait for something else than room, such as
        # the place of another adapter, for as long as that one is used.
        if tokens and self._awaiting_turn and self._is_idle:
            return None
        return tokens

    def on_blocks_allocated(
        self,
        request: str,
        blocks: Blocks,
        tokens_to_load: int,
    ) -> Blocks:
        """Starts the load of a request, or serves its cached blocks.

        `blocks`: ids by KV-cache group, of the whole request. Returns those that vLLM takes as
        loaded and the load does not write.
        """
        self._awaiting_turn.discard(request)
        leg = self.legs.get(request)
        if leg is None:
            return ()
        # Not when it is preempted: None would put it in front of loads that begin later.
        leg.yields_turn = False
        return leg.on_blocks_allocated(blocks, tokens_to_load)

    def on_scheduled(
        self,
        request: str,
        token_end: int,
        new_blocks: Blocks | None,
    ) -> None:
        """Announces the blocks that a prefill leg got in this step.

        `token_end`: the step computes the request up to this token. `new_blocks`: None if the
        request got none.
        """
        leg = self.legs.get(request)
        # A decode leg announces no computed blocks: it serves what it had cached, and that is
        # announced with the allocation.
        if not isinstance(leg, PrefillLeg):
            return
        # One list for each group also without new blocks: the sender extends its lists by them.
        if not new_blocks:
            new_blocks = [()] * len(self.cache.block_sizes)
        leg.on_scheduled(token_end, new_blocks)

    def on_preempted(self, request: str) -> None:
        """Stops serving the blocks of a request: vLLM has taken them back."""
        leg = self.legs.get(request)
        if leg is not None:
            leg.on_preempted()

    def on_lookup_counts(
        self,
        counts_by_transfer: Mapping[str, list[int]],
    ) -> None:
        """Adds the answers of lookups: tokens at D by transfer, one count for each rank."""
        for transfer, counts in counts_by_transfer.items():
            leg = self._lookups.get(transfer)
            # The request may have ended while its ranks still answered.
            if leg is not None:
                leg.on_lookup_counts(counts)

    def on_load_finished(self, request: str) -> None:
        """Makes a loading leg an ordinary request, after a success or a failure."""
        leg = self.legs.get(request)
        # An aborted request is forgotten before the workers report the end of its load.
        if leg is not None:
            self._awaiting_turn.add(request)
            leg.on_load_finished()

    def on_finished(self, request: str, *, is_normal: bool) -> bool:
        """Ends and forgets a leg; returns whether vLLM keeps its blocks until they are sent.

        `is_normal`: the request has all its tokens; it was not aborted.
        """
        # Rule 2.  Forgotten first, so that a repeated call ends nothing twice.
        leg = self.legs.pop(request, None)
        if leg is None:
            return False
        self._awaiting_turn.discard(request)
        keeps_blocks = leg.on_finished(is_normal=is_normal and self._has_room(leg))
        if keeps_blocks and leg.facts.is_handover and isinstance(leg, PrefillLeg):
            self._handover_blocks[request] = leg.announced_blocks
            self._handovers_by_block.update(leg.announced_blocks)
        # No later call would remove the entry.
        if leg.facts.reuse is not None:
            self._lookups.pop(leg.facts.reuse, None)
        return keeps_blocks

    def _has_room(self, leg: RequestLeg) -> bool:
        """Returns whether the blocks of a finished prompt may wait for a receiver."""
        # Rule 8.  Any client of this engine may request a handover that is never claimed.  The
        # blocks of the others keep the engine able to compute.
        limit = self.cache.max_handover_blocks
        if limit is None or not leg.facts.is_handover or not isinstance(leg, PrefillLeg):
            return True
        # One alone is permitted: a prompt of more than half the cache is none the worse.
        held = self._handovers_by_block.keys()
        return not held or len(held) + len(leg.announced_blocks - held) <= limit

    def on_released(self, request: str) -> None:
        """Notes that vLLM has the blocks of a finished prompt back."""
        for block in self._handover_blocks.pop(request, ()):
            self._handovers_by_block[block] -= 1
            if not self._handovers_by_block[block]:
                del self._handovers_by_block[block]

    def on_step_scheduled(self, now: float, *, is_empty: bool) -> None:
        """Notes whether a step computes anything, and has P keep prompts that wait here."""
        self._is_idle = is_empty
        if not is_empty:
            self._computed_at = now
        self._expect_loads(now)
        # Rule 7.  vLLM stops its scan at a request that lacks room.  Before 0.32 the blocks may be
        # those of ended loads behind it, which get no turn then, and no request would ever run
        # again.  Not in two scans in a row: the request in front may be the one that has room.
        is_stuck = is_empty and bool(self._awaiting_turn)
        self._yields_turns = is_stuck and not self._has_yielded
        self._has_yielded = False

    def _expect_loads(self, now: float) -> None:
        """Has P keep the prompts that wait here, of those whose time has come."""
        # Rule 9.  A leg that has begun or ended leaves the heap here.
        computes = now < self._computed_at + IDLE_SECONDS
        while self._queued and self._queued[0][0] <= now:
            _, until, request = heapq.heappop(self._queued)
            leg = self.legs.get(request)
            if now >= until or not isinstance(leg, DecodeLeg) or leg.state is not DecodeState.NEW:
                continue
            if computes:
                leg.expect_load()
            due = now + _seconds_until_next(leg.facts, has_asked=computes)
            heapq.heappush(self._queued, (due, until, request))

    def take_events(self) -> StepEvents:
        """Returns the events for the workers since the last step, and collects anew."""
        # Called in steps that compute nothing, too: cancels and revocations cannot wait (rule 4).
        return self._step.take()

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself.  Tests call it after each call."""
        for request, leg in self.legs.items():
            assert leg.facts.request == request, request
            leg.validate()
        assert self._awaiting_turn <= self.legs.keys(), self._awaiting_turn
        for transfer, leg in self._lookups.items():
            assert self.legs.get(leg.facts.request) is leg, transfer


def _seconds_until_next(facts: LegFacts, *, has_asked: bool) -> float:
    """Returns when P is asked again to keep a prompt, in seconds from now."""
    seconds = min((worker.lease for worker in facts.sources), default=math.inf) / 3
    # P's lease goes on while this engine computes nothing.
    if not has_asked:
        seconds = min(seconds, IDLE_SECONDS)
    # Not below: the sources choose their lease, and each request costs a turn here.
    return max(seconds, MIN_KEEPALIVE_SECONDS)
