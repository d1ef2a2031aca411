"""What the NIXL carriers of two workers say to each other, and the checks on it.  Pure.

D -> P   Hello    who are you?
P -> D   Part     of a Card: NIXL's metadata of P's agent, and what it has registered
P -> D   Cannot   there is no agent here, and why
P -> D   Lies     a piece: where its bytes lie in P's memory, in wire order
D -> P   Look     a read of mine does not move: let UCX work for a while
D -> P   Still    how often have you let UCX work, ever?
P -> D   Stood    so often
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Annotated, TypeVar

import msgspec

from ...errors import BadMessage
from ...protocol.messages import MAX_NOTE_BYTES, Count, Name

TEST_REGION_BYTES = 4 << 20  # bytes of the region by which a reader measures the way
NONCE_BYTES = (
    16  # bytes at both ends of it, by which the reader knows that it reads from whom it thinks
)
MAX_RUNS_PER_NOTE = 3000  # in one note: two numbers of at most 9 bytes each, and room
MAX_PARTS = 256  # of a card or a piece
Run = tuple[
    Annotated[int, msgspec.Meta(ge=0, lt=2**62)], Annotated[int, msgspec.Meta(gt=0, le=2**40)]
]  # address, bytes
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
Parts = Annotated[int, msgspec.Meta(gt=0, le=MAX_PARTS)]


class NixlHello(msgspec.Struct, frozen=True, tag="hello"):
    attempt: Count


class ProbeLook(msgspec.Struct, frozen=True, tag="look"):
    pass


class ProbeProgress(msgspec.Struct, frozen=True, tag="still"):
    attempt: Count
    turn: Count


class ProbeProgressReply(msgspec.Struct, frozen=True, tag="stood"):
    attempt: Count
    turn: Count
    count: Annotated[int, msgspec.Meta(ge=0)]


class AgentInfoPart(msgspec.Struct, frozen=True, tag="part"):
    attempt: Count
    index: Index
    count: Parts
    data: bytes


class NixlUnavailable(msgspec.Struct, frozen=True, tag="cannot"):
    attempt: Count
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class PieceRuns(msgspec.Struct, frozen=True, tag="lies"):
    transfer: Name
    number: Count
    agent: Name  # of whose memory the addresses are
    index: Index
    count: Parts
    runs: Annotated[list[Run], msgspec.Meta(max_length=MAX_RUNS_PER_NOTE)]


class AgentInfo(msgspec.Struct, frozen=True):
    """An agent that may be read from."""

    agent: Name
    metadata: bytes
    regions: Annotated[list[Run], msgspec.Meta(max_length=100_000)]  # as `whole` makes them
    test: Run
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


AtPrefill = NixlHello | ProbeLook | ProbeProgress
AtDecode = AgentInfoPart | NixlUnavailable | ProbeProgressReply | PieceRuns
_at_prefill: msgspec.msgpack.Decoder[AtPrefill] = msgspec.msgpack.Decoder(AtPrefill)
_at_decode: msgspec.msgpack.Decoder[AtDecode] = msgspec.msgpack.Decoder(AtDecode)
_card = msgspec.msgpack.Decoder(AgentInfo)
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def decode_at_prefill(data: bytes) -> AtPrefill:
    return _decoded(_at_prefill, data)


def decode_at_decode(data: bytes) -> AtDecode:
    return _decoded(_at_decode, data)


def decode_card(data: bytes, source: str) -> AgentInfo:
    """Whose card it is must be who gave it."""
    card = _decoded(_card, data)
    if not card.agent.startswith(f"{source}#"):
        raise BadMessage(f"an agent {card.agent!r} from {source}")
    card = msgspec.structs.replace(card, regions=whole(card.regions))
    if card.test[1] != TEST_REGION_BYTES or not is_inside([card.test], card.regions):
        raise BadMessage(f"a test region that {source} has not registered")
    return card


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"NIXL's note: {error}") from None


def parts(attempt: int, card: AgentInfo) -> list[bytes]:
    data, size = encode(card), MAX_NOTE_BYTES - 256
    count = -(-len(data) // size)
    return [
        encode(AgentInfoPart(attempt, at, count, data[at * size : (at + 1) * size]))
        for at in range(count)
    ]


def pieces(transfer: str, number: int, agent: str, runs: Sequence[Run]) -> list[bytes]:
    count = -(-len(runs) // MAX_RUNS_PER_NOTE)
    return [
        encode(
            PieceRuns(
                transfer,
                number,
                agent,
                at,
                count,
                list(runs[at * MAX_RUNS_PER_NOTE : (at + 1) * MAX_RUNS_PER_NOTE]),
            )
        )
        for at in range(count)
    ]


def merged(runs: Iterable[Run]) -> list[Run]:
    """Neighbours in memory that follow each other become one."""
    made: list[Run] = []
    for address, size in runs:
        if made and sum(made[-1]) == address:
            made[-1] = (made[-1][0], made[-1][1] + size)
        else:
            made.append((address, size))
    return made


def cut(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Both cut to common lengths.  They must have the same bytes in all."""
    cuts = list(_cut(ours, theirs))
    return [(a, size) for a, _, size in cuts], [(b, size) for _, b, size in cuts]


def _cut(ours: Sequence[Run], theirs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    others = iter(theirs)
    there, left = 0, 0
    for here, size in ours:
        while size:
            if not left:
                there, left = next(others)
            step = min(size, left)
            yield here, there, step
            here, there, size, left = here + step, there + step, size - step, left - step


def whole(regions: Iterable[Run]) -> list[Run]:
    """In order; regions that touch are one."""
    return merged(sorted(regions))


def is_inside(runs: Iterable[Run], regions: Sequence[Run]) -> bool:
    """Whether each run lies in one of the regions, which are `whole`."""
    for address, size in runs:
        at = bisect_right(regions, address, key=itemgetter(0)) - 1
        if at < 0 or address + size > sum(regions[at]):
            return False
    return True
