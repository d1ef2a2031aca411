"""Records of a load, from its request to its report.

    IncomingTransfer -- SourceRecord    for each sender that this rank reads from
                     -- PieceRecord     for each piece, until it is written

`receiver.py` has the states of transfers and sources, `piece_reads.py` those of pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ..kv.extents import Extent
from . import messages
from .block_comparison import BlockComparison
from .events import LoadRequested, LoadResult, SendMessage
from .read_plan import ReadPlan
from .reasons import Reason, Uncompared

# Between two keep-alives, however short the lease of a source is.
MIN_KEEPALIVE_SECONDS = 0.1


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
    comparison: BlockComparison
    bytes_remaining: int  # still to be written
    last_seen: float  # time of its last message or bytes
    state: SourceState = SourceState.MOVING
    # By KV-cache group: ids of the source's blocks, from the prompt's first one on.
    blocks: dict[int, list[int]] = field(default_factory=dict)
    uncounted_bytes: int = 0  # read without a ReadRequest
    transports: set[str] = field(default_factory=set)  # that have written pieces
    # From the last Progress.  Kept, because an older one may arrive after it.
    tokens_final: int = 0
    tokens_partial: int = 0
    layers_partial: int = 0

    def advance(self, event: messages.Progress) -> bool:
        """Takes what is final by now; returns False if it was known."""
        # Progress is cumulative, so a later message is never smaller than an earlier one.
        progress = (event.tokens_final, event.tokens_partial, event.layers_partial)
        if progress <= (self.tokens_final, self.tokens_partial, self.layers_partial):
            return False
        self.tokens_final = event.tokens_final
        self.tokens_partial = event.tokens_partial
        self.layers_partial = event.layers_partial
        return True

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

    def read_complete(self, transfer: str, reader: str, token_end: int) -> SendMessage:
        """Returns the message that all bytes are in place."""
        complete = messages.ReadComplete(
            transfer=transfer,
            source=self.name,
            reader=reader,
            extents=self.comparison.extents(token_end),
            uncounted_bytes=self.uncounted_bytes,
        )
        return SendMessage(self.name, complete)


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
    keepalive_interval: float  # of this transfer: see `_keepalive_interval`
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
        found = (source.comparison.uncompared for source in self.sources.values())
        return next((reason for reason in found if reason is not None), None)

    def forgive_sleep(self, interval: float, now: float) -> None:
        """Prolongs all waits by the time in which this process slept.

        `interval`: seconds between the keep-alives of this rank.
        """
        # Not the transfer's own interval: sources choose their lease, and by a short one each
        # tick would be sleep, so that a silent source were never given up.
        if now < self.retry_at + interval:
            return
        # A whole interval was missed: this process slept, and so its peers seem silent.  They
        # get one more keep-alive, which is sent now, and the rest of `peer_timeout` to answer it.
        for source in self.open_sources:
            source.last_seen = max(source.last_seen, now - interval)
        # Nothing could be requested meanwhile, so the missed time is no stall of theirs.
        self.last_progress = min(now, self.last_progress + now - self.retry_at)

    def deadlines(self, peer_timeout: float) -> list[float]:
        """Returns the times at which a tick is due; none in DRAINING."""
        if not self.open_sources:
            return []
        silent = [source.last_seen + peer_timeout for source in self.open_sources]
        return [self.retry_at, *silent]

    def reason_overdue(self, peer_timeout: float, now: float) -> Reason | None:
        """Returns why the load is given up by now; None if it goes on."""
        # One silent source is enough: without its layers or heads the load has no use.
        if any(now >= source.last_seen + peer_timeout for source in self.open_sources):
            return Reason.PEER_TIMEOUT
        # The peers answer, but tokens and bytes do not come: recomputing is quicker.
        if now >= self.last_progress + self.stall_timeout:
            return Reason.TRANSFER_STALLED
        return None

    def result(
        self, name: str, reason: Reason | None, now: float, *, sums_blocks: bool
    ) -> LoadResult:
        """Returns the report of the load's end.  `sums_blocks`: this rank can sum blocks."""
        uncompared = None
        # A rank that reads nothing has no sources.
        if reason is None and self.sources:
            uncompared = self.uncompared if sums_blocks else Uncompared.NOT_SUMMED_HERE
        return LoadResult(
            transfer=name,
            reason=reason,
            bytes_landed=self.bytes_landed,
            bytes_overlapped=self.bytes_overlapped,
            seconds=now - self.started_at,
            seconds_after_prefill=now - max(self.computed_at, self.started_at),
            ended_at=now,
            is_verified=reason is None and bool(self.sources) and uncompared is None,
            uncompared=uncompared,
            detail=self.detail,
        )

    def validate(self, name: str) -> None:
        """Raises AssertionError if the state contradicts itself.  `name`: of the transfer."""
        if self.failure is not None:
            # Else no event would be left that reports the transfer.
            assert self.pieces, (name, self)
            assert all(p.state is PieceState.POSTED for p in self.pieces.values()), (name, self)
            return
        # Else it would be settled, and reported before.
        assert self.open_sources, (name, self)
        for source in self.sources.values():
            if source.state is SourceState.SETTLED and source.comparison.confirmed_sums:
                assert source.comparison.sums == source.comparison.confirmed_sums, (name, self)
            is_moving = source.state is SourceState.MOVING
            has_pieces = any(p.source == source.name for p in self.pieces.values())
            assert is_moving == bool(source.bytes_remaining), (name, self)
            assert is_moving or not has_pieces, (name, self)


def begin_load(
    event: LoadRequested,
    plans: Mapping[int, list[ReadPlan]],
    keepalive_interval: float,
    now: float,
    *,
    sums_blocks: bool,
) -> IncomingTransfer:
    """Returns the record of a load that begins.

    `plans`: all that this rank reads, by rank of the source.  `keepalive_interval` in seconds: the
    longest one.  `sums_blocks`: this rank can sum blocks.
    """
    interval = _keepalive_interval(event, keepalive_interval)
    t = IncomingTransfer(
        sources={},
        token_end=event.token_end,
        stall_timeout=event.stall_timeout,
        prompt=event.prompt,
        started_at=now,
        last_progress=now,
        retry_at=now + interval,
        keepalive_interval=interval,
    )
    for rank, read_plans in plans.items():
        name = event.sources[rank].name
        # Without sums of this rank nothing is compared.
        comparable = [plan for plan in read_plans if sums_blocks and plan.is_comparable]
        source = SourceRecord(
            name=name,
            readers=event.plan.readers[rank],
            read_plans=read_plans,
            comparison=BlockComparison(name, comparable, len(comparable) == len(read_plans)),
            # The sum is known before any Progress, so the last byte is recognised without a
            # message that could be lost.
            bytes_remaining=sum(read_plan.bytes for read_plan in read_plans),
            last_seen=now,
        )
        t.sources[name] = source
    return t


def _keepalive_interval(event: LoadRequested, longest: float) -> float:
    """Returns the seconds between keep-alives of a load: at most a third of a source's lease.

    The settings of two engines may differ.
    """
    lease = min((worker.lease for worker in event.sources), default=math.inf)
    # Not below: the sources choose their lease, and each keep-alive costs a turn here.
    return min(longest, max(lease / 3, MIN_KEEPALIVE_SECONDS))
