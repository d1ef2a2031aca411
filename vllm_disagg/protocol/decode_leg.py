"""The decode leg of a request: its KV is loaded from P; cached blocks may be served to P.

Main transfer, P to D (events in brackets):

    NEW --still waits for blocks [LoadExpected]--> NEW
    NEW --blocks to load [LoadRequested]--> LOADING --load finished--> LOCAL
    NEW --nothing to load, aborted, refused [LoadSkipped]--> LOCAL
    LOADING --aborted [LoadCancelled]-->

A failed load leaves the leg LOCAL, so vLLM computes the prompt here.

Bidirectional KV reuse, D to P, of the blocks that the request has from D's prefix cache:

    NEW --blocks allocated [BlocksScheduled(cached)]--> SERVING
    NEW, SERVING --load finished, preempted, aborted [BlocksRevoked]--> ENDED
"""

from __future__ import annotations

from enum import Enum, auto

from ..kv import reshard
from .events import BlocksRevoked, BlocksScheduled, LoadCancelled, LoadExpected, LoadSkipped
from .request_leg import Blocks, CacheFacts, LegFacts, RequestLeg, StepEvents


class DecodeState(Enum):
    """State of a decode leg's main transfer; see the head of this file."""

    NEW = auto()
    LOADING = auto()  # the workers read
    LOCAL = auto()  # an ordinary request from here on


class ServeBackState(Enum):
    """State of a decode leg's bidirectional KV reuse; see the head of this file."""

    NEW = auto()
    SERVING = auto()  # the workers have the cached blocks, which this request holds
    ENDED = auto()  # also: never permitted


