"""Every message between a prefill worker (P) and a decode worker (D).

This is the only file that knows the wire. A message is one frame: a version byte, then msgpack.
Both ends are named in each message, and a name holds the process's incarnation: what was meant for
another life of a process has no effect. There is one union per direction, so a message for the
wrong side does not even decode.

    D -> P   TransferRequest     I want this transfer (repeated: it is also the sign of life)
    P -> D   Progress    so much is final
    D -> P   ReadRequest    send me this piece (a credit: P never sends what was not asked for)
    P -> D   Header   before the bytes of a piece, on the data socket
    D -> P   Done     all my bytes are in place.  Did you hold the blocks until now?
    P -> D   Confirm  the answer
    both     Fail     this transfer will not happen
    both     Note     from the one's carrier of bytes to the other's, which alone know what it says
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ..errors import BadMessage
from ..kv.extents import Extent

VERSION = 2
MAX_PIECE_BYTES = 64 << 20  # bytes
MAX_FRAME_BYTES = 64 * 1024  # bytes of a control message
MAX_NOTE_BYTES = 60 * 1024  # bytes of what a carrier says in one

Name = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TransferRequest(msgspec.Struct, frozen=True, tag="pull"):
    transfer: Name
    source: Name
    reader: Name
    address: Name  # <carrier>:<how the carrier knows the reader>, where the reader takes its pieces
    readers: Count = 1  # P may let go when so many are done; 0: this rank is needed by nobody
    prompt: Name = ""  # a digest of what the reader will compute on: P serves none but the same


class Progress(msgspec.Struct, frozen=True, tag="offer"):
    """Final: tokens [0, tokens) in all layers, and tokens [0, ahead) in the layers [0, layers).
    Cumulative.

    `still`: seconds since P's vLLM has last begun or ended a step, while a prompt of this kind
    waits for its next one.
    """

    transfer: Name
    source: Name
    reader: Name
    tokens: Count
    ahead: Count
    layers: Count
    still: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ReadRequest(msgspec.Struct, frozen=True, tag="fetch"):
    transfer: Name
    source: Name
    reader: Name
    number: Count
    extent: Extent


class ReadComplete(msgspec.Struct, frozen=True, tag="done"):
    transfer: Name
    source: Name
    reader: Name


class Confirm(msgspec.Struct, frozen=True, tag="settled"):
    """`intact`: P held the blocks, without a break, until the reader had its bytes."""

    transfer: Name
    source: Name
    reader: Name
    intact: bool


class Abort(msgspec.Struct, frozen=True, tag="fail"):
    transfer: Name
    source: Name
    reader: Name
    reason: Name


class TransportNote(msgspec.Struct, frozen=True, tag="note"):
    """What the carriers of two workers tell each other, by the carrier's name. One that is lost is
    said again or missed.
    """

    source: Name
    reader: Name
    carrier: Name
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]


class PieceHeader(msgspec.Struct, frozen=True, tag="header"):
    """Precedes a piece on the data socket. `checksum`: xxh3_64 of the bytes, seeded with the
    transfer.
    """

    transfer: Name
    number: Count
    checksum: int


ToSender = TransferRequest | ReadRequest | ReadComplete | Abort
ToReceiver = Progress | Confirm | Abort
AtSender = ToSender | TransportNote  # what a worker takes from its readers
AtReceiver = ToReceiver | TransportNote  # what it takes from its sources

_encode = msgspec.msgpack.Encoder().encode
_at_sender: msgspec.msgpack.Decoder[AtSender] = msgspec.msgpack.Decoder(AtSender)
_at_receiver: msgspec.msgpack.Decoder[AtReceiver] = msgspec.msgpack.Decoder(AtReceiver)
_header = msgspec.msgpack.Decoder(PieceHeader)
_PREFIX = bytes([VERSION])
T = TypeVar("T")


def encode(message: AtSender | AtReceiver | PieceHeader) -> bytes:
    return _PREFIX + _encode(message)


def decode_at_sender(frame: bytes) -> AtSender:
    return _decode(_at_sender, frame)


def decode_at_receiver(frame: bytes) -> AtReceiver:
    return _decode(_at_receiver, frame)


def decode_header(frame: bytes) -> PieceHeader:
    return _decode(_header, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadMessage(f"a message of {len(frame)} bytes")
    if frame[:1] != _PREFIX:
        raise BadMessage(f"protocol version {frame[:1].hex() or 'missing'}, ours is {VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from None
