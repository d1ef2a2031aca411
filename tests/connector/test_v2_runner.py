"""vLLM's V2 model runner: it changes blocks before the connector's own hook is called.

`update_requests` is vLLM's method, on stand-ins for the parts of the runner that it uses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from test_worker_side import Recorder

from kv_connectors import compat
from kv_connectors import worker as worker_module
from kv_connectors.metadata import StepMetadata
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol import events

v2 = pytest.importorskip("vllm.v1.worker.gpu.model_runner")
V2 = SimpleNamespace(use_v2_model_runner=True, speculative_config=None)
REVOKED = events.BlocksRevoked("gone")
STEP = StepMetadata(sender_events=[REVOKED, events.PrefillFinished("over")])


class StepRecorder(Recorder):
    """Records events and changes of blocks in one list."""

    worker = SimpleNamespace(control="tcp://127.0.0.1:1")

    def changes(self, what: str) -> Any:
        """Returns a function that records a change of blocks."""
        return lambda *arguments: self.facts.append(what)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StepRecorder:
    """Registers a worker in an engine with the V2 runner; returns its driver."""
    made = StepRecorder()
    monkeypatch.setattr(v2.GPUModelRunner, "update_requests", v2.GPUModelRunner.update_requests)
    monkeypatch.setattr(v2, "copy_kv_cache_blocks_inplace", made.changes("copied"))
    monkeypatch.setattr(worker_module, "Driver", lambda *arguments: made)
    key = keys.FleetKey(b"k" * keys.KEY_BYTES)
    worker = WorkerSide(Config(transport="zmq"), key, 0, V2, None)  # type: ignore[arg-type]
    memory = SimpleNamespace(shape=uniform(1, 16, [64]))
    monkeypatch.setattr(worker, "_memory", lambda caches: (memory, ["a"]))
    worker.register_kv_caches({"a": torch.zeros(1)})
    return made


def update_requests(driver: StepRecorder, metadata: object) -> None:
    """Calls vLLM's method for a step that clears one block and copies another."""
    states = SimpleNamespace(
        num_computed_tokens_np=np.zeros(1, np.int32),
        prefill_len=SimpleNamespace(np=np.zeros(1, np.int32)),
        num_computed_prefill_tokens=np.zeros(1, np.int32),
    )
    runner = SimpleNamespace(
        req_states=states,
        kv_block_zeroer=SimpleNamespace(zero_block_ids=driver.changes("cleared")),
        kv_caches=[],
        kv_cache_config=SimpleNamespace(num_blocks=2),
    )
    step = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        new_block_ids_to_zero=[1],
        kv_cache_block_copies=["0 to 1"],
        kv_connector_metadata=metadata,
    )
    v2.GPUModelRunner.update_requests(runner, step)


@pytest.mark.parametrize(
    "metadata", [STEP, SimpleNamespace(metadata=(object(), STEP))], ids=["ours", "of several"]
)
def test_revoked_blocks_are_submitted_before_v2_changes_blocks(
    driver: StepRecorder, metadata: object
) -> None:
    update_requests(driver, metadata)
    assert driver.facts == [REVOKED, "cleared", "copied"]


def test_a_step_of_the_warm_up_revokes_nothing(driver: StepRecorder) -> None:
    update_requests(driver, None)
    assert driver.facts == ["cleared", "copied"]


def test_a_second_registration_wraps_nothing_again(driver: StepRecorder) -> None:
    wrapped = v2.GPUModelRunner.update_requests
    compat.before_blocks_change(V2, wrapped.revoked_by)
    assert v2.GPUModelRunner.update_requests is wrapped


def test_v1_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = v2.GPUModelRunner.update_requests
    for vllm_config in (SimpleNamespace(), SimpleNamespace(use_v2_model_runner=False)):
        compat.before_blocks_change(vllm_config, print)
    assert v2.GPUModelRunner.update_requests is before


def test_an_unknown_v2_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(v2.GPUModelRunner, "update_requests")
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        compat.before_blocks_change(V2, print)
