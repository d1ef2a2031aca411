"""Pairs in other modes than vLLM's defaults, on both sides: exact answers, and KV moves.

In float32: a mode may change how requests are batched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Machine
from engines import BLOCK, Engine, Proxy, wait
from test_topologies import LENGTHS, TOKEN_BYTES, several

pytestmark = pytest.mark.wide

COMPILER = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch.compile needs a C++ compiler: g++"
)
# A prompt in one step: what has moved before its end has moved layer by layer.
WHOLE = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]
MODES = {
    "no-async": ["--no-async-scheduling"],
    "no-chunks": WHOLE,
    "no-prefixes": ["--no-enable-prefix-caching"],
    "compiled": ["--no-enforce-eager", *WHOLE],
}
PARAMS = [pytest.param(mode, marks=COMPILER if mode == "compiled" else ()) for mode in MODES]


class Pair:
    """A pair, and a plain vLLM of the same mode."""

    def __init__(self, machine: Machine, mode: str) -> None:
        flags = ["--dtype", "float32", *MODES[mode]]
        env = (
            {"VLLM_CPU_CI_ENV": "0"} if mode == "compiled" else {}
        )  # else vLLM for CPUs only pretends to compile
        self.prefill = Engine(
            f"{mode}-P", machine.folder, *flags, role="kv_producer", cpu="0", env=env
        )
        self.decode = Engine(
            f"{mode}-D", machine.folder, *flags, role="kv_consumer", cpu="1", env=env
        )
        self.plain = Engine(f"{mode}-plain", machine.folder, *flags, cpu="1", env=env)
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name=f"{mode}-proxy")
        machine.start(self.prefill, self.decode)
        machine.start(self.plain, self.proxy)


@pytest.fixture(scope="module", params=PARAMS)
def pair(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    made = Pair(machine, request.param)
    yield made
    machine.stop()


def test_answers_are_plain_vllms_and_kv_moves(pair: Pair) -> None:
    common = tokens(200, "modes common")
    prompts = [tokens(LENGTHS[at % len(LENGTHS)] * (1 + at % 2), f"modes {at}") for at in range(78)]
    distinct = [body(prompt, 12, logprobs=3) for prompt in prompts]
    shared = [
        body(common + tokens(1 + 17 * at, f"modes common {at}"), 12, logprobs=3) for at in range(30)
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
            assert pair.decode.received == moved
    assert pair.decode.metric("vllm:disagg_overlapped_bytes_total") > 0, (
        "nothing moved while the prefill computed"
    )
    for engine in (pair.prefill, pair.decode):
        engine.wait_free()
        engine.expect_alive()
