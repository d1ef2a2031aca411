"""In vLLM's MultiConnector with its OffloadingConnector, which has room for few blocks.

So computed KV is kept in host memory and loaded again, and both engines announce it. Only the
copying is ours (`copying.py`): vLLM's needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import Body, ask, body, expect_same, tokens
from conftest import Machine
from engines import BLOCK, Engine, Proxy, beside, wait
from test_kv_events import Events, announced
from test_topologies import several

pytestmark = pytest.mark.wide

BLOCKS = 40  # of the KV cache; a request needs 8 at the most
LOADED = "vllm:kv_offload_load_bytes_total"


def engine(machine: Machine, name: str, role: str, cpu: str, *more: str) -> Engine:
    spec = {
        "spec_name": "CopyingSpec",
        "spec_module_path": "copying",
        "cpu_bytes_to_use": 256 << 20,
    }
    other = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": spec}
    flags = [
        *("--dtype", "float32"),
        *("--num-gpu-blocks-override", str(BLOCKS)),
        *beside(other, role, machine.key),
        *more,
    ]
    return Engine(name, machine.folder, *flags, cpu=cpu, env={"PYTHONPATH": path()})


def path() -> str:
    return f"{Path(__file__).parents[2]}:{Path(__file__).parent}"


class Pair:
    def __init__(self, machine: Machine) -> None:
        p_flags, p_events = announced()
        d_flags, d_events = announced()
        self.prefill = engine(machine, "offloading-P", "kv_producer", "0", *p_flags)
        self.decode = engine(machine, "offloading-D", "kv_consumer", "1", *d_flags)
        self.plain = Engine("offloading-plain", machine.folder, "--dtype", "float32", cpu="1")
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name="offloading-proxy")
        machine.start(self.prefill, self.decode)
        machine.start(self.plain, self.proxy)
        self.events = [Events(p_events), Events(d_events)]

    def check(self, asked: list[Body]) -> None:
        right = several(lambda one: ask(self.plain.url, one), asked)
        for ours, plain, what in zip(
            several(lambda one: ask(self.proxy.url, one), asked), right, asked, strict=True
        ):
            expect_same(ours, plain, f"{len(what['prompt'])} tokens:")


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    made = Pair(machine)
    yield made
    for events in made.events:
        events.close()
    machine.stop()


def test_what_left_the_cache_comes_back_and_is_transferred(pair: Pair) -> None:
    """32 prompts of 3 to 7 blocks, three times: neither cache holds them until the next turn."""
    prompts = [tokens(400 + 16 * at, f"offloading {at}") for at in range(32)]
    received = []
    for turn in range(3):
        pair.check([body(prompt, 12 + turn, logprobs=3) for prompt in prompts])
        received.append(pair.decode.received)
    assert received[0] < received[1] < received[2], (
        "D had the prompts: nothing was transferred again"
    )
    assert pair.prefill.metric(LOADED) > 0, "P computed everything again"
    blocks = {tuple(one[:end]) for one in prompts for end in range(BLOCK, len(one) + 1, BLOCK)}
    for events in pair.events:
        wait("each block in the KV cache is announced", lambda e=events: blocks <= e.stored)
        assert len(events.kept) >= len(blocks), "the other connector's blocks are not announced"
    for one in (pair.prefill, pair.decode):
        one.wait_free()
        one.expect_alive()


def test_whole_requests_use_what_d_has_kept(pair: Pair) -> None:
    """Requests with `echo` run at D alone."""
    prompts = [tokens(400 + 16 * at, f"offloading {at}") for at in range(16)]
    before = pair.decode.metric(LOADED)
    pair.check([body(prompt, 8, echo=True) for prompt in prompts])
    wait("D loads what it has kept", lambda: pair.decode.metric(LOADED) > before)
