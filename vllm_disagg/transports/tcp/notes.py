"""What the TCP carriers of two workers say to each other, over control and ahead of each piece.
Pure.

D -> P   Hello    let me in
P -> D   Door     where, and the ticket to show there
P -> D   Gone     pieces cannot come to this address: its connection has ended here
P => D   Head     on the connection: what follows is this piece; after its bytes, their checksum
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ...errors import BadMessage
from ...protocol.messages import MAX_PIECE_BYTES, Count, Name

TOKEN_BYTES = 16  # bytes
ACCEPTED = b"\1"
CHECKSUM_BYTES = 8  # bytes
HEADER_LENGTH_BYTES = 2  # bytes of a Head's length
MIN_BYTES_PER_SECOND = (
    1e6  # bytes a second: a piece that is slower than that is given up, and its blocks are free
)


def due(now: float, size: int, silence: float) -> float:
    """When all of a piece must have crossed."""
    return now + silence + size / MIN_BYTES_PER_SECOND


class TcpHello(msgspec.Struct, frozen=True, tag="hello"):
    attempt: Count


class Listening(msgspec.Struct, frozen=True, tag="door"):
    attempt: Count
    host: Name
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    path: Name  # the same door for neighbours on one machine
    ticket: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class NotListening(msgspec.Struct, frozen=True, tag="gone"):
    address: Name


class PieceHead(msgspec.Struct, frozen=True, array_like=True):
    transfer: Name
    number: Count
    size: Annotated[int, msgspec.Meta(gt=0, le=MAX_PIECE_BYTES)]


AtDecode = Listening | NotListening
_at_prefill = msgspec.msgpack.Decoder(TcpHello)
_at_decode: msgspec.msgpack.Decoder[AtDecode] = msgspec.msgpack.Decoder(AtDecode)
_head = msgspec.msgpack.Decoder(PieceHead)
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def address(attempt: int) -> str:
    return f"tcp:{attempt}"


def decode_at_prefill(data: bytes) -> TcpHello:
    return _decoded(_at_prefill, data)


def decode_at_decode(data: bytes) -> AtDecode:
    return _decoded(_at_decode, data)


def decode_head(data: bytes | bytearray) -> PieceHead:
    return _decoded(_head, data)


def encode_head(head: PieceHead) -> bytes:
    data = encode(head)
    return len(data).to_bytes(HEADER_LENGTH_BYTES, "big") + data


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes | bytearray) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"TCP: {error}") from None
