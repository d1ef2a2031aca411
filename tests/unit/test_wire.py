"""Bytes of a peer: whatever they are, they decode or are BadMessage."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg import wire
from vllm_disagg.errors import BadMessage

DECODERS = [wire.decode_at_prefill, wire.decode_at_decode, wire.decode_header]
EXTENT = wire.Extent(0, 2, 128, 200)
FOR_PREFILL = [
    wire.Pull("t", "p", "d", "a", 2),
    wire.Fetch("t", "p", "d", 3, EXTENT),
    wire.Done("t", "p", "d"),
    wire.Fail("t", "p", "d", "cancelled"),
    wire.Note("p", "d", "nixl", b"\0\xff"),
]
FOR_DECODE = [
    wire.Offer("t", "p", "d", 128, 200, 1),
    wire.Settled("t", "p", "d", True),
    wire.Fail("t", "p", "d", "refused"),
    wire.Note("p", "d", "nixl", b"x"),
]


@pytest.mark.parametrize("message", FOR_PREFILL)
def test_round_trip_to_prefill(message: wire.ToPrefill) -> None:
    assert wire.decode_at_prefill(wire.encode(message)) == message


@pytest.mark.parametrize("message", FOR_DECODE)
def test_round_trip_to_decode(message: wire.ToDecode) -> None:
    assert wire.decode_at_decode(wire.encode(message)) == message


@pytest.mark.parametrize("message", FOR_PREFILL[:3])
def test_a_message_for_the_other_side_does_not_decode(message: wire.ToPrefill) -> None:
    with pytest.raises(BadMessage):
        wire.decode_at_decode(wire.encode(message))


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_bad_messages_and_nothing_else(decode, data: bytes) -> None:  # type: ignore[no-untyped-def]
    for frame in (data, wire._PREFIX + data):
        try:
            decode(frame)
        except BadMessage:
            pass


@pytest.mark.parametrize("message", [*FOR_PREFILL, *FOR_DECODE])
def test_truncated_or_flipped_messages_do_not_raise_anything_else(message: wire.ToPrefill | wire.ToDecode) -> None:
    whole = wire.encode(message)
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [bytes([*whole[:i], whole[i] ^ 1 << bit, *whole[i + 1 :]]) for i in range(len(whole)) for bit in range(8)]
    for frame in damaged:
        for decode in DECODERS:
            try:
                decode(frame)
            except BadMessage:
                pass


def test_what_is_refused() -> None:
    nested = wire._PREFIX + b"\x91" * 60_000
    other_version = b"\x01" + wire.encode(FOR_PREFILL[0])[1:]
    huge = wire.encode(wire.Done("x" * 70_000, "p", "d"))
    fetch = {"type": "fetch", "transfer": "t", "source": "p", "reader": "d", "number": -1}
    negative = wire._PREFIX + msgspec.msgpack.encode(fetch)
    for frame in (nested, other_version, huge, negative, b""):
        with pytest.raises(BadMessage):
            wire.decode_at_prefill(frame)


def test_unknown_fields_are_ignored_so_that_fields_may_be_added() -> None:
    later = {"type": "done", "transfer": "t", "source": "p", "reader": "d", "new": 1}
    assert wire.decode_at_prefill(wire._PREFIX + msgspec.msgpack.encode(later)) == wire.Done("t", "p", "d")


def test_the_largest_note_fits_into_a_message() -> None:
    note = wire.Note("p" * 256, "d" * 256, "c" * 256, b"x" * wire.MAX_NOTE)
    assert wire.decode_at_decode(wire.encode(note)) == note
