"""DisaggConnector: refusals before an engine serves."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kv_connectors import compat, compatibility, connector, data_parallel, kv_layout
from kv_connectors.connector import DisaggConnector
from kv_connectors.metadata import FailedProof, StepMetadata
from kv_connectors.scheduler import SchedulerSide
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config, parse
from vllm_disagg.errors import ConfigError, ProofFailed
from vllm_disagg.fleet import keys

KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
GROUPS: Any = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))]


def test_handshakes_of_another_connector_are_refused() -> None:
    """MultiConnector hands every child the handshakes of the first one."""
    ours: Any = SimpleNamespace(_scheduler=None)
    theirs: Any = {(0, 0): object()}
    with pytest.raises(ConfigError, match="must be the first"):
        DisaggConnector.set_xfer_handshake_metadata_pp_aware(ours, theirs)


def test_old_names_of_settings_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm_disagg"):
        connector._warn_of(Config(), {"key_file": "k", "silence": 3.0, "piece": 4096})
    assert [record.getMessage() for record in caplog.records] == [
        "kv_connector_extra_config: silence is now peer_timeout, piece is now piece_bytes;"
        " version 0.2 refuses the old names"
    ]
    caplog.clear()
    connector._warn_of(Config(), {"key_file": "k", "peer_timeout": 3.0})
    assert not caplog.records


@pytest.mark.parametrize(
    ("places", "role", "stages", "is_async", "words"),
    [
        (1, "kv_consumer", 1, True, "a full KV cache: vLLM may end this engine"),
        (2, "kv_both", 1, True, "more than 2 adapters (--max-loras) are under way"),
        (1, "kv_producer", 2, False, "pipeline stages: vLLM may end this engine"),
        (1, "kv_producer", 1, True, ""),
        (1, "kv_consumer", 1, False, ""),
        (None, "kv_consumer", 2, True, ""),
    ],
)
def test_few_places_of_adapters_are_told_at_start(
    places: int | None,
    role: str,
    stages: int,
    is_async: bool,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM's own defect: test_scheduler_worlds.py has engines that end by it."""
    given: Any = SimpleNamespace(
        lora_config=None if places is None else SimpleNamespace(max_loras=places),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=role != "kv_producer"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
    )
    with caplog.at_level("WARNING", "vllm_disagg"):
        connector._warn_of_adapters(given)
    assert len(caplog.records) == bool(words) and words in caplog.text


@pytest.mark.parametrize("value", [True, False])
def test_the_old_setting_gpu_is_one_warning(value: bool, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"key_file": "k", "gpu": value}
    assert parse(extra) == Config(key_file="k")
    with caplog.at_level(logging.WARNING, "vllm_disagg"):
        connector._warn_of(Config(key_file="k"), extra)
    assert [record.getMessage() for record in caplog.records] == [
        "kv_connector_extra_config: gpu has no effect (KV in GPU memory is served without a"
        " setting): leave it out"
    ]


@pytest.mark.parametrize(
    ("device", "use_mla", "preferred"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)],
)
def test_on_gpus_heads_are_contiguous(device: str, use_mla: bool, preferred: bool) -> None:
    vllm_config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=use_mla),
    )
    found = DisaggConnector.get_required_kvcache_layout(vllm_config)
    assert found == (compat.HEADS_TOGETHER if preferred else None)
    vllm_config.model_config = None  # vLLM asks before it knows the model, too
    assert DisaggConnector.get_required_kvcache_layout(vllm_config) is None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_tokens_in_flight_of_preempted_requests_are_kept(role: Any) -> None:
    engine: Any = object.__new__(DisaggConnector)
    engine._kv_transfer_config = KVTransferConfig(kv_connector="DisaggConnector", kv_role=role)
    assert engine.requires_kv_delivery is False


def test_the_preferred_layout_is_one_of_vllms() -> None:
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32")
    preferred = layouts.KVCacheLayout[str(compat.HEADS_TOGETHER)]
    assert preferred.is_layer_compact
    assert preferred.is_block_contiguous


