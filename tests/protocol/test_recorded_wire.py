"""Releases side by side: what one has sent another one understands, while the versions are equal.

`recorded_wire.json` has each message as the first release of its version sent it. A field that is
added has a default, so that the record is still understood; and an older release ignores it. Any
other change needs another version (`VERSION` in messages, grants or handovers), and a new record:

    python tests/protocol/test_recorded_wire.py

tests/connector/test_recorded_facts.py does so for the facts by which engines are paired.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from vllm_disagg.fleet import grants, handovers, registration
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import NOTHING, RankLayout
from vllm_disagg.kv.memory import MemoryPlace
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.peers import EngineCard, EngineInfo, WorkerInfo
from vllm_disagg.transports import local_links
from vllm_disagg.transports.collective import notes as collective
from vllm_disagg.transports.nixl import notes as nixl
from vllm_disagg.transports.tcp import notes as tcp

RECORD = Path(__file__).with_name("recorded_wire.json")
VERSIONS = {
    "wire": messages.VERSION,
    "grants": grants.VERSION,
    "handovers": handovers.VERSION,
}

Decode = Callable[[bytes], object]
ENDS = ("t", "p", "d")  # transfer, source, reader
WORKER = WorkerInfo("p", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "ipc:///p", "boot", ["tcp"])
WORKER = msgspec.structs.replace(WORKER, holds=NOTHING, key="k", lease=7.0)
TRANSFER = "0123456789abcdef" * 2
LAYOUT = {"dtype": "bfloat16", "transfer protocol": "5"}


class Case(NamedTuple):
    """One kind of message, and how the other end decodes it."""

    sample: Any
    decode: Decode
    is_json: bool = False

    def encode(self, value: object) -> bytes:
        """Encodes the sample, or the same with more in it."""
        return msgspec.json.encode(value) if self.is_json else msgspec.msgpack.encode(value)


def framed(decode: Decode) -> Decode:
    """Returns a decoder of a message without its byte of the version."""
    return lambda data: decode(messages._PREFIX + data)


def as_type(kind: type) -> Decode:
    return msgspec.msgpack.Decoder(kind).decode


def cases() -> dict[str, Case]:
    at_sender = framed(messages.decode_at_sender)
    at_receiver = framed(messages.decode_at_receiver)
    blocks = [messages.NewBlocks(0, 2, [7, 9])]
    plane = nixl.RemotePlane(4096, 256, 2, 64, 64)
    region = (1 << 20, 8 << 20)
    samples = [
        (at_sender, messages.TransferRequest(*ENDS, "tcp:1", 2, "digest", True)),
        (at_sender, messages.ReadRequest(*ENDS, 3, Extent(0, 2, 128, 200))),
        (at_sender, messages.ReadComplete(*ENDS, [Extent(0, 2, 128, 256)], 4096)),
        (at_receiver, messages.Progress(*ENDS, 128, 200, 1, 0.5, blocks)),
        (at_receiver, messages.Confirm(*ENDS, True, [1, 2])),
        (at_receiver, messages.Abort(*ENDS, "cancelled")),
        (at_receiver, messages.TransportNote("p", "d", "tcp", b"\0\xff")),
        (framed(messages.decode_header), messages.PieceHeader("t", 3, 2**63)),
        (tcp.decode_receiver_note, tcp.TcpHello(1)),
        (tcp.decode_sender_note, tcp.Listening(1, "10.0.0.1", 7, "/s", b"0123456789abcdef")),
        (tcp.decode_sender_note, tcp.NotListening("tcp:1")),
        (tcp.decode_head, tcp.PieceHead("t", 3, 4096)),
        (nixl.decode_receiver_note, nixl.NixlHello(1)),
        (nixl.decode_receiver_note, nixl.ProbeLook()),
        (nixl.decode_receiver_note, nixl.ProbeProgress(1, 2)),
        (nixl.decode_sender_note, nixl.ProbeProgressReply(1, 2, 3)),
        (nixl.decode_sender_note, nixl.AgentInfoPart(1, 0, 2, b"part")),
        (nixl.decode_sender_note, nixl.NixlUnavailable(1, "no thread")),
        (nixl.decode_sender_note, nixl.PieceRuns("t", 3, "p#1", 0, 1, b"\1" * 16)),
        (
            as_type(nixl.AgentInfo),
            nixl.AgentInfo(
                "p#1", b"metadata", [region], region, b"n" * 16, MemoryPlace(), [[plane]]
            ),
        ),
        (collective.decode_receiver_note, collective.PairRequest(1, 4096)),
        (collective.decode_receiver_note, collective.LinkParameters(1, b"blob")),
        (collective.decode_sender_note, collective.ChannelReady(1)),
        (collective.decode_sender_note, collective.ChannelPiece(1, 2, "t", 3, 4096, 5)),
        (collective.decode_sender_note, collective.ChannelBroken(1, "closed")),
        (as_type(local_links.LinkHello), local_links.LinkHello()),
        (
            as_type(local_links.LinkOffer),
            local_links.LinkOffer(
                "/l", b"t" * local_links.TOKEN_BYTES, b"k" * local_links.KEY_BYTES
            ),
        ),
        (as_type(RankLayout), NOTHING),
        (as_type(WorkerInfo), WORKER),
        (
            as_type(grants.Grant),
            grants.Grant(grants.VERSION, "decode", TRANSFER, "d", [WORKER], 60.0, TRANSFER, 9.0),
        ),
        (
            as_type(handovers.Handover),
            handovers.Handover(handovers.VERSION, TRANSFER, TRANSFER, [WORKER], LAYOUT, 60.0),
        ),
    ]
    engine = EngineInfo("d", "both", [WORKER], LAYOUT, 1, True, 2.5, "0.32.0", "recompute")
    in_json = [
        EngineCard("d", 2.5, 1),
        msgspec.structs.replace(engine, plain_chat=True, computes_last_token=True, drains=True),
        registration.RegistrationNote("c", "d", 7, "decode", "http://10.0.0.1:8200", True),
    ]
    found = {type(sample).__name__: Case(sample, decode) for decode, sample in samples}
    for sample in in_json:
        decode = msgspec.json.Decoder(type(sample)).decode
        found[type(sample).__name__] = Case(sample, decode, is_json=True)
    return found


CASES = cases()


def test_the_record_is_of_these_versions() -> None:
    recorded = json.loads(RECORD.read_text())
    assert recorded["versions"] == VERSIONS
    assert recorded["messages"].keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_messages_of_earlier_releases_are_understood(name: str) -> None:
    recorded = json.loads(RECORD.read_text())["messages"][name]
    case = CASES[name]
    assert case.decode(bytes.fromhex(recorded)) == case.sample, "it needs another version"


@pytest.mark.parametrize("name", CASES)
def test_additions_of_later_releases_are_ignored(name: str) -> None:
    case = CASES[name]
    codec = msgspec.json if case.is_json else msgspec.msgpack
    value = codec.decode(case.encode(case.sample))
    if isinstance(value, dict):
        value["added later"] = [1]
    else:
        value.append("added later")
    assert case.decode(case.encode(value)) == case.sample


if __name__ == "__main__":
    found = {name: case.encode(case.sample).hex() for name, case in CASES.items()}
    RECORD.write_text(json.dumps({"versions": VERSIONS, "messages": found}, indent=2) + "\n")
