"""Notes between the NIXL transports of two workers, and the checks on them. Pure.

    receiver -> sender   NixlHello            asks for the sender's AgentInfo
    sender -> receiver   AgentInfoPart        NIXL's metadata of its agent, and registered regions
    sender -> receiver   NixlUnavailable      why there is no agent for the receiver
    sender -> receiver   PieceRuns            where a piece is in the sender's memory, in wire order
    receiver -> sender   ProbeLook            a read makes no progress: let UCX work for a while
    receiver -> sender   ProbeProgress        asks how often UCX has been let work, ever
    sender -> receiver   ProbeProgressReply   that count

A *run* is a contiguous range of memory: (address, bytes).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from operator import itemgetter
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np

from ...errors import BadMessage
from ...kv.layout import RankLayout, Text
from ...kv.memory import MemoryPlace
from ...kv.paired_planes import PairedPlanes
from ...kv.planes import Plane, PlaneTable
from ...kv.runs import RunList, Runs, are_inside, joined, merged, runs_of
from ...protocol.events import BlocksAtSource
from ...protocol.messages import MAX_NOTE_BYTES, Count, Name

TEST_REGION_BYTES = 4 << 20  # by which a receiver measures the path
# At both ends of the test region. By the nonce a receiver checks that it reads the right process.
NONCE_BYTES = 16
# Of an AgentInfo or a piece. It bounds what a receiver collects before the last part has come.
MAX_PARTS = 256
NOTE_OVERHEAD_BYTES = 1024  # two names and some numbers
RUN_FORMAT = np.dtype("<i8")  # of each of the two numbers of a run in PieceRuns
RUN_BYTES = 2 * RUN_FORMAT.itemsize
MAX_RUNS_PER_NOTE = (MAX_NOTE_BYTES - NOTE_OVERHEAD_BYTES) // RUN_BYTES
# The limits keep address + bytes below 2**63: NIXL adds them in 64 bits.
ADDRESS_LIMIT = 2**62
MAX_RUN_BYTES = 2**40
RunAddress = Annotated[int, msgspec.Meta(ge=0, lt=ADDRESS_LIMIT)]
# Of planes. With MAX_BLOCK_ID they keep the address of a row below 2**63. A layout with heads
# outside of blocks has rows as far apart as a head's part of the whole cache.
MAX_STRIDE_BYTES = 2**30
MAX_ROW_STRIDE_BYTES = 2**40
MAX_PLANES_PER_LAYER = 64
MAX_PLANE_ROWS = 2**16
MAX_BLOCK_ID = 2**31  # as of a Count
Stride = Annotated[int, msgspec.Meta(ge=0, le=MAX_STRIDE_BYTES)]
RowBytes = Annotated[int, msgspec.Meta(gt=0, le=MAX_STRIDE_BYTES)]
RunBytes = Annotated[int, msgspec.Meta(gt=0, le=MAX_RUN_BYTES)]
Run = tuple[RunAddress, RunBytes]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
Parts = Annotated[int, msgspec.Meta(gt=0, le=MAX_PARTS)]


class NixlHello(msgspec.Struct, frozen=True, tag="hello"):
    """A receiver's wish to read; `attempt` numbers its attempts at this sender."""

    attempt: Count
    nixl: Text = ""  # its release of NIXL; an older receiver does not report it


class ProbeLook(msgspec.Struct, frozen=True, tag="look"):
    """A read makes no progress; the sender lets UCX work for PROGRESS_SECONDS."""


class ProbeProgress(msgspec.Struct, frozen=True, tag="still"):
    """A question for the number of times that the sender has let UCX work."""

    # Both come back in the reply: an older count would prove a path that needed help since.
    attempt: Count
    turn: Count


class ProbeProgressReply(msgspec.Struct, frozen=True, tag="stood"):
    """The answer to the ProbeProgress of the same turn."""

    attempt: Count
    turn: Count
    count: Annotated[int, msgspec.Meta(ge=0)]


class AgentInfoPart(msgspec.Struct, frozen=True, tag="part"):
    """Part `index` of `count` of an encoded AgentInfo."""

    attempt: Count
    index: Index
    count: Parts
    data: bytes


class NixlUnavailable(msgspec.Struct, frozen=True, tag="cannot"):
    """No agent runs at the sender, or none that this receiver may read from."""

    attempt: Count
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class PieceRuns(msgspec.Struct, frozen=True, tag="runs"):
    """Part `index` of `count` of a piece's runs, in the memory of this agent.

    `runs` has two numbers a run, in RUN_FORMAT.
    """

    transfer: Name
    number: Count
    # The addresses are valid in this agent only; the receiver may have met another one before.
    agent: Name
    index: Index
    count: Parts
    # Bytes, because decoding thousands of pairs of Python's integers takes milliseconds.
    runs: bytes


class RemotePlane(NamedTuple):
    """A Plane of the sender, with limits on what a peer may claim."""

    address: RunAddress
    block_stride: Stride
    rows: Annotated[int, msgspec.Meta(gt=0, le=MAX_PLANE_ROWS)]
    row_stride: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROW_STRIDE_BYTES)]
    row_bytes: RowBytes


