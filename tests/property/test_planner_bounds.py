"""Capacity bounds against simulations, and pruned searches against searches of everything."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from vllm_disagg.planner.cost import hardware, model
from vllm_disagg.planner.cost.latency import LinearLatency
from vllm_disagg.planner.search import demand, optimizer
from vllm_disagg.planner.search.bounds import CapacityBounds
from vllm_disagg.planner.search.scenario import PerformanceSource, Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.simulator import Objective
from vllm_disagg.planner.simulation.workload import Arrivals

SEEDS = range(10)


def _quiet(done: int, total: int, best: optimizer.PlacementScore | None) -> None:
    assert done <= total


def small_scenario(seed: int) -> Scenario:
    """Returns a random cluster of up to 4 instances under random traffic."""
    random = Random(seed)
    constant = random.choice([0.0, 0.004, 0.02])
    prefill = (constant, random.uniform(2e-5, 2e-4), random.choice([0.0, 1e-9, 1e-8]))
    decode = (random.uniform(0.002, 0.02), random.uniform(0, 4e-7), random.uniform(0, 3e-4))
    source = PerformanceSource(
        "profile",
        "random",
        fitted=LinearLatency(1, prefill, decode, decode, chunk=512),
        kv_tokens=random.choice([3000, 20_000, 400_000]),
        budget=random.choice([128, 512, 2048]),
    )
    lengths = random.choice(["200:20", "900:60", "60:200", "humaneval-like", "sharegpt-like"])
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load(lengths),
        arrivals=Arrivals(*random.choice([("poisson", 1.0), ("gamma", 3.0)])),
        objective=Objective(
            random.choice([0.2, 1.0]), random.choice([0.02, 0.05]), 0.9, random.random() < 0.6
        ),
        requests=random.choice([50, 100]),
        seeds=random.choice([1, 2]),
        gpus=random.choice([3, 4]),
        link=hardware.link("none"),
        distserve=random.random() < 0.3,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_no_goodput_is_above_its_bound(seed: int) -> None:
    scenario = small_scenario(seed)
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    for placement in (*optimizer.disaggregated(scenario), *optimizer.colocated(scenario)):
        score = optimizer.evaluate(scenario, placement, samples, -1.0)
        assert score
        assert score.total <= bounds.rate(placement) * (1 + 1e-9), placement


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("flags", [(0, True), (4 * 210, False), (4 * 210, True)])
def test_no_goodput_is_above_its_bound_with_whole_prompts_at_d(
    seed: int, flags: tuple[int, bool]
) -> None:
    scenario = msgspec.structs.replace(
        small_scenario(seed), distserve=False, min_prompt_bytes=flags[0], spill=flags[1]
    )
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    for placement in optimizer.disaggregated(scenario):
        score = optimizer.evaluate(scenario, placement, samples, -1.0)
        assert score
        assert score.total <= bounds.rate(placement) * (1 + 1e-9), placement


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cheapest_placement_for_a_rate_is_that_of_trying_all(seed: int) -> None:
    scenario = small_scenario(seed)
    samples = scenario.samples()
    rate = 0.6 * max(
        optimizer.estimate(scenario, place, samples[0]) * place.gpus
        for place in optimizer.disaggregated(scenario)
    )
    found = demand._cheapest(scenario, rate, lambda kind, place: None)
    everything = optimizer.disaggregated(scenario)
    holding = [p.gpus for p in everything if demand.trial(scenario, p, samples, rate)]
    assert (found.split.placement.gpus if found.split else None) == min(holding, default=None)
    if found.split and found.least_units:
        assert found.least_units <= found.split.placement.gpus


def _roofline_scenario(gpus: int, requests: int, ttft: float = 1.5) -> Scenario:
    source = PerformanceSource("roofline", "h100", model.load("opt-13b"), hardware.gpu("h100"))
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load("2000:20"),
        arrivals=Arrivals("poisson"),
        objective=Objective(ttft, 0.05),
        requests=requests,
        seeds=1,
        gpus=gpus,
        link=hardware.link("ib-400"),
    )


def test_a_shortlist_has_the_best_of_all_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = _roofline_scenario(5, 150)
    placements = optimizer.disaggregated(scenario)
    criteria = (scenario.criterion.units, optimizer.of_budget)
    kinds = [optimizer.Candidates(dict.fromkeys(placements, 0.0), _quiet)]
    brute = optimizer.search_kinds(scenario, kinds, 0, 1, criteria)[0]
    monkeypatch.setattr(optimizer, "MAX_SIMULATED_PLACEMENTS", 0)
    monkeypatch.setattr(optimizer, "SHORTLIST_PLACEMENTS", 10)
    short = optimizer.search_kinds(scenario, kinds, 1, 1, criteria)[0]
    for units, found, best in zip(criteria, short, brute, strict=True):
        assert len(best) > 20
        # Both values from one sample: a shortlist's finalists are simulated longer.
        values = {score.placement: score.value(units) for score in best}
        shortest = values[found[0].placement]
        assert shortest >= (1 - 2 * scenario.tolerance) * best[0].value(units)


@pytest.mark.parametrize(("ttft", "tpot"), [(0.075, 0.05), (1.5, 0.006)])
def test_only_what_can_meet_the_objective_is_searched(ttft: float, tpot: float) -> None:
    scenario = _roofline_scenario(8, 60, ttft)
    objective = msgspec.structs.replace(scenario.objective, tpot=tpot)
    scenario = msgspec.structs.replace(scenario, objective=objective)
    samples = scenario.samples()
    everything = optimizer.disaggregated(scenario)
    kind = optimizer.Candidates(dict.fromkeys(everything, 0.0), _quiet)
    bounds = CapacityBounds(scenario, samples)
    found = optimizer.KindSearch(scenario, kind, bounds, 1, (optimizer.of_budget,)).ordered
    able = [place for place in everything if not scenario.infeasible(place, samples[0])]
    assert 0 < len(able) < len(everything)
    assert sorted(found) == sorted(able)


def test_a_shortlist_leaves_prompts_time_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a tight TTFT some shapes miss it alone, and other prefill instances need idle time."""
    scenario = _roofline_scenario(8, 60, ttft=0.075)
    criteria = (scenario.criterion.units, optimizer.of_budget)
    kinds = [optimizer.Candidates(dict.fromkeys(optimizer.disaggregated(scenario), 0.0), _quiet)]
    everything = optimizer.search_kinds(scenario, kinds, 1, 1, criteria)[0]
    monkeypatch.setattr(optimizer, "MAX_SIMULATED_PLACEMENTS", 0)
    monkeypatch.setattr(optimizer, "SHORTLIST_PLACEMENTS", 6)
    short = optimizer.search_kinds(scenario, kinds, 1, 1, criteria)[0]
    for units, found, best in zip(criteria, short, everything, strict=True):
        # A shortlist has other first probes: in so few requests rates differ by some percent.
        assert found and found[0].value(units) >= 0.95 * best[0].value(units)


def test_a_bisection_finds_the_price_of_trying_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = _roofline_scenario(6, 200)
    for rate in (10.0, 25.0):
        found = demand._cheapest(scenario, rate, lambda kind, place: None)
        with monkeypatch.context() as patch:
            patch.setattr(demand, "MAX_TRIED", 0)
            quick = demand._cheapest(scenario, rate, lambda kind, place: None)
        assert found.split and quick.split
        assert quick.split.placement.gpus == found.split.placement.gpus
        assert found.least_units and found.least_units <= found.split.placement.gpus


def test_a_rate_is_refused_only_after_all_that_could_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a tight TTFT those with the most capacity miss it, and others with less hold it."""
    scenario = _roofline_scenario(8, 200, ttft=0.075)
    sample = scenario.samples()[0]
    tried = []
    monkeypatch.setattr(demand, "MAX_TRIED", 0)
    quick = demand._cheapest(scenario, 12.0, lambda kind, place: tried.append(place))
    monkeypatch.undo()
    found = demand._cheapest(scenario, 12.0, lambda kind, place: None)
    assert found.split and quick.split
    assert quick.split.placement.gpus == found.split.placement.gpus
    assert not any(scenario.infeasible(place, sample) for place in tried)
