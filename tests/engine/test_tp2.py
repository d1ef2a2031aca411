"""Two workers on each side; the reference is the prefill engine, which computes everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asking import ask, at_once, body, english, expect_same, tokens
from conftest import Machine, Main
from direct import Legs
from engines import BLOCK, Engine, Proxy, wait
from test_exact import needed

pytestmark = pytest.mark.wide


class Tp2:
    """Two engines on separate cores: vLLM's workers spin while they wait, and starve others."""

    def __init__(self, machine: Machine) -> None:
        both = ["--tensor-parallel-size", "2"]
        self.prefill = Engine("tp2-P", machine.folder, *both, role="kv_producer", cpu="0|0")
        self.decode = Engine("tp2-D", machine.folder, *both, role="kv_consumer", cpu="1|1")
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name="tp2-proxy")
        machine.start(self.prefill, self.decode)
        machine.start(self.proxy)
        self.legs = Legs(machine.key, self.prefill, self.decode)
        # Beside workers that spin on the same cores a first contact can take longer than
        # `peer_timeout`. D then computes this prompt, and the tests below count bytes.
        ask(self.proxy.url, body(tokens(300, "tp2 first contact"), 4))


@pytest.fixture(scope="module")
def tp2(machine: Machine, main: Main) -> Iterator[Tp2]:
    main.stop()  # for the memory's sake
    made = Tp2(machine)
    yield made
    made.legs.close()
    machine.stop(made.proxy, made.decode, made.prefill)


def test_two_workers_a_side(tp2: Tp2) -> None:
    assert len(tp2.legs.p.workers) == len(tp2.legs.d.workers) == 2
    lengths = [1, 100, BLOCK, BLOCK + 1, 256, 257, 512, 700, 1000, 1500, 2000]
    before = tp2.decode.received
    for length in lengths:
        asked = body(tokens(length, f"tp2 {length}"), 24)
        ours = ask(tp2.proxy.url, asked)
        expect_same(ours, ask(tp2.prefill.url, asked), f"{length} tokens:")
    wait("all KV arrives", lambda: tp2.decode.received >= before + needed(lengths))
    assert tp2.decode.received == before + needed(lengths)


def test_many_at_once(tp2: Tp2) -> None:
    asked = [body(english(200 + 150 * at, f"tp2 {at}"), 24) for at in range(16)]
    ours = at_once(lambda one: ask(tp2.proxy.url, one), asked)
    for one, what in zip(ours, asked, strict=True):
        expect_same(one, ask(tp2.prefill.url, what))
    for engine in (tp2.prefill, tp2.decode):
        engine.wait_free()
        engine.expect_alive()
