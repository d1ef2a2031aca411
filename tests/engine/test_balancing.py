"""Data parallel ranks that compute in step, balanced in vLLM's ways, at D and at P.

    internal   one API server; its second rank runs without one, as on another machine
    external   one API server for each rank
    hybrid     two API servers with two ranks each

Mixtral in float32, with the stand-in of `test_expert_ranks`, in the plain engine too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asking import Body, Record, ask, expect_exact_or_clean, expect_same
from conftest import Machine
from engines import Engine, Proxy, free_port, wait
from test_expert_ranks import (
    STAND_IN,
    WITH_EXPERTS,
    ask_while_it_dies,
    prompts,
    wait_until_free,
)
from test_models import FLOAT32, model, several

pytestmark = pytest.mark.wide

ADDRESS = "127.0.0.1"
WAYS = [
    ("internal", "D"),
    ("external", "D"),
    ("hybrid", "D"),
    ("external", "P"),
    ("hybrid", "P"),
]


class Headless(Engine):
    """Ranks without an API server, as on another machine: ready with the server that has them."""

    def is_ready(self) -> bool:
        return True


def engine(
    machine: Machine, name: str, *flags: str, role: str = "", cpu: str = "0", kind: type = Engine
) -> Engine:
    made = kind(
        name,
        machine.folder,
        *FLOAT32,
        *flags,
        role=role,
        cpu=cpu,
        model=model("moe"),
        env=STAND_IN,
    )
    assert isinstance(made, Engine)
    return made


def balanced_engines(machine: Machine, way: str, role: str) -> list[Engine]:
    """Returns the processes of the engine with ranks, the one with the first rank first."""
    side, on_cpu = ("P", "0") if role == "kv_producer" else ("D", "1")
    shared = [WITH_EXPERTS, "--data-parallel-address", ADDRESS]
    shared += ["--data-parallel-rpc-port", str(free_port())]

    def part(at: int, *flags: str, cpu: str = on_cpu, kind: type = Engine) -> Engine:
        name = f"{way}-{side}{at}"
        return engine(machine, name, *shared, *flags, role=role, cpu=cpu, kind=kind)

    if way == "internal":
        local = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
        head = part(0, *local)
        head.ranks = 2
        return [
            head,
            part(1, *local, "--headless", "--data-parallel-start-rank", "1", kind=Headless),
        ]
    if way == "external":
        size = ["--data-parallel-size", "2"]
        return [part(at, *size, "--data-parallel-rank", str(at)) for at in range(2)]
    found = []
    for at in range(2):
        local = ["--data-parallel-size", "4", "--data-parallel-size-local", "2"]
        start = ["--data-parallel-start-rank", str(2 * at), "--data-parallel-hybrid-lb"]
        found.append(part(at, *local, *start, cpu=f"{on_cpu}|{on_cpu}"))
        found[-1].ranks = 2
    return found


class Pair:
    """An engine with ranks at one side, a single one at the other, and their proxy."""

    def __init__(self, machine: Machine, way: str, side: str) -> None:
        self.name = f"{way}-{side}"
        self.way = way
        if side == "P":
            role, other, other_cpu = "kv_producer", "kv_consumer", "1"
            self.moved = "vllm:disagg_sent_bytes_total"
        else:
            role, other, other_cpu = "kv_consumer", "kv_producer", "0"
            self.moved = "vllm:disagg_received_bytes_total"
        self.single = engine(machine, f"{self.name}-single", role=other, cpu=other_cpu)
        self.parts = balanced_engines(machine, way, role)
        self.servers = [part for part in self.parts if not isinstance(part, Headless)]
        self.prefill, decode = [self.single], self.servers
        if side == "P":
            self.prefill, decode = decode, self.prefill
        self.proxy = Proxy(machine.folder, self.prefill, decode, name=f"{self.name}-proxy")
        machine.start(self.single, *self.parts)
        machine.start(self.proxy)
        urls = [url for server in [self.single, *self.servers] for url in server.urls]
        wait("every rank is known", lambda: self.proxy.members() == dict.fromkeys(urls, True))

    def moved_by_rank(self) -> list[float]:
        """Returns the bytes of KV that each rank has sent, or received."""
        name = self.moved
        if self.way == "external":
            return [server.metric(name) for server in self.servers]
        found = []
        for at, server in enumerate(self.servers):
            first = at * server.ranks
            labels = [f'engine="{first + rank}"' for rank in range(server.ranks)]
            found += [server.metric(name, label) for label in labels]
        return found


@pytest.fixture(scope="module")
def right(machine: Machine) -> list[Record]:
    """The answers of one plain vLLM."""
    machine.stop()  # all others, for the memory's sake
    plain = engine(machine, "balancing-plain")
    machine.start(plain)
    found = several(lambda one: ask(plain.url, one), prompts())
    assert {one.status for one in found} == {200}
    machine.stop(plain)
    return found


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def pair(machine: Machine, right: list[Record], request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(machine, *request.param)
    yield made
    machine.stop()


def test_every_rank_takes_part_and_answers_are_plain_vllms(right: list[Record], pair: Pair) -> None:
    asked = prompts()
    ours = several(lambda one: ask(pair.proxy.url, one), asked)
    for one, expected, what in zip(ours, right, asked, strict=True):
        expect_same(one, expected, f"{len(what['prompt'])} tokens:")
    assert all(pair.moved_by_rank()), f"a rank moved nothing: {pair.moved_by_rank()}"
    for server in [pair.single, *pair.servers]:
        wait_until_free(server)
        assert server.is_alive()
    for server in pair.prefill:
        assert server.metric("vllm:disagg_unclaimed_prefills_total") == 0


def test_a_rank_that_dies(right: list[Record], pair: Pair) -> None:
    """The rank of the last process: each answer is EXACT or CLEAN, and its engine ends."""
    asked: list[Body] = [{**one, "cache_salt": pair.name} for one in prompts()[:24]]
    found = ask_while_it_dies(pair.proxy.url, asked, pair.parts[-1].child("EngineCore"))
    for one, expected in zip(found, right, strict=False):
        expect_exact_or_clean(one, expected)
    for server in pair.servers:
        wait(f"vLLM ends {server.name}", lambda e=server: not e.is_alive(), 60)
