"""Sources of step times and memory, and the shapes of instances that each of them permits."""

from __future__ import annotations

from functools import cache

import msgspec

from ...errors import ConfigError
from ..cost import aiconfigurator, distserve
from ..cost.hardware import (
    CPU_DEFAULTS,
    GPU_MEMORY_UTILIZATION,
    GPUS_OF_A_MACHINE,
    EngineDefaults,
    GpuType,
    NetworkLink,
    engine_defaults,
)
from ..cost.latency import (
    LatencyModel,
    LinearLatency,
    PathDelay,
    ScaledLatency,
)
from ..cost.roofline import (
    FITTED_GPUS,
    FITTED_VLLM,
    TPOT_ERROR_LEFT_OUT,
    TTFT_ERROR_LEFT_OUT,
    InstanceShape,
    RooflineLatency,
)
from ..cost.sizes import ModelCosts
from ..cost.speculative import SpeculativeDecoding, SpeculativeLatency
from ..cost.step_tables import StepTables
from .placement import ReplicaGroup

MAX_TENSOR_PARALLEL = 8  # GPUs that it may span: those of a node
# Numbers of pipeline stages that need not divide the layers: the largest stage sets the time.
UNEVEN_STAGES = (2, 3, 4, 6, 8)
MAX_STAGES = 16  # of a pipeline in a roofline
MIN_KV_TOKENS = 16  # of an instance: one block


