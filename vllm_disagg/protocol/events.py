"""Events and actions of the protocol machines, apart from the messages on the wire.

An event is a fact from outside the machine; an action is a request to the driver.  All are plain
values, so a run can be recorded, read and replayed.  A connector's scheduler hands such events to
its workers in vLLM's step metadata.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from ..kv.block_sums import SummedBlocks
from ..kv.extents import Extent
from ..kv.layout import RemoteLayout
from ..kv.reshard import ReshardPlan
from . import messages
from .peers import WorkerInfo
from .reasons import Reason as Reason  # noqa: PLC0414 - `events.Reason` is its name
from .reasons import Uncompared


# Events for the sender ----------------------------------------------------------------------------
class BlocksScheduled(msgspec.Struct, frozen=True, tag=True):
    """Reports that this engine step computes the prompt up to `tokens`."""

    transfer: str
    tokens: int
    blocks: list[list[int]]  # block ids added since the last such event, by KV-cache group
    # The tokens are a prefix-cache hit: this step or an earlier one computes them.
    cached: bool = False
    prompt: str = ""  # digest of the whole prompt; receivers of another prompt are refused
    # vLLM goes on to write tokens into the last block that the receivers do not read, so its sum
    # would be no evidence.
    writes_more: bool = False
    # LoRA adapter of the prompt; empty: none.  Of use to the worker's adapter to vLLM alone.
    adapter: str = ""


class LayersComputed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the first `layers` layers of the last BlocksScheduled are final."""

    transfer: str
    layers: int


class BlocksSummed(msgspec.Struct, frozen=True, tag=True):
    """Reports sums of the blocks that hold the prompt up to `tokens`, in all layers.

    Cumulative: earlier blocks keep their sums.  Precedes the LayersComputed of all layers.
    """

    transfer: str
    tokens: int
    layers: list[SummedBlocks]  # by layer of the rank


class LayersRecomputed(msgspec.Struct, frozen=True, tag=True):
    """Reports that final layers were computed again.

    Receivers may have read their earlier bytes.
    """

    transfer: str


class PrefillFinished(msgspec.Struct, frozen=True, tag=True):
    """Reports that the request has finished; vLLM keeps its blocks until ReleaseBlocks."""

    transfer: str


class BlocksRevoked(msgspec.Struct, frozen=True, tag=True):
    """Reports that vLLM has taken the blocks back at once (abort, preemption)."""

    transfer: str


class SendCompleted(msgspec.Struct, frozen=True, tag=True):
    """Reports the end of a SendPiece: the transport no longer reads the blocks for it."""

    # No status: a piece that was lost is requested again.
    transfer: str
    reader: str
    number: int
    address: str


class ConnectionLost(msgspec.Struct, frozen=True, tag=True):
    """Reports that the receiver's end of a connection has closed.

    The receiver's process may still run, and connect again.
    """

    reader: str


# Events for the receiver --------------------------------------------------------------------------
class GroupBlocks(msgspec.Struct, frozen=True):
    """Blocks of a prompt in one KV-cache group, from a token on."""

    token: int  # of the first block; a multiple of the group's block size
    ids: list[int]


class LoadRequested(msgspec.Struct, frozen=True, tag=True):
    """Reports that vLLM has parked a request, with blocks for its tokens up to `token_end`."""

    transfer: str
    sources: list[WorkerInfo]  # the sending engine's workers by rank
    plan: ReshardPlan
    blocks: list[GroupBlocks]  # by KV-cache group
    token_end: int
    # Seconds without progress after which the load fails.  With each load, because the proxy and
    # the leg decide: computing again pays sooner for some loads than for others.
    stall_timeout: float
    prompt: str = ""  # digest of the whole prompt


class LookupRequested(msgspec.Struct, frozen=True, tag=True):
    """Requests the number of tokens that all sources have; lasts until a load or a cancel."""

    transfer: str
    sources: list[WorkerInfo]  # the sending engine's workers by rank
    plan: ReshardPlan
    prompt: str = ""  # digest of the whole prompt


class LoadExpected(msgspec.Struct, frozen=True, tag=True):
    """Reports that a request still waits for blocks into which its load goes.

    The sources keep the prompt for a further lease.
    """

    transfer: str
    sources: list[WorkerInfo]  # the sending engine's workers by rank
    plan: ReshardPlan
    prompt: str = ""  # digest of the whole prompt, for senders of earlier releases


class LoadSkipped(msgspec.Struct, frozen=True, tag=True):
    """Reports that no rank reads anything of this transfer (prefix hit, abort in the queue).

    The sources release their blocks.
    """

    # Without it the sources would hold their blocks for the lease.
    transfer: str
    sources: list[WorkerInfo]
    plan: ReshardPlan  # in which no rank reads


class LoadCancelled(msgspec.Struct, frozen=True, tag=True):
    """Reports that vLLM has cancelled a load or a lookup."""

    transfer: str


class ReadStatus(str, Enum):
    """Names how a posted read has ended."""

    WRITTEN = "written"  # all bytes are in the blocks
    DAMAGED = "damaged"  # size or checksum was wrong, or the copy into the blocks failed
    CANCELLED = "cancelled"  # by CancelReads, or because its path to the source broke


class ReadCompleted(msgspec.Struct, frozen=True, tag=True):
    """Reports the end of a PostRead: nothing is written into its blocks any more."""

    transfer: str
    number: int
    status: ReadStatus


class LayersSummed(msgspec.Struct, frozen=True, tag=True):
    """Reports the end of a SumBlocks."""

    transfer: str
    source: str
    sums: list[int]  # layer sums of all layers of its extents, in order; empty: not summed