LayerPlanes = Annotated[list[RemotePlane], msgspec.Meta(max_length=MAX_PLANES_PER_LAYER)]
_layer_planes = msgspec.msgpack.Decoder(LayerPlanes)


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent that may be read from.

    `regions` are registered memory, one by one. `test` is the test region. `planes` are those of
    the KV cache by layer, in wire order; none where they exceed the limits. All are at `place`.
    """

    agent: Name
    # Of NIXL. It holds the keys to all registered memory, so it goes in notes only: by CURVE.
    metadata: bytes
    regions: Annotated[list[Run], msgspec.Meta(max_length=100_000)]
    test: Run
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    place: MemoryPlace = MemoryPlace()
    planes: Annotated[list[LayerPlanes], msgspec.Meta(max_length=4096)] = []
    nixl: Text = ""  # the sender's release of NIXL; an older sender does not report it


ReceiverNote = NixlHello | ProbeLook | ProbeProgress
SenderNote = AgentInfoPart | NixlUnavailable | ProbeProgressReply | PieceRuns
_receiver_note: msgspec.msgpack.Decoder[ReceiverNote] = msgspec.msgpack.Decoder(ReceiverNote)
_sender_note: msgspec.msgpack.Decoder[SenderNote] = msgspec.msgpack.Decoder(SenderNote)
_agent_info = msgspec.msgpack.Decoder(AgentInfo)
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def release_obstacle(there: str, here: str) -> str:
    """Returns why two releases of NIXL do not connect; empty where they do.

    `there`: the sender's release. `here`: the receiver's. Empty where it is not known.
    """
    # A sender with NIXL 1.3.0 ends by SIGSEGV when a receiver with 1.5.1 connects, and the other
    # way round UCX finds no path (2026-11-29). Which releases fit is not stated.
    if there == here and here:
        return ""
    unknown = "of an unknown version"
    return f"NIXL {there or unknown} there, {here or unknown} here: install one version"


def decode_receiver_note(data: bytes) -> ReceiverNote:
    """Decodes a note of a receiver. Raises BadMessage."""
    return _decode(_receiver_note, data)


def decode_sender_note(data: bytes) -> SenderNote:
    """Decodes a note of a sender. Raises BadMessage."""
    return _decode(_sender_note, data)


def decode_agent_info(data: bytes, sender: str, holds: RankLayout) -> AgentInfo:
    """Decodes the AgentInfo that this sender gave, whose layers are those that it `holds`.

    Raises BadMessage if the agent is another worker's, if its test region is not registered, or if
    its planes are not those of such layers.
    """
    info = _decode(_agent_info, data)
    # NIXL has one entry a name: under another worker's name this sender could take that worker's
    # place.
    if not info.agent.startswith(f"{sender}#"):
        raise BadMessage(f"an agent {info.agent!r} from {sender}")
    # Of this very size: the peer must not choose how much memory a test read takes here.
    _, test_bytes = info.test
    is_registered = are_inside(runs_of([info.test]), registered(info))
    if test_bytes != TEST_REGION_BYTES or not is_registered:
        raise BadMessage(f"a test region that {sender} has not registered")
    # A plane without bytes, or of another layer, would give bytes from elsewhere.
    claimed = [sum(plane.rows * plane.row_bytes for plane in layer) for layer in info.planes]
    if info.planes and claimed != [sum(holds.kinds[at].block_bytes) for at in holds.layers]:
        raise BadMessage(f"planes that are not those of the layers of {sender}")
    return info


def remote_planes(planes: Sequence[Sequence[Plane]]) -> list[list[RemotePlane]]:
    """Returns planes for an AgentInfo, by layer; none if one exceeds the limits.

    Then receivers request each piece.
    """
    made = [[RemotePlane(*plane) for plane in layer] for layer in planes]
    for layer in made:
        try:
            _layer_planes.decode(encode(layer))
        except msgspec.ValidationError:
            return []
    return made


def registered(info: AgentInfo) -> Runs:
    """Returns the registered memory of an agent, in order of address."""
    # Joined again here: `are_inside` needs the order, and a peer may send any.
    return joined(runs_of(info.regions))


def sampled_runs(info: AgentInfo) -> Runs:
    """Returns both ends of each registration, between the nonces at both ends of the test region.

    KV may be of an allocator whose memory CUDA exports to no process, unlike the test region. Or
    CUDA exports its first part only, as of memory that was mapped in pieces.
    """
    address, size = info.test
    ends = []
    for start, length in info.regions:
        sample = min(length, NONCE_BYTES)
        ends += [(start, sample), (start + length - sample, sample)]
    last = (address + size - NONCE_BYTES, NONCE_BYTES)
    return runs_of([(address, NONCE_BYTES), *ends, last])


def decode_runs(note: PieceRuns) -> Runs:
    """Returns the runs of a note. Raises BadMessage for none, and for those of no memory."""
    if not note.runs or len(note.runs) % RUN_BYTES:
        raise BadMessage(f"NIXL's note: {len(note.runs)} bytes of runs")
    runs = np.frombuffer(note.runs, RUN_FORMAT).reshape(-1, 2).astype(np.int64)
    addresses = runs[:, 0]
    sizes = runs[:, 1]
    has_address = (addresses >= 0) & (addresses < ADDRESS_LIMIT)
    has_size = (sizes > 0) & (sizes <= MAX_RUN_BYTES)
    if not (has_address & has_size).all():
        raise BadMessage("NIXL's note: a run that no memory has")
    return runs


class SenderMemory:
    """KV memory of a sender, as its AgentInfo describes it.

    `regions` are registered memory, in order of address; regions that touch are one.
    """

    # Made once for each path: for small pieces this takes as long as finding their runs.
    def __init__(self, info: AgentInfo, ours: Sequence[Sequence[Plane]] = ()) -> None:
        self.regions = registered(info)
        self._registrations = runs_of(info.regions)
        layers = [[Plane(*plane) for plane in layer] for layer in info.planes]
        self._table = PlaneTable(layers)
        self._layers = layers
        self._ours = ours
        # By the number of the sender's layer that is our first one: of pipelines it may be any.
        self._paired: dict[int, PairedPlanes] = {}
        # By layer: block ids below this are in registered memory, in all planes.
        ordered = sorted(info.regions)
        self._block_limits = [
            min((_block_limit(plane, ordered) for plane in layer), default=0) for layer in layers
        ]

    def check(self, blocks: BlocksAtSource) -> None:
        """Raises BadMessage unless these blocks are in registered memory.

        Each plane is in one registration.
        """
        limits = self._block_limits[blocks.layer : blocks.layer_end]
        if len(limits) != blocks.layer_end - blocks.layer:
            layers = len(self._block_limits)
            raise BadMessage(f"layers {blocks.layer} to {blocks.layer_end} of {layers}")
        # Before the arrays are made: their size would be of the peer's choice.
        count = len(blocks.ids) * self._table.rows(blocks.layer, blocks.layer_end)
        if count > MAX_PARTS * MAX_RUNS_PER_NOTE:
            raise BadMessage(f"{count} runs of one piece")
        # There is no checksum that would notice bytes from elsewhere.
        if max(blocks.ids) >= min(limits, default=0):
            raise BadMessage("blocks outside registered memory")

    def paired_runs(
        self, layer: int, our_blocks: Sequence[int], blocks: BlocksAtSource
    ) -> tuple[RunList, RunList, int] | None:
        """Returns what to read of checked blocks into ours, from our layer `layer` on.

        These are our runs, the sender's, and their bytes.  None where blocks of both sides differ.
        """
        shift = blocks.layer - layer
        paired = self._paired.get(shift)
        if paired is None:
            paired = self._paired[shift] = PairedPlanes(self._ours, self._layers, shift)
        layer_end = layer + blocks.layer_end - blocks.layer
        return paired.runs(layer, layer_end, our_blocks, blocks.ids)

    def runs(self, blocks: BlocksAtSource) -> Runs:
        """Returns the sender's runs of checked blocks."""
        made = self._table.runs(blocks.layer, blocks.layer_end, blocks.ids)
        # Not by `regions`: no read may cross from one registration into the next.
        return merged(made, self._registrations)