class DecodeLeg(RequestLeg):
    """A request whose KV another engine computes for this one."""

    def __init__(
        self,
        facts: LegFacts,
        cache: CacheFacts,
        step: StepEvents,
    ) -> None:
        """Creates a new leg, whose first events go to `step`."""
        super().__init__(facts, cache, step)
        self.state = DecodeState.NEW
        self.reuse = ServeBackState.NEW if facts.reuse else ServeBackState.ENDED
        self.cached_tokens = 0  # from this engine's prefix cache
        step.loading_requests[facts.transfer] = facts.request

    @property
    def waits_for_kv(self) -> bool:
        """Whether the request can only go on after a report of the workers."""
        return self.state is DecodeState.LOADING

    # Main transfer --------------------------------------------------------------------------------
    def expect_load(self) -> None:
        """Asks P to keep the prompt of a new leg, which still waits for blocks."""
        assert self.facts.plan is not None, "a decode leg has a plan"
        expected = LoadExpected(
            self.facts.transfer, self.facts.sources, self.facts.plan, self.facts.digest
        )
        self.step.for_receiver.append(expected)

    def _missing_tokens(self, cached_tokens: int, now: float) -> int | None:
        """Returns how many tokens are loaded from P."""
        # After its load, and after a preemption, the request is computed here.
        if self.state is not DecodeState.NEW:
            return 0
        # Of the last call: vLLM calls until there is room, and its cache changes meanwhile.
        self.cached_tokens = cached_tokens
        missing = self.facts.prompt_tokens - self.cache.tokens_left_out - cached_tokens
        # With all whole blocks cached, computing the rest is faster than reading it, and part of
        # it must be computed anyway.
        is_nearly_cached = cached_tokens > 0 and missing <= max(self.cache.block_sizes)
        if missing <= 0 or is_nearly_cached:
            return 0
        if not self._allocates_last():
            return missing
        return missing + self.cache.tokens_left_out if self._may_allocate_last() else 0

    def _allocates_last(self) -> bool:
        """Returns whether the load takes blocks for the token that is left out of it, too.

        That token may be the first one of a block, which vLLM then allocates after the load. For
        groups with windows vLLM keeps no block free for that. If loads hold all blocks by then, the
        request gets none, vLLM stops its scan there, and no request ever runs again.
        """
        token = self.facts.prompt_tokens - self.cache.tokens_left_out
        starts_block = any(token % size == 0 for size in self.cache.block_sizes)
        return any(self.cache.windows) and starts_block

    def _may_allocate_last(self) -> bool:
        """Returns whether vLLM may take all tokens of the prompt as loaded.

        It then computes the last one again, in a block that it has.
        """
        tokens = self.facts.prompt_tokens
        for size, window in zip(self.cache.block_sizes, self.cache.windows, strict=True):
            # vLLM allocates the window of the token after the prompt. That of the last one begins
            # one token earlier, which may be in one block more.
            first = tokens - window + 1
            if window and first > 0 and first % size == 0:
                return False
            # vLLM caches whole blocks of the load before the last token is computed.
            if tokens % size == 0:
                return False
        return True

    def on_blocks_allocated(self, blocks: Blocks, tokens_to_load: int) -> Blocks:
        """Serves the cached blocks to P, and starts the load from P.

        Returns the blocks, by group, that vLLM takes as loaded and the load does not write.
        """
        if self.state is not DecodeState.NEW:
            return ()
        # Even if nothing is loaded: P may still wait for the answer to its lookup.
        self._serve_cached_blocks(blocks)
        if tokens_to_load == 0:
            self._skip_load()
            return ()
        self.state = DecodeState.LOADING
        token_end = self.facts.prompt_tokens - self.cache.tokens_left_out
        allocated_end = self.facts.prompt_tokens if self._allocates_last() else token_end
        tokens = range(allocated_end - tokens_to_load, token_end)
        self._request_load(self.facts.transfer, blocks, tokens, self.facts.stall_timeout)
        if allocated_end == token_end:
            return ()
        sizes = self.cache.block_sizes
        return [ids[-(-token_end // size) :] for size, ids in zip(sizes, blocks, strict=True)]

    def _end_load(self) -> None:
        if self.state is not DecodeState.LOADING:
            return
        self.state = DecodeState.LOCAL
        # After a failure vLLM frees the blocks; after a success P has read all that it needs.
        self._end_reuse()

    def _skip_load(self) -> None:
        """Makes the leg an ordinary request, and has P release its blocks."""
        self.state = DecodeState.LOCAL
        assert self.facts.plan is not None, "a decode leg has a plan"
        # With a plan in which no rank reads, each source is informed by exactly one of our ranks.
        source_count = len(self.facts.sources)
        rank_count = len(self.facts.plan.shards)
        empty_plan = reshard.nothing(source_count, rank_count)
        skipped = LoadSkipped(self.facts.transfer, self.facts.sources, empty_plan)
        self.step.for_receiver.append(skipped)

    # Reuse ----------------------------------------------------------------------------------------
    def _serve_cached_blocks(self, blocks: Blocks) -> None:
        """Lets P read the blocks that this leg has from its prefix cache.

        The request holds these blocks until it is preempted or ends.
        """
        if self.reuse is not ServeBackState.NEW:
            return
        cached_blocks = []
        # Revoked at once without any: P's lookup must not wait for its deadline.
        is_complete = self.cached_tokens > 0
        for block_size, ids in zip(self.cache.block_sizes, blocks, strict=True):
            cached = list(ids[: self.cached_tokens // block_size])
            cached_blocks.append(cached)
            # MultiConnector of older vLLM passes no blocks to connectors that load nothing; that of
            # vLLM 0.32 passes all.
            if len(cached) * block_size < self.cached_tokens:
                is_complete = False
        if not is_complete:
            self._end_reuse()
            return
        self.reuse = ServeBackState.SERVING
        assert self.facts.reuse is not None
        # `cached`: a request of this very step may still compute these blocks, so the workers
        # announce them as final when the step ends.
        scheduled = BlocksScheduled(
            transfer=self.facts.reuse,
            tokens=self.cached_tokens,
            blocks=cached_blocks,
            cached=True,
            prompt=self.facts.digest,
            adapter=self.facts.adapter,
        )
        self.step.for_sender.append(scheduled)

    def _end_reuse(self) -> None:
        """Ends the reuse in any state, and revokes what P may read."""
        if self.reuse is ServeBackState.ENDED:
            return
        # Also from NEW: the sender then refuses P, which else would wait for its deadline.
        self.reuse = ServeBackState.ENDED
        assert self.facts.reuse is not None
        self.step.for_sender.append(BlocksRevoked(self.facts.reuse))

    # End ------------------------------------------------------------------------------------------
    def on_preempted(self) -> None:
        """Stops serving cached blocks: vLLM has taken them back, read by P or not."""
        self._end_reuse()

    def on_refused(self) -> None:
        """Makes a new leg an ordinary request, and informs P at once."""
        self._end_reuse()
        self._skip_load()

    def on_finished(self, *, is_normal: bool) -> bool:
        """Ends the leg; vLLM keeps none of its blocks."""
        self._end_reuse()
        # While LOADING, vLLM keeps the blocks until the workers have reported the end of the load.
        if self.state is DecodeState.LOADING:
            self.step.for_receiver.append(LoadCancelled(self.facts.transfer))
        # Aborted in the queue: no rank will ever read, and P would hold its blocks for the lease.
        elif self.state is DecodeState.NEW:
            self._skip_load()
        return False

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself.  Tests call it after each call."""
        context = (self.facts, self.state, self.reuse)
        if self.reuse is ServeBackState.SERVING:
            assert self.cached_tokens > 0 and self.state is not DecodeState.NEW, context
        if self.reuse is not ServeBackState.ENDED:
            assert self.facts.reuse is not None, context
