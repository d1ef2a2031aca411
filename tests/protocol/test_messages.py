"""Wire format: any bytes of a peer either decode or raise BadMessage."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.errors import BadMessage
from vllm_disagg.kv import extents
from vllm_disagg.protocol import messages

DECODERS = [messages.decode_at_sender, messages.decode_at_receiver, messages.decode_header]
EXTENT = extents.Extent(0, 2, 128, 200)
TO_SENDER: list[messages.AtSender] = [
    messages.TransferRequest("t", "p", "d", "a", 2),
    messages.ReadRequest("t", "p", "d", 3, EXTENT),
    messages.ReadComplete("t", "p", "d"),
    messages.Abort("t", "p", "d", "cancelled"),
    messages.TransportNote("p", "d", "nixl", b"\0\xff"),
]
TO_RECEIVER: list[messages.AtReceiver] = [
    messages.Progress("t", "p", "d", 128, 200, 1),
    messages.Confirm("t", "p", "d", True),
    messages.Abort("t", "p", "d", "unknown_transfer"),
    messages.TransportNote("p", "d", "nixl", b"x"),
]


@pytest.mark.parametrize("message", TO_SENDER)
def test_messages_to_the_sender_round_trip(message: messages.AtSender) -> None:
    assert messages.decode_at_sender(messages.encode(message)) == message


@pytest.mark.parametrize("message", TO_RECEIVER)
def test_messages_to_the_receiver_round_trip(message: messages.AtReceiver) -> None:
    assert messages.decode_at_receiver(messages.encode(message)) == message


@pytest.mark.parametrize("message", TO_SENDER[:3])
def test_a_message_for_the_other_side_does_not_decode(message: messages.AtSender) -> None:
    with pytest.raises(BadMessage):
        messages.decode_at_receiver(messages.encode(message))


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_bad_messages_and_nothing_else(decode, data: bytes) -> None:  # type: ignore[no-untyped-def]
    for frame in (data, messages._PREFIX + data):
        try:
            decode(frame)
        except BadMessage:
            pass


@pytest.mark.parametrize("message", [*TO_SENDER, *TO_RECEIVER])
def test_truncated_or_flipped_messages_do_not_raise_anything_else(
    message: messages.AtSender | messages.AtReceiver,
) -> None:
    whole = messages.encode(message)
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [
        bytes([*whole[:i], whole[i] ^ 1 << bit, *whole[i + 1 :]])
        for i in range(len(whole))
        for bit in range(8)
    ]
    for frame in damaged:
        for decode in DECODERS:
            try:
                decode(frame)
            except BadMessage:
                pass


def test_malformed_frames_are_refused() -> None:
    nested = messages._PREFIX + b"\x91" * 60_000
    other_version = b"\x01" + messages.encode(TO_SENDER[0])[1:]
    huge = messages.encode(messages.ReadComplete("x" * 70_000, "p", "d"))
    request = {"type": "read_request", "transfer": "t", "source": "p", "reader": "d", "number": -1}
    negative = messages._PREFIX + msgspec.msgpack.encode(request)
    most = messages.TransferRequest("t", "p", "d", "a", messages.MAX_RECEIVERS)
    assert messages.decode_at_sender(messages.encode(most)) == most
    crowd = messages.encode(msgspec.structs.replace(most, readers=messages.MAX_RECEIVERS + 1))
    for frame in (nested, other_version, huge, negative, crowd, b""):
        with pytest.raises(BadMessage):
            messages.decode_at_sender(frame)


@pytest.mark.parametrize("decode", DECODERS)
def test_a_frame_of_another_version_is_refused_in_one_line(decode) -> None:  # type: ignore[no-untyped-def]
    """Version 2 had other tags: its Pull, Offer and Fetch do not decode here."""
    old = b"\x02" + msgspec.msgpack.encode(
        {"type": "pull", "transfer": "t", "source": "p", "reader": "d", "address": "a"}
    )
    with pytest.raises(BadMessage) as error:
        decode(old)
    assert str(error.value) == (
        f"a message of protocol version 2, this worker has version {messages.VERSION}: "
        "run the same vllm-disagg on all engines"
    )


def test_unknown_fields_are_ignored_so_that_fields_may_be_added() -> None:
    later = {"type": "read_complete", "transfer": "t", "source": "p", "reader": "d", "new": 1}
    assert messages.decode_at_sender(
        messages._PREFIX + msgspec.msgpack.encode(later)
    ) == messages.ReadComplete("t", "p", "d")


def test_the_largest_note_fits_into_a_message() -> None:
    note = messages.TransportNote("p" * 256, "d" * 256, "c" * 256, b"x" * messages.MAX_NOTE_BYTES)
    assert messages.decode_at_receiver(messages.encode(note)) == note
