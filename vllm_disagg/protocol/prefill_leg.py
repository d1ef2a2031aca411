"""The prefill leg of a request: its KV is sent to D; the start of it may be read back from D.

Main transfer, P to D (events in brackets):

    NEW --scheduled [BlocksScheduled]--> COMPUTING --finished [PrefillFinished]-->
    NEW, COMPUTING --preempted, aborted, refused [BlocksRevoked]--> LOCAL

Bidirectional KV reuse, D to P. D may have the start of the prompt cached, from an earlier answer:

    NEW --arrived [LookupRequested]--> LOOKING_UP
    LOOKING_UP --blocks allocated [LoadRequested]--> READING
    READING --load finished--> ENDED
    LOOKING_UP, READING --nothing to read, aborted [LoadCancelled]--> ENDED

P computes what it does not get, so no state waits without a limit: the workers bound the load, and
`REUSE_LOOKUP_SECONDS` bounds the lookup.
"""

from __future__ import annotations

from enum import Enum, auto

from .events import (
    BlocksRevoked,
    BlocksScheduled,
    LoadCancelled,
    LookupRequested,
    PrefillFinished,
)
from .request_leg import NULL_BLOCK, Blocks, CacheFacts, LegFacts, RequestLeg, StepEvents

# A prefill leg waits so long for the answers to its lookup.  Short, because the client waits too,
# and P can compute all that D might have.
REUSE_LOOKUP_SECONDS = 0.25
# A reuse load without progress for so long fails, and P computes.  Shorter than that of the main
# load, because D has the KV in memory already: no progress means that D has a problem.
REUSE_STALL_SECONDS = 1.0


class PrefillState(Enum):
    """State of a prefill leg's main transfer; see the head of this file."""

    NEW = auto()
    COMPUTING = auto()  # the workers have its blocks
    LOCAL = auto()  # an ordinary request from here on


class ReadBackState(Enum):
    """State of a prefill leg's bidirectional KV reuse; see the head of this file."""

    NEW = auto()
    LOOKING_UP = auto()  # the workers request from D how many tokens it has
    READING = auto()  # the workers read
    ENDED = auto()  # also: never permitted


