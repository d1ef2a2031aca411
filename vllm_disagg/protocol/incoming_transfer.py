"""Records of a load: its sources, and its pieces that have not been written yet.

    IncomingTransfer -- SourceRecord    for each sender that this rank reads from
                     -- PieceRecord     for each piece from its cut to its last byte

`receiver.py` has the states of transfers and sources, `piece_reads.py` those of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..kv.extents import Extent
from . import messages
from .read_plan import ReadPlan
from .reasons import Reason, Uncompared


class SourceState(Enum):
    """State of one source of a transfer; see the head of `receiver.py`."""

    MOVING = auto()
    SETTLING = auto()
    SETTLED = auto()


class PieceState(Enum):
    """State of one piece; see the head of `piece_reads.py`."""

    QUEUED = auto()
    POSTED = auto()
    CANCELLED = auto()


@dataclass
class PieceRecord:
    """A piece that has not been written yet."""

    source: str
    read_plan: ReadPlan
    extent: Extent  # in the source's numbering
    bytes: int
    credit: int  # bytes of the window that it takes up
    state: PieceState = PieceState.QUEUED
    # At which its read was posted last.  If the source sends elsewhere by now, the read waits in
    # vain.
    address: str = ""
    retry_at: float = 0.0  # time at which to request it again
    damaged_by: list[str] = field(default_factory=list)  # transports, at each damaged arrival
    is_requested: bool = False  # by a ReadRequest since its read was posted last

    @property
    def credit_in_use(self) -> int:
        """Bytes of the window that it takes up at present."""
        # A CANCELLED piece counts too: it is posted again without waiting for a new credit.
        if self.state is PieceState.QUEUED:
            return 0
        return self.credit


@dataclass
class SourceRecord:
    """A sender's part in one transfer."""

    name: str
    readers: int  # ranks of this engine that read from it
    read_plans: list[ReadPlan]
    bytes_remaining: int  # still to be written
    last_seen: float  # time of its last message or bytes
    state: SourceState = SourceState.MOVING
    # Of the blocks that are compared with the source's; empty without a comparison.
    compared: list[ReadPlan] = field(default_factory=list)
    sums: list[int] | None = None  # of these blocks here; None until they are summed
    confirmed_sums: list[int] | None = None  # of the same blocks at the source; None until Confirm
    # By KV-cache group: ids of the source's blocks, from the prompt's first one on.
    blocks: dict[int, list[int]] = field(default_factory=dict)
    uncounted_bytes: int = 0  # read without a ReadRequest
    transports: set[str] = field(default_factory=set)  # that have written pieces
    # From the last Progress.  Kept, because an older one may arrive after it.
    tokens_final: int = 0
    tokens_partial: int = 0
    layers_partial: int = 0

    def add_blocks(self, added: list[messages.NewBlocks], token_end: int) -> None:
        """Adds block ids of the source to those that are known."""
        sizes = {plan.source_kind.group: plan.source_kind.block_size for plan in self.read_plans}
        for new in added:
            # Without the limits a faulty source could fill the memory.
            if new.group not in sizes:
                continue
            known = self.blocks.setdefault(new.group, [])
            # One that follows a lost Progress leaves a gap: the place of its blocks is unknown.
            if new.first <= len(known):
                count = -(-token_end // sizes[new.group])
                later = new.ids[len(known) - new.first :]
                known += later[: count - len(known)]

    @property
    def uncompared(self) -> Uncompared | None:
        """Why not all blocks of a settled source were compared; None if all are equal."""
        if len(self.compared) < len(self.read_plans):
            return Uncompared.OTHER_LAYOUT
        return None if self.confirmed_sums else Uncompared.NO_SENDER_SUMS

    def difference(self) -> str:
        """Returns which layer of this rank differs from the source's; the first one of several."""
        assert self.sums is not None and self.confirmed_sums is not None
        if not self.sums:
            return "this rank could not sum its blocks"
        layers: list[int] = []
        for plan in self.compared:
            layers += range(plan.shard.layer, plan.shard.layer_end)
        pairs = zip(layers, self.sums, self.confirmed_sums, strict=False)
        for layer, ours, theirs in pairs:
            if ours != theirs:
                return f"layer {layer} of this rank has other bytes than at {self.name}"
        return f"{self.name} has summed {len(self.confirmed_sums)} layers of {len(layers)}"


@dataclass
class IncomingTransfer:
    """One load and its sources."""

    sources: dict[str, SourceRecord]
    token_end: int
    stall_timeout: float
    prompt: str  # digest of the whole prompt
    started_at: float
    last_progress: float  # time at which tokens, bytes or a Confirm arrived last
    retry_at: float  # time of the next keep-alive
    keepalive_interval: float  # of this transfer: see `Receiver._keepalive_interval`
    failure: Reason | None = None  # set in DRAINING
    pieces_created: int = 0
    pieces: dict[int, PieceRecord] = field(default_factory=dict)  # those not written yet, by number
    bytes_landed: int = 0
    bytes_overlapped: int = 0  # written before the sender had computed the whole prompt
    computed_at: float = 0.0  # time of the last Progress with which a source had all tokens
    detail: str = ""  # of a failure

    @property
    def open_sources(self) -> list[SourceRecord]:
        """Sources that have bytes or a Confirm to send; none in DRAINING."""
        # DRAINING: no source takes part any more, and none can keep the transfer open.
        if self.failure is not None:
            return []
        return [s for s in self.sources.values() if s.state is not SourceState.SETTLED]

    @property
    def uncompared(self) -> Uncompared | None:
        """Why not all blocks that were read were compared: that of the first such source."""
        found = (source.uncompared for source in self.sources.values())
        return next((reason for reason in found if reason is not None), None)
