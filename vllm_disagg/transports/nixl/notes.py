"""Notes between the NIXL transports of two workers, and the checks on them. Pure.

    receiver -> sender   NixlHello            asks for the sender's AgentInfo
    sender -> receiver   AgentInfoPart        NIXL's metadata of its agent, and registered regions
    sender -> receiver   NixlUnavailable      no agent runs here, and why
    sender -> receiver   PieceRuns            where a piece is in the sender's memory, in wire order
    receiver -> sender   ProbeLook            a read makes no progress: let UCX work for a while
    receiver -> sender   ProbeProgress        asks how often UCX has been let work, ever
    sender -> receiver   ProbeProgressReply   that count

A *run* is a contiguous range of memory: (address, bytes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Annotated, TypeVar

import msgspec

from ...errors import BadMessage
from ...protocol.messages import MAX_NOTE_BYTES, Count, Name

TEST_REGION_BYTES = 4 << 20  # by which a receiver measures the path
# At both ends of the test region. By the nonce a receiver checks that it reads the right process.
NONCE_BYTES = 16
MAX_RUNS_PER_NOTE = 3000  # two numbers of at most 9 bytes each, with room to spare
# Of an AgentInfo or a piece. It bounds what a receiver collects before the last part has come.
MAX_PARTS = 256
NOTE_OVERHEAD_BYTES = 256
# The limits keep address + bytes below 2**63: NIXL adds them in 64 bits.
RunAddress = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
RunBytes = Annotated[int, msgspec.Meta(gt=0, le=2**40)]
Run = tuple[RunAddress, RunBytes]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
Parts = Annotated[int, msgspec.Meta(gt=0, le=MAX_PARTS)]


class NixlHello(msgspec.Struct, frozen=True, tag="hello"):
    """A receiver's wish to read; `attempt` numbers its attempts at this sender."""

    attempt: Count


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
    """No agent runs at the sender."""

    attempt: Count
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class PieceRuns(msgspec.Struct, frozen=True, tag="lies"):
    """Part `index` of `count` of a piece's runs, in the memory of this agent."""

    transfer: Name
    number: Count
    # The addresses are valid in this agent only; the receiver may have met another one before.
    agent: Name
    index: Index
    count: Parts
    runs: Annotated[list[Run], msgspec.Meta(max_length=MAX_RUNS_PER_NOTE)]


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent that may be read from.

    `regions` are registered memory, as `joined_regions` makes them. `test` is the test region.
    """

    agent: Name
    # Of NIXL. It holds the keys to all registered memory, so it goes over the control channel only.
    metadata: bytes
    regions: Annotated[list[Run], msgspec.Meta(max_length=100_000)]
    test: Run
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


ReceiverNote = NixlHello | ProbeLook | ProbeProgress
SenderNote = AgentInfoPart | NixlUnavailable | ProbeProgressReply | PieceRuns
_receiver_note: msgspec.msgpack.Decoder[ReceiverNote] = msgspec.msgpack.Decoder(ReceiverNote)
_sender_note: msgspec.msgpack.Decoder[SenderNote] = msgspec.msgpack.Decoder(SenderNote)
_agent_info = msgspec.msgpack.Decoder(AgentInfo)
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def decode_receiver_note(data: bytes) -> ReceiverNote:
    """Decodes a note of a receiver. Raises BadMessage."""
    return _decode(_receiver_note, data)


def decode_sender_note(data: bytes) -> SenderNote:
    """Decodes a note of a sender. Raises BadMessage."""
    return _decode(_sender_note, data)


def decode_agent_info(data: bytes, sender: str) -> AgentInfo:
    """Decodes the AgentInfo that this sender gave.

    Raises BadMessage if the agent is another worker's, or if its test region is not registered.
    """
    info = _decode(_agent_info, data)
    # NIXL has one entry a name: under another worker's name this sender could take that worker's
    # place.
    if not info.agent.startswith(f"{sender}#"):
        raise BadMessage(f"an agent {info.agent!r} from {sender}")
    # Joined again here, because `is_inside` needs the order and a peer may send any.
    regions = joined_regions(info.regions)
    info = msgspec.structs.replace(info, regions=regions)
    # Of this very size: the peer must not choose how much memory a test read takes here.
    _, test_bytes = info.test
    is_registered = is_inside([info.test], info.regions)
    if test_bytes != TEST_REGION_BYTES or not is_registered:
        raise BadMessage(f"a test region that {sender} has not registered")
    return info


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


def piece_notes(transfer: str, number: int, agent: str, runs: Sequence[Run]) -> list[bytes]:
    """Returns a piece's runs as encoded PieceRuns notes."""
    count = -(-len(runs) // MAX_RUNS_PER_NOTE)
    made = []
    for index in range(count):
        first = index * MAX_RUNS_PER_NOTE
        part = list(runs[first : first + MAX_RUNS_PER_NOTE])
        note = PieceRuns(transfer, number, agent, index, count, part)
        made.append(encode(note))
    return made


def merged(runs: Iterable[Run]) -> list[Run]:
    """Joins each run with the one before it where they touch; the order stays."""
    # Fewer and longer runs are faster (docs/benchmarks/transports.md). They are not sorted, because
    # their order is that of the bytes on the wire.
    made: list[Run] = []
    for address, size in runs:
        last_address, last_size = made[-1] if made else (0, 0)
        if made and last_address + last_size == address:
            made[-1] = (last_address, last_size + size)
        else:
            made.append((address, size))
    return made


def cut(local: Sequence[Run], remote: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Cuts both lists to common lengths, pair by pair. They must have equal bytes in total."""
    # NIXL reads descriptor by descriptor, each into one of the same length. The two engines may
    # have scattered the piece's blocks differently.
    local_runs = []
    remote_runs = []
    for local_address, remote_address, size in _common_cuts(local, remote):
        local_runs.append((local_address, size))
        remote_runs.append((remote_address, size))
    return local_runs, remote_runs


def _common_cuts(local: Sequence[Run], remote: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """Yields (local address, remote address, bytes)."""
    remote_runs = iter(remote)
    remote_address = 0
    remote_bytes = 0
    for local_address, local_bytes in local:
        while local_bytes:
            if not remote_bytes:
                remote_address, remote_bytes = next(remote_runs)
            step = min(local_bytes, remote_bytes)
            yield local_address, remote_address, step
            local_address += step
            remote_address += step
            local_bytes -= step
            remote_bytes -= step


def joined_regions(regions: Iterable[Run]) -> list[Run]:
    """Returns the regions in order of address; regions that touch become one."""
    # Joined, because `merged` joins the runs of a piece too: one run may cover two planes that
    # follow each other in memory.
    return merged(sorted(regions))


def is_inside(runs: Iterable[Run], regions: Sequence[Run]) -> bool:
    """Returns whether each run is within one of the regions, which `joined_regions` made."""
    for address, size in runs:
        # The last region that begins at the address or before it.
        index = bisect_right(regions, address, key=itemgetter(0)) - 1
        if index < 0:
            return False
        region_address, region_size = regions[index]
        if address + size > region_address + region_size:
            return False
    return True