class PrefillLeg(RequestLeg):
    """A request whose KV this engine computes for another one."""

    def __init__(
        self,
        facts: LegFacts,
        cache: CacheFacts,
        step: StepEvents,
    ) -> None:
        """Creates a new leg, whose first events go to `step`."""
        super().__init__(facts, cache, step)
        self.state = PrefillState.NEW
        self.reuse = ReadBackState.NEW if facts.reuse else ReadBackState.ENDED
        self.announced_tokens = 0  # computed or scheduled, as announced to the workers
        # Of all KV-cache groups, which share one numbering; without the null block.
        self.announced_blocks: set[int] = set()
        self.lookup_counts: list[int] = []  # tokens at D, one count for each rank
        self.lookup_deadline: float | None = None  # set when the request's turn has come
        step.serving_requests[facts.transfer] = facts.request

    @property
    def waits_for_kv(self) -> bool:
        """Whether the request can only go on after a report of the workers."""
        return self.reuse in (ReadBackState.LOOKING_UP, ReadBackState.READING)

    # Reuse ----------------------------------------------------------------------------------------
    def on_arrived(self) -> None:
        """Starts the lookup at D.

        An early lookup is answered by the time the request's turn comes.
        """
        # Without permission, or after a refusal, the reuse has ended already.
        if self.reuse is not ReadBackState.NEW:
            return
        assert self.facts.reuse is not None and self.facts.plan is not None
        self.reuse = ReadBackState.LOOKING_UP
        lookup = LookupRequested(
            transfer=self.facts.reuse,
            sources=self.facts.sources,
            plan=self.facts.plan,
            prompt=self.facts.digest,
        )
        self.step.for_receiver.append(lookup)

    def on_lookup_counts(self, counts: list[int]) -> None:
        """Adds answers of the lookup: tokens at D, one count for each rank of this engine."""
        # Late answers have no effect: P computes by then.
        if self.reuse is ReadBackState.LOOKING_UP:
            self.lookup_counts += counts

    def _missing_tokens(self, cached_tokens: int, now: float) -> int | None:
        """Returns how many tokens are read from D; None while the lookup runs."""
        if self.state is not PrefillState.NEW or self.reuse is not ReadBackState.LOOKING_UP:
            return 0
        # The limit counts from the request's first turn: time in vLLM's queue costs nothing.
        if self.lookup_deadline is None:
            self.lookup_deadline = now + REUSE_LOOKUP_SECONDS
        assert self.facts.plan is not None, "a lookup has a plan"
        ranks = len(self.facts.plan.shards)
        is_answered = len(self.lookup_counts) >= ranks
        if not is_answered and now < self.lookup_deadline:
            return None
        # The least: a rank that lacks a token would leave its layers or heads without KV.
        tokens_at_d = min(self.lookup_counts) if is_answered else 0
        # At least one token of the prompt must be computed here.  D's count cannot be trusted: with
        # more tokens than the prompt has, an assertion of vLLM's scheduler would end the engine.
        if cached_tokens < tokens_at_d < self.facts.prompt_tokens:
            return tokens_at_d - cached_tokens
        self._end_reuse()
        return 0

    def on_blocks_allocated(self, blocks: Blocks, tokens_to_load: int) -> Blocks:
        """Has the workers read from D, or ends the reuse."""
        # Later the reuse has ended: this engine computes, also again after a preemption.
        if self.state is not PrefillState.NEW:
            return ()
        # No tokens: the lookup found none, or MultiConnector chose another connector.
        if self.reuse is not ReadBackState.LOOKING_UP or not tokens_to_load:
            self._end_reuse()
            return ()
        transfer = self.facts.reuse
        assert transfer is not None, "a lookup has a transfer"
        self.reuse = ReadBackState.READING
        self.step.loading_requests[transfer] = self.facts.request
        # The load begins where P's own cache ends.  From its end on P computes.
        token_end = min(self.lookup_counts)
        tokens = range(token_end - tokens_to_load, token_end)
        self._request_load(transfer, blocks, tokens, REUSE_STALL_SECONDS)
        return ()

    def _end_load(self) -> None:
        if self.reuse is ReadBackState.READING:
            self.reuse = ReadBackState.ENDED

    def _end_reuse(self) -> None:
        """Ends the reuse in any state, and informs the workers if they take part."""
        workers_take_part = self.waits_for_kv
        self.reuse = ReadBackState.ENDED
        if workers_take_part:
            assert self.facts.reuse is not None
            self.step.for_receiver.append(LoadCancelled(self.facts.reuse))

    # Main transfer --------------------------------------------------------------------------------
    def on_scheduled(self, token_end: int, new_blocks: Blocks) -> None:
        """Announces the blocks in which vLLM computes the prompt up to `token_end`."""
        if self.state is PrefillState.LOCAL:
            return
        if self.announced_tokens >= self.facts.prompt_tokens:  # generated tokens are not sent
            return
        self.state = PrefillState.COMPUTING
        # D needs no KV after the prompt, however far the step reaches.
        self.announced_tokens = min(self.facts.prompt_tokens, token_end)
        for ids in new_blocks:
            self.announced_blocks.update(ids)
        self.announced_blocks.discard(NULL_BLOCK)
        scheduled = BlocksScheduled(
            transfer=self.facts.transfer,
            tokens=self.announced_tokens,
            blocks=[list(ids) for ids in new_blocks],
            prompt=self.facts.digest,
            writes_more=self.facts.writes_more,
            adapter=self.facts.adapter,
        )
        self.step.for_sender.append(scheduled)

    def on_preempted(self) -> None:
        """Revokes the blocks: vLLM has taken them back, read by D or not."""
        self._end_reuse()
        # LOCAL was revoked before.  When vLLM computes the prompt again, its new blocks are not
        # announced: D recomputes by then.
        if self.state is not PrefillState.LOCAL:
            self.state = PrefillState.LOCAL
            self.step.for_sender.append(BlocksRevoked(self.facts.transfer))

    def on_refused(self) -> None:
        """Makes a new leg an ordinary request, and informs D at once."""
        self.on_preempted()

    def on_finished(self, *, is_normal: bool) -> bool:
        """Ends the leg; returns whether vLLM keeps its blocks until they are sent.

        `is_normal`: the request has all its tokens; it was not aborted.
        """
        self._end_reuse()
        # Half a prompt, or one that was aborted in its last step, may lack KV: D is informed at
        # once and recomputes, rather than wait until its load stalls.
        is_computed = self.announced_tokens >= self.facts.prompt_tokens
        if self.state is PrefillState.COMPUTING and is_computed and is_normal:
            self.step.for_sender.append(PrefillFinished(self.facts.transfer))
            return True
        self.on_preempted()
        return False

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself.  Tests call it after each call."""
        context = (self.facts, self.state, self.reuse)
        assert 0 <= self.announced_tokens <= self.facts.prompt_tokens, context
        if self.state is PrefillState.NEW:
            assert self.announced_tokens == 0, context
        else:
            assert self.reuse is ReadBackState.ENDED, context
        if self.reuse is not ReadBackState.ENDED:
            assert self.facts.reuse is not None and self.facts.plan is not None, context
        if self.reuse is ReadBackState.READING:
            assert self.lookup_counts, context