def _block_limit(plane: Plane, registrations: Sequence[Run]) -> int:
    """Returns how many blocks of a plane, from the first on, are in the registration of its base.

    The registrations are in order of address.
    """
    index = bisect.bisect_right(registrations, plane.base, key=itemgetter(0)) - 1
    if index < 0:
        return 0
    address, registered_bytes = registrations[index]
    block_bytes = (plane.rows - 1) * plane.row_stride + plane.row_bytes  # with gaps
    room = address + registered_bytes - plane.base - block_bytes
    # A faulty peer may claim a stride of none.
    blocks = room // max(plane.block_stride, 1) + 1
    return max(0, min(blocks, MAX_BLOCK_ID))


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    # The last two are msgspec's for deep nesting and for names that are not UTF-8.
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"NIXL's note: {error}") from None


def agent_info_notes(attempt: int, info: AgentInfo) -> list[bytes]:
    """Returns an AgentInfo as encoded AgentInfoPart notes."""
    # In parts, because a model of many layers has more regions than one control message holds.
    data = encode(info)
    part_bytes = MAX_NOTE_BYTES - NOTE_OVERHEAD_BYTES
    count = -(-len(data) // part_bytes)
    made = []
    for index in range(count):
        first = index * part_bytes
        part = data[first : first + part_bytes]
        note = AgentInfoPart(attempt, index, count, part)
        made.append(encode(note))
    return made


def piece_notes(transfer: str, number: int, agent: str, runs: Runs) -> list[bytes]:
    """Returns a piece's runs as encoded PieceRuns notes."""
    count = -(-len(runs) // MAX_RUNS_PER_NOTE)
    made = []
    for index in range(count):
        first = index * MAX_RUNS_PER_NOTE
        part = runs[first : first + MAX_RUNS_PER_NOTE].astype(RUN_FORMAT)
        note = PieceRuns(transfer, number, agent, index, count, part.tobytes())
        made.append(encode(note))
    return made
