"""The common part of both kinds of legs: facts, events of the next step, blocks of a load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..kv.reshard import ReshardPlan
from . import events
from .peers import WorkerInfo

NULL_BLOCK = 0  # the id of vLLM's block without content
Blocks = Sequence[Sequence[int]]  # ids by KV-cache group


@dataclass(frozen=True)
class CacheFacts:
    """The properties of an engine's KV cache on which its legs depend."""

    block_sizes: list[int]  # tokens, by KV-cache group
    # vLLM computes the last token of a fully loaded prompt again. With a sliding window it has not
    # allocated the oldest token in that one's window. An SSM state would be advanced twice. So
    # the last token is left out of the load: 1 token, or 0.
    tokens_left_out: int = 0
    # Tokens of the sliding window, by KV-cache group; 0 for a group that keeps all. Empty: none.
    windows: list[int] = field(default_factory=list)
    # Blocks of the whole engine that handed-over prompts may hold together; None: no limit.
    max_handover_blocks: int | None = None
    # Blocks that one load may take so that vLLM ever begins it; None: no limit.
    max_load_blocks: int | None = None

    def can_load(self, tokens: int) -> bool:
        """Returns whether vLLM may ever begin a load after which a request has so many tokens."""
        if self.max_load_blocks is None:
            return True
        windows = self.windows or [0] * len(self.block_sizes)
        blocks = 0
        for size, window in zip(self.block_sizes, windows, strict=True):
            first = max(0, tokens - window + 1) // size if window else 0
            blocks += -(-tokens // size) - first
        return blocks <= self.max_load_blocks


@dataclass(frozen=True)
class LegFacts:
    """A request of vLLM and the content of its grant."""

    request: str  # vLLM's id
    transfer: str
    prompt_tokens: int
    digest: str  # of all inputs of the prompt's KV
    sources: list[WorkerInfo]  # the other engine's workers, if this leg reads from them
    plan: ReshardPlan | None  # which rank of this engine reads what; None if none reads
    stall_timeout: float  # seconds without progress after which the main load fails
    adapter: str = ""  # LoRA adapter, by what vLLM's caches tell it by; empty: none
    # On P too vLLM goes on after the tokens that D reads, in the same block.
    writes_more: bool = False
    reuse: str | None = None  # transfer id of bidirectional KV reuse; None if it is not permitted
    # A prefill leg of the standard handshake: no receiver is known before its answer.
    is_handover: bool = False


@dataclass
class StepEvents:
    """Events for the workers of one engine, which go with vLLM's next step."""

    for_sender: list[events.ForSender] = field(default_factory=list)
    for_receiver: list[events.ForReceiver] = field(default_factory=list)
    # Transfer id -> vLLM's request id, for new transfers. There are two maps because both legs of
    # one transfer may run on one engine.
    serving_requests: dict[str, str] = field(default_factory=dict)
    loading_requests: dict[str, str] = field(default_factory=dict)

    def take(self) -> StepEvents:
        """Returns the events so far, and collects anew."""
        taken = StepEvents(
            for_sender=self.for_sender,
            for_receiver=self.for_receiver,
            serving_requests=self.serving_requests,
            loading_requests=self.loading_requests,
        )
        # New containers, because the taken ones travel with the step.  This object stays: all legs
        # hold it.
        self.for_sender = []
        self.for_receiver = []
        self.serving_requests = {}
        self.loading_requests = {}
        return taken


class RequestLeg(ABC):
    """One request with a grant.

    A subclass holds the states of the main transfer and of bidirectional KV reuse.
    """

    def __init__(self, facts: LegFacts, cache: CacheFacts, step: StepEvents) -> None:
        """Creates a new leg, whose first events go to `step`."""
        self.facts = facts
        self.cache = cache
        self.step = step  # one object for all legs of an engine
        self.yields_turn = False  # a load has ended, and the request had no turn since

    @property
    @abstractmethod
    def waits_for_kv(self) -> bool:
        """Whether the request can only go on after a report of the workers."""

    def tokens_to_load(self, cached_tokens: int, now: float) -> int | None:
        """Returns how many prompt tokens come from the other engine; None if not known yet.

        `cached_tokens`: the tokens before them, from this engine's prefix cache.

        Also returns None once after a load has ended, for the sake of loads that failed. vLLM looks
        at requests with loads before all others, and stops at one that needs more blocks than are
        free. After a failed load the request holds no block. With sliding windows it needs more
        blocks to compute than to load. In front of the requests that hold the pool it would block
        vLLM forever. None moves it behind them, and they can run. Once is enough; more often would
        let a stream of new loads starve it.
        """
        if self.yields_turn:
            self.yields_turn = False
            return None
        missing = self._missing_tokens(cached_tokens, now)
        # With speculative decoding vLLM keeps blocks free beside each load.  A load that needs all
        # would wait forever, and all requests behind it.  0 has the prompt computed here.
        if missing and not self.cache.can_load(cached_tokens + missing):
            return 0
        return missing

    @abstractmethod
    def _missing_tokens(self, cached_tokens: int, now: float) -> int | None:
        """Returns the number of `tokens_to_load` for a request whose turn it is."""

    @abstractmethod
    def on_blocks_allocated(self, blocks: Blocks, tokens_to_load: int) -> Blocks:
        """Starts the load of a request, or serves its cached blocks.

        Returns the blocks, by group, that vLLM takes as loaded and the load does not write.
        """

    @abstractmethod
    def on_preempted(self) -> None:
        """Stops serving blocks: vLLM has taken them back, read by the receiver or not."""

    def on_load_finished(self) -> None:
        """Makes a loading leg an ordinary request, after a success or a failure."""
        # After a success too, since the call does not name the outcome.  vLLM then gives the
        # request blocks without a call of `tokens_to_load`.
        self.yields_turn = True
        self._end_load()

    @abstractmethod
    def _end_load(self) -> None:
        """Leaves the state in which the workers read."""

    @abstractmethod
    def on_refused(self) -> None:
        """Makes a new leg an ordinary request, and informs the other engine at once."""

    @abstractmethod
    def on_finished(self, *, is_normal: bool) -> bool:
        """Ends the leg; returns whether vLLM keeps its blocks until they are sent.

        `is_normal`: the request has all its tokens; it was not aborted.
        """

    def _request_load(
        self,
        transfer: str,
        blocks: Blocks,
        tokens: range,
        stall_timeout: float,
    ) -> None:
        """Has the workers read these tokens of the prompt into `blocks`."""
        assert self.facts.plan is not None, "a leg without a plan never loads"
        # Only blocks of these tokens: those before them are in the prefix cache, where other
        # requests use them.
        group_blocks = [
            blocks_of_tokens(ids, block_size, tokens)
            for block_size, ids in zip(self.cache.block_sizes, blocks, strict=True)
        ]
        load = events.LoadRequested(
            transfer=transfer,
            sources=self.facts.sources,
            plan=self.facts.plan,
            blocks=group_blocks,
            token_end=tokens.stop,
            stall_timeout=stall_timeout,
            prompt=self.facts.digest,
        )
        self.step.for_receiver.append(load)

    @abstractmethod
    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself.  Tests call it after each call."""


def blocks_of_tokens(ids: Sequence[int], block_size: int, tokens: range) -> events.GroupBlocks:
    """Returns the blocks of one KV-cache group that hold these tokens.

    Leaves out leading null blocks: vLLM puts them where a sliding window has passed.
    """
    first = tokens.start // block_size
    stop = -(-tokens.stop // block_size)
    # P refuses tokens that its own window has passed, and all requests share the null block.  The
    # last block stays in any case: a load has at least one.
    while first < stop - 1 and ids[first] == NULL_BLOCK:
        first += 1
    return events.GroupBlocks(first * block_size, list(ids[first:stop]))
