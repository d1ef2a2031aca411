"""Peers: descriptions of workers and engines that other processes receive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from ..kv.layout import NOTHING, RankLayout, Text

PROTOCOL_FACT = "transfer protocol"
CONFIG_FACTS = ("model config", "draft")  # digests of what the library transformers has filled in


class WorkerInfo(msgspec.Struct, frozen=True):
    """Addresses and KV layout of one rank of an engine.

    `name` is unique to the process: a restarted worker has another one.
    """

    name: Text
    control: Text  # tcp://HOST:PORT, authenticated
    data: Text  # tcp://HOST:PORT
    local: Text = ""  # ipc://PATH, the same data for receivers on `host`
    host: Text = ""  # boot id of the machine
    # Transports that can carry its KV, besides ZMQ.
    carriers: Annotated[list[Text], msgspec.Meta(max_length=8)] = []
    holds: RankLayout = NOTHING
    key: Text = ""  # public name of the fleet key of its ports; empty without a key
    # Seconds for which it keeps blocks without a keep-alive.  An older engine does not report it.
    lease: Annotated[float, msgspec.Meta(gt=0)] = 10.0


class EngineInfo(msgspec.Struct, frozen=True):
    """Description of an engine in its answer to a probe."""

    incarnation: Text
    role: Literal["prefill", "decode", "both"]
    workers: list[WorkerInfo]  # by rank: pipeline stage, then tensor parallel rank
    layout: dict[str, str]  # facts that must be equal in two engines that exchange KV
    # Data parallel rank behind one API server; None if this is its only engine.
    rank: int | None = None
    # Whether it can read back KV that a decode engine has cached, and can serve such KV.
    two_way: bool = False
    # Seconds since this incarnation began.  Grants expire by this clock, so no two machines need
    # the same time.
    clock: float = 0.0
    version: str = ""  # of vLLM, for operators
    failure_policy: str = ""  # vLLM's kv_load_failure_policy, for operators
    # Whether its chats are the model's text, without a parser that takes reasoning out of it.
    plain_chat: bool = False
    # Whether its prefill legs compute the last token of a prompt: only then is the token that they
    # sample the answer's first.  False of an older engine, which does not report it.
    computes_last_token: bool = False
    # Whether SIGTERM lets its running requests finish: its `--shutdown-timeout` is not 0.  False of
    # an older engine, which does not report it.
    drains: bool = False
    # Digest of the settings that choose an answer's tokens beside the request: sampling defaults,
    # logits processors and the like.  Empty of an older engine, which does not report it.
    answer_settings: Text = ""
    label: int | None = None  # with a rank: the value of `engine` in its API server's metrics
    # Releases by which its layout was made. Empty of an older engine, which does not report them.
    release: Text = ""  # of this project
    transformers: Text = ""  # of that library, which completes a model's configuration

    @property
    def transports(self) -> list[str]:
        """The transports that each of its workers has; ZMQ is always among them."""
        common: set[str] = set(self.workers[0].carriers) if self.workers else set()
        for worker in self.workers:
            common &= set(worker.carriers)
        return sorted(common | {"zmq"})


class EngineCard(msgspec.Struct, frozen=True):
    """The part of EngineInfo that the next probe needs.

    It answers a grant that names no engine, and one that is refused.
    """

    # No addresses and no layout: a request without a valid grant must not learn them.

    incarnation: Text
    clock: float
    rank: int | None = None


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Returns the first fact that keeps two engines from exchanging KV; empty if there is none."""
    for fact, here, there in differences(ours, theirs):
        return f"{fact} is {here} on one side and {there} on the other"
    return ""


def engine_difference(ours: EngineInfo, theirs: EngineInfo) -> str:
    """Returns the `difference` of two engines' layouts, with the releases that may explain it."""
    for fact, _, _ in differences(ours.layout, theirs.layout):
        return difference(ours.layout, theirs.layout) + different_releases(fact, ours, theirs)
    return ""


def different_releases(fact: str, ours: EngineInfo, theirs: EngineInfo) -> str:
    """Returns, as the end of a line, the releases in which engines of different facts differ."""
    # Another release of this project may compute any fact in another way.
    releases = [("vllm-disagg", ours.release, theirs.release)]
    if fact in CONFIG_FACTS:
        releases.append(("transformers", ours.transformers, theirs.transformers))
    words = [
        f"; {name} {here or 'unknown'} on one side and {there or 'unknown'} on the other"
        for name, here, there in releases
        if here != there
    ]
    return "".join(words)


def differences(ours: dict[str, str], theirs: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields each fact that keeps two engines from exchanging KV: name, our value, theirs."""
    # Sorted, so that both engines and the proxy name the same fact of several. The protocol first:
    # engines with another one may compute other facts differently, too.
    facts = ours.keys() | theirs.keys()
    for fact in sorted(facts, key=lambda fact: (fact != PROTOCOL_FACT, fact)):
        # A fact that only one side has is a difference: the other is of another version.
        if ours.get(fact) != theirs.get(fact):
            yield fact, ours.get(fact, "unknown"), theirs.get(fact, "unknown")