def test_a_failed_proof_leaves_an_engine_without_transfers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = SchedulerSide(KEY, "decode", {"dtype": "bf16"}, GROUPS)
    engine: Any = SimpleNamespace(_scheduler=scheduler, _registrations=[], _register=None)
    metadata: Any = {(0, 0): FailedProof("layer a: rows differ")}
    with caplog.at_level(logging.ERROR, "vllm_disagg"):
        DisaggConnector.set_xfer_handshake_metadata_pp_aware(engine, metadata)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "KV transfers are off: layer a: rows differ; this engine computes every prompt itself"
    )
    assert scheduler.engine is None and not engine._registrations


@pytest.mark.parametrize(("seconds", "is_logged"), [(0, True), (9, True), (10, False)])
def test_an_engine_that_drops_kv_at_sigterm_logs_it(
    seconds: int, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm_disagg"):
        connector._note_short_shutdown(seconds, 10.0)
    assert ("--shutdown-timeout of 10 or more" in caplog.text) == is_logged


@pytest.mark.parametrize(("seconds", "drains"), [(0, False), (1, True)])
def test_an_engine_with_a_shutdown_timeout_lets_requests_finish(
    seconds: int, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "answer_settings", lambda _: "")
    told: list[bool] = []
    scheduler = SimpleNamespace(
        set_workers=lambda *_, drains, **others: told.append(drains), engine=None
    )
    transfer = SimpleNamespace(kv_load_failure_policy="recompute")
    vllm_config = SimpleNamespace(shutdown_timeout=seconds, kv_transfer_config=transfer)
    engine: Any = SimpleNamespace(_scheduler=scheduler, _vllm_config=vllm_config)
    DisaggConnector.set_xfer_handshake_metadata_pp_aware(engine, {})
    assert told == [drains]


DRAFTS = SimpleNamespace(method="ngram", num_speculative_tokens=4)


@pytest.mark.parametrize("speculative", [None, DRAFTS])
def test_an_engine_that_drafts_computes_seeded_requests(
    monkeypatch: pytest.MonkeyPatch, speculative: Any
) -> None:
    monkeypatch.setattr(compatibility, "layout", lambda vllm_config, compress: {})
    monkeypatch.setattr(data_parallel, "shared_server_rank", lambda vllm_config: None)
    monkeypatch.setattr(data_parallel, "computes_in_step", lambda vllm_config: False)
    monkeypatch.setattr(compatibility, "permits_bidirectional_reuse", lambda vllm_config: True)
    monkeypatch.setattr(compat, "around_adapter_loads", lambda note: None)
    role = SimpleNamespace(kv_role="kv_consumer")
    engine: Any = SimpleNamespace(_kv_transfer_config=role)
    # In the case without drafts the model's images attend to later tokens.
    model = SimpleNamespace(is_mm_prefix_lm=speculative is None)
    vllm_config: Any = SimpleNamespace(speculative_config=speculative, model_config=model)
    caches: Any = SimpleNamespace(kv_cache_groups=GROUPS, num_blocks=10)
    DisaggConnector._create_scheduler(engine, Config(), KEY, vllm_config, caches)
    assert engine._scheduler._admission.computes_seeded is (speculative is not None)
    assert engine._scheduler._admission.computes_images is (speculative is None)
    has_limit = engine._scheduler._legs.cache.max_load_blocks is not None
    assert has_limit is (speculative is not None)
    assert engine._scheduler._may_sleep


def test_a_load_beside_drafts_leaves_the_blocks_of_a_step_free() -> None:
    """vLLM begins no other load: a prompt that needs the whole pool is computed."""
    specs = [SimpleNamespace(block_size=size) for size in (4, 16)]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    caches = SimpleNamespace(kv_cache_groups=groups, num_blocks=100)
    speculative = SimpleNamespace(num_speculative_tokens=3)
    drafts = SimpleNamespace(speculative_config=speculative, num_lookahead_tokens=3)
    assert compat.max_load_blocks(drafts, caches) == 100 - 1 - (2 + 1)  # seven tokens of a step
    assert compat.max_load_blocks(SimpleNamespace(speculative_config=None), caches) is None


def test_a_rank_in_step_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "layout", lambda vllm_config, compress: {})
    monkeypatch.setattr(compatibility, "permits_bidirectional_reuse", lambda vllm_config: True)
    monkeypatch.setattr(compat, "around_adapter_loads", lambda note: None)
    transfer = SimpleNamespace(kv_role="kv_consumer", engine_id="a1b2_dp1")
    parallel = SimpleNamespace(
        data_parallel_size=2,
        data_parallel_index=1,
        data_parallel_external_lb=False,
        data_parallel_hybrid_lb=False,
    )
    vllm_config: Any = SimpleNamespace(
        speculative_config=None,
        parallel_config=parallel,
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(),
    )
    engine: Any = SimpleNamespace(_kv_transfer_config=transfer)
    caches: Any = SimpleNamespace(kv_cache_groups=GROUPS, num_blocks=10)
    DisaggConnector._create_scheduler(engine, Config(), KEY, vllm_config, caches)
    assert not engine._scheduler._may_sleep
    assert engine._scheduler._rank == data_parallel.SharedServerRank(1, 1)


