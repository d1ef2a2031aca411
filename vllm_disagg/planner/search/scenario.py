"""Scenarios (times and memory of hardware, traffic, objective) and placements."""

from __future__ import annotations

from functools import cache

import msgspec

from ...errors import ConfigError
from ...fleet.conventions import (
    BYTES_PER_TOKEN,
    DEFAULT_POLICY,
    DEFAULT_PREFILL_CONCURRENCY,
    PolicyName,
)
from ..cost import distserve
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
    FITTED_GPUS,
    FITTED_VLLM,
    TPOT_ERROR_LEFT_OUT,
    TTFT_ERROR_LEFT_OUT,
    InstanceShape,
    LatencyModel,
    LinearLatency,
    PathDelay,
    RooflineLatency,
    ScaledLatency,
    unloaded_decode,
    unloaded_prefill,
)
from ..cost.sizes import ModelCosts
from ..cost.speculative import SpeculativeDecoding, SpeculativeLatency
from ..simulation.replica import SchedulingRules
from ..simulation.simulator import Deployment, Handoff, Objective, ReplicaPool
from ..simulation.workload import Arrivals, Workload, WorkloadSample

UNLIMITED = 1 << 40
MAX_TENSOR_PARALLEL = 8  # GPUs that it may span: those of a node
# Numbers of pipeline stages that need not divide the layers: the largest stage sets the time.
UNEVEN_STAGES = (2, 3, 4, 6, 8)
MAX_STAGES = 16  # of a pipeline in a roofline
KV_MARGIN_RATIO = 1.02  # of the tokens needed: those that vLLM logged were within 2 %
MIN_KV_TOKENS = 16  # of an instance: one block
# From the last byte at D to D's step: its scheduler's notice, docs/benchmarks/handoff.md (on CPUs).
NOTICE_SECONDS = 0.0037
# Of a sample, at either end, simulated and not counted: there the deployment fills and empties.
EDGE_SHARE = 0.1


class PerformanceSource(msgspec.Struct, frozen=True):
    """Source of step times and memory of one GPU type.

    It is a set of published coefficients, a file of measured points or a roofline.
    """

    kind: str  # coefficients | profile | roofline
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

    def shapes(self, gpus: int) -> list[tuple[int, int]]:
        """Lists (TP, PP) of instances of up to `gpus` GPUs that hold the weights and some KV."""
        if self.fitted or not self.model:
            return [(self.measured_tp, 1)] if self.measured_tp <= gpus else []
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
    def defaults(self) -> EngineDefaults:
        """Limits of an instance that is started without flags, or as it was profiled."""
        is_on_gpu = self.gpu or self.was_on_gpu or self.kind == "coefficients"
        found = engine_defaults(self.gpu) if is_on_gpu else CPU_DEFAULTS
        return EngineDefaults(self.budget or found.budget, found.sequences)

    @property
    def fitted_to(self) -> str:
        """The engines whose measured times the step times are fitted to; empty if not known."""
        if self.kind == "roofline":
            return f"runs of vLLM {FITTED_VLLM}"
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
        errors = f"TPOT by {TPOT_ERROR_LEFT_OUT:.0%} and TTFT by {TTFT_ERROR_LEFT_OUT:.0%}"
        fitted = f"roofline of {self.name}, fitted to runs of vLLM on {', '.join(FITTED_GPUS)}"
        if self.name.lower() in FITTED_GPUS:
            return f"{fitted}: off in the mean, for other models, {errors}"
        return (
            f"{fitted} and on no {self.name}: its error is not measured there; elsewhere {errors}"
        )


class ReplicaGroup(msgspec.Struct, frozen=True, order=True):
    """Group of `n` equal instances of TP*PP*DP GPUs; with DP the experts are parallel, too."""

    tp: int
    pp: int
    n: int
    dp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.tp * self.pp * self.dp * self.n

    @property
    def ranks(self) -> int:
        """Schedulers of all instances: each data parallel rank has one."""
        return self.dp * self.n

    def __str__(self) -> str:
        words = f"{self.n} x TP{self.tp}" + (f" PP{self.pp}" if self.pp > 1 else "")
        return words + (f" DP{self.dp} EP{self.tp * self.dp}" if self.dp > 1 else "")


