"""Each transport between two real engines: every answer is plain vLLM's, and the bytes came the way that was asked for.

What is right is what the prefill engine itself says: it computes everything, and loads nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from asking import ask, at_once, body, english, expect_same, tokens
from conftest import Machine
from engines import BLOCK, CHUNK, Engine, Proxy, wait
from test_exact import needed

TRANSPORTS = ["gloo", "zmq"]
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 500, 767, 768, 769, 1000, 1500]


class Pair:
    def __init__(self, machine: Machine, transport: str) -> None:
        self.machine, self.transport = machine, transport
        settings: dict[str, object] = {"transport": transport}
        self.prefill = Engine(f"{transport}-P", machine.folder, role="kv_producer", cpu="0", settings=settings)
        self.decode = Engine(f"{transport}-D", machine.folder, role="kv_consumer", cpu="1", settings=settings)
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name=f"{transport}-proxy")
        machine.start(self.prefill, self.decode)
        machine.start(self.proxy)

    def check(self, asked: list[dict[str, object]]) -> None:
        ours = at_once(lambda one: ask(self.proxy.url, one), asked)
        plain = at_once(lambda one: ask(self.prefill.url, one), asked)
        for one, expected, what in zip(ours, plain, asked, strict=True):
            expect_same(one, expected, f"{self.transport} {what['prompt']!r:.60}")

    @property
    def carried(self) -> int:
        """Bytes that landed at D by the transport."""
        return int(self.decode.metric(f"vllm:disagg_received_by_{self.transport}_bytes_total"))

    def stop(self) -> None:
        self.machine.stop(self.proxy, self.decode, self.prefill)


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(machine, request.param)
    yield made
    made.stop()


def test_at_least_a_hundred_answers_are_exact_and_came_by_it(pair: Pair) -> None:
    pair.check([body(tokens(300, f"{pair.transport} first"))])  # until two workers have met, ZMQ carries
    wait("the first bytes come", lambda: pair.decode.received >= needed([300]), 5)
    before, received = pair.carried, pair.decode.received
    lengths = [length + at for at in range(8) for length in LENGTHS]
    for start in range(0, len(lengths), 16):
        part = lengths[start : start + 16]
        pair.check([body(tokens(length, f"{pair.transport} {start} {length}"), 12) for length in part])
    pair.check([body(english(200 + 150 * at, f"{pair.transport} {at}"), 12) for at in range(16)])
    wait("all KV arrives", lambda: pair.decode.received >= received + needed(lengths), 5)
    share = (pair.carried - before) / (pair.decode.received - received)
    assert share > 0.95, f"only {share:.0%} of the bytes came by {pair.transport}"


def test_a_prefill_engine_that_dies_is_recomputed_exactly(pair: Pair) -> None:
    asked = [body(tokens(1500 + at, f"{pair.transport} dies {at}"), 24) for at in range(6)]
    timer = threading.Timer(0.3, lambda: pair.prefill.stop(gently=0))
    timer.start()
    ours = at_once(lambda one: ask(pair.proxy.url, one), asked)
    timer.join()
    pair.machine.start_again(pair.prefill)
    plain = at_once(lambda one: ask(pair.prefill.url, one), asked)
    for one, expected in zip(ours, plain, strict=True):
        expect_same(one, expected)
    before = pair.carried
    wait("the proxy has noticed", pair.proxy.is_ready, 15)
    for at in range(6):
        pair.check([body(tokens(400, f"{pair.transport} again {at}"))])
    wait(f"KV comes by {pair.transport} again", lambda: pair.carried > before, 10)
