"""The class that vLLM loads. Each hook is a line or two; what happens is in `scheduler` and
`worker`.
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
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.fleet.conventions import KV_ROLES
from vllm_disagg.fleet.registration import Registration, register_all

from . import compat, compatibility, prompt_digest, supported
from .metadata import Handshake, WorkerMetadata
from .metrics import PromMetrics, Stats
from .scheduler import SchedulerSide
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

# In vLLM's processes our log lines go where vLLM's go.
logging.getLogger("vllm_disagg").handlers = list(logging.getLogger("vllm").handlers)
logging.getLogger("vllm_disagg").setLevel(logging.getLogger("vllm").level)

ROLES = {kv_role: role for role, kv_role in KV_ROLES.items()}


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = config.parse(self._kv_transfer_config.kv_connector_extra_config)
        if problem := compat.check(vllm.__version__):
            if not settings.gpu:  # who tries it on a GPU may have an older vLLM there
                raise ConfigError(problem)
            logging.getLogger("vllm_disagg").warning("%s; it is tried all the same (gpu)", problem)
        key = keys.load(settings.key_file, insecure=settings.insecure)
        supported.refuse_unsupported(
            vllm_config, kv_cache_config, gpu=settings.gpu, compress=settings.compress
        )
        self._scheduler: SchedulerSide
        self._worker: WorkerSide
        self._registrations: list[Registration] = []
        if role is KVConnectorRole.SCHEDULER:
            kind = ROLES[str(self._kv_transfer_config.kv_role)]
            layout, among = (
                compatibility.layout(vllm_config, settings.compress),
                compatibility.data_parallel_rank(vllm_config),
            )
            compat.before_adapters_load(prompt_digest.note_adapter)
            two_way, groups = compatibility.two_way(vllm_config), kv_cache_config.kv_cache_groups
            self._scheduler = SchedulerSide(
                key, kind, layout, groups, rank=among, two_way=two_way, host=settings.host
            )
            if settings.insecure:
                logging.getLogger("vllm_disagg").warning(
                    "insecure is set: this engine has no fleet key, so EVERY client may put foreign KV into its prefix cache,"
                    " read its KV, and make it connect to any port of this machine; set key_file"
                )
            if settings.compress != "off":
                logging.getLogger("vllm_disagg").warning(
                    "compress is %s: KV is rounded on its way, so answers are NOT exactly a plain vLLM's",
                    settings.compress,
                )
            self._register = lambda incarnation: register_all(
                settings, key, incarnation, kind, among
            )
        else:
            rank = vllm_config.parallel_config.rank
            self._worker = WorkerSide(settings, key, rank, vllm_config, kv_cache_config)

    # Workers --------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        return self._worker.handshake

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:  # type: ignore[override]
        """Before anything writes into blocks that were given up."""
        self._worker.withdraw(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:  # type: ignore[override]
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step's metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only when its KV is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received, failed = self._worker.results()
        self._worker.take_failed_blocks()  # said by request
        return compat.Results(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, _ = self._worker.results()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self._worker.take_found()

    def get_kv_connector_stats(self) -> Stats | None:
        return self._worker.stats.take() if self._role is KVConnectorRole.WORKER else None

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.WORKER:
            self._worker.close()
        for registration in self._registrations:
            registration.close()

    # Scheduler ------------------------------------------------------------------------------------
    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:  # type: ignore[override]
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): handshake for rank, handshake in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Handshake]
    ) -> None:  # type: ignore[override]
        """Keys: (stage of the pipeline, tensor parallel rank); sorted, they are in the order of
        vLLM's global rank.
        """
        if not all(
            isinstance(said, Handshake) for said in metadata.values()
        ):  # MultiConnector hands out one child's only
            raise ConfigError(
                "DisaggConnector must be the first among the connectors of MultiConnector that shake hands"
            )
        self._scheduler.set_workers([metadata[rank] for rank in sorted(metadata)])
        if self._scheduler.engine and not self._registrations:
            self._registrations = self._register(self._scheduler.engine.incarnation)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._scheduler.tokens_to_load(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            self._scheduler.loaded(request_id)
        if isinstance(said := connector_output.kv_connector_worker_meta, WorkerMetadata):
            self._scheduler.found(said.found)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    # Statistics -----------------------------------------------------------------------------------
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data) if data is not None else Stats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