class Placement(msgspec.Struct, frozen=True, order=True):
    """Disaggregated groups, or one colocated group (`decode` is None).

    A colocated group has a schedule (`chunked` or prefill first) and a token budget per step.
    Disaggregated ones have the proxy's flags that let the decode side compute prompts whole.
    """

    prefill: ReplicaGroup
    decode: ReplicaGroup | None = None
    budget: int = 0
    chunked: bool = True
    on_decode_gpus: bool = False  # colocated on the decode side's GPU type
    min_prompt_bytes: int = 0
    spill: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of all groups."""
        return self.prefill.gpus + (self.decode.gpus if self.decode else 0)

    @property
    def shapes(self) -> tuple[ReplicaGroup, ReplicaGroup | None]:
        """Groups of one instance each: the shapes without their numbers."""
        one = msgspec.structs.replace(self.prefill, n=1)
        return one, msgspec.structs.replace(self.decode, n=1) if self.decode else None

    @property
    def instances(self) -> int:
        """Instances of all groups."""
        return self.prefill.n + (self.decode.n if self.decode else 0)

    @property
    def proxy_flags(self) -> list[str]:
        """The proxy's flags with which the decode side computes prompts whole; none by default."""
        found = []
        if self.min_prompt_bytes:
            found += ["--min-prompt-bytes", str(self.min_prompt_bytes)]
        return [*found, "--spill"] if self.spill else found

    @property
    def flag_words(self) -> list[str]:
        """The same flags as one text for people; none by default."""
        return [" ".join(self.proxy_flags)] if self.proxy_flags else []

    def is_short(self, prompt: int) -> bool:
        """Whether the decode side computes each prompt of so many tokens."""
        return BYTES_PER_TOKEN * prompt < self.min_prompt_bytes

    def __str__(self) -> str:
        if self.decode:
            return ", ".join([f"prefill {self.prefill}, decode {self.decode}", *self.flag_words])
        schedule = f"chunked prefill of {self.budget} tokens" if self.chunked else "prefill first"
        return f"colocated {self.prefill}, {schedule}"


