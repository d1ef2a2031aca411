"""Notes between the collective transports of two workers, over the control channel. Pure.

    receiver -> sender   PairRequest      asks for a communicator
    both                 LinkParameters   data with which the links of both ends connect
    sender -> receiver   ChannelReady     the sender's end is up
    sender -> receiver   ChannelPiece     the next send carries this piece
    both                 ChannelBroken    the link of this end is closed

`channel.py` has the order of the notes and their effects.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ...errors import BadMessage
from ...protocol.messages import Count, Name

MAX_SLOT_BYTES = 64 << 20
MAX_REASON_CHARACTERS = 256


class PairRequest(msgspec.Struct, frozen=True, tag="pair"):
    """Receiver: asks for a communicator; `slot` is the largest piece it will ask for, in bytes."""

    epoch: Count
    slot: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOT_BYTES)]


class LinkParameters(msgspec.Struct, frozen=True, tag="meet"):
    """Either end: data of its link, without which the other link cannot connect."""

    epoch: Count
    blob: Annotated[bytes, msgspec.Meta(max_length=16384)]


class ChannelReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sender: its end is up."""

    epoch: Count


class ChannelPiece(msgspec.Struct, frozen=True, tag="piece"):
    """Sender: the seq-th send of this epoch is queued, and carries this piece of `size` bytes."""

    epoch: Count
    seq: int
    transfer: Name
    number: Count
    size: Count
    checksum: int


class ChannelBroken(msgspec.Struct, frozen=True, tag="broken"):
    """Either end: its link of this epoch is closed, or will not be made."""

    epoch: Count
    why: Name


AtSenderEnd = PairRequest | LinkParameters | ChannelBroken
AtReceiverEnd = LinkParameters | ChannelReady | ChannelPiece | ChannelBroken

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_receiver_note: msgspec.msgpack.Decoder[AtSenderEnd] = msgspec.msgpack.Decoder(AtSenderEnd)
_sender_note: msgspec.msgpack.Decoder[AtReceiverEnd] = msgspec.msgpack.Decoder(AtReceiverEnd)


def encode(note: AtSenderEnd | AtReceiverEnd) -> bytes:
    """Encodes a note of either end."""
    return _encode(note)


def decode_receiver_note(data: bytes) -> AtSenderEnd:
    """Decodes a note of a receiver, for the sender's end. Raises BadMessage."""
    return _decode(_receiver_note, data)


def decode_sender_note(data: bytes) -> AtReceiverEnd:
    """Decodes a note of a sender, for the receiver's end. Raises BadMessage."""
    return _decode(_sender_note, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a note: {error}") from None
