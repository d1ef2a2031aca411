"""Engines of different parallelism and block sizes: four pairs, compared with one plain vLLM.

In float32: with bfloat16 the order of sums in tensor parallelism alone may decide between tokens of
nearly equal probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from asking import Body, Record, ask, body, expect_same, tokens
from conftest import Machine
from direct import Legs
from engines import BLOCK, CHUNK, Engine, Proxy, wait

pytestmark = pytest.mark.wide

TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, channels, float32
LENGTHS = [1, 31, 32, 33, 100, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 385, 500, 640]
PAIRS = ["TP 2 to TP 1", "TP 1 to TP 2", "blocks of 128 to 32", "blocks of 32 to 128"]
AT_ONCE = 12


@dataclass
class Asked:
    """Requests and plain vLLM's answers to them."""

    bodies: list[Body]
    plain: list[Record]


class Topologies:
    def __init__(self, machine: Machine) -> None:
        exact = ["--dtype", "float32"]
        small, two = ["--block-size", "32"], ["--tensor-parallel-size", "2"]
        self.p2 = Engine("topo-P-tp2", machine.folder, *exact, *two, role="kv_producer", cpu="0|0")
        self.p1 = Engine("topo-P-32", machine.folder, *exact, *small, role="kv_producer", cpu="0")
        self.d1 = Engine("topo-D", machine.folder, *exact, role="kv_consumer", cpu="1")
        self.d2 = Engine(
            "topo-D-tp2-32", machine.folder, *exact, *two, *small, role="kv_consumer", cpu="1|1"
        )
        self.plain = Engine("topo-plain", machine.folder, *exact, cpu="1")
        machine.start(self.p2, self.p1, self.d1)
        machine.start(self.d2, self.plain)
        pairs = [(self.p2, self.d1), (self.p1, self.d2), (self.p2, self.d2), (self.p1, self.d1)]
        self.legs = {
            name: Legs(machine.key, *pair) for name, pair in zip(PAIRS, pairs, strict=True)
        }
        self.proxy = Proxy(
            machine.folder, [self.p2, self.p1], [self.d1, self.d2], name="topo-proxy"
        )
        machine.start(self.proxy)
        self.distinct = self.answered(
            [tokens(LENGTHS[at % len(LENGTHS)], f"topo {at}") for at in range(72)]
        )
        common = tokens(200, "topo common")
        self.common = self.answered(
            [common + tokens(1 + 17 * at, f"topo common {at}") for at in range(30)]
        )

    def answered(self, prompts: list[list[int]]) -> Asked:
        bodies = [body(prompt, 12, logprobs=3) for prompt in prompts]
        return Asked(bodies, several(lambda one: ask(self.plain.url, one), bodies))


def several(do, bodies: list[Body]) -> list[Record]:  # type: ignore[no-untyped-def]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(do, bodies))


@pytest.fixture(scope="module")
def topologies(machine: Machine) -> Iterator[Topologies]:
    machine.stop()  # all others, for the memory's sake
    made = Topologies(machine)
    yield made
    for legs in made.legs.values():
        legs.close()
    machine.stop()


@pytest.mark.parametrize("pair", PAIRS)
def test_answers_are_plain_vllms_and_kv_moves(topologies: Topologies, pair: str) -> None:
    legs = topologies.legs[pair]
    size = 32 if legs.prefill is topologies.p1 else BLOCK
    before = legs.decode.received
    for asked in (topologies.distinct, topologies.common):
        salted = [
            {**one, "cache_salt": pair} for one in asked.bodies
        ]  # so that each pair starts with cold caches
        for ours, plain, what in zip(
            several(legs.ask, salted), asked.plain, asked.bodies, strict=True
        ):
            expect_same(ours, plain, f"{pair}, {len(what['prompt'])} tokens:")
        if asked is topologies.distinct:
            moved = sum(-(-len(one["prompt"]) // size) * size for one in asked.bodies) * TOKEN_BYTES
            wait("all KV arrives", lambda: legs.decode.received >= before + moved)  # noqa: B023
            assert legs.decode.received == before + moved
    assert legs.decode.received > before + moved
    assert not legs.decode.metric("vllm:disagg_damaged_pieces_total")
    for engine in (legs.prefill, legs.decode):
        engine.wait_free()


def test_behind_one_proxy_all_pairs_serve(topologies: Topologies) -> None:
    before = [engine.received for engine in (topologies.d1, topologies.d2)]
    salted = [{**one, "cache_salt": "proxy"} for one in topologies.distinct.bodies[:32]]
    answers = several(lambda one: ask(topologies.proxy.url, one), salted)
    for ours, plain in zip(answers, topologies.distinct.plain, strict=False):
        expect_same(ours, plain)
    assert all(
        engine.received > was
        for engine, was in zip((topologies.d1, topologies.d2), before, strict=True)
    )
