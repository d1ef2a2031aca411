"""vLLM's events of its KV cache, which routers read: D announces received blocks as its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from asking import ask, body, expect_same, tokens
from conftest import Machine
from direct import Legs
from engines import BLOCK, Engine, free_port, wait

pytestmark = pytest.mark.wide

REQUESTS = 12
GPU = "GPU"


class Events:
    """The blocks that one engine has announced, each by all tokens up to its end.

    `kept`: the hashes of those in another memory, of which vLLM announces no tokens.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        self._socket.connect(endpoint)
        self.stored: set[tuple[int, ...]] = set()
        self.kept: set[object] = set()
        self._chains: dict[object, tuple[int, ...]] = {}  # by the hash of the last block
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                _, _, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] != "BlockStored":
                    continue
                if event["medium"] == GPU:  # the KV cache, on a CPU too
                    self._add(event)
                else:
                    self.kept |= set(event["block_hashes"])
        self._socket.close()

    def _add(self, event: dict[str, object]) -> None:
        before = self._chains.get(event["parent_block_hash"], ())
        all_tokens = before + tuple(event["token_ids"])  # type: ignore[arg-type]
        hashes = event["block_hashes"]
        assert isinstance(hashes, list)
        for at, block in enumerate(hashes, 1):
            chain = all_tokens[: len(before) + at * BLOCK]
            self._chains[block] = chain
            self.stored.add(chain)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def announced() -> tuple[list[str], str]:
    """Returns the flags of an engine that announces its blocks, and the address to read them."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
    }
    return ["--kv-events-config", json.dumps(config)], endpoint


class Fleet:
    def __init__(self, machine: Machine) -> None:
        self.events: dict[str, Events] = {}
        self.engines: dict[str, Engine] = {}
        endpoints = {}
        for name, role, cpu in (
            ("P", "kv_producer", "0"),
            ("D", "kv_consumer", "1"),
            ("plain", "", "1"),
        ):
            flags, endpoints[name] = announced()
            self.engines[name] = Engine(
                f"events-{name}", machine.folder, *flags, role=role, cpu=cpu
            )
        machine.start(*self.engines.values())
        self.events = {name: Events(endpoint) for name, endpoint in endpoints.items()}
        self.legs = Legs(machine.key, self.engines["P"], self.engines["D"])


@pytest.fixture(scope="module")
def fleet(machine: Machine) -> Iterator[Fleet]:
    machine.stop()  # all others, for the memory's sake
    made = Fleet(machine)
    yield made
    made.legs.close()
    for events in made.events.values():
        events.close()
    machine.stop()


def test_d_announces_what_a_plain_engine_announces(fleet: Fleet) -> None:
    decode = fleet.engines["D"]
    asked = [body(tokens(90 + 110 * at, f"events {at}"), 50) for at in range(REQUESTS)]
    expected: set[tuple[int, ...]] = set()
    for one in asked:
        expect_same(fleet.legs.ask(one), ask(fleet.engines["plain"].url, one))
        prompt = tuple(one["prompt"])
        expected |= {prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    assert decode.metric("vllm:disagg_load_seconds_count") >= REQUESTS - 1  # one has no block
    for name in ("P", "D", "plain"):
        stored = fleet.events[name].stored
        wait(f"{name} announces all prompts", lambda s=stored: expected <= s)
    # With the blocks of the answers.
    plain = fleet.events["plain"].stored
    wait("D announces the same blocks", lambda: fleet.events["D"].stored == plain)
    assert len(plain) > len(expected)
