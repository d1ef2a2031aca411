"""DisaggConnector, the class that vLLM loads.

Each hook is one or two lines: `scheduler` and `worker` hold the logic. vLLM creates one instance
in the scheduler's process and one in each worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_disagg import config
from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.fleet.conventions import KV_ROLES
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.fleet.registration import Registration, register_all

from . import (
    client_calls,
    compat,
    compatibility,
    data_parallel,
    engine_description,
    prompt_digest,
    supported,
)
from .metadata import FailedProof, Handshake, WorkerMetadata
from .metrics import ConnectorPromMetrics, ConnectorStats
from .scheduler import SchedulerSide, TransferLimits
from .worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .metadata import StepMetadata

log = logging.getLogger("vllm_disagg")
# In vLLM's processes our log lines go where vLLM's go.
log.handlers = list(logging.getLogger("vllm").handlers)
log.setLevel(logging.getLogger("vllm").level)

ROLES = {kv_role: role for role, kv_role in KV_ROLES.items()}


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for prefill/decode disaggregation; see KVConnectorBase_V1 for the hooks.

    Raises ConfigError at start for settings, models and versions that are not supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Checks the settings, and creates the half of this process. `role`: which half."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        settings = config.parse(extra)
        if problem := compat.check(vllm.__version__):
            raise ConfigError(problem)
        key = keys.load(settings.key_file, insecure=settings.insecure)
        supported.refuse_unsupported(vllm_config, kv_cache_config, compress=settings.compress)
        self._scheduler: SchedulerSide
        self._worker: WorkerSide
        self._registrations: list[Registration] = []
        prompt_digest.note_lora_settings(vllm_config.lora_config)
        if role is KVConnectorRole.SCHEDULER:
            self._create_scheduler(settings, key, vllm_config, kv_cache_config)
            _warn_of(settings, extra)
            _warn_of_adapters(vllm_config)
            _note_short_shutdown(vllm_config.shutdown_timeout, settings.lease)
        else:
            compat.around_adapter_reads(vllm_config, prompt_digest.note_read)
            rank = vllm_config.parallel_config.rank
            self._worker = WorkerSide(settings, key, rank, vllm_config, kv_cache_config)

    def _create_scheduler(
        self,
        settings: Config,
        key: FleetKey,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        role = ROLES[str(self._kv_transfer_config.kv_role)]
        rank = data_parallel.shared_server_rank(vllm_config)
        compat.around_adapter_loads(prompt_digest.note_load)
        client_calls.keep_kv_mapped()
        client_calls.refuse_worker_methods()
        self._scheduler = SchedulerSide(
            key,
            role,
            compatibility.layout(vllm_config, settings.compress),
            kv_cache_config.kv_cache_groups,
            rank=rank,
            host=settings.host,
            limits=TransferLimits(
                bidirectional_reuse=compatibility.permits_bidirectional_reuse(vllm_config),
                handover_patience=settings.lease,
                handover_blocks=kv_cache_config.num_blocks // 2,
                load_blocks=compat.max_load_blocks(vllm_config, kv_cache_config),
                may_sleep=not data_parallel.computes_in_step(vllm_config),
            ),
        )
        if vllm_config.speculative_config is not None:
            self._scheduler.compute_seeded_requests()
        if getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
            self._scheduler.compute_image_requests()
        header = rank.header if rank is not None else None
        self._register = lambda incarnation: register_all(settings, key, incarnation, role, header)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM drops the tokens in flight of requests that it preempts: never.

        A request that P computes whole would go on with the next of its seed's random numbers. D
        has heard that the blocks are lost, and computes the prompt.
        """
        return False

    # Worker ---------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts KV transfers on these caches. `kv_caches`: tensors by layer name."""
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Handshake | FailedProof | None:
        """Returns this worker's addresses and layout for the scheduler."""
        return self._worker.handshake

    def handle_preemptions(  # type: ignore[override]
        self, kv_connector_metadata: StepMetadata
    ) -> None:
        """Revokes blocks before the step writes into them.

        It is the earliest hook of vLLM's V1 runner. For V2 see `compat.before_blocks_change`.
        """
        self._worker.revoke_blocks(kv_connector_metadata)

    def bind_connector_metadata(  # type: ignore[override]
        self, connector_metadata: StepMetadata
    ) -> None:
        """Begins a step with the scheduler's events."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: loads began with the step's metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is scheduled only after its whole load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Announces layers that are final by now; the KV itself stays in its blocks."""
        self._worker.on_layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Announces the KV of this step; does not wait."""
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns ended transfers, vLLM 0.32 and later; failures by request."""
        sent, received, failed = self._worker.take_results()
        self._worker.take_failed_blocks()  # dropped: failures are reported by request here
        return compat.Results(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests (sent, received), before vLLM 0.32."""
        sent, received, _ = self._worker.take_results()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of failed loads, before vLLM 0.32."""
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Returns the answers of lookups and the landed KV, for the scheduler."""
        return self._worker.take_metadata()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Returns the statistics of this half since last time; None without any.

        vLLM calls it at the end of each step.
        """
        if self._role is KVConnectorRole.WORKER:
            return self._worker.stats.take()
        return self._scheduler.on_step_ended()

    def shutdown(self) -> None:
        """Stops the driver of a worker, and withdraws the scheduler's registrations at proxies."""
        if self._role is KVConnectorRole.WORKER:
            self._worker.close()
        for registration in self._registrations:
            registration.close()

    # Scheduler ------------------------------------------------------------------------------------
    def set_xfer_handshake_metadata(  # type: ignore[override]
        self, metadata: dict[int, Handshake | FailedProof]
    ) -> None:
        """Describes this engine from its workers' handshakes, by tensor parallel rank."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): handshake for rank, handshake in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Handshake | FailedProof]
    ) -> None:  # type: ignore[override]
        """Describes this engine from its workers' handshakes, and registers it at the proxies.

        If the proof of one worker has failed, or two ranks share a GPU, the engine has no
        description, and takes part in no transfer.

        `metadata`: by (pipeline stage, tensor parallel rank). Sorted keys have the order of vLLM's
        global ranks. Raises ConfigError for handshakes of another connector: MultiConnector hands
        out those of one child only.
        """
        handshakes: list[Handshake] = []
        for rank in sorted(metadata):
            handshake = metadata[rank]
            if isinstance(handshake, FailedProof):
                _log_off(handshake.difference)
                return
            if not isinstance(handshake, Handshake):
                raise ConfigError(
                    "DisaggConnector must be the first among the connectors of MultiConnector that"
                    " exchange handshakes: move it to the front of its list"
                )
            handshakes.append(handshake)
        if difference := engine_description.shared_gpu(handshakes):
            supported.refuse_without_transfers(self._vllm_config, difference)
            _log_off(difference)
            return
        transfer: Any = self._vllm_config.kv_transfer_config
        self._scheduler.set_workers(
            handshakes,
            str(transfer.kv_load_failure_policy),
            plain_chat=not compat.parses_reasoning(self._vllm_config),
            answer_settings=compatibility.answer_settings(self._vllm_config),
            drains=self._vllm_config.shutdown_timeout > 0,
        )
        if self._scheduler.engine and not self._registrations:
            self._registrations = self._register(self._scheduler.engine.incarnation)

    def on_new_request(self, request: Request) -> None:
        """Makes the leg of a request with a grant."""
        self._scheduler.on_request_arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns (tokens to load, whether vLLM parks the request).

        None means not known yet: vLLM calls again.
        """
        count = self._scheduler.tokens_to_load(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Starts the load of a request into its new blocks."""
        ids = blocks.get_block_ids()
        unwritten = self._scheduler.on_blocks_allocated(request, ids, num_external_tokens)
        if any(unwritten):
            compat.clear_with_step(self._kv_cache_manager, unwritten)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Returns the events for the workers that go with this step."""
        return self._scheduler.build_step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Passes the workers' results of a step to the scheduler's half."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._scheduler.on_kv_landed(metadata.landed_at)
        for request_id in connector_output.finished_recving or ():
            self._scheduler.on_load_finished(request_id)
        self._scheduler.on_released(connector_output.finished_sending or ())
        if isinstance(metadata, WorkerMetadata):
            self._scheduler.on_lookup_counts(metadata.lookup_counts)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns (whether blocks stay until they are sent, `kv_transfer_params` of the answer)."""
        return self._scheduler.on_request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Does the same as `request_finished`, for models with several KV-cache groups."""
        return self._scheduler.on_request_finished(request)

    # Statistics -----------------------------------------------------------------------------------
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns the KV layout to prefer; None leaves the choice to vLLM.

        On GPUs it keeps each head of a block contiguous: ranks that hold other heads then read long
        runs. vLLM takes another layout, with a warning, where a kernel does not support this one.
        """
        model = vllm_config.model_config
        if vllm_config.device_config.device_type == "cpu" or model is None or model.use_mla:
            return None
        return compat.HEADS_TOGETHER

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Returns statistics with this data, or empty ones."""
        return ConnectorStats(data=data) if data is not None else ConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """Returns the connector's Prometheus metrics."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _log_off(difference: str) -> None:
    log.error("KV transfers are off: %s; this engine computes every prompt itself", difference)


def _warn_of_adapters(vllm_config: VllmConfig) -> None:
    """Warns of settings with which vLLM ends an engine that has too few places of adapters.

    Its scheduler counts them by the requests of a step. A running request that is left out of one
    loses its adapter's place, and an assertion fails when it goes on. Requests are left out with
    pipeline stages, and as of vLLM 0.32 where blocks that are loaded ahead of a step are lacking.
    """
    if vllm_config.lora_config is None:
        return
    transfer = vllm_config.kv_transfer_config
    loads = transfer is not None and transfer.is_kv_consumer
    with_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    if with_stages or (loads and vllm_config.scheduler_config.async_scheduling):
        log.warning(
            "--enable-lora with %s: vLLM may end this engine while requests of more than %d"
            " adapters (--max-loras) are under way; set --max-loras to the number of adapters in"
            " use%s",
            "pipeline stages" if with_stages else "asynchronous scheduling and a full KV cache",
            vllm_config.lora_config.max_loras,
            "" if with_stages else ", or --no-async-scheduling",
        )


def _note_short_shutdown(shutdown_seconds: float, lease_seconds: float) -> None:
    """Logs what SIGTERM costs, if vLLM then gives running work less time than a lease."""
    if shutdown_seconds < lease_seconds:
        log.info(
            "engine: at SIGTERM, answers and KV that no D has read are dropped after %g s;"
            " with --shutdown-timeout of %g or more they have time to end",
            shutdown_seconds,
            lease_seconds,
        )


def _warn_of(settings: Config, extra: dict[str, Any]) -> None:
    """Warns of settings that make a fleet less secure or less exact, or that have an old name."""
    if warning := config.old_names_warning(extra):
        log.warning(warning)
    if warning := config.removed_warning(extra):
        log.warning(warning)
    if settings.insecure:
        log.warning(
            "insecure is set: this engine has no fleet key, so EVERY client may put foreign KV into"
            " its prefix cache, read its KV, and make it connect to any port of this machine; set"
            " key_file"
        )
    if settings.compress != "off":
        log.warning(
            "compress is %s: KV is rounded for the transfer, so answers are NOT exactly a plain"
            " vLLM's",
            settings.compress,
        )
