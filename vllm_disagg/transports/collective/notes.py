"""Notes between the collective transports of two workers, over the control channel. Pure.

    receiver -> sender   PairRequest      requests a communicator
    both                 LinkParameters   data with which the links of both ends connect
    sender -> receiver   ChannelReady     the sender's end is up
    sender -> receiver   ChannelPiece     the next send carries this piece
    both                 ChannelBroken    the link of this end is closed

`channel.py` has the order of the notes and their effects.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from ...config import MAX_PIECE_BYTES
from ...errors import BadMessage
from ...protocol.messages import Count, Name

# Of one slot: no sender serves a larger piece. The peer chooses the size, and each channel
# allocates several slots of it.
MAX_SLOT_BYTES = MAX_PIECE_BYTES
# As many as a Name has. A longer reason would not decode, and the peer would wait for a timeout.
MAX_REASON_CHARACTERS = 256


class PairRequest(msgspec.Struct, frozen=True, tag="pair"):
    """Receiver's request for a communicator; `slot` is the size of its largest piece, in bytes."""

    epoch: Count
    slot: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOT_BYTES)]


class LinkParameters(msgspec.Struct, frozen=True, tag="meet"):
    """Data of either end's link, without which the other link cannot connect."""

    epoch: Count
    # Of the library, and opaque here: an address of Gloo or the unique id of NCCL.
    blob: Annotated[bytes, msgspec.Meta(max_length=16384)]


class ChannelReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sender's report that its end is up."""

    epoch: Count


class ChannelPiece(msgspec.Struct, frozen=True, tag="piece"):
    """Sender's announcement: the seq-th send of this epoch carries this piece of `size` bytes."""

    epoch: Count
    # Without limits: the receiver accepts one value only, the next of its own count.
    seq: int
    transfer: Name
    number: Count
    # The receiver must know it before the bytes come: a receive is posted for an exact size.
    size: Count
    # Over the control channel, because a collective library does not authenticate its connections.
    # Any int: it is unsigned from a host (xxh3_64), and signed from a GPU (a sum of int64).
    checksum: int


class ChannelBroken(msgspec.Struct, frozen=True, tag="broken"):
    """Either end's report that its link of this epoch is closed, or will not be made."""

    # It breaks this epoch only. The note may be late, when the next epoch has begun already.
    epoch: Count
    why: Name


# By direction: a worker may have both ends for one peer, and each end decodes only notes for it.
AtSenderEnd = PairRequest | LinkParameters | ChannelBroken
AtReceiverEnd = LinkParameters | ChannelReady | ChannelPiece | ChannelBroken

MAX_EPOCH_DIGITS = 9  # any number of so many is a Count

T = TypeVar("T")
_encode = Encoder().encode
_receiver_note: Decoder[AtSenderEnd] = Decoder(AtSenderEnd)
_sender_note: Decoder[AtReceiverEnd] = Decoder(AtReceiverEnd)


def address(transport: str, epoch: int) -> str:
    """Returns where the pieces of an epoch arrive, as in a receiver's requests."""
    # With the epoch: a request that crosses a new pairing is not served by the new channel. Its
    # read was cancelled with the old one.
    return f"{transport}:{epoch}"


def epoch_of(address: str) -> int | None:
    """Returns the epoch that an address names, or None.

    An address comes from another process, so its last part may be any text.
    """
    text = address.rpartition(":")[2]
    if not text.isdecimal() or len(text) > MAX_EPOCH_DIGITS:
        return None
    return int(text)


def encode(note: AtSenderEnd | AtReceiverEnd) -> bytes:
    """Encodes a note of either end."""
    return _encode(note)


def decode_receiver_note(data: bytes) -> AtSenderEnd:
    """Decodes a note of a receiver, for the sender's end. Raises BadMessage."""
    return _decode(_receiver_note, data)


def decode_sender_note(data: bytes) -> AtReceiverEnd:
    """Decodes a note of a sender, for the receiver's end. Raises BadMessage."""
    return _decode(_sender_note, data)


def _decode(decoder: Decoder[T], data: bytes) -> T:
    # The last two are msgspec's for deep nesting and for names that are not UTF-8. Any other
    # exception would end the driver's thread, and with it all transfers of this worker.
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a note: {error}") from None
