"""A pair by each transport except ZMQ: exact answers, bytes by that transport, and a dead P."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import pytest
from asking import ask, at_once, body, expect_same, tokens
from conftest import Machine
from engines import BLOCK, CHUNK, Engine, Proxy, wait
from test_exact import needed
from test_listening import expect_listening

pytestmark = pytest.mark.wide

CARRIERS = [
    "tcp",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            not importlib.util.find_spec("nixl"), reason="nixl is not installed"
        ),
    ),
    "gloo",
]
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 1, 700, 1500]


class Pair:
    def __init__(self, machine: Machine, carrier: str) -> None:
        self.machine, self.carrier = machine, carrier
        settings: dict[str, object] = {"transport": carrier}
        self.plain = Engine(f"plain-{carrier}", machine.folder, cpu="1")
        self.prefill = Engine(
            f"P-{carrier}", machine.folder, role="kv_producer", cpu="0", settings=settings
        )
        self.decode = Engine(
            f"D-{carrier}", machine.folder, role="kv_consumer", cpu="1", settings=settings
        )
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name=f"proxy-{carrier}")
        self.processes = (self.prefill, self.decode, self.plain, self.proxy)
        machine.start(*self.processes[:3])
        machine.start(self.proxy)

    @property
    def carried(self) -> int:
        label = f'transport="{self.carrier}"'
        return int(self.decode.metric("vllm:disagg_received_wire_bytes_total", label))

    def check(self, prompts: list[list[int]]) -> None:
        asked = [body(prompt, 16) for prompt in prompts]
        plain = at_once(lambda one: ask(self.plain.url, one), asked)
        for ours, expected in zip(
            at_once(lambda one: ask(self.proxy.url, one), asked), plain, strict=True
        ):
            expect_same(ours, expected)

    def comes_up(self) -> None:
        """Sends requests until the transport is in use instead of ZMQ."""

        def done() -> bool:
            before = self.carried
            self.check([tokens(300, time.monotonic())])
            time.sleep(0.5)
            return self.carried > before

        wait(f"{self.carrier} carries KV", done)


@pytest.fixture(scope="module", params=CARRIERS)
def pair(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(machine, request.param)
    yield made
    machine.stop(*made.processes[::-1])


def test_a_hundred_requests_are_exact(pair: Pair) -> None:
    pair.comes_up()
    before, count = pair.carried, 0
    for turn in range(16):
        prompts = [tokens(length, f"{pair.carrier} {turn} {length}") for length in LENGTHS]
        pair.check(prompts)
        count += needed(map(len, prompts))
    wait("all KV came by it", lambda: pair.carried - before == count)
    assert pair.decode.metric("vllm:disagg_damaged_pieces_total") == 0


def test_what_listens_is_known_and_on_the_loopback(pair: Pair) -> None:
    pair.comes_up()
    ours = {"tcp": 3, "nixl": 4, "gloo": 3}[pair.carrier]
    expect_listening(pair.prefill, pair.plain, ours, ours)
    expect_listening(pair.decode, pair.plain, 2 if pair.carrier == "tcp" else ours, ours)


def test_a_prefill_engine_that_dies(pair: Pair) -> None:
    pair.comes_up()
    prompts = [tokens(1800 + at, time.monotonic()) for at in range(8)]
    asked = [body(prompt, 24) for prompt in prompts]
    plain = at_once(lambda one: ask(pair.plain.url, one), asked)

    def with_a_kill(one: dict[str, object] | None) -> object:
        if one is None:
            time.sleep(0.3)
            pair.prefill.stop(gently=0)
            return None
        return ask(pair.proxy.url, one)

    *ours, _ = at_once(with_a_kill, [*asked, None])
    for one, expected in zip(ours, plain, strict=True):
        expect_same(one, expected)  # type: ignore[arg-type]
    pair.machine.start_again(pair.prefill)
    pair.comes_up()
