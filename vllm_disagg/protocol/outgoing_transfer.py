"""Records of a prompt's KV at its sender, and of its receivers.

    OutgoingTransfer -- ReceiverRecord    for each receiver that has sent a TransferRequest

`sender.py` has their states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..kv.block_sums import BlockSums
from ..kv.extents import Extent
from ..kv.layout import LayerLayout, RankLayout
from . import messages
from .lease import Lease
from .reasons import Reason


class SendState(Enum):
    """State of an outgoing transfer; see the head of `sender.py`."""

    WANTED = auto()
    COMPUTING = auto()
    HELD = auto()


@dataclass
class ReceiverRecord:
    """One receiver of one outgoing transfer."""

    address: str  # <transport>:<address>, to which its pieces go
    # Digest of its own prompt.  The first request sets it, and no later one can replace it to
    # pass the comparison.
    prompt: str
    lease: Lease
    # Number and address of each SendPiece that has not ended.
    sending: set[tuple[int, str]] = field(default_factory=set)
    reads_by_address: bool = False
    blocks_sent: dict[int, int] = field(default_factory=dict)  # by KV-cache group: how many
    is_complete: bool = False  # has sent ReadComplete
    sums: list[int] = field(default_factory=list)  # those of its Confirm
    waiting: messages.ReadComplete | None = None  # until the blocks are summed
    is_gone: bool = False  # aborted, refused, or silent for the lease

    @property
    def is_active(self) -> bool:
        """Whether the receiver may still request pieces."""
        return not (self.is_complete or self.is_gone)


@dataclass
class OutgoingTransfer:
    """One prompt's KV and its receivers."""

    state: SendState
    deadline: float  # end of WANTED and HELD while no receiver is active
    blocks: list[list[int]] = field(default_factory=list)  # block ids by KV-cache group
    prompt: str = ""  # digest of the prompt that the blocks belong to
    tokens_final: int = 0  # final in all layers
    tokens_partial: int = 0  # final in the first `layers_partial` layers
    layers_partial: int = 0
    block_sums: BlockSums | None = None  # None: the blocks are not summed
    tokens_summed: int = 0  # tokens whose blocks have their sums
    is_recomputed: bool = False  # final layers were computed again: no receiver is served any more
    expected_receivers: int | None = None  # set by the first TransferRequest
    receivers: dict[str, ReceiverRecord] = field(default_factory=dict)

    def is_over(self) -> bool:
        """Whether all expected receivers have ended and no piece is being sent."""
        ended = sum(not receiver.is_active for receiver in self.receivers.values())
        expected = self.expected_receivers
        # None: no request came yet, so the number of receivers is unknown.  0 expected: over at
        # once.  Ended receivers count however they ended: none of them reads any more.
        return expected is not None and ended >= expected and not self.is_sending()

    def is_sending(self) -> bool:
        """Whether a transport still reads blocks of this transfer."""
        # A receiver that has gone counts too: its transport may not have noticed yet.
        return any(receiver.sending for receiver in self.receivers.values())

    def is_final(self, extent: Extent) -> bool:
        """Whether all bytes of the extent are computed and do not change any more."""
        # Progress is a staircase of two steps; the extent is under the upper or the lower one.
        if extent.token_end <= self.tokens_final:
            return True
        return extent.token_end <= self.tokens_partial and extent.layer_end <= self.layers_partial

    def active_receivers(self) -> list[str]:
        """Names of the receivers that may still request pieces."""
        return [name for name, receiver in self.receivers.items() if receiver.is_active]

    def holds_start(self, extent: Extent, kind: LayerLayout) -> bool:
        """Whether vLLM still keeps the extent's first block; of a sliding window it frees some."""
        if not kind.window:
            return True
        # vLLM's own rule: it frees the blocks that end before the first token to which the next
        # token attends.  They may hold another request by now, and `Confirm` would vouch for them.
        return extent.token + kind.block_size > self.tokens_partial - kind.window + 1

    def reason_unserved(self, receiver: ReceiverRecord) -> Reason | None:
        """Returns why an active receiver cannot be served; None if it can."""
        if self.is_recomputed:
            return Reason.BLOCKS_REVOKED
        # While WANTED the prompt is unknown; it is compared when vLLM schedules it.
        if self.state is not SendState.WANTED and receiver.prompt != self.prompt:
            return Reason.PROMPT_MISMATCH
        return None

    def next_deadline(self) -> float | None:
        """Returns when the state may change by time alone; None if by events only."""
        # The first lease of an active receiver decides; without one, the transfer's own deadline.
        leases = [
            receiver.lease.ends_at for receiver in self.receivers.values() if receiver.is_active
        ]
        # COMPUTING ends by vLLM's events only, sends by SendCompleted only.
        if leases or self.state is SendState.COMPUTING or self.is_sending():
            return min(leases, default=None)
        return self.deadline

    def end_silent_receivers(self, now: float) -> None:
        """Ends the part of each receiver whose lease has run out."""
        # Silence for the lease is as good as an Abort.
        for receiver in self.receivers.values():
            if receiver.is_active and receiver.lease.ends_at <= now:
                receiver.is_gone = True

    def prolong(self, seconds: float) -> None:
        """Adds to all waits the time in which this process slept."""
        self.deadline += seconds
        for receiver in self.receivers.values():
            receiver.lease.prolong(seconds)

    def validate(self, name: str, layout: RankLayout) -> None:
        """Raises AssertionError if the state contradicts itself.  `layout`: of this rank.

        `name`: of the transfer, for the message.
        """
        assert (self.state is SendState.WANTED) == (not self.blocks), (name, self)
        capacities = [0]  # by layer kind: tokens for which there are blocks
        if self.blocks:
            capacities = [len(self.blocks[kind.group]) * kind.block_size for kind in layout.kinds]
        assert self.tokens_final <= self.tokens_partial <= min(capacities), (name, self)
        assert self.layers_partial < len(layout.layers), (name, self)
        for receiver in self.receivers.values():
            assert len(receiver.sending) <= messages.MAX_PIECES_PER_RECEIVER, (name, self)
        # Else no event would be left that releases the blocks before the lease runs out.
        assert not (self.state is SendState.HELD and self.is_over()), (name, self)
