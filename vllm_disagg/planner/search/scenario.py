"""Scenarios: inputs of a search or a simulation, and what follows from them for a placement."""

from __future__ import annotations

import msgspec

from ...fleet.conventions import DEFAULT_POLICY, DEFAULT_PREFILL_CONCURRENCY, PolicyName
from ..cost.hardware import EngineDefaults, NetworkLink
from ..cost.latency import unloaded_decode, unloaded_prefill
from ..simulation.deployment import Deployment, Handoff, ReplicaPool
from ..simulation.objective import Objective
from ..simulation.replica import SchedulingRules
from ..simulation.workload import Arrivals, Workload, WorkloadSample
from .performance_source import PerformanceSource, latency_of
from .placement import Criterion, Placement, ReplicaGroup

UNLIMITED = 1 << 40
KV_MARGIN_RATIO = 1.02  # of the tokens needed: those that vLLM logged were within 2 %
# From the last byte at D to D's step: its scheduler's notice, docs/benchmarks/handoff.md (on CPUs).
NOTICE_SECONDS = 0.0037
# Of a sample, at either end, simulated and not counted: there the deployment fills and empties.
EDGE_SHARE = 0.1


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
            return "DistServe's rules have no such proxy: give --rules vllm"
        return ""

    @property
    def no_min_prompt_bytes(self) -> str:
        """The same of --min-prompt-bytes alone."""
        trace = self.workload.trace
        if trace and any(row.hash_ids for row in trace.requests):
            return (
                "the trace has hash_ids: the proxy counts the bytes that D lacks of a prompt, and"
                " here all bytes of it are counted: give --workload without them"
            )
        return self.no_proxy_flags

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
