"""Records of a prompt's KV at its sender, and of its receivers.

    OutgoingTransfer -- ReceiverRecord    for each receiver that has sent a TransferRequest

`sender.py` has their states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..kv.block_sums import BlockSums
from ..kv.extents import Extent
from ..kv.layout import LayerLayout
from . import messages
from .lease import Lease


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