def test_counts_of_the_schedulers_half_are_reported_once() -> None:
    scheduler = SchedulerSide(KEY, "decode", {"dtype": "bf16"}, GROUPS)
    engine: Any = SimpleNamespace(_scheduler=scheduler, _role=KVConnectorRole.SCHEDULER)
    assert DisaggConnector.get_kv_connector_stats(engine) is None
    scheduler.stats.count("refused_parameters")
    found = DisaggConnector.get_kv_connector_stats(engine)
    assert found is not None and found.data["refused_parameters"] == 1
    assert DisaggConnector.get_kv_connector_stats(engine) is None


class Register:
    """Replaces the two steps before a worker starts its driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
        transfer = SimpleNamespace(kv_load_failure_policy=policy)
        vllm_config: Any = SimpleNamespace(kv_transfer_config=transfer, speculative_config=None)
        self.worker = WorkerSide(Config(), KEY, 0, vllm_config, None)  # type: ignore[arg-type]

        def memory(caches: Any) -> Any:
            raise ProofFailed("layer a: rows differ")

        monkeypatch.setattr(self.worker, "_memory", memory)

    def start(self) -> None:
        self.worker.register_kv_caches({})


def test_a_worker_whose_proof_failed_serves_as_a_plain_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = Register(monkeypatch, "recompute")
    started.start()
    worker = started.worker
    assert worker.handshake == FailedProof("layer a: rows differ")
    worker.revoke_blocks(StepMetadata())
    worker.begin_step(StepMetadata())
    worker.on_layer_computed("a")
    worker.end_step()
    assert worker.take_results() == (set(), set(), set())
    assert worker.take_metadata() is None and not worker.take_failed_blocks()
    worker.close()


def test_a_worker_whose_proof_failed_does_not_start_where_failed_loads_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"off: layer a: rows differ; .* does not start"):
        Register(monkeypatch, "fail").start()


def test_a_gpu_that_lacks_something_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, memory, a driver: each has errors of its own."""
    started = Register(monkeypatch, "recompute")
    started.worker._kv_cache_config = SimpleNamespace()  # type: ignore[assignment]
    vllm_config: Any = started.worker._vllm_config
    vllm_config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    vllm_config.model_config = None
    monkeypatch.setattr(kv_layout, "kv_heads", lambda model: {1})
    monkeypatch.delattr(started.worker, "_memory")

    def device_memory(caches: Any, rank: Any) -> Any:
        raise RuntimeError("out of memory\nand a long explanation")

    monkeypatch.setattr(started.worker, "_device_memory", device_memory)
    cache: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    started.worker.register_kv_caches({"a": cache})
    assert started.worker.handshake == FailedProof(
        "the kernels cannot be run here (RuntimeError: out of memory)"
    )
