"""A worker's half of the connector: vLLM's hooks on one side, the driver on the other."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.kv.layout import NOTHING
from vllm_disagg.kv.memory import Memory
from vllm_disagg.protocol import events

from . import kv_layout, transports
from .layers import Layers
from .metadata import Handshake, StepMetadata, WorkerMetadata
from .metrics import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("vllm_disagg.worker")

PROGRESS_BYTES = (
    2 << 20
)  # bytes: layers are offered in groups that hold so much, so that messages stay few


class WorkerSide:
    def __init__(
        self,
        config: Config,
        key: FleetKey,
        rank: int,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        self._config, self._key, self._rank = config, key, rank
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._driver: Driver | None = None
        self._layers = Layers([])
        self._shape = NOTHING
        self._group = 1  # layers per offer, in this step
        self._announced = 0  # layers that this step has said to be final
        self._launched: Callable[[], None] = lambda: (
            None
        )  # what copies must come after: see `device`
        self._serving: dict[str, str] = {}  # transfer -> vLLM's id, whose blocks others read
        self._loading: dict[str, str] = {}  # transfer -> vLLM's id, which reads
        self._computing: list[str] = []  # transfers of which this step computes a part
        self._cached: list[str] = []  # transfers of what is in memory when this step ends
        self._sought: set[str] = set()
        self._found: dict[str, list[int]] = {}
        self._failed_blocks: set[int] = set()
        self._blocks: dict[str, list[int]] = {}  # of loads under way
        self.stats = Stats()
        self.handshake: Handshake | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = caches  # the driver holds addresses only
        memory, names = self._memory(caches)
        self._layers = Layers(names)
        self._shape = memory.shape
        others = transports.chosen(self._config, next(iter(caches.values())).device.type)
        self._driver = Driver(self._config, self._key, memory, self._rank, others)
        self.handshake = Handshake(self._driver.worker, names)
        log.info("KV transfers at %s", self._driver.worker.control)

    def _memory(self, caches: Mapping[str, torch.Tensor]) -> tuple[Memory, list[str]]:
        """And the layers' names, in its order."""
        parallel, model = self._vllm_config.parallel_config, self._vllm_config.model_config
        size = parallel.tensor_parallel_size
        rank = kv_layout.RankCache(self._rank % size, size, kv_layout.kv_heads(model))
        config = self._kv_cache_config
        if next(iter(caches.values())).device.type == "cpu":
            return kv_layout.host_memory(
                caches, config.kv_cache_groups, config.num_blocks, rank, self._vllm_config
            )
        from .gpu.device import device_memory  # noqa: PLC0415 - Triton, which CPUs need not have

        memory, names = device_memory(caches, config.kv_cache_groups, config.num_blocks, rank)
        self._launched = memory.launched
        return memory, names

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise RuntimeError("vLLM used the KV connector before it registered its KV caches")
        return self._driver

    # A step ---------------------------------------------------------------------------------------
    def withdraw(self, metadata: StepMetadata) -> None:
        """At once, before this step clears blocks or copies into them; `begin` says it again, which
        changes nothing.
        """
        if withdrawn := [
            event for event in metadata.prefill if isinstance(event, events.BlocksRevoked)
        ]:
            self.driver.submit(withdrawn)

    def begin(self, metadata: StepMetadata) -> None:
        self._serving.update(metadata.serving)
        self._loading.update(metadata.loading)
        for event in metadata.decode:
            if isinstance(event, events.LoadRequested):
                self._blocks[event.transfer] = [
                    block for blocks in event.blocks for block in blocks.ids
                ]
            elif isinstance(event, events.LookupRequested):
                self._sought.add(event.transfer)
            elif isinstance(event, events.LoadSkipped):
                self._loading.pop(event.transfer, None)
            elif event.transfer not in self._blocks:  # cancelled before it was wanted
                self._sought.discard(event.transfer)
        for withdrawn in metadata.prefill:
            if isinstance(withdrawn, events.BlocksRevoked):
                self._serving.pop(withdrawn.transfer, None)
        scheduled = [e for e in metadata.prefill if isinstance(e, events.BlocksScheduled)]
        self._cached = [e.transfer for e in scheduled if e.cached]
        scheduled = [e for e in scheduled if not e.cached]
        self._computing = [e.transfer for e in scheduled]
        if self._computing:
            self._layers.begin()
            self._announced = 0
        per_layer = max(
            sum(k.block_bytes) * sum(len(e.blocks[k.group]) for e in scheduled)
            for k in self._shape.kinds
        )
        self._group = -(-PROGRESS_BYTES // per_layer) if per_layer else len(self._layers) + 1
        if metadata.decode:
            self._launched()
        if metadata.prefill or metadata.decode:
            self.driver.submit([*self._offered(metadata.prefill), *metadata.decode])

    def _offered(
        self, prefill: list[events.ForSender]
    ) -> Iterator[events.ForSender | events.LayersComputed]:
        """Without overlap a prompt's KV is offered when all of it is there."""
        for event in prefill:
            if isinstance(event, events.PrefillFinished) and self._config.overlap == "off":
                yield events.LayersComputed(event.transfer, len(self._layers))
            yield event

    def layer_computed(self, name: str) -> None:
        """Not called in full CUDA graphs: then `end` offers the whole chunk."""
        if self._config.overlap != "layer" or not self._computing:
            return
        final = self._layers.computed(name)
        if final < self._announced:
            self._take_back(name)
        elif final - self._announced >= self._group:
            self._announced = final
            self._announce(self._computing, final)

    def _take_back(self, name: str) -> None:
        """What readers were offered has changed, and they may have read it before."""
        count = len(self._computing)
        log.warning(
            "layer %s was computed again after its KV was offered; D recomputes the %d prompts of this step",
            name,
            count,
        )
        self._announced = 0
        self.driver.submit([events.LayersRecomputed(transfer) for transfer in self._computing])

    def end(self) -> None:
        if self._has_failed():
            return
        if self._computing and self._config.overlap != "off":
            self._announce(self._computing, len(self._layers))
        self._computing = []

    def _has_failed(self) -> bool:
        """Whether this step's forward pass raised. vLLM ends steps in a `finally`, and nothing of
        such a step is final.
        """
        if sys.exc_info()[0] is None:
            return False
        spoiled = [*self._computing, *self._cached]
        self._computing, self._cached = [], []
        if spoiled:
            log.error(
                "a forward pass failed: the KV of its %d requests is offered to no other engine",
                len(spoiled),
            )
            self.driver.submit([events.LayersRecomputed(transfer) for transfer in spoiled])
        return True

    def _announce(self, transfers: list[str], layers: int) -> None:
        self._launched()
        self.driver.submit([events.LayersComputed(transfer, layers) for transfer in transfers])

    # What has ended -------------------------------------------------------------------------------
    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Request ids: (sent, received, of these failed). Each id once, and only ids that the
        scheduler awaits.
        """
        # vLLM has not said that the step is over, as with drafts on all stages of a pipeline but
        # the last
        if self._computing:
            self.end()
        if (
            self._cached and not self._has_failed()
        ):  # asked for after each step, also one that computes nothing
            self._announce(self._cached, len(self._layers))
            self._cached = []
        sent, received, failed = set[str](), set[str](), set[str]()
        for outcome in self.driver.take():
            if isinstance(outcome, events.LookupResult):
                self._found.setdefault(outcome.transfer, []).append(outcome.tokens)
                continue
            self.stats.record(outcome, back=outcome.transfer in self._sought)
            ours, ended = (
                (self._serving, sent)
                if isinstance(outcome, events.ReleaseBlocks)
                else (self._loading, received)
            )
            request = ours.pop(outcome.transfer, None)
            if request is None:
                log.error("transfer %s has ended, but belongs to no request", outcome.transfer)
            else:
                ended.add(request)
            if isinstance(outcome, events.LoadResult):
                self._sought.discard(outcome.transfer)
                blocks = self._blocks.pop(outcome.transfer, [])
                if request is not None and outcome.reason is not None:
                    failed.add(request)
                    self._failed_blocks.update(blocks)
        self.stats.count_sent(self.driver.counters)
        return sent, received, failed

    def take_found(self) -> WorkerMetadata | None:
        found, self._found = self._found, {}
        return WorkerMetadata(found) if found else None

    def take_failed_blocks(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