class TransportChanged(msgspec.Struct, frozen=True, tag=True):
    """Reports that pieces from this source come to `address` from now on."""

    source: str
    address: str  # <transport>:<address>
    # Limit of one piece, if the transport needs another one than the setting `piece_bytes`; 0: no.
    piece_bytes: int = 0
    # The transport reads a piece without a ReadRequest, if its PostRead has `at_source`.
    reads_by_address: bool = False


# Events for both ----------------------------------------------------------------------------------
class ClockTick(msgspec.Struct, frozen=True, tag=True):
    """Reports that time has passed."""


# Actions ------------------------------------------------------------------------------------------
class SendMessage(msgspec.Struct, frozen=True, tag=True):
    """Sends a message to the worker `to`."""

    # A request without a promise: any message may be lost, and the machines repeat what matters.
    to: str
    message: messages.ToSender | messages.ToReceiver


class SendPiece(msgspec.Struct, frozen=True, tag=True):
    """Sends the bytes of a piece.  Ends in one SendCompleted."""

    transfer: str
    reader: str
    address: str
    number: int
    extent: Extent
    blocks: list[int]  # ids of the blocks that hold the extent's tokens, in order

    def completed(self) -> SendCompleted:
        """Returns the event that ends this action."""
        return SendCompleted(self.transfer, self.reader, self.number, self.address)


class CountSentBytes(msgspec.Struct, frozen=True, tag=True):
    """Adds bytes that a receiver has read by address to the total of this worker."""

    size: int


class ReleaseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Gives a finished request's blocks back to vLLM."""

    transfer: str
    delivered: bool  # whether all expected receivers have all their bytes


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Opens the control channel to a sending worker."""

    worker: WorkerInfo


class BlocksAtSource(msgspec.Struct, frozen=True, tag=True):
    """Blocks that hold a piece at its source, with all heads of these layers."""

    layer: int
    layer_end: int
    ids: list[int]


class PostRead(msgspec.Struct, frozen=True, tag=True):
    """Writes this piece into `blocks` when its bytes arrive at `address`, if they are right.

    Ends in one ReadCompleted.
    """

    transfer: str
    number: int
    source: str
    address: str  # <transport>:<address>, of this worker
    extent: Extent  # in this rank's numbering; `token` need not start a block
    blocks: list[int]
    remote_layout: RemoteLayout | None = None  # layout of the piece's bytes, if not as in blocks
    # Known only for a transport that reads by address: it reads at once, without a ReadRequest.
    at_source: BlocksAtSource | None = None


class CancelReads(msgspec.Struct, frozen=True, tag=True):
    """Ends these posted reads: at once, or with the write that is under way."""

    transfer: str
    numbers: list[int]


class SumBlocks(msgspec.Struct, frozen=True, tag=True):
    """Sums the blocks that were read from a source.  Ends in one LayersSummed."""

    transfer: str
    source: str
    extents: list[Extent]  # of whole blocks, in this rank's numbering
    blocks: list[list[int]]  # by extent

    def completed(self, sums: list[int]) -> LayersSummed:
        """Returns the event that ends this action."""
        return LayersSummed(self.transfer, self.source, sums)


class GiveUpPath(msgspec.Struct, frozen=True, tag=True):
    """Takes no piece of this source by this transport any more: it has brought other bytes.

    May come again.  The loads in flight go on: each is compared, or its pieces come elsewhere.
    """

    source: str
    transport: str


class LookupResult(msgspec.Struct, frozen=True, tag=True):
    """Reports that all sources of a lookup have at least `tokens` tokens; 0 if one refuses."""

    transfer: str
    tokens: int


class LoadResult(msgspec.Struct, frozen=True, tag=True):
    """Reports the end of a load to vLLM; with a reason, vLLM recomputes the prompt."""

    transfer: str
    reason: Reason | None
    bytes_landed: int = 0
    bytes_overlapped: int = 0  # bytes that landed while the sender still computed the prompt
    seconds: float = 0.0  # since LoadRequested
    seconds_after_prefill: float = 0.0  # since D knew the whole prompt's KV to be final
    ended_at: float = 0.0  # seconds, by the machine's clock
    is_verified: bool = False  # all blocks have the sums of their senders' blocks
    uncompared: Uncompared | None = None  # of a load that succeeded and is not verified
    detail: str = ""  # with KV_MISMATCH and CORRUPT: which layer differs, or what came damaged


SenderEvent = (
    BlocksScheduled
    | LayersComputed
    | BlocksSummed
    | LayersRecomputed
    | PrefillFinished
    | BlocksRevoked
    | SendCompleted
    | ConnectionLost
    | ClockTick
    | messages.ToSender
)
SenderAction = SendMessage | SendPiece | CountSentBytes | ReleaseBlocks
ReceiverEvent = (
    LoadRequested
    | LookupRequested
    | LoadExpected
    | LoadSkipped
    | LoadCancelled
    | ReadCompleted
    | LayersSummed
    | TransportChanged
    | ClockTick
    | messages.ToReceiver
)
ReceiverAction = (
    ConnectPeer
    | SendMessage
    | PostRead
    | CancelReads
    | SumBlocks
    | GiveUpPath
    | LookupResult
    | LoadResult
)
ForSender = BlocksScheduled | PrefillFinished | BlocksRevoked
ForReceiver = LoadRequested | LookupRequested | LoadExpected | LoadSkipped | LoadCancelled
# The layers come from the worker's forward pass; all other facts come from the scheduler.
Fact = ForSender | LayersComputed | BlocksSummed | LayersRecomputed | ForReceiver
