"""Notes between the TCP transports of two workers, and the frame of a piece. Pure.

    receiver -> sender   TcpHello       asks to be accepted, with the number of the attempt
    sender -> receiver   Listening      where the sender listens, and a token for one connection
    sender -> receiver   NotListening   pieces cannot go to this address: its connection has ended

Notes go over the control channel. On the connection itself, each piece is

    length of the head (2 bytes)   PieceHead   bytes of the piece   checksum (8 bytes)
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ...config import MAX_PIECE_BYTES
from ...errors import BadMessage
from ...protocol.messages import Count, Name

TOKEN_BYTES = 16  # 128 random bits, which cannot be guessed
# The sender's answer to a valid token. A connect alone proves nothing: the kernel accepts it before
# the sender has looked at the token.
ACCEPTED = b"\1"
CHECKSUM_BYTES = 8
# Of the field that holds the length of a PieceHead. Two bytes bound it at 64 KiB, before anything
# of the head can be trusted.
HEADER_LENGTH_BYTES = 2
# A piece that is slower than this is given up, so that its blocks become free.
MIN_BYTES_PER_SECOND = 1e6


def piece_deadline(now: float, size: int, peer_timeout: float) -> float:
    """Returns when all `size` bytes of a piece must have crossed."""
    # Both ends use it, besides their limit on a stall: a peer that passes one byte now and then
    # never stalls, and would hold the blocks for hours.
    return now + peer_timeout + size / MIN_BYTES_PER_SECOND


class TcpHello(msgspec.Struct, frozen=True, tag="hello"):
    """A receiver's wish to connect; `attempt` numbers its attempts at this sender."""

    # Returned in Listening, and part of the address `tcp:<attempt>`. So neither a late note nor a
    # late ReadRequest is taken for one of the present connection.
    attempt: Count


class Listening(msgspec.Struct, frozen=True, tag="door"):
    """Where the sender listens.

    `path` is a UNIX socket of the same listener, for receivers on the same machine. `token` is
    what the receiver sends first on its connection.
    """

    attempt: Count
    # The receiver dials it only if it is the host of the sender's control channel.
    host: Name
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    path: Name
    # Older engines know it as `ticket`.
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)] = (
        msgspec.field(name="ticket")
    )


class NotListening(msgspec.Struct, frozen=True, tag="gone"):
    """The sender has no connection for this address any more."""

    address: Name


class PieceHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of a piece on a connection; `size` counts the bytes that follow it."""

    transfer: Name
    number: Count
    # Bounded while decoding, because the receiver may allocate a buffer of this size.
    size: Annotated[int, msgspec.Meta(gt=0, le=MAX_PIECE_BYTES)]


ReceiverNote = TcpHello
SenderNote = Listening | NotListening
_receiver_note = msgspec.msgpack.Decoder(ReceiverNote)
_sender_note: msgspec.msgpack.Decoder[SenderNote] = msgspec.msgpack.Decoder(SenderNote)
_head = msgspec.msgpack.Decoder(PieceHead)
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def address(attempt: int) -> str:
    """Returns the address of the connection that this attempt made."""
    return f"tcp:{attempt}"


def decode_receiver_note(data: bytes) -> ReceiverNote:
    """Decodes a note of a receiver. Raises BadMessage."""
    return _decode(_receiver_note, data)


def decode_sender_note(data: bytes) -> SenderNote:
    """Decodes a note of a sender. Raises BadMessage."""
    return _decode(_sender_note, data)


def decode_head(data: bytes | bytearray) -> PieceHead:
    """Decodes the head of a piece, without its length. Raises BadMessage."""
    return _decode(_head, data)


def encode_head(head: PieceHead) -> bytes:
    """Encodes the head of a piece, with its length in front."""
    data = encode(head)
    return len(data).to_bytes(HEADER_LENGTH_BYTES, "big") + data


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | bytearray) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"TCP: {error}") from None
