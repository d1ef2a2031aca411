"""Prefill and decode engines of two versions of vLLM, with the same code of ours.

The reference is plain vLLM of this environment. DISAGG_OTHER_VLLM names the other environment
(`make versions` sets it). In float32: the order of sums may differ between versions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Machine
from direct import Legs
from engines import BLOCK, Engine, Proxy, wait
from test_topologies import LENGTHS, TOKEN_BYTES, several

OTHER = os.environ.get("DISAGG_OTHER_VLLM", "")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        not OTHER, reason="DISAGG_OTHER_VLLM names no environment with another vLLM"
    ),
]
PAIRS = ["other to this", "this to other"]


class Versions:
    def __init__(self, machine: Machine) -> None:
        exact, there = ["--dtype", "float32"], Path(OTHER) / "bin"
        self.p = Engine("versions-P", machine.folder, *exact, role="kv_producer", cpu="0")
        self.d = Engine("versions-D", machine.folder, *exact, role="kv_consumer", cpu="1")
        self.other_p = Engine(
            "versions-other-P", machine.folder, *exact, role="kv_producer", cpu="0", home=there
        )
        self.other_d = Engine(
            "versions-other-D", machine.folder, *exact, role="kv_consumer", cpu="1", home=there
        )
        self.plain = Engine("versions-plain", machine.folder, *exact, cpu="1")
        machine.start(self.p, self.other_d)
        machine.start(self.other_p, self.d)
        machine.start(self.plain)
        pairs = [(self.other_p, self.d), (self.p, self.other_d)]
        self.legs = {
            name: Legs(machine.key, *pair) for name, pair in zip(PAIRS, pairs, strict=True)
        }
        self.proxy = Proxy(
            machine.folder, [self.p, self.other_p], [self.d, self.other_d], name="versions-proxy"
        )
        machine.start(self.proxy)
        common = tokens(200, "versions common")
        self.prompts = [tokens(LENGTHS[at % len(LENGTHS)], f"versions {at}") for at in range(78)]
        self.shared = [common + tokens(1 + 17 * at, f"versions common {at}") for at in range(30)]
        self.bodies = [body(prompt, 12, logprobs=3) for prompt in self.prompts + self.shared]
        self.right = several(lambda one: ask(self.plain.url, one), self.bodies)


@pytest.fixture(scope="module")
def versions(machine: Machine) -> Iterator[Versions]:
    machine.stop()  # all others, for the memory's sake
    made = Versions(machine)
    yield made
    for legs in made.legs.values():
        legs.close()
    machine.stop()


def test_both_versions_alone_give_the_same_tokens(versions: Versions) -> None:
    """The condition for the other tests. Without a grant the other decode engine is a plain one."""
    alone = several(
        lambda one: ask(versions.other_d.url, {**one, "cache_salt": "alone"}), versions.bodies
    )
    for ours, plain in zip(alone, versions.right, strict=True):
        expect_same(ours, plain)


@pytest.mark.parametrize("pair", PAIRS)
def test_answers_are_plain_vllms_and_kv_moves(versions: Versions, pair: str) -> None:
    legs = versions.legs[pair]
    before = legs.decode.received
    salted = [{**one, "cache_salt": pair} for one in versions.bodies]
    for ours, plain, what in zip(
        several(legs.ask, salted), versions.right, versions.bodies, strict=True
    ):
        expect_same(ours, plain, f"{pair}, {len(what['prompt'])} tokens:")
    moved = sum(-(-len(prompt) // BLOCK) * BLOCK for prompt in versions.prompts) * TOKEN_BYTES
    wait("all KV arrives", lambda: legs.decode.received > before + moved)
    assert not legs.decode.metric("vllm:disagg_damaged_pieces_total")
    for engine in (legs.prefill, legs.decode):
        engine.wait_free()


def test_behind_one_proxy_all_pairs_serve(versions: Versions) -> None:
    engines = (versions.d, versions.other_d)
    before = [engine.received for engine in engines]
    salted = [{**one, "cache_salt": "proxy"} for one in versions.bodies[:39]]
    for ours, plain in zip(
        several(lambda one: ask(versions.proxy.url, one), salted), versions.right, strict=False
    ):
        expect_same(ours, plain)
    for engine, was in zip(engines, before, strict=True):
        wait(f"{engine.name} gets KV", lambda e=engine, w=was: e.received > w)
