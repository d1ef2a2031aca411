"""Upper bounds of goodput from the capacity of one instance: rates that no schedule exceeds.

A request that meets the objective has its prompt computed within TTFT, and each token of its answer
within TPOT in the mean. So the work of these requests fits into the instances' time between the
first arrival and the last deadline. The work of a request is at least

    prompt:  its tokens at the price of a full step, and its attention
    answer:  its steps at the price of the best batch, and its contexts

Two facts limit the best batch. It holds no more context than fits the KV cache. And the steps of a
request take TPOT in the mean, so longer steps must be paid for by shorter ones. Both enter with a
multiplier, as Lagrange's: the bound holds for each multiplier of 0 or more, and the best is taken.

Flags of the proxy let D compute prompts. Each prompt below --min-prompt-bytes is work of D, beside
its answers. With --spill any side may compute any prompt: then the work of all, at the lower price
of both sides, fits into the time of all instances.

The requests with the most work are left out, as many as may miss. Nothing is assumed of the order
in which requests are served. `tests/property/test_planner_bounds.py` compares with simulations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean

import msgspec

from ..cost.latency import LatencyModel, unloaded_prefill
from ..cost.queueing import usable_load
from ..simulation.workload import WorkloadSample
from .performance_source import latency_of
from .placement import Placement, ReplicaGroup
from .scenario import UNLIMITED, Scenario

SINGLE_SIZES = 64  # batches up to this size are tried one by one
SIZE_RATIO = 1.02  # from one range of larger batches to the next
MULTIPLIER_STEPS = 40  # of the search of the best multiplier
# Bounds are taken over the requests with the shortest answers, of several shares: long answers have
# late deadlines.
ANSWER_SHARES = (0.5, 0.75, 0.9, 1.0)


PromptPrice = tuple[float, float]  # least seconds of a token and of a square


class StepPrice(msgspec.Struct, frozen=True):
    """Least seconds of an instance for one step of one sequence, and for a token of its context."""

    step: float
    context: float


class BatchRange(msgspec.Struct, frozen=True):
    """Batches of up to `size` sequences, with the least seconds of their steps."""

    size: int
    stage: float  # of the first stage
    whole: float  # of all stages, with the least context


class SideWork(msgspec.Struct, frozen=True):
    """Least work of some requests in seconds, and the time for it after the last arrival."""

    seconds: float
    slack: float

    def rate(self, instances: int, span: float) -> float:
        """Returns the requests/s above which the work does not fit.

        `span` is the time between the first and the last arrival at 1 request/s.
        """
        left = self.seconds - instances * self.slack
        return instances * span / left if left > 0 else float("inf")


class CapacityBounds:
    """Upper bounds for the placements of one scenario and its samples."""

    def __init__(self, scenario: Scenario, samples: Sequence[WorkloadSample]) -> None:
        self._scenario = scenario
        self.samples = samples
        # Seconds between the first and the last arrival that count, at 1 request/s.
        self._spans = [
            sum(sample.gaps[sample.counted.start + 1 : sample.counted.stop]) for sample in samples
        ]
        self._works: dict[tuple[object, ...], list[list[SideWork]]] = {}
        self._loads: dict[tuple[ReplicaGroup, int, bool], float] = {}
        self._misses: dict[tuple[object, ...], list[bool]] = {}
        self._requests: list[RequestWork] = []

    def rate(self, placement: Placement) -> float:
        """Returns requests/s of all GPUs that the goodput does not exceed."""
        return self._mean(placement, lambda work: work)

    def capacity(self, placement: Placement) -> float:
        """Returns the requests/s that the work allows for ever, without the time after arrivals.

        It is the bound of a sample without an end: it orders placements, and proves nothing.
        """
        return self._mean(placement, lambda work: SideWork(work.seconds, 0.0))

    def usable(self, placement: Placement) -> float:
        """Returns the capacity with that for prompts at a load that leaves them time to wait.

        TTFT less the time of a mean prompt alone is the patience. It orders placements, and proves
        nothing.
        """
        load = 1.0
        if not placement.spill:
            key = placement.shapes[0], placement.prefill.ranks, placement.on_decode_gpus
            if key not in self._loads:
                self._loads[key] = self._usable_load(placement)
            load = self._loads[key]
        return self._mean(placement, lambda work: SideWork(work.seconds, 0.0), load)

    def _usable_load(self, placement: Placement) -> float:
        """Returns the load at which as many prompts as may miss TTFT wait too long for it."""
        objective = self._scenario.objective
        source, _ = self._scenario.sources(placement)
        latency = latency_of(source, placement.prefill)
        prompt = round(fmean(fmean(sample.prompts) for sample in self.samples))
        alone = unloaded_prefill(latency, prompt)
        patience = objective.ttft - alone - source.path.of(prompt)
        ranks = placement.prefill.ranks
        late = 1 - objective.attainment
        return usable_load(alone / latency.pp, max(0.0, patience), late, ranks)

    def feasible(self, placement: Placement) -> list[bool]:
        """Returns for each sample whether its objective can be met, at however low a rate.

        It is found once for each shape of a side: an answer depends on nothing else of a placement.
        """
        p, d = placement.shapes
        scenario = self._scenario
        flags = (placement.min_prompt_bytes, placement.spill)
        prompts = ("late", placement.on_decode_gpus, p, d if any(flags) else None, *flags)
        answers = ("slow", bool(d) or placement.on_decode_gpus, d or p)
        if prompts not in self._misses:
            self._misses[prompts] = [scenario.is_late(placement, s) for s in self.samples]
        if answers not in self._misses:
            slow = [bool(scenario.slow_limit(placement, s)) for s in self.samples]
            self._misses[answers] = slow
        sides = zip(self._misses[prompts], self._misses[answers], strict=True)
        return [not any(misses) for misses in sides]

    def _mean(
        self, placement: Placement, adapt: Callable[[SideWork], SideWork], first_load: float = 1.0
    ) -> float:
        """Returns the mean over samples of the least bound of both sides.

        The first side's is multiplied by `first_load`.
        """
        sides = self._sides(placement)
        rates = []
        for seed, span in enumerate(self._spans):
            bounds = [float("inf")]
            for load, (instances, works) in zip((first_load, 1.0), sides, strict=True):
                bounds += [load * adapt(work).rate(instances, span) for work in works[seed]]
            rates.append(min(bounds))
        return fmean(rates)

    def _sides(self, placement: Placement) -> list[tuple[int, list[list[SideWork]]]]:
        """Returns the instances and the work of each side, by sample."""
        p = placement.prefill
        d = placement.decode
        if not d:
            return [
                (p.ranks, self._work("prompts", placement, p)),
                (p.ranks, self._work("both", placement, p)),
            ]
        answers = (d.ranks, self._work("answers", placement, d))
        if placement.spill:
            return [answers, (p.ranks + d.ranks, self._work("both", placement, p, d))]
        return [(p.ranks, self._work("prompts", placement, p)), answers]

    def _work(self, kind: str, placement: Placement, *groups: ReplicaGroup) -> list[list[SideWork]]:
        """Returns the works of one instance in each sample, computed once for each shape.

        `kind`: prompts at P, answers with the prompts that D computes in any case, or both.
        `groups`: those on which the works depend.
        """
        shapes = [msgspec.structs.replace(group, n=1) for group in groups]
        schedule = (placement.budget, placement.chunked, placement.on_decode_gpus)
        key = (kind, *shapes, *schedule, placement.min_prompt_bytes)
        if key not in self._works:
            if not self._requests:
                self._requests = [RequestWork(self._scenario, s) for s in self.samples]
            found = []
            for requests in self._requests:
                if kind == "prompts":
                    found.append([self._prompts(placement, requests)])
                else:
                    found.append(self._answers(placement, requests, kind == "both"))
            self._works[key] = found
        return self._works[key]

    def _prompts(self, placement: Placement, requests: RequestWork) -> SideWork:
        """Returns the work of the prompts that the prefill side computes in any case."""
        scenario = self._scenario
        source, _ = scenario.sources(placement)
        rules = scenario.rules(source, placement.budget, placement.chunked)
        most = rules.budget if placement.chunked else UNLIMITED
        price = latency_of(source, placement.prefill).least_prompt(most)
        return requests.prompts(price, lambda prompt: not placement.is_short(prompt))

    def _answers(
        self, placement: Placement, requests: RequestWork, with_all_prompts: bool
    ) -> list[SideWork]:
        """Returns the work of the answers, with that of all prompts or of those that D computes."""
        scenario = self._scenario
        prefill, source = scenario.sources(placement)
        group = placement.decode or placement.prefill
        rules = scenario.rules(source, placement.budget, placement.chunked)
        kv = scenario.kv_tokens(source, group)
        latency = latency_of(source, group)
        prices = prices_of_steps(
            latency,
            min(rules.sequences, max(1, kv // requests.least_context)),
            kv,
            requests.least_context,
            scenario.objective.tpot,
        )
        if with_all_prompts:
            other = latency_of(prefill, placement.prefill).least_added_prompt()
            token, square = map(min, zip(latency.least_added_prompt(), other, strict=True))
            return requests.answers(prices, (token, square), lambda _: True)
        return requests.answers(prices, latency.least_added_prompt(), placement.is_short)


class RequestWork:
    """Work of the requests of one sample, for any instance."""

    def __init__(self, scenario: Scenario, sample: WorkloadSample) -> None:
        self._objective = scenario.objective
        self._distserve = scenario.distserve
        self._numbers = sample.counted
        self._sample = sample
        self.least_context = min(sample.prompts)
        lists = zip(sample.prefixes or (), sample.kept or sample.prefixes or (), strict=True)
        blocks = Counter(block for ids, kept in lists for block in {*ids, *kept})
        self._cached = [self._cacheable(r, blocks) for r in self._numbers]
        steps = sorted(self._steps(r) for r in self._numbers)
        # Lengths of answers up to which requests are bounded; fixed lengths have one only.
        self._ends_of_shares = sorted(
            {steps[int(share * (len(steps) - 1))] for share in ANSWER_SHARES}
        )

    def _cacheable(self, r: int, blocks: Counter[int]) -> int:
        """Returns the leading tokens of a prompt that any other request may have computed."""
        if not self._sample.prefixes:
            return 0
        count = 0
        for block in self._sample.prefixes[r]:
            if blocks[block] < 2:
                break
            count += 1
        return min(count * self._sample.block, self._sample.prompts[r] - 1)

    def prompts(self, price: PromptPrice, is_here: Callable[[int], bool]) -> SideWork:
        """Returns the work of the prompts whose tokens `is_here` selects."""
        costs = self._prompt_costs(price, is_here)
        return self._heaviest_left_out(costs, self._objective.ttft, 1)

    def _prompt_costs(self, price: PromptPrice, is_here: Callable[[int], bool]) -> list[float]:
        """Returns the least seconds of each prompt here; 0 of others."""
        token, square = price
        costs = []
        for r, cached in zip(self._numbers, self._cached, strict=True):
            prompt = self._sample.prompts[r]
            cost = token * (prompt - cached) + square * (prompt**2 - cached**2)
            costs.append(cost if is_here(prompt) else 0.0)
        return costs

    def answers(
        self, steps: Sequence[StepPrice], prompts: PromptPrice, is_here: Callable[[int], bool]
    ) -> list[SideWork]:
        """Returns bounds of the work of answers, and of the prompts on the same instances."""
        objective = self._objective
        # Both limits in one request, or as many misses of each.
        lists = 1 if objective.joint else 2
        prompt_costs = self._prompt_costs(prompts, is_here)
        counts = [self._steps(r) for r in self._numbers]
        found = []
        for price in steps:
            costs = []
            for r, count, prompt_cost in zip(self._numbers, counts, prompt_costs, strict=True):
                contexts = count * self._sample.prompts[r] + count * (count - 1) / 2
                costs.append(prompt_cost + count * price.step + contexts * price.context)
            for longest in self._ends_of_shares:
                kept = [cost for cost, n in zip(costs, counts, strict=True) if n <= longest]
                slack = objective.ttft + objective.tpot * longest
                found.append(self._heaviest_left_out(kept, slack, lists))
        return found

    def _steps(self, r: int) -> int:
        """Returns the steps of an answer that TPOT limits."""
        output = self._sample.outputs[r]
        return output if self._distserve else output - 1

    def _heaviest_left_out(self, costs: Sequence[float], slack: float, lists: int) -> SideWork:
        """Sums the costs without the heaviest, as many as may miss."""
        allowed = lists * self._objective.allowed(len(self._numbers))
        kept = sorted(costs)[: max(0, len(costs) - allowed)]
        return SideWork(sum(kept), slack)


def prices_of_steps(
    latency: LatencyModel, most: int, kv: int, least_context: int, tpot: float
) -> list[StepPrice]:
    """Returns prices that no batch of up to `most` sequences undercuts."""
    ranges = _batch_ranges(latency, most, least_context)
    slope = min(latency.decode(n, True)[1] for n in (1, most))
    prices = [StepPrice(_least(ranges, 0.0, 0.0, 0.0), slope)]
    # A step that holds `kv` tokens of context pays its constant with them.
    one = latency.decode(1, True)[0]
    constant = max(0.0, 2 * one - latency.decode(2, True)[0])
    context = constant / kv
    prices.append(StepPrice(_least(ranges, constant, 0.0, 0.0), slope + context))
    # The price is concave in the multiplier of TPOT.
    low = 0.0
    high = ranges[0].stage / max(tpot - ranges[0].whole, 1e-9)
    for _ in range(MULTIPLIER_STEPS):
        third = (high - low) / 3
        below = _least(ranges, 0.0, low + third, tpot)
        above = _least(ranges, 0.0, high - third, tpot)
        if below < above:
            low += third
        else:
            high -= third
    prices.append(StepPrice(_least(ranges, 0.0, low, tpot), slope))
    return prices


def _least(ranges: Sequence[BatchRange], credit: float, multiplier: float, tpot: float) -> float:
    """Returns the least price of a step of one sequence; 0 is always one."""
    found = []
    for batch in ranges:
        paid = batch.stage - credit
        # A negative share is largest in a batch of one.
        share = paid / batch.size if paid > 0 else paid
        found.append(share + multiplier * (batch.whole - tpot))
    return max(0.0, min(found))


def _batch_ranges(latency: LatencyModel, most: int, least_context: int) -> list[BatchRange]:
    """Returns ranges that cover all batches of up to `most` sequences."""
    starts = list(range(1, min(most, SINGLE_SIZES) + 1))
    while int(starts[-1] * SIZE_RATIO) + 1 <= most:
        starts.append(int(starts[-1] * SIZE_RATIO) + 1)
    ends = [start - 1 for start in starts[1:]] + [most]
    stages = []
    wholes = []
    for start in starts:
        first_base, _ = latency.decode(start, True)
        base, slope = latency.decode(start, False)
        stages.append(first_base)
        later = (latency.pp - 1) * base
        wholes.append(first_base + later + latency.pp * slope * start * least_context)
    # Fits may take less time for more sequences; a bound must not take more for fewer.
    stages = list(accumulate(reversed(stages), min))[::-1]
    wholes = list(accumulate(reversed(wholes), min))[::-1]
    return [BatchRange(*row) for row in zip(ends, stages, wholes, strict=True)]
