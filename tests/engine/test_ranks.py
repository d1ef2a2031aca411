"""Data parallel engines: two ranks behind one API server, on either side, registered at the proxy.

In float32: two ranks batch differently from one engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Machine
from engines import BLOCK, Engine, Proxy, free_port, wait
from test_topologies import LENGTHS, TOKEN_BYTES, several
from two_legs import ask_both, send_decode, send_prefill

pytestmark = pytest.mark.wide


class Pair:
    def __init__(self, machine: Machine, at_p: int, at_d: int) -> None:
        meeting = free_port()
        register, exact = f"http://127.0.0.1:{meeting}", ["--dtype", "float32"]
        self.prefill = Engine(
            f"ranks-P{at_p}",
            machine.folder,
            *exact,
            role="kv_producer",
            cpu="0|0" if at_p else "0",
            ranks=at_p,
            register=register,
        )
        self.decode = Engine(
            f"ranks-D{at_d}",
            machine.folder,
            *exact,
            role="kv_consumer",
            cpu="1|1" if at_d else "1",
            ranks=at_d,
            register=register,
        )
        self.plain = Engine(f"ranks-plain{at_p}", machine.folder, *exact, cpu="1")
        self.proxy = Proxy(
            machine.folder, [], [], "--allow-registration", name=f"ranks-proxy{at_p}", port=meeting
        )
        machine.start(self.prefill, self.decode)
        machine.start(self.plain, self.proxy)
        self.all = dict.fromkeys([*self.prefill.urls, *self.decode.urls], True)
        wait("every rank is known", lambda: self.proxy.members() == self.all)


@pytest.fixture(scope="module", params=[(2, 0), (0, 2)], ids=["P", "D"])
def pair(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    made = Pair(machine, *request.param)
    yield made
    machine.stop()


def by_rank(engine: Engine, name: str) -> list[float]:
    return [engine.metric(name, f'engine="{rank}"') for rank in range(max(1, engine.ranks))]


def test_answers_are_plain_vllms_and_every_rank_takes_part(pair: Pair) -> None:
    common = tokens(200, "ranks common")
    prompts = [tokens(LENGTHS[at % len(LENGTHS)], f"ranks {at}") for at in range(78)]
    distinct = [body(prompt, 12, logprobs=3) for prompt in prompts]
    shared = [
        body(common + tokens(1 + 17 * at, f"ranks common {at}"), 12, logprobs=3) for at in range(30)
    ]
    for asked in (distinct, shared):
        right = several(lambda one: ask(pair.plain.url, one), asked)
        for ours, plain, what in zip(
            several(lambda one: ask(pair.proxy.url, one), asked), right, asked, strict=True
        ):
            expect_same(ours, plain, f"{len(what['prompt'])} tokens:")
        if asked is distinct:
            moved = sum(-(-len(prompt) // BLOCK) * BLOCK for prompt in prompts) * TOKEN_BYTES
            wait("all KV arrives", lambda: pair.decode.received >= moved)  # noqa: B023
            assert pair.decode.received == moved, (
                "some legs went to ranks that their grants were not for"
            )
    assert all(by_rank(pair.prefill, "vllm:disagg_sent_bytes_total")), "a rank of P sent nothing"
    assert all(by_rank(pair.decode, "vllm:disagg_received_bytes_total")), (
        "a rank of D received nothing"
    )
    for engine in (pair.prefill, pair.decode):
        engine.wait_free()
    assert pair.prefill.metric("vllm:disagg_unclaimed_prefills_total") == 0
    assert pair.proxy.members() == pair.all


def test_two_legs_in_turn_by_a_router_that_knows_no_ranks(pair: Pair) -> None:
    """vLLM chooses the rank of either leg, so a handover reaches any rank of D."""
    prompts = [tokens(LENGTHS[at % len(LENGTHS)], f"two legs {at}") for at in range(102)]
    asked = [body(prompt, 12, logprobs=3) for prompt in prompts]
    right = several(lambda one: ask(pair.plain.url, one), asked)
    before = pair.decode.received
    ours = several(lambda one: ask_both(pair.prefill.url, pair.decode.url, one), asked)
    for one, plain, what in zip(ours, right, asked, strict=True):
        expect_same(one, plain, f"{len(what['prompt'])} tokens:")
    moved = sum(-(-len(prompt) // BLOCK) * BLOCK for prompt in prompts) * TOKEN_BYTES
    wait("all KV arrives", lambda: pair.decode.received >= before + moved)
    # One handover at each rank of D: one loads, the other computes.
    prompt = tokens(500, "at each rank")
    asked_twice = body(prompt, 12, logprobs=3)
    params = send_prefill(pair.prefill.url, asked_twice)
    plain = ask(pair.plain.url, asked_twice)
    for url in pair.decode.urls * 2:
        expect_same(send_decode(url, asked_twice, params), plain, url)
    moved += -(-len(prompt) // BLOCK) * BLOCK * TOKEN_BYTES
    assert pair.decode.received == before + moved
    for engine in (pair.prefill, pair.decode):
        engine.wait_free()
