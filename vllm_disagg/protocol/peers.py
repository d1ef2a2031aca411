"""What an engine and its workers say of themselves, and whether two engines may exchange KV."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..kv.layout import NOTHING, RankLayout, Text


class WorkerInfo(msgspec.Struct, frozen=True):
    """Where one rank of an engine listens. `name` is unique to the process: a restarted worker has
    another.
    """

    name: Text
    control: Text  # tcp://HOST:PORT, authenticated
    data: Text  # tcp://HOST:PORT
    local: Text = ""  # ipc://PATH, the same data for readers on `host`
    host: Text = ""  # boot id of the machine
    carriers: Annotated[
        list[Text], msgspec.Meta(max_length=8)
    ] = []  # what can carry its KV besides ZMQ
    holds: RankLayout = NOTHING


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself in the answer to a probe."""

    incarnation: Text
    role: Literal["prefill", "decode", "both"]
    workers: list[WorkerInfo]  # by rank: stage of the pipeline, then tensor parallel rank
    layout: dict[str, str]  # facts that two engines must share to exchange KV
    rank: int | None = (
        # among the data parallel ranks behind one API server; None when it has only this engine
        None
    )
    two_way: bool = (
        False  # whether it can read back what a decode engine has cached, and serve that
    )
    clock: float = 0.0  # seconds since this incarnation began


class EngineCard(msgspec.Struct, frozen=True):
    """The part of it that the answer to a grant without an engine, or to a refused one, has: enough
    to mint another.
    """

    incarnation: Text
    clock: float
    rank: int | None = None


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """What keeps two layouts from exchanging KV, in words; empty when nothing does."""
    for fact in sorted(ours.keys() | theirs.keys()):
        if ours.get(fact) != theirs.get(fact):
            return f"{fact} is {ours.get(fact, 'unknown')} on one side and {theirs.get(fact, 'unknown')} on the other"
    return ""
