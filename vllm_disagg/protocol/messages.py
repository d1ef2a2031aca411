"""Messages between a sender and a receiver of KV, and their wire format.

No other file depends on the format.  A message is one frame: a version byte, then msgpack.  Both
ends are named in each message, and a worker's name holds its process's incarnation: a message meant
for an earlier or later process has no effect.  There is one union per direction, so a message for
the wrong side does not decode.

    receiver                                 sender
       |-- TransferRequest ------------------->|  requests a transfer; repeated as a keep-alive
       |<------------------------- Progress ---|  how many tokens and layers are final
       |-- ReadRequest ----------------------->|  requests one piece; no other is sent.  None for
       |                                       |  pieces that are read by address, see below
       |<----------- PieceHeader and bytes ----|  on the data socket, of transports that need one
       |-- ReadComplete ---------------------->|  all bytes are in place
       |<------------------------- Confirm ----|  whether the blocks were held, and their sums
       |<------------------------> Abort       |  the transfer will not happen, and why
       |<----------------> TransportNote       |  opaque to all but the two ends of one transport

A receiver whose transport reads the sender's memory by address needs the block ids only.  They come
with Progress, so it reads at once: no request, and nothing to do for the sender.

The fields `source` and `reader` name the worker that sends KV and the worker that receives it.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ..errors import BadMessage
from ..kv.extents import Extent

# Of the format, notes of transports included; both ends must have the same.  Engines compare it
# before any transfer, so the check in `_decode` meets another version only if an engine was
# replaced meanwhile.  A new field with a default needs no new version, since decoders ignore fields
# that they do not know: tests/protocol/test_recorded_wire.py.
VERSION = 6
# Of one control message, also for ZMQ itself (maxmsgsize): without a limit it reserves as much
# memory as the header of a frame announces.
MAX_FRAME_BYTES = 64 * 1024
# Of the data of one TransportNote.  The difference has room for the names beside the data.
MAX_NOTE_BYTES = 60 * 1024

# Block ids in one Progress, of all groups: msgpack takes up to 5 bytes for each.  Pieces in blocks
# beyond them are requested one by one.
MAX_BLOCKS_PER_PROGRESS = 8192

# KV-cache groups of an engine; `RankLayout` has at most as many kinds.
MAX_GROUPS = 64

# Extents in one ReadComplete, and sums in one Confirm: as many as a rank may have layers.
MAX_SUMMED_LAYERS = 4096

# Receivers of one transfer, of which a sender keeps a record each: more than an engine has ranks.
MAX_RECEIVERS = 4096

# Pieces of one transfer that one receiver may have outstanding.  A sender need not trust receivers:
# it drops a request beyond the limit, which comes again after `peer_timeout`.
MAX_PIECES_PER_RECEIVER = 64

# Limits are checked while decoding: behind that no code meets a negative number or a huge name.
Name = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
# Only durations cross the wire, never moments: two machines have no common clock.
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TransferRequest(msgspec.Struct, frozen=True, tag="transfer_request"):
    """Requests a transfer from a sender; repeated while the transfer runs, as the keep-alive."""

    transfer: Name
    source: Name
    reader: Name
    address: Name  # <transport>:<address>, where the receiver takes its pieces
    # The blocks are released after so many receivers; 0: none needs this rank.
    readers: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECEIVERS)] = 1
    prompt: Name = ""  # digest of the receiver's own prompt; another prompt's KV is never served
    reads_by_address: bool = False  # Progress is to have the block ids
    # The request still waits for blocks: the prompt is kept for a further lease, and no receiver is
    # known by it.  Unanswered, since it is repeated.
    is_queued: bool = False


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Block ids of a prompt at the sender, in one KV-cache group.  An array on the wire."""

    group: Count
    first: Count  # place of the first one in the list of all blocks of the prompt
    ids: Annotated[list[Count], msgspec.Meta(max_length=MAX_BLOCKS_PER_PROGRESS)]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Reports to a receiver how much of a prompt's KV is final.  Cumulative.

    Tokens [0, tokens_final) are final in all layers.  Tokens [0, tokens_partial) are final in the
    layers [0, layers_partial).
    """

    transfer: Name
    source: Name
    reader: Name
    tokens_final: Count
    tokens_partial: Count
    layers_partial: Count
    # Since the sender's engine last began or ended a step; 0 if no prompt is being computed.
    # Needed because the sender's thread answers keep-alives even while its engine is stuck.
    seconds_without_step: Seconds = 0.0
    # Those that earlier ones to this receiver did not have.  Not cumulative: a lost one costs a
    # ReadRequest for each piece in its blocks.
    blocks: Annotated[list[NewBlocks], msgspec.Meta(max_length=MAX_GROUPS)] = []


class ReadRequest(msgspec.Struct, frozen=True, tag="read_request"):
    """Requests the bytes of one piece.  This is the credit: no other is sent."""

    transfer: Name
    source: Name
    reader: Name
    # Of the piece, within the transfer and receiver.  It comes back in PieceHeader; the receiver
    # remembers the extent behind it.
    number: Count
    # An extent and no block ids: the sender looks them up when it serves.
    extent: Extent


class ReadComplete(msgspec.Struct, frozen=True, tag="read_complete"):
    """Reports to a sender that all its bytes are in place, and requests a Confirm."""

    transfer: Name
    source: Name
    reader: Name
    # Of which the receiver compares layer sums: each of whole blocks, in ascending order of layers.
    # Empty without a comparison.
    extents: Annotated[list[Extent], msgspec.Meta(max_length=MAX_SUMMED_LAYERS)] = []
    # Read by address without a ReadRequest: the sender's transport has not counted them.
    uncounted_bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Answers ReadComplete.  `valid`: the blocks were held without a break until then."""

    transfer: Name
    source: Name
    reader: Name
    valid: bool
    # Layer sums of all layers of the extents of ReadComplete, in order.  Empty if the sender has
    # none.
    sums: Annotated[list[int], msgspec.Meta(max_length=MAX_SUMMED_LAYERS)] = []


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a transfer for one receiver.  `reason` is a value of `reasons.Reason`."""

    transfer: Name
    source: Name
    reader: Name
    reason: Name


class TransportNote(msgspec.Struct, frozen=True, tag="transport_note"):
    """Carries data between the two ends of one transport.

    A note may be lost: each transport repeats its notes, or does without one.  Unlike the messages
    above it overtakes no other note of its sender, unless the transport allows for that.
    """

    source: Name
    reader: Name
    transport: Name
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]


class PieceHeader(msgspec.Struct, frozen=True, tag="piece_header"):
    """Precedes the bytes of a piece on a data socket."""

    transfer: Name
    number: Count
    # xxh3_64 of the bytes, seeded with the transfer: bytes of another transfer do not pass.  It
    # detects errors, not forgery.
    checksum: int


# One union a direction: a worker is sender and receiver at once in bidirectional reuse, and a
# message must never reach the wrong one of its two machines.  PieceHeader is in neither, because it
# comes on a data socket only.
ToSender = TransferRequest | ReadRequest | ReadComplete | Abort
ToReceiver = Progress | Confirm | Abort
AtSender = ToSender | TransportNote  # all that a worker accepts from receivers
AtReceiver = ToReceiver | TransportNote  # all that a worker accepts from senders

_encode = msgspec.msgpack.Encoder().encode
_at_sender: msgspec.msgpack.Decoder[AtSender] = msgspec.msgpack.Decoder(AtSender)
_at_receiver: msgspec.msgpack.Decoder[AtReceiver] = msgspec.msgpack.Decoder(AtReceiver)
_header = msgspec.msgpack.Decoder(PieceHeader)
_PREFIX = bytes([VERSION])
T = TypeVar("T")


def encode(message: AtSender | AtReceiver | PieceHeader) -> bytes:
    """Returns the frame of a message."""
    return _PREFIX + _encode(message)


def decode_at_sender(frame: bytes) -> AtSender:
    """Returns the message of a frame from a receiver.  Raises BadMessage for anything else."""
    return _decode(_at_sender, frame)


def decode_at_receiver(frame: bytes) -> AtReceiver:
    """Returns the message of a frame from a sender.  Raises BadMessage for anything else."""
    return _decode(_at_receiver, frame)


def decode_header(frame: bytes) -> PieceHeader:
    """Returns the header of a piece.  Raises BadMessage for anything else."""
    return _decode(_header, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    # ZMQ's own limit is higher on data sockets, whose frames are parts of pieces.
    if len(frame) > MAX_FRAME_BYTES:
        raise BadMessage(f"a message of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    if not frame:
        raise BadMessage("an empty message")
    # Checked before decoding: another version may have the same tags with other fields.
    if frame[:1] != _PREFIX:
        raise BadMessage(
            f"a message of protocol version {frame[0]}, this worker has version {VERSION}: "
            "run the same vllm-disagg on all engines"
        )
    # msgspec passes on RecursionError for deep nesting, and UnicodeDecodeError for names that are
    # not UTF-8.  Any exception that escaped here would end the driver's thread, for all transfers.
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from None