class Criterion(msgspec.Struct, frozen=True):
    """What goodput is divided by, and what is to be least: GPUs, their price or their power.

    `prefill` and `decode` are the units of one GPU of each side.
    """

    unit: str = "GPU"
    prefill: float = 1.0
    decode: float = 1.0

    def units(self, placement: Placement) -> float:
        """Returns the units of all GPUs of a placement."""
        if placement.decode:
            decode = placement.decode.gpus * self.decode
            return placement.prefill.gpus * self.prefill + decode
        each = self.decode if placement.on_decode_gpus else self.prefill
        return placement.prefill.gpus * each


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a search or a simulation."""

    prefill: PerformanceSource
    decode: PerformanceSource
    workload: Workload
    arrivals: Arrivals
    objective: Objective
    requests: int = 1000
    seeds: int = 5
    gpus: int = 4
    link: NetworkLink
    overlap: bool = True
    notice: float = NOTICE_SECONDS
    policy: PolicyName = DEFAULT_POLICY
    concurrency: int = DEFAULT_PREFILL_CONCURRENCY
    # The proxy's flags as given, of all disaggregated placements. None: `plan` tries values.
    min_prompt_bytes: int | None = None
    spill: bool | None = None
    kv_limit: int = 0  # tokens of KV of each instance, instead of what its memory holds
    budget: int = 0  # tokens of a step; 0: the default of each source
    sequences: int = 0  # that run at once; 0: the default of each source
    distserve: bool = False  # DistServe's rules and clock
    tolerance: float = 0.01
    criterion: Criterion = Criterion()
    price: Criterion | None = None
    max_model_len: int = 0  # tokens of the longest request; 0: the model's own
    nics: float = 0.0  # links of each GPU of P's nodes; 0: each instance has one link
    decode_nics: float = 0.0  # the same of D's

    def samples(self) -> list[WorkloadSample]:
        """Draws one sample of requests for each seed.  DistServe's rules count all of them."""
        edge = 0 if self.distserve else int(self.requests * EDGE_SHARE)
        samples = []
        for seed in range(self.seeds):
            drawn = self.workload.sample(self.requests, seed, self.arrivals)
            samples.append(msgspec.structs.replace(drawn, edge=edge))
        return samples

    @property
    def gives_proxy_flags(self) -> bool:
        """Whether flags were given with which the decode side computes prompts whole."""
        return self.min_prompt_bytes is not None or self.spill is not None

    @property
    def no_proxy_flags(self) -> str:
        """The reason why those flags cannot be simulated; empty if they can."""
        if self.distserve:
            return "DistServe's rules have no such proxy"
        trace = self.workload.trace
        if trace and any(row.hash_ids for row in trace.requests):
            return (
                "the trace has hash_ids: the proxy counts the bytes that D lacks of a prompt, and"
                " prefixes that D keeps are not simulated"
            )
        return ""

    def longer_sample(self) -> str:
        """Describes what gives samples of more requests."""
        return "give a longer trace" if self.workload.trace else "give more --requests"

    def deployment(self, placement: Placement) -> Deployment:
        """Builds the deployment to simulate.

        DistServe's rules: no token budget, as many sequences as fit, the decode instance chosen
        when the prefill ends. Its hard-coded 50,000 tokens of a decode batch are not the default:
        --kv-limit sets them. The chunked baseline keeps its budget.
        """
        if not placement.decode:
            source, _ = self.sources(placement)
            rules = self.rules(source, placement.budget, placement.chunked)
            side = self._side(source, placement.prefill, rules)
            return Deployment(side, distserve=self.distserve, policy=self.policy, path=source.path)
        return Deployment(
            self._side(self.prefill, placement.prefill, self.rules(self.prefill, 0, True)),
            self._side(self.decode, placement.decode, self.rules(self.decode, 0, True)),
            self._handoff(placement.prefill, placement.decode),
            self.policy,
            self.distserve,
            self.prefill.path,
            placement.min_prompt_bytes,
            placement.spill,
        )

    def sources(self, placement: Placement) -> tuple[PerformanceSource, PerformanceSource]:
        """Returns the sources of the instances that prefill and of those that decode."""
        if placement.decode:
            return self.prefill, self.decode
        source = self.decode if placement.on_decode_gpus else self.prefill
        return source, source

    def _link_of(self, prefill: ReplicaGroup, decode: ReplicaGroup) -> NetworkLink:
        """Returns the link of a pair: the NICs of its GPUs together, of the slower instance."""
        if not self.nics:
            return self.link
        links = min(prefill.tp * prefill.pp * self.nics, decode.tp * decode.pp * self.decode_nics)
        return msgspec.structs.replace(self.link, bandwidth=self.link.bandwidth * links)

    def _handoff(self, prefill: ReplicaGroup, decode: ReplicaGroup) -> Handoff:
        """Builds the hand-off of the model's KV; without a model it has no bytes."""
        found = Handoff(
            self._link_of(prefill, decode),
            overlap=self.overlap,
            concurrency=UNLIMITED if self.distserve else self.concurrency,
            notice=0.0 if self.distserve else self.notice,
        )
        model = self.prefill.model
        if not model:
            return found
        # The KV of a draft layer travels, too.
        layers = model.layers + self.prefill.draft_layers
        kv = sum(g.layers * g.token_bytes for g in model.kv if not g.window)
        return msgspec.structs.replace(
            found,
            bytes_per_token=kv * layers / model.layers,
            layers=layers,
            windows=tuple(group for group in model.kv if group.window),
            state_bytes=model.state_bytes,
        )

    def _side(
        self, source: PerformanceSource, group: ReplicaGroup, rules: SchedulingRules
    ) -> ReplicaPool:
        """Builds the pool of one group."""
        kv = self.kv_tokens(source, group)
        return ReplicaPool(group.ranks, latency_of(source, group), kv, rules)

    def kv_tokens(self, source: PerformanceSource, group: ReplicaGroup) -> int:
        """Returns the tokens of KV of one instance, or of one of its data parallel ranks."""
        return self.kv_limit or source.kv(group.tp, group.pp, group.dp)

    def holds(self, source: PerformanceSource, group: ReplicaGroup, tokens: int) -> bool:
        """Returns whether the KV of an instance surely holds one request of so many tokens."""
        of_one = msgspec.structs.replace(source, context=max(1, tokens))
        return self.kv_tokens(of_one, group) >= tokens * KV_MARGIN_RATIO

    def limits(self, source: PerformanceSource, budget: int = 0) -> EngineDefaults:
        """Returns the limits of an instance; `budget` 0 selects the scenario's own.

        vLLM refuses to start with more sequences than tokens in a step.
        """
        budget = budget or self.budget or source.defaults.budget
        sequences = self.sequences or source.defaults.sequences
        return EngineDefaults(budget, min(sequences, budget))

    def rules(self, source: PerformanceSource, budget: int, chunked: bool) -> SchedulingRules:
        """Returns the scheduling rules; `budget` 0 selects the scenario's own."""
        if self.distserve:
            return SchedulingRules(budget if budget and chunked else UNLIMITED, UNLIMITED, chunked)
        limits = self.limits(source, budget)
        return SchedulingRules(limits.budget, limits.sequences, chunked)

    def words_of(self, placement: Placement) -> str:
        """Describes a placement for people, with GPU types where there are two."""
        if self.prefill.name == self.decode.name:
            return str(placement)
        if not placement.decode:
            source, _ = self.sources(placement)
            return f"{placement} on {source.name}"
        prefill = f"prefill {placement.prefill} on {self.prefill.name}"
        decode = f"decode {placement.decode} on {self.decode.name}"
        return ", ".join([prefill, decode, *placement.flag_words])

    def words(self) -> list[str]:
        """Describes for people the source of the times, and the traffic."""
        times = f"times: {self.prefill.words()}"
        if self.decode != self.prefill:
            times += f"; decode: {self.decode.words()}"
        if path := self.prefill.path.of(0):
            per_token = 1e6 * self.prefill.path.seconds_per_token
            times += f"; path of a request {1e3 * path:.3g} ms + {per_token:.3g} us/token"
        traffic = f"traffic: {self.workload.name}, {self.seeds} x {self.requests} requests"
        trace = self.workload.trace
        if trace and self.seeds > 1 and self.seeds * self.requests > len(trace.requests):
            traffic += f" of the trace's {len(trace.requests)}, which the samples share"
        if self.workload.left_out:
            traffic += (
                f", {self.workload.left_out} of the trace left out: vLLM refuses their length"
            )
        return [times, f"{traffic}, {self.arrivals.kind} arrivals; link {self.link.name}"]

    # --- closed forms ---

    def capacities(self, placement: Placement, sample: WorkloadSample) -> tuple[float, float]:
        """Estimates requests/s of the prefill and of the decode instances, each alone; not a bound.

        Prefill: prompts one after the other. Decode: the largest batch with a step within TPOT and
        ITL and with KV that fits, at the mean context.
        """
        prefill, decode = self.sources(placement)
        answering = placement.decode or placement.prefill
        return (
            self._prefill_capacity(prefill, placement.prefill, sample),
            self._decode_capacity(decode, answering, sample),
        )

    def _prefill_capacity(
        self, source: PerformanceSource, group: ReplicaGroup, sample: WorkloadSample
    ) -> float:
        """Estimates requests/s of a prefill group alone."""
        latency = latency_of(source, group)
        work = sum(latency.mixed(p, float(p) ** 2, 0, 0, True) for p in sample.prompts[:200])
        return group.ranks * min(200, len(sample)) / work

    def _decode_capacity(
        self, source: PerformanceSource, group: ReplicaGroup, sample: WorkloadSample
    ) -> float:
        """Estimates requests/s of a decode group alone."""
        latency = latency_of(source, group)
        output = sum(sample.outputs) / len(sample)
        context = sum(sample.prompts) / len(sample) + output / 2
        room = self.kv_tokens(source, group) / context

        def step_seconds(n: int) -> float:
            base, slope = latency.decode(n, True)
            return latency.pp * (base + slope * n * context)

        sequences = UNLIMITED if self.distserve else self.limits(source).sequences
        low = 1
        high = max(1, min(sequences, int(room) // latency.pp))
        most = min(self.objective.tpot, self.objective.itl or self.objective.tpot)
        if step_seconds(high) > most:
            while low < high:
                middle = (low + high + 1) // 2
                if step_seconds(middle) <= most:
                    low = middle
                else:
                    high = middle - 1
        return group.ranks * latency.pp * high / (step_seconds(high) * output)

    def infeasible(self, placement: Placement, sample: WorkloadSample) -> str:
        """Returns the objective that no rate can meet, or an empty text.

        Too many requests miss it even alone, on an idle instance. Work added to a batch never makes
        it faster, and a prompt in chunks is not faster than in one.
        """
        if self.is_late(placement, sample):
            return "ttft"
        return self.slow_limit(placement, sample)

    def is_late(self, placement: Placement, sample: WorkloadSample) -> bool:
        """Returns whether too many prompts miss TTFT even alone."""
        if sample.prefixes:  # a cached prefix makes a prompt faster than alone
            return False
        source, answering = self.sources(placement)
        prefill = latency_of(source, placement.prefill)
        decode = latency_of(answering, placement.decode or placement.prefill)
        late = 0
        for r in sample.counted:
            prompt = sample.prompts[r]
            sides = [decode if placement.is_short(prompt) else prefill]
            if placement.spill:
                sides.append(decode)
            alone = min(unloaded_prefill(side, prompt) for side in sides)
            late += alone + source.path.of(prompt) > self.objective.ttft
        return late > self.objective.allowed(len(sample.counted))

    def slow_limit(self, placement: Placement, sample: WorkloadSample) -> str:
        """Returns the limit of tokens that too many answers miss even alone, or an empty text."""
        objective = self.objective
        _, source = self.sources(placement)
        decode = latency_of(source, placement.decode or placement.prefill)
        # Each gap is a step or more, so the limit of gaps is one of the mean, too.
        for name, limit in (("tpot", objective.tpot), ("itl", objective.itl)):
            if limit is None:
                continue
            slow = 0
            for r in sample.counted:
                seconds = unloaded_decode(decode, sample.prompts[r])
                slow += sample.outputs[r] > 1 and seconds > limit
            if slow > objective.allowed(len(sample.counted)):
                return name
        return ""


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
