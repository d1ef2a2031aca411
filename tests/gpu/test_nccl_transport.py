"""NCCL's transport between two drivers: this project's own code over a simulated GPU and NCCL."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu
from simulated_nccl import Network, SimulatedNccl
from stream_world import BLOCK_TOKENS, Engine, Shape

from kv_connectors.gpu import nccl
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.protocol import events
from vllm_disagg.transports.collective import channel

KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
SHAPE = Shape(layers=3, blocks=12, block_bytes=512)
LIMIT_SECONDS = 30.0
PIECE_BYTES = 1024
PEER_SECONDS = 3.0  # far above what a busy machine delays a thread


class Pair:
    """P and D, each with a driver; `load` moves one prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = SimulatedGpu(1)
        self.network = Network(self.gpu)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(nccl, "PIECE_BYTES", 2 * PIECE_BYTES)
        monkeypatch.setattr(nccl, "load", lambda: SimulatedNccl(self.network))
        world: Any = SimpleNamespace(gpu=self.gpu, shape=SHAPE)
        self.p = Engine(world, "p")
        self.d = Engine(world, "d")
        for cache in self.p.caches:
            cache.copy_(torch.randint(0, 255, cache.shape, dtype=torch.uint8))
        self.drivers = [self._driver(engine) for engine in (self.p, self.d)]
        self.prompts = 0

    @staticmethod
    def _driver(engine: Engine) -> Driver:
        config = Config(transport="nccl", piece_bytes=PIECE_BYTES, peer_timeout=PEER_SECONDS)
        make = nccl.transport_factory(config, "cuda")
        return Driver(config, KEY, engine.memory, 0, {"nccl": make})

    @property
    def by_nccl(self) -> int:
        return self.drivers[1].counters.received.get("nccl", 0)

    def load(self) -> None:
        """Loads a prompt; its bytes must be right, whichever transport moves them."""
        p, d = self.drivers
        self.prompts += 1
        transfer = f"{self.prompts:032x}"
        blocks = list(range(SHAPE.blocks))
        tokens = SHAPE.blocks * BLOCK_TOKENS
        for cache in self.d.caches:
            cache.zero_()
        computed = events.LayersComputed(transfer, SHAPE.layers)
        p.submit([events.BlocksScheduled(transfer, tokens, [blocks]), computed])
        p.submit([events.PrefillFinished(transfer)])
        plan = reshard.plan([p.worker.holds], [d.worker.holds])
        target = [events.GroupBlocks(0, blocks)]
        d.submit([events.LoadRequested(transfer, [p.worker], plan, target, tokens, 60.0)])
        result = outcome(d)
        assert isinstance(result, events.LoadResult) and result.reason is None, result
        outcome(p)
        for ours, theirs in zip(self.d.caches, self.p.caches, strict=True):
            assert torch.equal(ours, theirs)

    def load_until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < end
            self.load()

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()


def outcome(driver: Driver) -> object:
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        if taken := driver.take():
            return taken[0]
        time.sleep(0.001)
    raise AssertionError("nothing came")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    logging.getLogger("vllm_disagg").propagate = True
    made = Pair(monkeypatch)
    yield made
    made.close()


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [line for line in map(logging.LogRecord.getMessage, caplog.records) if text in line]


def test_kv_comes_by_nccl_after_the_proof(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sizes: list[int] = []

    def receive(number: int, content: bytes) -> bytes:
        sizes.append(len(content))
        return content

    pair.network.receive = receive
    pair.load_until(lambda: pair.by_nccl)
    # The proof fills a slot; pieces are cut to NCCL's own size, not to the setting.
    assert sizes[0] == max(sizes) == nccl.PIECE_BYTES > PIECE_BYTES
    assert max(sizes[1:]) > PIECE_BYTES
    assert lines(caplog, "nccl: connected and proved; pieces of ")
    # None of the driver's or the collective worker's: a call may wait there.
    assert pair.network.threads == {"vllm-disagg-nccl"}
    assert not pair.gpu.races


def test_a_wrong_proof_leaves_the_path_unused(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.network.receive = lambda number, content: bytes([content[0] ^ 1]) + content[1:]
    pair.load_until(lambda: pair.network.calls.count("ncclCommAbort") == 2)
    for _ in range(3):
        pair.load()
    assert pair.by_nccl == 0
    assert pair.network.calls.count("ncclCommInitRankConfig") == 2, "tried again at once"
    (line,) = lines(caplog, "reads from")
    assert line.endswith(
        "its KV goes by another transport: its proof piece arrived with wrong bytes"
    )


def test_a_proof_that_never_ends_holds_up_no_load(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PAIRING_SECONDS", 2.0)
    pair.network.is_silent = True
    # On a busy machine the first attempts may not even connect in time.
    pair.load_until(lambda: lines(caplog, "its proof piece did not arrive within 2 s"))
    assert pair.by_nccl == 0
    pair.load_until(lambda: pair.network.calls.count("ncclCommAbort") >= 2)


def test_a_peer_that_stops_after_the_proof_is_replaced_by_zmq(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.load_until(lambda: pair.by_nccl)
    before = dict(pair.drivers[1].counters.received)
    pair.network.is_silent = True
    pair.load()
    assert pair.drivers[1].counters.received["nccl"] == before["nccl"]
    assert lines(caplog, f"no progress for {PEER_SECONDS:g} s")
