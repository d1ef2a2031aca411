"""What goes into the protocol machines and what comes out, besides wire messages.

An event is a fact the machine could not know by itself; an action is a thing it may not do by
itself. All are plain values, so a run can be recorded, read by a person and replayed. What a
scheduler tells its workers in vLLM's step metadata *is* a list of these events.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from ..kv.extents import Extent
from ..kv.layout import RemoteLayout
from ..kv.reshard import ReshardPlan
from . import messages
from .peers import WorkerInfo


class Reason(str, Enum):
    """Why a transfer did not deliver; a closed set, because it labels metrics."""

    CANCELLED = "cancelled"  # vLLM no longer wants it
    WITHDRAWN = "withdrawn"  # P's request was aborted or preempted
    DIFFERENT = "different"  # P computes another prompt under this name
    REFUSED = "refused"  # P knows nothing (any more) of this transfer, or has no room for it
    SILENT = "silent"  # P does not answer
    LATE = "late"  # P answers, but nothing moves
    STALLED = "stalled"  # P's worker answers, but its vLLM has made no step for long, and has work
    CORRUPT = "corrupt"  # bytes did not match their checksum or size, again and again
    BROKEN = "broken"  # our own driver failed
    LOST = "lost"  # P let go of the blocks before we were done


# Events, prefill side -----------------------------------------------------------------------------
class BlocksScheduled(msgspec.Struct, frozen=True, tag=True):
    """This step computes the prompt up to `tokens`; `blocks` are the block ids added since the last
    such event, by group.
    """

    transfer: str
    tokens: int
    blocks: list[list[int]]
    cached: bool = (
        False  # of a prefix-cache hit: computed by whatever this step or an earlier one computes
    )
    prompt: str = ""  # a digest of the whole of it: readers who have another are served nothing


class LayersComputed(msgspec.Struct, frozen=True, tag=True):
    """The first `layers` layers of what the last BlocksScheduled announced are in memory, and do
    not change any more.
    """

    transfer: str
    layers: int


class LayersRecomputed(msgspec.Struct, frozen=True, tag=True):
    """Layers that this step has said to be final were computed again: readers may have what they
    were before.
    """

    transfer: str


class PrefillFinished(msgspec.Struct, frozen=True, tag=True):
    """The request has finished; its blocks stay until we ReleaseBlocks them."""

    transfer: str


class BlocksRevoked(msgspec.Struct, frozen=True, tag=True):
    """The blocks are vLLM's again (abort, preemption), whatever we were doing with them."""

    transfer: str


class SendCompleted(msgspec.Struct, frozen=True, tag=True):
    """A SendPiece has ended: the transport no longer reads our blocks for it."""

    transfer: str
    reader: str


class ConnectionLost(msgspec.Struct, frozen=True, tag=True):
    """The reader's end of a connection has closed: its process has ended, or it will soon say
    something.
    """

    reader: str


# Events, decode side ------------------------------------------------------------------------------
class GroupBlocks(msgspec.Struct, frozen=True):
    """Of one KV-cache group: the blocks of a prompt from `token`, a multiple of the group's block
    size.
    """

    token: int
    ids: list[int]


class LoadRequested(msgspec.Struct, frozen=True, tag=True):
    """vLLM has parked a request and allocated `blocks`, by group, for its tokens up to `token_end`."""

    transfer: str
    sources: list[WorkerInfo]  # P's workers by rank
    plan: ReshardPlan
    blocks: list[GroupBlocks]
    token_end: int
    patience: float
    prompt: str = ""  # a digest of the whole of it


class LookupRequested(msgspec.Struct, frozen=True, tag=True):
    """How many tokens of a transfer do its sources have?  Until it is LoadRequested or
    LoadCancelled.
    """

    transfer: str
    sources: list[WorkerInfo]
    plan: ReshardPlan
    prompt: str = ""


class LoadSkipped(msgspec.Struct, frozen=True, tag=True):
    """We shall read nothing of this transfer (a full prefix hit, an abort in the queue): P may let
    go.
    """

    transfer: str
    sources: list[WorkerInfo]
    plan: ReshardPlan  # in which nobody reads


class LoadCancelled(msgspec.Struct, frozen=True, tag=True):
    """vLLM no longer wants a transfer that it wanted or sought."""

    transfer: str


class PieceArrived(msgspec.Struct, frozen=True, tag=True):
    """The bytes of a piece are here, in the transport's own memory."""

    transfer: str
    number: int


class PieceWritten(msgspec.Struct, frozen=True, tag=True):
    """A Land has ended; `ok` says whether size and checksum were right."""

    transfer: str
    number: int
    ok: bool


class TransportChanged(msgspec.Struct, frozen=True, tag=True):
    """From now on pieces from this source come to `address`. `lost`: what was asked for before will
    not come.
    """

    source: str
    address: str
    lost: bool = False


# Events, both sides -------------------------------------------------------------------------------
class ClockTick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed."""


# Actions ------------------------------------------------------------------------------------------
class SendMessage(msgspec.Struct, frozen=True, tag=True):
    to: str
    message: messages.ToSender | messages.ToReceiver


class SendPiece(msgspec.Struct, frozen=True, tag=True):
    """Send the bytes of a piece; `blocks` hold the extent's tokens in order. Ends in SendCompleted."""

    transfer: str
    reader: str
    address: str
    number: int
    extent: Extent
    blocks: list[int]


class ReleaseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Give the blocks back to vLLM."""

    transfer: str
    delivered: bool


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Be ready to exchange messages with this worker."""

    worker: WorkerInfo


class WritePiece(msgspec.Struct, frozen=True, tag=True):
    """Check the piece that has just arrived and copy it into `blocks`.  Ends in PieceWritten."""

    transfer: str
    number: int
    extent: Extent  # in our own numbering; `token` need not start a block
    blocks: list[int]
    theirs: RemoteLayout | None = None


class LookupResult(msgspec.Struct, frozen=True, tag=True):
    """All sources of what was sought have at least so many tokens; 0 if one of them will not serve
    it.
    """

    transfer: str
    tokens: int


class LoadResult(msgspec.Struct, frozen=True, tag=True):
    """Tell vLLM.  With a reason the load failed, and all of it is to be recomputed."""

    transfer: str
    reason: Reason | None
    landed: int = 0  # bytes
    early: int = 0  # bytes of these that landed while P still computed
    seconds: float = 0.0  # since LoadRequested


SenderEvent = (
    BlocksScheduled
    | LayersComputed
    | LayersRecomputed
    | PrefillFinished
    | BlocksRevoked
    | SendCompleted
    | ConnectionLost
    | ClockTick
    | messages.ToSender
)
SenderAction = SendMessage | SendPiece | ReleaseBlocks
ReceiverEvent = (
    LoadRequested
    | LookupRequested
    | LoadSkipped
    | LoadCancelled
    | PieceArrived
    | PieceWritten
    | TransportChanged
    | ClockTick
    | messages.ToReceiver
)
ReceiverAction = ConnectPeer | SendMessage | WritePiece | LookupResult | LoadResult
ForSender = BlocksScheduled | PrefillFinished | BlocksRevoked
ForReceiver = LoadRequested | LookupRequested | LoadSkipped | LoadCancelled
