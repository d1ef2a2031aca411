"""A worker's half of the connector: vLLM's hooks on one side, the driver on the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from vllm_disagg import events, transports
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.keys import FleetKey

from . import kvcache
from .messages import Handshake, StepMetadata
from .stats import Stats

log = logging.getLogger("vllm_disagg.worker")

OFFER = 2 << 20  # bytes: layers are offered in groups that hold so much, so that messages stay few


class WorkerSide:
    def __init__(self, config: Config, key: FleetKey, rank: int, num_blocks: int, block_size: int) -> None:
        self._config, self._key, self._rank = config, key, rank
        self._num_blocks, self._block_size = num_blocks, block_size
        self._driver: Driver | None = None
        self._layers: dict[str, int] = {}
        self._block_bytes = 0
        self._group = 1  # layers per offer, in this step
        self._requests: dict[str, str] = {}  # transfer -> vLLM's id
        self._computing: list[str] = []  # transfers of which this step computes a part
        self._failed_blocks: set[int] = set()
        self._blocks: dict[str, list[int]] = {}  # of loads under way
        self.stats = Stats()
        self.handshake: Handshake | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = caches  # the driver holds addresses only
        memory = kvcache.host_memory(caches, self._num_blocks, self._block_size)
        self._layers = {name: index for index, name in enumerate(caches, 1)}
        self._block_bytes = memory.shape.block_bytes
        self._driver = Driver(self._config, self._key, memory, self._rank, transports.chosen(self._config))
        self.handshake = Handshake(self._driver.worker, {"KV tensors": kvcache.describe(caches, self._num_blocks)})
        log.info("KV transfers at %s", self._driver.worker.control)

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise RuntimeError("vLLM used the KV connector before it registered its KV caches")
        return self._driver

    # A step --------------------------------------------------------------------------------------------------
    def begin(self, metadata: StepMetadata) -> None:
        self._requests.update(metadata.requests)
        for event in metadata.decode:
            if isinstance(event, events.Wanted):
                self._blocks[event.transfer] = event.blocks
            elif isinstance(event, events.Unneeded):
                self._requests.pop(event.transfer, None)
        for withdrawn in metadata.prefill:
            if isinstance(withdrawn, events.Withdrawn):
                self._requests.pop(withdrawn.transfer, None)
        scheduled = [e for e in metadata.prefill if isinstance(e, events.Scheduled)]
        self._computing = [e.transfer for e in scheduled]
        per_layer = self._block_bytes * sum(len(e.blocks) for e in scheduled)
        self._group = -(-OFFER // per_layer) if per_layer else len(self._layers) + 1
        if metadata.prefill or metadata.decode:
            self.driver.submit([*metadata.prefill, *metadata.decode])

    def layer_computed(self, name: str) -> None:
        if self._computing and (layer := self._layers.get(name, 0)) % self._group == 0 and layer:
            self._announce(layer)

    def end(self) -> None:
        if self._computing:
            self._announce(len(self._layers))
        self._computing = []

    def _announce(self, layers: int) -> None:
        self.driver.submit([events.Computed(transfer, layers) for transfer in self._computing])

    # What has ended ------------------------------------------------------------------------------------------
    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Request ids: (sent, received, of these failed).  Each id once, and only ids that the scheduler awaits."""
        sent, received, failed = set(), set(), set()
        for outcome in self.driver.take():
            request = self._requests.pop(outcome.transfer, None)
            blocks = self._blocks.pop(outcome.transfer, [])
            self.stats.record(outcome)
            if request is None:
                log.error("transfer %s has ended, but belongs to no request", outcome.transfer)
            elif isinstance(outcome, events.Release):
                sent.add(request)
            else:
                received.add(request)
                if outcome.reason is not None:
                    failed.add(request)
                    self._failed_blocks.update(blocks)
        self.stats.count_sent(self.driver.counters)
        return sent, received, failed

    def take_failed_blocks(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
