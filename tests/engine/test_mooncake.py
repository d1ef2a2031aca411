"""In vLLM's MultiConnector with its MooncakeStoreConnector: a store of KV that P and D share.

Needs libibverbs1, librdmacm1, libnuma1, and Mooncake for machines without CUDA: `make wide` has it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import Body, ask, body, expect_same, tokens
from conftest import Machine
from engines import BLOCK, Engine, Process, Proxy, beside, free_port, wait
from test_kv_events import Events, announced
from test_topologies import several

pytestmark = pytest.mark.wide

BLOCKS = 40  # of the KV cache; a request needs 8 at the most
MOVED = "vllm:mooncake_store_operation_bytes_total"
STORE_BYTES = 64 << 20  # of each engine
PROMPTS = 32


class MooncakeMaster(Process):
    """Knows where the store has each piece of KV."""

    def __init__(self, folder: Path, package: Path) -> None:
        port = free_port()
        command = [
            str(package / "mooncake_master"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={port}"),
            *(f"--metrics_port={free_port()}", "--logtostderr"),
        ]
        super().__init__("mooncake-master", command, folder, port, {})

    def is_ready(self) -> bool:
        """Whether it listens."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True


def engine(machine: Machine, name: str, role: str, cpu: str, config: Path, *more: str) -> Engine:
    """Returns an engine with both connectors."""
    store = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_extra_config": {"load_async": True},
    }
    flags = [
        *("--dtype", "float32"),
        *("--num-gpu-blocks-override", str(BLOCKS)),
        *beside(store, role, machine.key),
        *more,
    ]
    env = {"ENGINE_CHANGES": "host_mooncake", "MOONCAKE_CONFIG_PATH": str(config)}
    return Engine(name, machine.folder, *flags, cpu=cpu, env=env)


class Pair:
    """P and D with the store, the proxy, and a plain vLLM."""

    def __init__(self, machine: Machine, package: Path) -> None:
        master = MooncakeMaster(machine.folder, package)
        machine.start(master)
        config = machine.folder / "mooncake.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{master.port}",
                    "protocol": "tcp",
                    "global_segment_size": STORE_BYTES,
                    "local_buffer_size": STORE_BYTES,
                }
            )
        )
        p_flags, p_events = announced()
        d_flags, d_events = announced()
        self.prefill = engine(machine, "mooncake-P", "kv_producer", "0", config, *p_flags)
        self.decode = engine(machine, "mooncake-D", "kv_consumer", "1", config, *d_flags)
        self.plain = Engine("mooncake-plain", machine.folder, "--dtype", "float32", cpu="1")
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name="mooncake-proxy")
        machine.start(self.prefill, self.decode)
        machine.start(self.plain, self.proxy)
        self.events = [Events(p_events), Events(d_events)]

    def check(self, asked: list[Body]) -> None:
        """Asserts that the fleet answers as the plain vLLM."""
        right = several(lambda one: ask(self.plain.url, one), asked)
        found = several(lambda one: ask(self.proxy.url, one), asked)
        for ours, plain, what in zip(found, right, asked, strict=True):
            expect_same(ours, plain, f"{len(what['prompt'])} tokens:")


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    """Starts all, without the other engines of the session."""
    store = pytest.importorskip("mooncake.store", exc_type=ImportError)
    machine.stop()
    made = Pair(machine, Path(store.__file__).parent)
    yield made
    for events in made.events:
        events.close()
    machine.stop()


def test_answers_with_a_store_of_kv_beside(pair: Pair) -> None:
    """32 prompts of 3 to 7 blocks, four times: the store has all, the engines' caches do not."""
    prompts = [tokens(400 + 16 * at, f"mooncake {at}") for at in range(PROMPTS)]
    for turn in range(4):
        pair.check([body(prompt, 12 + turn, logprobs=3) for prompt in prompts])
    assert pair.decode.received > 0, "no KV came from P"
    stored = pair.prefill.metric(MOVED)
    assert stored > 0, "the store was not used"
    blocks = {tuple(one[:end]) for one in prompts for end in range(BLOCK, len(one) + 1, BLOCK)}
    for events in pair.events:
        wait("each block in the KV cache is announced", lambda e=events: blocks <= e.stored)
    for one in (pair.prefill, pair.decode):
        one.wait_free()
        assert one.is_alive()