class PerformanceSource(msgspec.Struct, frozen=True):
    """Source of step times and memory of one GPU type.

    It is a set of published coefficients, a file of measured points, a roofline or tables.
    """

    kind: str  # coefficients | profile | roofline | aiconfigurator
    name: str  # the set of coefficients, the file, or the GPU
    model: ModelCosts | None = None
    gpu: GpuType | None = None
    fitted: LinearLatency | None = None
    kv_tokens: int = 0  # of the profiled instance
    budget: int = 0  # its token budget; 0 if the file has none
    served: str = ""  # its model's name
    machine: str = ""  # on which it was profiled
    vllm: str = ""  # its version
    measured_tp: int = 1  # GPUs of the profiled instance
    path: PathDelay = PathDelay()  # of a request, outside the engine
    link: NetworkLink | None = None  # to decode instances, if the file measured a hand-off
    context: int = 4096  # tokens of a request, in the mean: for windows and states
    was_on_gpu: bool = False  # the profiled instance, as far as its file says
    beside: int = 0  # other instances of its machine that were under load
    scale: float = 1.0  # on all times, from a refit
    expert_parallel: bool = False  # also data parallel instances with parallel experts
    max_model_len: int = 0  # vLLM starts only if the KV of one such request fits; 0: not given
    drafts: SpeculativeDecoding | None = None  # of a roofline
    tables: tuple[tuple[int, StepTables], ...] = ()  # by tensor parallel size
    origin: str = ""  # of the tables

    def shapes(self, gpus: int) -> list[tuple[int, int]]:
        """Lists (TP, PP) of instances of up to `gpus` GPUs that hold the weights and some KV."""
        if self.fitted or not self.model:
            return [(self.measured_tp, 1)] if self.measured_tp <= gpus else []
        if self.tables:
            fitting = [tp for tp, _ in self.tables if tp <= gpus]
            return [(tp, 1) for tp in fitting if self.kv(tp, 1) >= self._least_kv]
        shapes = []
        for tp in self._degrees():
            for pp in self._stages(self.model, gpus // tp):
                if self.kv(tp, pp) >= self._least_kv:
                    shapes.append((tp, pp))
        return shapes

    def layouts(self, gpus: int) -> list[ReplicaGroup]:
        """Lists the shapes of one instance, with data and expert parallel ones.

        An instance with data parallelism shares its experts among all GPUs, and each rank has the
        rest of the model, KV and a scheduler of its own. Models without experts are not so served.
        """
        found = [ReplicaGroup(tp, pp, 1) for tp, pp in self.shapes(gpus)]
        if not self.expert_parallel or not self.model:
            return found
        for tp in self._degrees():
            dp = 2
            while tp * dp <= gpus and self.model.experts % (tp * dp) == 0:
                if self.kv(tp, 1, dp) >= self._least_kv:
                    found.append(ReplicaGroup(tp, 1, 1, dp))
                dp *= 2
        return found

    @property
    def _least_kv(self) -> int:
        """Tokens of KV without which vLLM does not start."""
        return max(MIN_KV_TOKENS, self.max_model_len)

    def _degrees(self) -> list[int]:
        """Lists the tensor parallel sizes that vLLM starts: heads and KV heads split evenly."""
        if not self.model:
            raise AssertionError("only a profile goes without a model")
        if self.kind == "coefficients":
            return distserve.degrees(self.name, self.model.name)
        most = min(MAX_TENSOR_PARALLEL, self.gpu.node if self.gpu else MAX_TENSOR_PARALLEL)
        powers_of_two = (tp for tp in range(1, most + 1) if tp & (tp - 1) == 0)
        return [tp for tp in powers_of_two if self._splits(self.model, tp)]

    @staticmethod
    def _splits(model: ModelCosts, tp: int) -> bool:
        """Returns whether ranks have equal heads, and equal or equally often copied KV heads."""
        kv_heads = {group.heads for group in model.kv}
        return model.heads % tp == 0 and all(h % tp == 0 or tp % h == 0 for h in kv_heads)

    def _stages(self, model: ModelCosts, most: int) -> list[int]:
        """Lists numbers of pipeline stages: those that divide the layers, and usual uneven ones."""
        if self.kind == "coefficients":
            return [pp for pp in range(1, most + 1) if model.layers % pp == 0]
        stages = range(1, min(most, MAX_STAGES) + 1)
        return [pp for pp in stages if model.layers % pp == 0 or pp in UNEVEN_STAGES]

    def latency(self, tp: int, pp: int, dp: int = 1) -> LatencyModel:
        """Returns the step times of an instance, or of one of its ranks, scaled by the refit."""
        found = self._unscaled(tp, pp, dp)
        return found if self.scale == 1 else ScaledLatency(found, self.scale)

    def _unscaled(self, tp: int, pp: int, dp: int) -> LatencyModel:
        """Returns the step times without the factor of a refit."""
        if self.fitted:
            return self.fitted
        if self.tables:
            return dict(self.tables)[tp]
        if not self.model:
            raise AssertionError("only a profile goes without a model")
        if self.kind == "coefficients":
            return distserve.latency(self.name, self.model.name, tp, pp)
        if not self.gpu:
            raise AssertionError("a roofline has a GPU")
        found = RooflineLatency(self.model, self.gpu, InstanceShape(tp, pp, dp))
        return SpeculativeLatency(found, self.drafts) if self.drafts else found

    def kv(self, tp: int, pp: int, dp: int = 1) -> int:
        """Returns the tokens of KV that an instance holds, or one of its data parallel ranks."""
        if self.fitted or not self.model:
            return self.kv_tokens
        memory = self.gpu.memory if self.gpu else distserve.GPU_MEMORY_BYTES
        share = self.memory_utilization
        return self.model.kv_capacity(memory, share, tp, pp, self.context, dp, self.draft_layers)

    @property
    def draft_layers(self) -> int:
        """Layers of the draft, beside the model's."""
        return self.drafts.layers if self.drafts else 0

    @property
    def memory_utilization(self) -> float:
        """Share of a GPU's memory that an instance uses; 0 for a profile, which has its tokens."""
        if self.fitted:
            return 0.0
        if self.kind == "coefficients":
            return distserve.MEMORY_UTILIZATION
        return GPU_MEMORY_UTILIZATION

    @property
    def machine_gpus(self) -> int:
        """GPUs of one machine."""
        return self.gpu.machine_gpus if self.gpu else GPUS_OF_A_MACHINE

    @property
    def is_on_gpu(self) -> bool:
        """Whether KV is on a GPU, as far as is known."""
        return self.gpu is not None or self.was_on_gpu or self.kind == "coefficients"

    @property
    def defaults(self) -> EngineDefaults:
        """Limits of an instance that is started without flags, or as it was profiled."""
        found = engine_defaults(self.gpu) if self.is_on_gpu else CPU_DEFAULTS
        return EngineDefaults(self.budget or found.budget, found.sequences)

    @property
    def fitted_to(self) -> str:
        """The engines whose measured times the step times are fitted to; empty if not known."""
        if self.kind == "roofline":
            return f"runs of vLLM {FITTED_VLLM}"
        if self.tables:
            return self.origin
        return f"vLLM {self.vllm}" if self.vllm else ""

    def words(self) -> str:
        """Describes for people which constants were measured."""
        words = self._words() + (f", times {self.scale:.3g}" if self.scale != 1 else "")
        return words + (f"; drafts: {self.drafts.words()}" if self.drafts else "")

    def _words(self) -> str:
        """Describes the source without the factor of a refit."""
        if self.kind == "coefficients":
            return f"{self.name}: fits to measurements that DistServe published (A100-80GB)"
        if self.kind == "profile":
            plural = "" if self.beside == 1 else "s"
            others = f"{self.beside or 'no'} other instance{plural} of its machine under load"
            vllm = f"vLLM {self.vllm}" if self.vllm else ""
            measured = ", ".join(filter(None, (self.served, vllm, self.machine)))
            return f"fitted to the measured points of {self.name} ({measured}), with {others}"
        if self.tables:
            degrees = ", ".join(f"TP{tp}" for tp, _ in self.tables)
            return f"{self.origin} on {self.name}, {degrees} alone: {aiconfigurator.ERROR_WORDS}"
        errors = f"TPOT by {TPOT_ERROR_LEFT_OUT:.0%} and TTFT by {TTFT_ERROR_LEFT_OUT:.0%}"
        fitted = f"roofline of {self.name}, fitted to runs of vLLM on {', '.join(FITTED_GPUS)}"
        if self.name.lower() in FITTED_GPUS:
            return f"{fitted}: off in the mean, for other models, {errors}"
        return (
            f"{fitted} and on no {self.name}: its error is not measured there; elsewhere {errors}"
        )


def latency_of(source: PerformanceSource, group: ReplicaGroup) -> LatencyModel:
    """Returns the step times of an instance of a group, built once for each shape."""
    return _latency(source, group.tp, group.pp, group.dp)


@cache
def _latency(source: PerformanceSource, tp: int, pp: int, dp: int) -> LatencyModel:
    """Returns the step times of an instance, built once."""
    return source.latency(tp, pp, dp)


def check_model(source: PerformanceSource, gpus: int, flag: str) -> None:
    """Raises ConfigError if the model fits on no instance of up to `gpus` GPUs."""
    if source.layouts(gpus):
        return
    name = source.model.name if source.model else source.name
    least = next((g for g in range(gpus + 1, 129) if source.layouts(g)), None)
    hint = "give a GPU with more memory"
    if least:
        hint = f"it needs at least {least}: give {flag} {least} or more"
    raise ConfigError(
        f"{name} fits nowhere on {gpus} GPU{'s' if gpus > 1 else ''} of {source.name}; {hint}"
    )
