"""A worker's half of the connector, between vLLM's hooks and the driver.

In each step vLLM calls, in this order:

    revoke_blocks           before the step clears or copies blocks
    begin_step              with the scheduler's events
    on_layer_computed       after each attention layer; never in full CUDA graphs
    end_step                after the forward pass; some set-ups of vLLM leave this call out
    take_results            after each step, also one that computes nothing

The setting `overlap` decides when KV is announced as final (`LayersComputed`): with "layer" during
the step, with "chunk" at its end, with "off" when the prefill has finished. Blocks of a prefix
cache hit are announced at the step's end: a request of the same step may compute them.

On a GPU all of these calls come when the step's kernels were launched, not when they have ended.
`gpu.facts` holds back what is not true before.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.errors import ConfigError, ProofFailed
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.kv.layout import NOTHING
from vllm_disagg.kv.memory import DirectMemory, Memory
from vllm_disagg.protocol import events
from vllm_disagg.transports.base import MakeTransport

from . import compat, kv_layout, prompt_digest, supported, transports
from .gpu.expert_numbers import expert_numbers
from .layers import FinalLayers, layers_per_event
from .metadata import FailedProof, Handshake, StepMetadata, WorkerMetadata
from .metrics import ConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .gpu.facts import GpuFacts
    from .gpu.machine import GpuInfo
    from .gpu.memory import DeviceMemory
    from .gpu.runtime import Runtime
    from .gpu.summing import ComputedSums, LoadedSums

log = logging.getLogger("vllm_disagg.worker")


def kv_device(caches: Mapping[str, torch.Tensor]) -> str:
    """Returns the type of the device that holds these KV caches, cpu or cuda."""
    return next(iter(caches.values())).device.type


class WorkerSide:
    """Translates vLLM's calls in one worker into events for its driver, and results back."""

    def __init__(
        self,
        config: Config,
        key: FleetKey,
        rank: int,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Creates the worker's half, without memory yet. `rank`: vLLM's global rank."""
        self._config = config
        self._key = key
        self._rank = rank
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._driver: Driver | None = None
        self._layers = FinalLayers([])
        self._layout = NOTHING
        self._layers_per_event = 1  # in this step
        self._announced_layers = 0  # announced as final in this step
        self._runtime: Runtime | None = None  # None on a CPU
        self._gpu: GpuInfo | None = None  # None on a CPU
        self._gpu_facts: GpuFacts | None = None  # None on a CPU
        self._computed_sums: ComputedSums | None = None  # None if blocks are not summed
        self._loaded_sums: LoadedSums | None = None
        self._serving_requests: dict[str, str] = {}  # transfer id -> vLLM's id of the sender
        self._loading_requests: dict[str, str] = {}  # transfer id -> vLLM's id of the receiver
        self._drafts_later = False  # whether layers of a draft are computed after the model's
        self._computing_transfers: list[str] = []  # this step computes a part of their prompts
        self._cached_transfers: list[str] = []  # in memory when this step ends
        self._sender_events: list[events.ForSender] = []  # of this step
        self._reuse_transfers: set[str] = set()  # of bidirectional KV reuse
        self._lookup_counts: dict[str, list[int]] = {}  # tokens found, by transfer
        self._landed_at: dict[str, float] = {}  # by request, of the machine's clock
        self._failed_blocks: set[int] = set()
        self._loading_blocks: dict[str, list[int]] = {}  # block ids, by transfer
        self.stats = ConnectorStats()
        self.handshake: Handshake | FailedProof | None = None

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Starts the driver on these KV caches. `caches`: tensors by layer name.

        If the proof fails, no driver is started. Raises ConfigError for a KV layout that cannot be
        moved. Raises it also if the proof fails where a failed load fails its request instead of
        being recomputed.
        """
        self._caches = caches  # kept alive: the driver holds addresses only
        has_draft = compat.has_draft_kv(self._vllm_config)
        self._drafts_later = has_draft and compat.drafts_here(self._vllm_config)
        try:
            memory, names = self._memory(caches)
            chosen = transports.chosen(self._config, kv_device(caches))
            chosen = self._without_obstacles(chosen, memory)
        except ProofFailed as error:
            self._stay_off(str(error))
            return
        self._layers = FinalLayers(names)
        self._layout = memory.shape
        self._driver = Driver(
            self._config, self._key, memory, self._rank, chosen, self._loaded_sums
        )
        self._start_gpu_facts(self._driver)
        gpu = self._gpu.uuid if self._gpu is not None else ""
        numbers = expert_numbers(self._vllm_config) if self._gpu is not None else {}
        self.handshake = Handshake(self._driver.worker, names, gpu, self._varies(names), numbers)
        compat.before_blocks_change(self._vllm_config, self._revoke_early)
        log.info(
            "worker %d: control channel for KV transfers at %s",
            self._rank,
            self._driver.worker.control,
        )

    def _memory(self, caches: Mapping[str, torch.Tensor]) -> tuple[Memory, list[str]]:
        """Returns the caches as memory of the driver, and the layers' names in its order."""
        size = self._vllm_config.parallel_config.tensor_parallel_size
        heads = kv_layout.kv_heads(self._vllm_config.model_config)
        if compat.has_draft_kv(self._vllm_config):
            speculative: Any = self._vllm_config.speculative_config
            heads |= kv_layout.kv_heads(speculative.draft_model_config)
        rank = kv_layout.RankCache(self._rank % size, size, heads)
        config = self._kv_cache_config
        if kv_device(caches) == "cpu":
            return kv_layout.host_memory(
                caches, config.kv_cache_groups, config.num_blocks, rank, self._vllm_config
            )
        try:
            return self._device_memory(caches, rank)
        except (ConfigError, ProofFailed):
            raise
        except ImportError as error:
            text = f"the kernels need Triton ({error}): install the one that torch requires"
            raise ProofFailed(text) from error
        # The one place: a compiler, a driver or memory may be missing, each with errors of its own.
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            text = f"the kernels cannot be run here ({type(error).__name__}: {reason})"
            raise ProofFailed(text) from error

    def _device_memory(
        self, caches: Mapping[str, torch.Tensor], rank: kv_layout.RankCache
    ) -> tuple[Memory, list[str]]:
        """Returns caches in GPU memory; raises ProofFailed if they are not moved rightly."""
        # Triton, which CPUs need not have.
        from .gpu import machine, start_checks  # noqa: PLC0415
        from .gpu.layout import device_memory  # noqa: PLC0415
        from .gpu.proof import prove  # noqa: PLC0415
        from .gpu.runtime import CudaRuntime  # noqa: PLC0415

        config = self._kv_cache_config
        device = next(iter(caches.values())).device
        self._runtime = CudaRuntime(device)
        self._runtime.use_device()
        self._gpu = machine.examine(device)
        if shortage := start_checks.memory_shortage(self._gpu, self._config.piece_bytes):
            raise ProofFailed(shortage)
        memory, names = device_memory(
            caches,
            config.kv_cache_groups,
            config.num_blocks,
            rank,
            self._vllm_config,
            self._runtime,
        )
        prove(memory, caches, names, config.num_blocks, self._rank)
        self._prepare_sums(memory)
        return memory, names

    def _prepare_sums(self, memory: DeviceMemory) -> None:
        # Triton, which CPUs need not have.
        from .gpu.block_sums import can_sum  # noqa: PLC0415
        from .gpu.summing import ComputedSums, LoadedSums  # noqa: PLC0415

        if can_sum(memory.planes):
            self._computed_sums = ComputedSums(memory)
            self._loaded_sums = LoadedSums(memory)

    def _varies(self, names: Sequence[str]) -> bool:
        """Returns whether tokens depend on their batch although they must not; warns if so."""
        if self._gpu is None:
            return False
        from .gpu.batch_variance import warns_of_variance  # noqa: PLC0415 - as above

        return warns_of_variance(self._vllm_config, names, self._rank)

    def _without_obstacles(
        self, chosen: dict[str, MakeTransport], memory: Memory
    ) -> dict[str, MakeTransport]:
        """Returns the chosen transports, without NIXL if it cannot serve this GPU's memory.

        Raises ProofFailed if UCX hangs.
        """
        if self._gpu is None or "nixl" not in chosen or not isinstance(memory, DirectMemory):
            return chosen
        from .gpu.start_checks import nixl_obstacle  # noqa: PLC0415 - as above

        reason = nixl_obstacle(self._config, memory, self._gpu)
        return transports.without(chosen, "nixl", reason, self._config) if reason else chosen

    def _stay_off(self, difference: str) -> None:
        """Has the engine run as a plain vLLM; raises ConfigError if it may not."""
        supported.refuse_without_transfers(self._vllm_config, difference)
        self.handshake = FailedProof(difference)

    def _start_gpu_facts(self, driver: Driver) -> None:
        if self._runtime is None:
            return
        from .gpu.facts import GpuFacts  # noqa: PLC0415 - as above

        self._gpu_facts = GpuFacts(self._runtime, driver.submit)
        self._gpu_facts.start()

    @property
    def driver(self) -> Driver:
        """The driver; RuntimeError before `register_kv_caches`."""
        if self._driver is None:
            raise RuntimeError("vLLM used the KV connector before it registered its KV caches")
        return self._driver

    def _submit(self, facts: Sequence[events.Fact]) -> None:
        """Submits facts to the driver: on a CPU now, on a GPU when its work makes them true."""
        if self._gpu_facts is None:
            self.driver.submit(facts)
        else:
            self._gpu_facts.submit(facts)

    # One step -------------------------------------------------------------------------------------
    def revoke_blocks(self, metadata: StepMetadata) -> None:
        """Submits revoked blocks before this step clears them or copies into them.

        `begin_step` submits the same events again, which changes nothing.
        """
        given = metadata.sender_events
        revoked = [event for event in given if isinstance(event, events.BlocksRevoked)]
        if revoked:
            self._submit(revoked)

    def _revoke_early(self, metadata: Any) -> None:
        """Calls `revoke_blocks` for vLLM's V2 runner, whose own hook comes too late.

        `metadata`: ours, that of MultiConnector with ours in it, or None in vLLM's warm-up.
        """
        for part in getattr(metadata, "metadata", [metadata]):
            if isinstance(part, StepMetadata):
                self.revoke_blocks(part)

    def begin_step(self, metadata: StepMetadata) -> None:
        """Submits the scheduler's events to the driver, and prepares to announce layers."""
        self._serving_requests.update(metadata.serving_requests)
        self._loading_requests.update(metadata.loading_requests)
        for event in metadata.receiver_events:
            self._note_receiver_event(event)
        self._sender_events = metadata.sender_events
        scheduled = self._note_sender_events()
        if self._computing_transfers:
            self._layers.begin_step()
            self._announced_layers = 0
        self._layers_per_event = layers_per_event(self._layout, scheduled)
        if metadata.sender_events or metadata.receiver_events:
            self._submit([*self._with_final_layers(), *metadata.receiver_events])

    def _note_receiver_event(self, event: events.ForReceiver) -> None:
        if isinstance(event, events.LoadRequested):
            ids = [block for blocks in event.blocks for block in blocks.ids]
            self._loading_blocks[event.transfer] = ids
        elif isinstance(event, events.LookupRequested):
            self._reuse_transfers.add(event.transfer)
        elif isinstance(event, events.LoadSkipped):
            self._loading_requests.pop(event.transfer, None)
        elif isinstance(event, events.LoadCancelled) and event.transfer not in self._loading_blocks:
            # Of a lookup: its load has not been requested.
            self._reuse_transfers.discard(event.transfer)

    def _note_sender_events(self) -> list[events.BlocksScheduled]:
        """Records this step's transfers; returns the events of prompts that it computes."""
        self._computing_transfers = []
        self._cached_transfers = []
        computed = []
        for event in self._sender_events:
            if self._computed_sums is not None:
                self._computed_sums.note(event)
            if isinstance(event, events.BlocksRevoked):
                self._serving_requests.pop(event.transfer, None)
            elif isinstance(event, events.BlocksScheduled) and event.cached:
                self._cached_transfers.append(event.transfer)
            elif isinstance(event, events.BlocksScheduled):
                self._computing_transfers.append(event.transfer)
                computed.append(event)
        return computed

    def _with_final_layers(self) -> Iterator[events.ForSender | events.LayersComputed]:
        """Yields the events; without overlap, all layers are final just before PrefillFinished."""
        for event in self._sender_events:
            if isinstance(event, events.PrefillFinished) and self._config.overlap == "off":
                yield events.LayersComputed(event.transfer, len(self._layers))
            yield event

    def on_layer_computed(self, name: str) -> None:
        """Counts a layer's call, and announces the layers that are final by now.

        vLLM does not call this in full CUDA graphs; then `end_step` announces the whole chunk.
        """
        if self._config.overlap != "layer" or not self._computing_transfers:
            return
        final_layers = self._layers.count_call(name)
        if final_layers < self._announced_layers:
            self._revoke_layers(name)
        elif final_layers - self._announced_layers >= self._layers_per_event:
            self._announced_layers = final_layers
            self._announce_layers(self._computing_transfers, final_layers)

    def _revoke_layers(self, name: str) -> None:
        """Takes back all announced layers of this step: receivers may have read old KV."""
        log.warning(
            "layer %s was computed again after its KV was announced as final;"
            " D recomputes the %d prompts of this step",
            name,
            len(self._computing_transfers),
        )
        self._announced_layers = 0
        self._submit_recomputed(self._computing_transfers)

    def _submit_recomputed(self, transfers: list[str]) -> None:
        if self._computed_sums is not None:
            for transfer in transfers:
                self._computed_sums.leave_out(transfer)
        self._submit([events.LayersRecomputed(transfer) for transfer in transfers])

    def end_step(self) -> None:
        """Announces all layers of the prompts that this step has computed."""
        if self._has_failed():
            return
        self._take_back_misread()
        if self._computing_transfers:
            # Before the layers: a receiver that has all of them waits for no sum.
            self._submit_sums(self._computing_transfers)
            if self._config.overlap != "off":
                self._announce_layers(self._computing_transfers, len(self._layers))
        self._computing_transfers = []
        if self._drafts_later:
            self._announce_cached()

    def _announce_cached(self) -> None:
        """Announces the blocks of prefix cache hits: this step has computed all of them."""
        self._take_back_misread()
        if self._cached_transfers:
            self._submit_sums(self._cached_transfers)
            self._announce_layers(self._cached_transfers, len(self._layers))
            self._cached_transfers = []

    def _take_back_misread(self) -> None:
        """Takes back the prompts of adapters that were read again, and had other files then."""
        if misread := prompt_digest.misread(self._sender_events):
            self._submit_recomputed(misread)

    def _has_failed(self) -> bool:
        """Returns whether this step's forward pass raised, and takes its layers back.

        vLLM ends steps in a `finally`, so the exception is still being handled here. No KV of such
        a step is final.
        """
        if sys.exc_info()[0] is None:
            return False
        failed = [*self._computing_transfers, *self._cached_transfers]
        self._computing_transfers = []
        self._cached_transfers = []
        if failed:
            log.error(
                "a forward pass failed: the KV of its %d prompts is not sent, and D recomputes it",
                len(failed),
            )
            self._submit_recomputed(failed)
        return True

    def _submit_sums(self, transfers: list[str]) -> None:
        """Has the blocks of this step summed behind it."""
        if self._computed_sums is not None:
            self._submit(self._computed_sums.sum_step(transfers))

    def _announce_layers(self, transfers: list[str], layers: int) -> None:
        self._submit([events.LayersComputed(transfer, layers) for transfer in transfers])

    # Results --------------------------------------------------------------------------------------
    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Returns the request ids (sent, received, those of received that failed) since last time.

        Each id is returned once, and only if the scheduler waits for it.
        """
        if self._drafts_later:
            # vLLM calls `end_step` after the draft's layers; after a failed forward pass, never.
            self._has_failed()
        else:
            if self._computing_transfers:
                # With drafts vLLM leaves it out on all pipeline stages but the last.
                self.end_step()
            if self._cached_transfers and not self._has_failed():
                self._announce_cached()
        sent: set[str] = set()
        received: set[str] = set()
        failed: set[str] = set()
        if isinstance(self.handshake, FailedProof):
            return sent, received, failed  # the scheduler has started no transfer
        for outcome in self.driver.take():
            if isinstance(outcome, events.LookupResult):
                self._lookup_counts.setdefault(outcome.transfer, []).append(outcome.tokens)
            elif isinstance(outcome, events.ReleaseBlocks):
                self._end_send(outcome, sent)
            else:
                self._end_load(outcome, received, failed)
        self.stats.count_sent(self.driver.counters)
        return sent, received, failed

    def _end_send(self, outcome: events.ReleaseBlocks, sent: set[str]) -> None:
        self.stats.record(outcome)
        request_id = self._serving_requests.pop(outcome.transfer, None)
        if request_id is None:
            self._log_unknown(outcome.transfer)
        else:
            sent.add(request_id)
            if not outcome.delivered:
                log.info(
                    "request %s: transfer %s: blocks released before the receiver had all KV",
                    request_id,
                    outcome.transfer,
                )

    def _end_load(self, outcome: events.LoadResult, received: set[str], failed: set[str]) -> None:
        is_reuse = outcome.transfer in self._reuse_transfers
        self.stats.record(outcome, is_reuse=is_reuse)
        self._reuse_transfers.discard(outcome.transfer)
        blocks = self._loading_blocks.pop(outcome.transfer, [])
        request_id = self._loading_requests.pop(outcome.transfer, None)
        if request_id is None:
            self._log_unknown(outcome.transfer)
            return
        received.add(request_id)
        if outcome.reason is None and not is_reuse:
            self._landed_at[request_id] = outcome.ended_at
        if outcome.reason is not None:
            failed.add(request_id)
            log.info(
                "request %s: transfer %s failed (%s); this engine recomputes the prompt",
                request_id,
                outcome.transfer,
                outcome.reason.value,
            )
            self._failed_blocks.update(blocks)

    @staticmethod
    def _log_unknown(transfer: str) -> None:
        log.error("transfer %s has ended, but no request is known for it; ignored", transfer)

    def take_metadata(self) -> WorkerMetadata | None:
        """Returns the answers of lookups and the landed KV since last time, None without any."""
        if not self._lookup_counts and not self._landed_at:
            return None
        # Workers may be on other machines than the scheduler, with other monotonic clocks.
        offset = time.time() - time.monotonic()
        landed_at = {request_id: at + offset for request_id, at in self._landed_at.items()}
        taken = WorkerMetadata(self._lookup_counts, landed_at)
        self._lookup_counts = {}
        self._landed_at = {}
        return taken

    def take_failed_blocks(self) -> set[int]:
        """Returns the blocks of loads that failed since last time."""
        blocks = self._failed_blocks
        self._failed_blocks = set()
        return blocks

    def close(self) -> None:
        """Stops the threads: first the one that submits to the driver."""
        if self._gpu_facts is not None:
            self._gpu_facts.close()
        if self._driver is not None:
            self._driver.close()
