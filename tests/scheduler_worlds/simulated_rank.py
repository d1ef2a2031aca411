"""One rank of an engine: the real worker side of the connector, over symbolic memory.

The calls and their order are those of vLLM's model runner. A step is a generator, which the world
advances a little at a time: drivers, other ranks and the network go on in the middle of it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulated_driver import SimulatedDriver
from symbol_cache import StepBatch, SymbolCache, WrongRead
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from world_config import worker_config
from world_models import LayerKind, RankLayer, rank_layout

from kv_connectors import compat
from kv_connectors.connector import DisaggConnector
from kv_connectors.layers import FinalLayers
from kv_connectors.metadata import Handshake

if TYPE_CHECKING:
    from simulated_engine import SimulatedEngine


@dataclass
class EngineStep:
    """One step of an engine on its way through the ranks."""

    number: int
    output: Any  # vLLM's SchedulerOutput
    metadata: bytes  # as vLLM sends it to the ranks
    batch: StepBatch
    results: dict[int, KVConnectorOutput] = field(default_factory=dict)  # by rank
    wrong: dict[str, WrongRead] = field(default_factory=dict)  # by request

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing."""
        return not self.batch.parts


class SimulatedRank:
    """A worker process of an engine."""

    def __init__(
        self,
        engine: SimulatedEngine,
        number: int,
        layers: Sequence[RankLayer],
        cache_config: KVCacheConfig,
    ) -> None:
        """Creates the rank with its connector. `number`: vLLM's global rank."""
        self.engine = engine
        self.number = number
        self.stage = number // engine.setup.tensor_ranks
        self.steps: deque[EngineStep] = deque()  # not begun
        self.ended_steps = 0
        self.layers_computed = 0  # since the start: ranks of a stage compute in lockstep
        self._layers = layers
        self._forward: Iterator[None] | None = None
        world = engine.world
        name = f"{engine.label}.{number}"
        layout = rank_layout(engine.model, layers, engine.setup.tensor_ranks)
        self.cache = SymbolCache(
            name, layers, layout, cache_config.num_blocks, engine.setup.block_size
        )
        self.driver = SimulatedDriver(world, name, number, self.cache, layout)
        config = worker_config(engine.config, number)
        self.connector = DisaggConnector(config, KVConnectorRole.WORKER, cache_config)
        side: Any = self.connector._worker
        self._side = side
        names = [layer.name for layer in layers]
        side._driver = self.driver
        side._layers = FinalLayers(names)
        side._drafts_later = compat.has_draft_kv(config) and compat.drafts_here(config)
        side._layout = layout
        side.handshake = Handshake(self.driver.worker, names)

    @property
    def can_advance(self) -> bool:
        """Whether the rank has something to compute and waits for no other rank."""
        if self._forward is None and not self.steps:
            return False
        peers = self.engine.stages[self.stage]
        if len(peers) > 1 and any(self.layers_computed > peer.layers_computed for peer in peers):
            return False
        if self._forward is not None:
            return True
        step = self.steps[0]
        if step.is_empty or not self.stage:
            return True
        before = self.engine.stages[self.stage - 1]
        return all(peer.ended_steps > step.number for peer in before)

    def advance(self) -> None:
        """Goes on with a step, to its next point at which others may go on."""
        if self._forward is None:
            self._forward = self._run(self.steps.popleft())
        for _ in self._forward:
            return
        self._forward = None
        self.ended_steps += 1

    def _run(self, step: EngineStep) -> Iterator[None]:
        """Runs one step as vLLM's model runner does: V2 calls the connector's first hook last."""
        connector = self.connector
        metadata = pickle.loads(step.metadata)
        if not self.engine.setup.has_new_runner:
            connector.handle_preemptions(metadata)
        else:
            # `compat.before_blocks_change` has V2 call this; its own hook comes too late.
            self._side._revoke_early(metadata)
        yield
        self._clear_blocks(step.output.new_block_ids_to_zero or [])
        assert not step.output.kv_cache_block_copies, "no model of the worlds copies blocks"
        yield
        if self.engine.setup.has_new_runner:
            connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if not step.is_empty:
            yield from self._compute_layers(step)
        connector.start_load_kv(None)
        connector.wait_for_save()
        yield
        output = self._take_results(step.output.finished_req_ids)
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        step.results[self.number] = output

    def _take_results(self, finished: set[str]) -> KVConnectorOutput:
        """Returns the ended transfers as vLLM asks for them."""
        if compat.Results is None:  # before vLLM 0.32
            sent, received = self.connector.get_finished(finished)
            return KVConnectorOutput(finished_sending=sent, finished_recving=received)
        results = self.connector.get_transfer_results(finished)
        return KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
        )

    def _clear_blocks(self, blocks: Sequence[int]) -> None:
        """Clears blocks; raises AssertionError if a receiver could still get one as valid."""
        served = self.driver.blocks_served().intersection(blocks)
        assert not served, f"rank {self.number}: clears blocks that it serves: {sorted(served)}"
        self.cache.clear(blocks)

    def _compute_layers(self, step: EngineStep) -> Iterator[None]:
        for layer in self._layers:
            self.cache.compute(layer, step.batch, step.wrong)
            self.layers_computed += 1
            yield
            # vLLM calls the connector after attention only.
            if self.engine.setup.has_layer_calls and layer.kind is not LayerKind.STATE:
                self.connector.save_kv_layer(layer.name, None, None)  # type: ignore[arg-type]

    def leftovers(self) -> dict[str, object]:
        """Returns what is left by name after all requests should have ended; empty if nothing."""
        side = self._side
        found: dict[str, object] = {
            "serving requests": side._serving_requests,
            "loading requests": side._loading_requests,
            "computing transfers": side._computing_transfers,
            "cached transfers": side._cached_transfers,
            "reuse transfers": side._reuse_transfers,
            "lookup counts": side._lookup_counts,
            "failed blocks": side._failed_blocks,
            "loading blocks": side._loading_blocks,
            **self.driver.leftovers(),
        }
        return {name: value for name, value in found.items() if value}
