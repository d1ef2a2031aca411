"""Channel: rules, events, actions and common state of the two ends of a communicator. Pure.

`sender_end.py` and `receiver_end.py` are its state machines, `notes.py` has what they exchange.

NCCL and Gloo match sends and receives by their order alone. So both ends must execute the same
operations in the same order. The sender's end announces that order in notes, which keep their order
and are authenticated (`zmq/control.py`):

    receiver                        sender
    PairRequest(epoch) -----------> both make a communicator; LinkParameters carry its address
              <-------------------- ChannelReady: the sender's end has connected
                                    TransmitProof: known bytes (`proof.py`), as the first send
    ReceiveSlot, CheckProof: the known bytes have arrived
    ChangeRoute: the channel is proved; from here on the receiver requests pieces by this epoch
                                    TransmitSlot on a ReadRequest: gather into a slot of the ring
              <-------------------- ChannelPiece(seq): gathered; the slot's send is queued, by seq
    ReceiveSlot, by seq; when the receive has ended, DeliverSlot; later SlotFreed

States of either end (`ChannelState`); an *epoch* is the time from OPENING to CLOSED:

    CLOSED -> OPENING   receiver: ConnectChannel, not before `retry_at`; sender: PairRequest
    OPENING -> PROVING  sender: LinkUp; receiver: LinkUp and ChannelReady
    PROVING -> UP       receiver: ProofChecked; sender: the proof's send has ended, or a request
                        by this epoch, which the receiver sends only after its proof
    any -> CLOSED       LinkFailed, ChannelBroken, a violated rule, a wrong proof, or no progress in
                        time: PAIRING_SECONDS while OPENING or PROVING, `patience` with bytes in
                        flight, else IDLE_SECONDS

A gap in seq, a wrong size or an epoch without progress breaks the epoch. Both ends then abort their
link. The receiver takes its pieces by ZMQ at once, and pairs again later, under the next epoch.

Rules, checked by `validate` and by tests/transports/collective/test_channel.py:
  1. Both ends execute one order: the n-th receive of an epoch takes the bytes of the n-th send.
  2. A slot has one user at a time. Nothing is posted beyond the slots, and a piece that waits for a
     slot is not lost.
  3. Each SendRequested ends in exactly one SendFinished, and not while its blocks are being read.
  4. Events of another epoch have no effect, with one exception: a gather that has ended gives its
     blocks back.
  5. A request by an epoch that is not open at the sender's end is answered by ChannelBroken. So a
     lost note of its end costs one request, not IDLE_SECONDS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from ...protocol.events import SendPiece
from .notes import AtReceiverEnd, AtSenderEnd, ChannelPiece

# At each end of a communicator: one is filled, one in flight, one emptied, one spare.
SLOTS_PER_CHANNEL = 4
# That making a communicator may take, and then its proof: a library may connect only with the first
# send. No note is repeated: a lost one ends the epoch by this limit.
PAIRING_SECONDS = 10.0
# The first send and receive of an epoch. Large enough that NCCL moves it as it moves large pieces.
PROOF_SEQ = 0
MAX_PROOF_BYTES = 4 << 20
# Pause after a proof with wrong bytes. That is no passing state of a network, so it is long.
WRONG_PROOF_RETRY_SECONDS = 300.0
# A communicator without a piece for so long is closed: it holds memory, and its peer may be gone.
IDLE_SECONDS = 300.0
# Pause of the receiver before it pairs again after a failure: at first, at most. Meanwhile its
# pieces come by ZMQ, so a long pause costs speed only, and each attempt costs memory for slots.
BACKOFF_SECONDS = (1.0, 60.0)


# Events -------------------------------------------------------------------------------------------
class ConnectChannel(msgspec.Struct, frozen=True):
    """Receiver: pieces of this peer are needed."""


class SendRequested(msgspec.Struct, frozen=True):
    """Sender: the peer asked for this piece; its address names an epoch."""

    piece: SendPiece
    epoch: int


class LinkUp(msgspec.Struct, frozen=True):
    """The link of this end has connected."""

    epoch: int


class LinkBlob(msgspec.Struct, frozen=True):
    """The link of this end has data for the link of the other end."""

    epoch: int
    blob: bytes


class SlotGathered(msgspec.Struct, frozen=True):
    """Sender: the piece's blocks have been read into the slot.

    `size` is -1 if the piece does not fit into a slot, or if reading failed.
    """

    # Comes for a closed epoch too: only then the piece's blocks may be given back (rule 3).

    epoch: int
    seq: int
    size: int
    checksum: int


class SlotCompleted(msgspec.Struct, frozen=True):
    """The seq-th send or receive of this epoch has succeeded."""

    epoch: int
    seq: int


class SlotFreed(msgspec.Struct, frozen=True):
    """Receiver: the delivered slot is not read any more."""

    epoch: int
    slot: int


class ProofChecked(msgspec.Struct, frozen=True):
    """Receiver: the proof piece in this slot has been compared with the known bytes."""

    epoch: int
    slot: int
    is_right: bool


class LinkFailed(msgspec.Struct, frozen=True):
    """The link has failed, or the transport closes it."""

    # One event for both: in either case the other end must close its link too.

    epoch: int
    why: str


class ChannelTick(msgspec.Struct, frozen=True):
    """Time has passed."""

    # The only event that ends an epoch for its deadline. A frozen peer causes no other event.


LinkEvent = LinkUp | LinkBlob | SlotGathered | SlotCompleted | LinkFailed
SenderEndEvent = AtSenderEnd | SendRequested | LinkEvent | ChannelTick
ReceiverEndEvent = (
    AtReceiverEnd | ConnectChannel | LinkEvent | ProofChecked | SlotFreed | ChannelTick
)


# Actions ------------------------------------------------------------------------------------------
class SendNote(msgspec.Struct, frozen=True):
    """Sends this note to the other end."""

    note: AtSenderEnd | AtReceiverEnd


class OpenLink(msgspec.Struct, frozen=True):
    """Makes this end's link, with SLOTS_PER_CHANNEL slots of `slot` bytes.

    Ends in LinkUp or LinkFailed.
    """

    epoch: int
    slot: int


class PassBlob(msgspec.Struct, frozen=True):
    """Gives the link data of the link of the other end."""

    epoch: int
    blob: bytes


class TransmitProof(msgspec.Struct, frozen=True):
    """Fills the slot with `size` known bytes, then sends it as PROOF_SEQ.

    Ends in SlotCompleted, unless the epoch breaks.
    """

    epoch: int
    slot: int
    size: int


class CheckProof(msgspec.Struct, frozen=True):
    """Compares the slot's first `size` bytes with the known ones; ends in ProofChecked."""

    epoch: int
    slot: int
    size: int


