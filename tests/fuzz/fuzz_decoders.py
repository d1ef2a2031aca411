"""All decoders of the wire, at high speed: what decodes is what its sender would have encoded.

They start from the recorded messages of `tests/protocol`, and from the kept frames of the corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
from fuzz_campaign import Unit
from fuzz_values import KEPT_FRAMES, mutated, random_bytes, values_of

from vllm_disagg.errors import BadGrant, BadMessage
from vllm_disagg.fleet import grants, handovers, sealing
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol import messages
from vllm_disagg.transports import local_links
from vllm_disagg.transports.collective import notes as channel_notes
from vllm_disagg.transports.nixl import notes as nixl_notes
from vllm_disagg.transports.tcp import notes as tcp_notes

KEY = FleetKey(b"k" * KEY_BYTES)
FRAMES = 40  # true ones, of each kind
HOLDS = uniform(layers=1, block_size=16, block_bytes=[64])
Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]


def _seal(use: str) -> Encode:
    return lambda content: sealing.seal(KEY, use, msgspec.msgpack.encode(content)).encode()


def _agent_info(data: bytes) -> nixl_notes.AgentInfo:
    return nixl_notes.decode_agent_info(data, "p/0", HOLDS)


def _piece_runs(data: bytes) -> Any:
    note = nixl_notes.decode_sender_note(data)
    return nixl_notes.decode_runs(note) if isinstance(note, nixl_notes.PieceRuns) else None


def _link_note(decoder: msgspec.msgpack.Decoder[Any]) -> Decode:
    return lambda data: local_links._decode(decoder, data)


# Type of the contents, encoder, decoder, and whether decoding gives the contents themselves.
WIRE: tuple[tuple[Any, Encode, Decode, bool], ...] = (
    (messages.AtSender, messages.encode, messages.decode_at_sender, True),
    (messages.AtReceiver, messages.encode, messages.decode_at_receiver, True),
    (messages.PieceHeader, messages.encode, messages.decode_header, True),
    (tcp_notes.ReceiverNote, tcp_notes.encode, tcp_notes.decode_receiver_note, True),
    (tcp_notes.SenderNote, tcp_notes.encode, tcp_notes.decode_sender_note, True),
    (tcp_notes.PieceHead, msgspec.msgpack.encode, tcp_notes.decode_head, True),
    (nixl_notes.ReceiverNote, nixl_notes.encode, nixl_notes.decode_receiver_note, True),
    (nixl_notes.SenderNote, nixl_notes.encode, nixl_notes.decode_sender_note, True),
    (nixl_notes.PieceRuns, nixl_notes.encode, _piece_runs, False),
    (nixl_notes.AgentInfo, nixl_notes.encode, _agent_info, True),
    (channel_notes.AtSenderEnd, channel_notes.encode, channel_notes.decode_receiver_note, True),
    (channel_notes.AtReceiverEnd, channel_notes.encode, channel_notes.decode_sender_note, True),
    (local_links.LinkHello, local_links._encode, _link_note(local_links._hello), True),
    (local_links.LinkOffer, local_links._encode, _link_note(local_links._offer), True),
    (
        grants.Grant,
        _seal(grants.USE),
        lambda data: grants.verify(KEY, data.decode("latin-1")),
        False,
    ),
    (
        handovers.Handover,
        _seal(handovers.USE),
        lambda data: handovers.verify(KEY, data.decode("latin-1")),
        False,
    ),
)


RECORD = Path(__file__).parents[1] / "protocol" / "recorded_wire.json"


def recorded_frames(kind: Any, encode: Encode) -> list[bytes]:
    """Returns the recorded frame of each message of a type or union."""
    recorded = json.loads(RECORD.read_text())["messages"]
    found = []
    for one in get_args(kind) or (kind,):
        content = bytes.fromhex(recorded[one.__name__])
        found.append(encode(msgspec.msgpack.decode(content, type=one)))
    return found


class DecoderTarget:
    """True frames of each kind, changed; and each frame at the decoder of another kind."""

    unit: Unit = "frames"
    batch = 300_000

    def __init__(self, random: Random) -> None:
        self._frames: list[list[bytes]] = []
        for kind, encode, _, _ in WIRE:
            make = values_of(kind)
            frames = [encode(make(random)) for _ in range(FRAMES)]
            self._frames.append([*recorded_frames(kind, encode), *frames])

    def feed(self, random: Random) -> None:
        """Decodes one frame."""
        at = int(random.random() * len(WIRE))
        _, encode, decode, is_same = WIRE[at]
        frame = random.choice(self._frames[at])
        how = random.random()
        if how < 0.7:
            frame = mutated(random, frame, self._frames[at])
        elif how < 0.8:
            frame = random.choice(random.choice(self._frames))
        elif how < 0.85:
            frame = random_bytes(random, 100)
        elif how < 0.9:
            frame = mutated(random, random.choice(KEPT_FRAMES), self._frames[at])
        try:
            found = decode(frame)
        except (BadMessage, BadGrant):
            return
        if is_same and decode(encode(found)) != found:
            raise AssertionError(f"{found!r} is decoded as another message")

    def finish(self) -> None:
        """Holds nothing."""

    def close(self) -> None:
        """Holds nothing."""
