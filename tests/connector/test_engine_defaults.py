"""The planner's limits of engines, against those of the vLLM that is installed."""

from __future__ import annotations

import inspect

import pytest
from vllm.config import CacheConfig
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

from vllm_disagg.planner.cost import hardware


class NamedGpu:
    """Stands for vLLM's platform on one GPU."""

    def __init__(self, gpu: hardware.GpuType) -> None:
        self._gpu = gpu

    def get_device_total_memory(self) -> int:
        """Returns the bytes of the GPU's memory."""
        return int(self._gpu.memory)

    def get_device_name(self) -> str:
        """Returns the name as CUDA has it."""
        return f"NVIDIA {self._gpu.name.upper()}"

    def is_device_capability(self, capability: tuple[int, int]) -> bool:
        """Returns false: vLLM 0.33 asks whether it is a DGX Spark, which the planner has not."""
        return False

    def is_tpu(self) -> bool:
        """Returns false."""
        return False

    def is_cpu(self) -> bool:
        """Returns false."""
        return False


@pytest.mark.parametrize("name", hardware.GPUS)
def test_the_planner_has_vllms_limits_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = hardware.gpu(name)
    monkeypatch.setattr(arg_utils, "current_platform", NamedGpu(gpu))
    tokens, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
    found = hardware.engine_defaults(gpu)
    assert found.budget == tokens[UsageContext.OPENAI_API_SERVER]
    assert found.sequences == sequences[UsageContext.OPENAI_API_SERVER]


class OneCpu(NamedGpu):
    """Stands for vLLM's platform on a CPU."""

    def is_cpu(self) -> bool:
        """Returns true."""
        return True


def test_the_planner_has_vllms_limits_of_a_step_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the smallest: also those of engines of which nothing is known."""
    monkeypatch.setattr(arg_utils, "current_platform", OneCpu(hardware.gpu("l4")))
    tokens, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
    found = hardware.CPU_DEFAULTS
    assert found.budget == tokens[UsageContext.OPENAI_API_SERVER]
    assert found.sequences == sequences[UsageContext.OPENAI_API_SERVER]
    for gpu in hardware.GPUS.values():
        of_gpu = hardware.engine_defaults(gpu)
        assert of_gpu.budget >= found.budget and of_gpu.sequences >= found.sequences


def test_the_planner_has_vllms_share_of_memory() -> None:
    default = inspect.signature(CacheConfig).parameters["gpu_memory_utilization"].default
    assert getattr(default, "default", default) == hardware.GPU_MEMORY_UTILIZATION