class TransmitSlot(msgspec.Struct, frozen=True):
    """Gathers the piece into the slot, then sends it.

    Always ends in SlotGathered; then in SlotCompleted, unless the epoch breaks.
    """

    # One action for both steps: the order of these actions is the order of sends (rule 1).

    epoch: int
    seq: int
    slot: int
    piece: SendPiece


class ReceiveSlot(msgspec.Struct, frozen=True):
    """Receives `size` bytes into the slot; ends in SlotCompleted, unless the epoch breaks."""

    epoch: int
    seq: int
    slot: int
    size: int


class DeliverSlot(msgspec.Struct, frozen=True):
    """Uses the piece in this slot; the slot holds it until SlotFreed."""

    # With the epoch, because the slots belong to one link: an action executed late, after the link
    # was closed, must not find another link's slot.

    epoch: int
    slot: int
    piece: ChannelPiece


class CloseLink(msgspec.Struct, frozen=True):
    """Aborts this end's link of this epoch."""

    epoch: int
    why: str


class SendFinished(msgspec.Struct, frozen=True):
    """Reports the end of a SendRequested: its blocks are not read for it any more."""

    piece: SendPiece


class ChangeRoute(msgspec.Struct, frozen=True):
    """Takes pieces by this epoch from now on.

    None takes them by ZMQ. Pieces that were asked for by the last epoch will not come.
    """

    # The epoch is a part of the receiver's address. So a sender recognises a request for an earlier
    # epoch, and does not send it by this one.

    epoch: int | None


SenderEndAction = (
    SendNote | OpenLink | PassBlob | TransmitProof | TransmitSlot | CloseLink | SendFinished
)
ReceiverEndAction = (
    SendNote
    | OpenLink
    | PassBlob
    | ReceiveSlot
    | CheckProof
    | CloseLink
    | DeliverSlot
    | ChangeRoute
)


class ChannelState(Enum):
    """State of one end; the module's docstring has the transitions."""

    CLOSED = auto()
    OPENING = auto()
    PROVING = auto()
    UP = auto()


@dataclass
class ChannelEnd:
    """State that both ends have.

    `patience` is the time without progress, in seconds, after which a busy epoch is given up.
    `slot` is the size of its slots in bytes. `seq` numbers the next send or receive. `free` lists
    the unused slots.
    """

    patience: float
    # The default of `piece_bytes`; the receiver's transport passes the size that it needs.
    slot: int = 4 << 20
    state: ChannelState = ChannelState.CLOSED
    epoch: int = 0
    last_progress: float = 0.0
    seq: int = 0
    free: list[int] = field(default_factory=list)

    def begin(self, epoch: int, now: float) -> None:
        """Enters OPENING for this epoch, with all slots free."""
        self.state = ChannelState.OPENING
        self.epoch = epoch
        self.last_progress = now
        # Both ends count anew in each epoch: no earlier operation exists on a new communicator.
        self.seq = PROOF_SEQ
        # All, although a slot of the last epoch may still be in use: each link has its own slots.
        self.free = list(range(SLOTS_PER_CHANNEL))

    @property
    def is_pairing(self) -> bool:
        """Whether no piece may be requested yet."""
        return self.state in (ChannelState.OPENING, ChannelState.PROVING)

    @property
    def proof_bytes(self) -> int:
        """Size of the proof piece, the same at both ends."""
        return min(self.slot, MAX_PROOF_BYTES)

    def begin_proof(self, now: float) -> int:
        """Enters PROVING; returns the slot of the proof piece."""
        self.state = ChannelState.PROVING
        self.last_progress = now
        self.seq = PROOF_SEQ + 1
        return self.free.pop()

    def deadline(self, is_busy: bool) -> float | None:
        """Returns when this epoch ends without progress; `is_busy`: bytes are in flight."""
        if self.state is ChannelState.CLOSED:
            return None
        if self.is_pairing:
            return self.last_progress + PAIRING_SECONDS
        # Without bytes in flight nothing waits for the peer, so a channel may be idle for long.
        return self.last_progress + (self.patience if is_busy else IDLE_SECONDS)

    def timeout_reason(self, is_busy: bool) -> str:
        """Returns why an epoch that has passed its deadline is closed."""
        if self.state is ChannelState.OPENING:
            return f"no communicator after {PAIRING_SECONDS:g} s"
        if self.state is ChannelState.PROVING:
            return f"its proof piece did not arrive within {PAIRING_SECONDS:g} s"
        if is_busy:
            return f"no progress for {self.patience:g} s"
        # The transport logs a reason that begins with "unused" as normal, not as a warning.
        return f"unused for {IDLE_SECONDS:g} s"
